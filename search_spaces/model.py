"""config.json -> ModelShape, and the shapes of well-known models for work without a network."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from vopt.search_spaces.quantized import read_quantization
from vopt.search_spaces.reading import LARGEST, Config, count, entries, integer, section
from vopt.search_spaces.shape import (
    DTYPE_BYTES,
    Experts,
    LatentAttention,
    LayerKind,
    LinearAttention,
    ModelShape,
    ShapeError,
)

__all__ = ["ModelShape", "ShapeError", "known_config", "known_model", "known_models", "shape_from_config"]

MOST_LAYERS = 10_000
"""Each layer is listed by its kind."""

KNOWN_TYPES = frozenset(
    {
        "llama",
        "mistral",
        "mistral3",
        "ministral3",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen2_vl",
        "qwen2_vl_text",
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_text",
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "deepseek_v2",
        "deepseek_v3",
        "kimi_k2",
        "gpt_oss",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "phi3",
        "granite",
        "olmo2",
        "olmo3",
        "llava",
        "smollm3",
        "seed_oss",
        "minimax_m2",
        "ernie4_5",
        "ernie4_5_moe",
    }
)
"""Model types whose layer layout is the one computed here."""


def shape_from_config(config: Config, name: str = "") -> ModelShape:
    """The shape that a parsed ``config.json`` describes; nested ``text_config`` and its kin are followed."""
    text = _text_config(config)
    kind = str(text.get("model_type") or config.get("model_type") or "")
    outer = str(config.get("model_type") or kind)
    if kind not in KNOWN_TYPES:
        raise ShapeError("the architecture", f"model_type {kind!r} is not one whose layers are known here")
    layers = integer(text, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ShapeError("num_hidden_layers", f"num_hidden_layers = {layers} is more than {MOST_LAYERS}")
    q_heads = integer(text, "num_attention_heads")
    hidden = integer(text, "hidden_size")
    if q_heads > hidden:
        raise ShapeError("head_dim", f"num_attention_heads = {q_heads} is more than hidden_size = {hidden}")
    linear = _linear(text)
    kinds = _layer_kinds(text, layers, kind, linear is not None)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ShapeError("the weights' size", f"dtype {dtype!r} is not one whose size is known here")
    vision = config.get("vision_config")
    experts = _experts(text, layers, kind)
    head_dim = integer(text, "head_dim", default=hidden // q_heads)
    return ModelShape(
        name=name or str(config.get("_name_or_path") or outer),
        model_type=kind,
        hidden=hidden,
        layer_kinds=kinds,
        q_heads=q_heads,
        kv_heads=integer(text, "num_key_value_heads", default=q_heads),
        head_dim=head_dim,
        ffn=integer(text, "intermediate_size", default=0 if experts and experts.layers == layers else None),
        vocab=integer(text, "vocab_size"),
        max_position=_max_position(text),
        dtype=dtype,
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", _tied_by_default(kind)))),
        gated_attention=bool(text.get("attn_output_gate", kind.startswith(("qwen3_next", "qwen3_5")))),
        window=_window(text) if LayerKind.SLIDING in kinds else None,
        latent=_latent(text),
        linear=linear,
        experts=experts,
        mtp_layers=count(text, "mtp_num_hidden_layers", "num_nextn_predict_layers"),
        quantization=read_quantization(section(config, "quantization_config") or section(text, "quantization_config"), dtype),
        multimodal=isinstance(vision, Mapping),
        vision_params=_vision_params(vision) if isinstance(vision, Mapping) else 0,
        rotary_values=_rotary_values(text, kind, head_dim),
    )


def _text_config(config: Config) -> Config:
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(nested := config.get(key), Mapping):
            return nested
    return config


def _max_position(text: Config) -> int:
    """The context length: YaRN's factor is in ``max_position_embeddings`` already unless the original length is given."""
    length = integer(text, "max_position_embeddings")
    scaling = section(text, "rope_scaling")
    if scaling.get("rope_type", scaling.get("type")) == "yarn" and scaling.get("original_max_position_embeddings") is not None:
        factor = scaling.get("factor", 1)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor < LARGEST:
            raise ShapeError("max_position_embeddings", f"rope_scaling.factor = {factor!r} is not a number from 1 on")
        return max(length, int(integer(scaling, "original_max_position_embeddings") * factor))
    return length


