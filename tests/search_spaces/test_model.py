"""Shapes: published parameter counts, nested and broken configs, every attention and quantization family."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.search_spaces.model import (
    ModelShape,
    ShapeError,
    known_config,
    known_model,
    known_models,
    shape_from_config,
)
from vopt.search_spaces.shape import LayerKind


def shape(name: str) -> ModelShape:
    found = known_model(name)
    assert found is not None
    return found


# Billions of parameters as the model cards state them.
PUBLISHED = {
    "Qwen/Qwen3-0.6B": (0.6, 0.02),
    "Qwen/Qwen3-8B": (8.2, 0.01),
    "Qwen/Qwen3-32B": (32.8, 0.01),
    "Qwen/Qwen3-30B-A3B": (30.5, 0.01),
    "Qwen/Qwen3-235B-A22B": (235, 0.01),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (80, 0.01),
    "meta-llama/Llama-3.1-8B-Instruct": (8.03, 0.005),
    "meta-llama/Llama-3.1-70B-Instruct": (70.6, 0.005),
    "mistralai/Mistral-7B-Instruct-v0.3": (7.25, 0.005),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (46.7, 0.005),
    "google/gemma-3-27b-it": (27.4, 0.01),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": (15.7, 0.005),
    "deepseek-ai/DeepSeek-V3": (671, 0.005),
    "openai/gpt-oss-20b": (20.9, 0.01),
    "openai/gpt-oss-120b": (116.8, 0.01),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_parameters_are_those_of_the_model_card(name: str) -> None:
    billions, tolerance = PUBLISHED[name]
    assert shape(name).total_params / 1e9 == pytest.approx(billions, rel=tolerance)


@pytest.mark.parametrize(
    "name, billions",
    [
        ("Qwen/Qwen3.5-35B-A3B", 2.95),
        ("openai/gpt-oss-20b", 3.6),
        ("openai/gpt-oss-120b", 5.1),
        ("deepseek-ai/DeepSeek-V3", 37),
        ("Qwen/Qwen3-30B-A3B", 3.0),
    ],
)
def test_active_parameters_count_the_experts_that_a_token_visits(name: str, billions: float) -> None:
    assert shape(name).active_params / 1e9 == pytest.approx(billions, rel=0.03)


def test_text_part_of_the_hybrid_moe_matches_its_published_count() -> None:
    model = shape("Qwen/Qwen3.5-35B-A3B")
    assert (model.total_params - model.vision_params) / 1e9 == pytest.approx(34.66, abs=0.01)
    assert model.params["experts"] / 1e9 == pytest.approx(32.21, abs=0.01)
    assert (model.count(LayerKind.FULL), model.count(LayerKind.LINEAR)) == (10, 30)
    assert model.hybrid
    assert model.mtp_layers == 1


def test_names_are_found_whatever_their_case_and_others_are_not() -> None:
    assert known_model("qwen/qwen3-8b") == shape("Qwen/Qwen3-8B")
    assert known_model("nobody/nothing") is None
    assert len(known_models()) >= 30


@pytest.mark.parametrize(
    "name, gigabytes",
    [
        ("Qwen/Qwen3-8B", 16.4),
        ("Qwen/Qwen3-32B-AWQ", 19.3),
        ("openai/gpt-oss-20b", 13.8),
        ("openai/gpt-oss-120b", 65.2),
        ("deepseek-ai/DeepSeek-V3", 673),
    ],
)
def test_weight_bytes_follow_the_quantization(name: str, gigabytes: float) -> None:
    assert shape(name).weight_bytes(text_only=True) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_quantized_weights_of_the_other_formats() -> None:
    base = known_config("Qwen/Qwen3-8B")
    assert base is not None

    def quantized(config: dict[str, Any]) -> ModelShape:
        return shape_from_config({**base, "quantization_config": config})

    gptq = quantized({"quant_method": "gptq", "bits": 4, "group_size": 128})
    packed = quantized(
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}}}
    )
    int8 = quantized({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}})
    nvfp4 = quantized({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    plain = shape("Qwen/Qwen3-8B").weight_bytes()
    assert packed.weight_bytes() == pytest.approx(gptq.weight_bytes(), rel=0.01)
    assert gptq.weight_bytes() < nvfp4.weight_bytes() < int8.weight_bytes() < plain
    assert int8.quantization is not None
    assert int8.quantization.bits == 8


def test_modules_left_alone_keep_their_dtype() -> None:
    base = known_config("Qwen/Qwen3.5-35B-A3B")
    assert base is not None
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    small = ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.linear_attn.in_proj_a"]
    few = shape_from_config({**base, "quantization_config": {**fp8, "modules_to_not_convert": small}})
    more = shape_from_config({**base, "quantization_config": {**fp8, "modules_to_not_convert": [*small, "re:.*linear_attn"]}})
    assert few.bytes_per_weight("linear_attention") == pytest.approx(1, abs=0.001)
    assert more.bytes_per_weight("linear_attention") == 2
    assert more.bytes_per_weight("head") == few.bytes_per_weight("head") == 2


def test_window_layers() -> None:
    assert shape("mistralai/Mistral-7B-Instruct-v0.1").count(LayerKind.SLIDING) == 32
    assert shape("mistralai/Mistral-7B-Instruct-v0.3").count(LayerKind.SLIDING) == 0
    gemma = shape("google/gemma-3-27b-it")
    assert (gemma.count(LayerKind.FULL), gemma.window) == (10, 1024)
    base = known_config("Qwen/Qwen3-8B")
    assert base is not None
    unused = shape_from_config({**base, "sliding_window": 4096, "use_sliding_window": False})
    assert unused.count(LayerKind.FULL) == 36


def test_layer_types_of_the_config_win_over_the_interval() -> None:
    base = known_config("Qwen/Qwen3.5-9B")
    assert base is not None
    types = ["linear_attention"] * 16 + ["full_attention"] * 16
    other = shape_from_config({**base, "text_config": {**base["text_config"], "layer_types": types}})
    assert (other.count(LayerKind.LINEAR), other.count(LayerKind.FULL)) == (16, 16)


def test_vision_and_mtp_weights_only_when_loaded() -> None:
    model = shape("Qwen/Qwen3.5-9B")
    plain = model.weight_bytes(text_only=True)
    assert model.weight_bytes() - plain == pytest.approx(2 * model.vision_params)
    assert model.weight_bytes(text_only=True, mtp=True) - plain == 2 * model.params["mtp"]


@given(st.sampled_from(known_models()), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
def test_ranks_share_the_weights_and_never_hold_less_than_an_even_share(name: str, tensor: int, pipeline: int) -> None:
    model = shape(name)
    each = model.weight_bytes_per_rank(tensor, pipeline)
    assert each <= model.weight_bytes() + 1
    if pipeline == 1:
        assert each >= model.weight_bytes() / tensor * 0.999


@pytest.mark.parametrize(
    "change, missing",
    [
        ({"model_type": "rwkv7"}, "the architecture"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"dtype": "float4"}, "the weights' size"),
        ({"quantization_config": {"quant_method": "secret"}}, "the weights' size"),
        ({"layer_types": ["full_attention"]}, "the layer kinds"),
        ({"layer_types": ["mamba2"] * 36}, "the layer kinds"),
        ({"layer_types": ["linear_attention"] * 36}, "the linear-attention state"),
    ],
)
def test_what_cannot_be_derived_is_named(change: dict[str, Any], missing: str) -> None:
    base = known_config("Qwen/Qwen3-8B")
    assert base is not None
    with pytest.raises(ShapeError, match="cannot derive") as caught:
        shape_from_config({**base, **change})
    assert caught.value.missing == missing


FIELDS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "intermediate_size", "max_position_embeddings", "dtype", "torch_dtype", "tie_word_embeddings", "rope_scaling",
    "layer_types", "full_attention_interval", "sliding_window", "use_sliding_window", "sliding_window_pattern",
    "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "linear_num_value_heads",
    "linear_num_key_heads", "linear_key_head_dim", "mamba_ssm_dtype", "num_experts", "n_routed_experts",
    "moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts", "mlp_only_layers", "first_k_dense_replace",
    "decoder_sparse_step", "num_experts_per_tok", "mtp_num_hidden_layers", "num_nextn_predict_layers", "quantization_config",
    "vision_config", "text_config", "llm_config", "_name_or_path", "attention_chunk_size",
)  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([2**31, 10**30, 10_001]), st.floats(), st.text(max_size=3)
)
ODDER = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3)
)
WEIGHTS = st.fixed_dictionaries({"weights": ODDER})
FORMATS = ("fp8", "awq", "gptq", "mxfp4", "modelopt", "bitsandbytes", "compressed-tensors")
DETAILS = ("weight_block_size", "bits", "group_size", "config_groups", "modules_to_not_convert", "ignore", "load_in_4bit")
QUANTIZED = st.fixed_dictionaries(
    {"quant_method": st.sampled_from(FORMATS)},
    optional={name: ODDER | WEIGHTS | st.fixed_dictionaries({"group_0": WEIGHTS}) for name in DETAILS},
)


@given(
    name=st.sampled_from(["Qwen/Qwen3-8B", "Qwen/Qwen3.5-35B-A3B-FP8", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b"]),
    field=st.sampled_from(FIELDS),
    value=ODDER | QUANTIZED,
    nested=st.booleans(),
)
def test_a_config_with_anything_in_it_is_a_shape_or_says_what_is_missing(
    name: str, field: str, value: Any, nested: bool
) -> None:
    config = known_config(name) or {}
    changed: dict[str, Any] = {**config, field: value}
    if nested and "text_config" in config:
        changed = {**config, "text_config": {**config["text_config"], field: value}}
    try:
        shape = shape_from_config(changed, name)
    except ShapeError:
        return
    assert shape.weight_bytes() > 0
    assert shape.summary()