def _rotary_values(text: Config, kind: str, head_dim: int) -> int:
    """Positions times width. Three-dimensional positions get four times as many (vLLM's ``rotary_embedding/mrope.py``), and
    Qwen3-Next and Qwen3.5 rotate a quarter of each head unless they say otherwise (``configs/qwen3_5.py``)."""
    rope = section(text, "rope_parameters") or section(text, "rope_scaling")
    share = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        share = 0.25 if kind.startswith(("qwen3_next", "qwen3_5")) else 1.0
    width = count(text, "qk_rope_head_dim") or int(head_dim * share)
    many = "mrope_section" in rope or kind.startswith(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"))
    return integer(text, "max_position_embeddings") * width * (4 if many else 1)


def _tied_by_default(kind: str) -> bool:
    return kind.startswith("gemma")


def _layer_kinds(text: Config, layers: int, kind: str, linear: bool) -> tuple[LayerKind, ...]:
    if text.get("layer_types") is not None:
        kinds = tuple(_layer_kind(entry) for entry in entries(text, "layer_types"))
        if len(kinds) < layers:
            raise ShapeError("the layer kinds", f"layer_types names {len(kinds)} of {layers} layers")
        return _without_unused_window(text, kinds[:layers])
    if linear:
        interval = integer(text, "full_attention_interval", default=4)
        return tuple(LayerKind.FULL if (i + 1) % interval == 0 else LayerKind.LINEAR for i in range(layers))
    if text.get("sliding_window") is None or not text.get("use_sliding_window", True):
        return (LayerKind.FULL,) * layers
    pattern = count(text, "sliding_window_pattern") or {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}.get(kind)
    if pattern:
        return tuple(LayerKind.FULL if (i + 1) % pattern == 0 else LayerKind.SLIDING for i in range(layers))
    return (LayerKind.SLIDING,) * layers


def _layer_kind(entry: object) -> LayerKind:
    match entry:
        case "full_attention" | "attention":
            return LayerKind.FULL
        case "sliding_attention" | "chunked_attention":
            return LayerKind.SLIDING
        case "linear_attention":
            return LayerKind.LINEAR
        case _:
            raise ShapeError("the layer kinds", f"layer_types holds {entry!r}, which is not known here")


def _without_unused_window(text: Config, kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    if text.get("sliding_window") is None and text.get("attention_chunk_size") is None:
        return tuple(LayerKind.FULL if kind is LayerKind.SLIDING else kind for kind in kinds)
    return kinds


def _window(text: Config) -> int:
    return integer(text, "sliding_window" if text.get("sliding_window") is not None else "attention_chunk_size")


def _latent(text: Config) -> LatentAttention | None:
    if text.get("kv_lora_rank") is None:
        return None
    return LatentAttention(
        kv_rank=integer(text, "kv_lora_rank"),
        rope_dim=integer(text, "qk_rope_head_dim"),
        nope_dim=integer(text, "qk_nope_head_dim"),
        v_dim=integer(text, "v_head_dim"),
        q_rank=count(text, "q_lora_rank") or None,
    )


def _linear(text: Config) -> LinearAttention | None:
    if text.get("linear_num_value_heads") is None:
        if "linear_attention" in entries(text, "layer_types"):
            raise ShapeError(
                "the linear-attention state", "layer_types names linear_attention, linear_num_value_heads is absent"
            )
        return None
    # Qwen3-Next says nothing and vLLM then keeps the model's dtype; Qwen3.5 asks for float32.
    state_dtype = str(text.get("mamba_ssm_dtype") or text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    if state_dtype.removeprefix("torch.") not in DTYPE_BYTES:
        raise ShapeError("the linear-attention state", f"dtype {state_dtype!r} is not one whose size is known here")
    return LinearAttention(
        k_heads=integer(text, "linear_num_key_heads"),
        v_heads=integer(text, "linear_num_value_heads"),
        k_dim=integer(text, "linear_key_head_dim"),
        v_dim=integer(text, "linear_value_head_dim"),
        conv_width=integer(text, "linear_conv_kernel_dim", default=4),
        state_dtype=state_dtype.removeprefix("torch."),
    )


def _experts(text: Config, layers: int, kind: str) -> Experts | None:
    key = next((k for k in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts") if text.get(k)), None)
    if key is None:
        return None
    width = count(text, "moe_intermediate_size") or integer(text, "intermediate_size")
    shared = count(text, "shared_expert_intermediate_size")
    shared = shared or width * count(text, "n_shared_experts", "moe_num_shared_experts")
    dense, first = entries(text, "mlp_only_layers"), count(text, "first_k_dense_replace")
    step = count(text, "decoder_sparse_step", "moe_layer_freq") or 1
    moe_layers = sum(1 for i in range(first, layers) if i not in dense and (i + 1) % step == 0)
    per_token = next((k for k in ("num_experts_per_tok", "moe_k", "experts_per_token") if text.get(k)), "num_experts_per_tok")
    return Experts(integer(text, key), integer(text, per_token), width, shared, moe_layers)


def _vision_params(vision: Config) -> int:
    """A vision transformer with a merger: weights only, since its work belongs to requests with images."""
    hidden = count(vision, "hidden_size", "embed_dim")
    depth = count(vision, "depth", "num_hidden_layers")
    inner = count(vision, "intermediate_size") or 4 * hidden
    merged = hidden * (count(vision, "spatial_merge_size") or 1) ** 2
    merger = merged * merged + merged * (count(vision, "out_hidden_size") or hidden)
    return depth * (4 * hidden * hidden + 2 * hidden * inner) + merger


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files("vopt.search_spaces").joinpath("models.toml").read_text(encoding="utf-8")
    return {name.lower(): {"name": name, **config} for name, config in tomllib.loads(text).items()}


def known_models() -> tuple[str, ...]:
    """Names of the models whose configs come with this package."""
    return tuple(entry["name"] for entry in _table().values())


def known_config(name: str) -> dict[str, Any] | None:
    """The minimal config of a well-known model (letter case ignored); entries may build on another with ``base``."""
    entry = _table().get(name.lower())
    if entry is None:
        return None
    config = {key: value for key, value in entry.items() if key not in ("name", "base")}
    if base := entry.get("base"):
        inherited = known_config(base) or {}
        text = {**inherited.get("text_config", {}), **config.get("text_config", {})}
        return {**inherited, **config, **({"text_config": text} if text else {})}
    return config


def known_model(name: str) -> ModelShape | None:
    """The shape of a well-known model, ``None`` when it is not in the table."""
    config = known_config(name)
    return None if config is None else shape_from_config(config, str(_table()[name.lower()]["name"]))
