"""The shape of a decoder-only model: what its weights, KV cache and step times follow from.

Counts are parameters, sizes are bytes. The formulas are those of the architectures' own code in Transformers and vLLM;
norms, biases and other vectors are left out (under 0.1 % of any model).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

DTYPE_BYTES = {
    "float32": 4.0,
    "float": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "half": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_per_token_head": 1.0,
    "int8_per_token_head": 1.0,
    "int4_per_token_head": 0.5,
    "nvfp4": 0.5625,  # 4 bits and an 8-bit scale for each 16 values
}
"""Bytes of one value by the names that vLLM gives to weight, KV-cache and state types."""


class ShapeError(ValueError):
    """A config that does not say what a model looks like. ``missing`` names what could not be derived."""

    def __init__(self, missing: str, detail: str) -> None:
        super().__init__(f"cannot derive {missing}: {detail}")
        self.missing = missing


class LayerKind(StrEnum):
    """How a layer remembers the past: everything, a window, or a state of fixed size."""

    FULL = "full"
    SLIDING = "sliding"
    LINEAR = "linear"


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): one compressed vector per token and layer, the same on every rank."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_rank: int | None = None


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Gated delta net (Qwen3-Next, Qwen3.5): a state per sequence whose size does not depend on its length."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    state_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts. ``shared_width`` is the summed width of the experts that every token visits."""

    number: int
    per_token: int
    width: int
    shared_width: int
    layers: int


@dataclass(frozen=True, slots=True)
class Quantization:
    """Weights in memory: ``bytes_per_weight`` with scales included, and the components left in the model's own dtype.
    ``weight_only``: they are known to be multiplied in 16 bits."""

    method: str
    bits: float
    bytes_per_weight: float
    kept: frozenset[str] = frozenset()
    weight_only: bool = False


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only language model, perhaps with a vision tower.

    ``layer_kinds`` has one entry per decoder layer. ``mtp_layers`` are extra layers for multi-token prediction; they are
    loaded only when speculation uses them. ``max_position`` is the context length that the checkpoint allows;
    ``rotary_values`` are the entries of the table of sines and cosines that vLLM keeps for it.
    """

    name: str
    model_type: str
    hidden: int
    layer_kinds: tuple[LayerKind, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_position: int
    dtype: str = "bfloat16"
    tied: bool = False
    gated_attention: bool = False
    window: int | None = None
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    experts: Experts | None = None
    mtp_layers: int = 0
    quantization: Quantization | None = None
    multimodal: bool = False
    vision_params: int = 0
    rotary_values: int = 0

    @property
    def layers(self) -> int:
        return len(self.layer_kinds)

    def count(self, kind: LayerKind) -> int:
        return self.layer_kinds.count(kind)

    @property
    def hybrid(self) -> bool:
        """Whether some layers keep a state instead of keys and values."""
        return self.linear is not None and LayerKind.LINEAR in self.layer_kinds

    @cached_property
    def attention_params_per_layer(self) -> int:
        """Projections of one attention layer (full or sliding)."""
        h = self.hidden
        if self.latent is not None:
            m = self.latent
            q_dim = self.q_heads * (m.nope_dim + m.rope_dim)
            query = h * q_dim if m.q_rank is None else h * m.q_rank + m.q_rank * q_dim
            up = m.kv_rank * self.q_heads * (m.nope_dim + m.v_dim)
            return query + h * (m.kv_rank + m.rope_dim) + up + self.q_heads * m.v_dim * h
        q_dim = self.q_heads * self.head_dim
        return h * q_dim * (2 if self.gated_attention else 1) + 2 * h * self.kv_heads * self.head_dim + q_dim * h

    @cached_property
    def linear_params_per_layer(self) -> int:
        """Projections of one gated-delta-net layer: q, k, v, output gate, decay and step, output."""
        if self.linear is None:
            return 0
        n, h = self.linear, self.hidden
        v_dim = n.v_heads * n.v_dim
        return h * (2 * n.k_heads * n.k_dim + 2 * v_dim) + 2 * h * n.v_heads + v_dim * h

    @cached_property
    def params(self) -> dict[str, int]:
        """Parameters by component, multi-token prediction apart (``mtp``), all layers together."""
        experts, h = self.experts, self.hidden
        moe_layers = experts.layers if experts else 0
        linear_layers = self.count(LayerKind.LINEAR)
        parts = {
            "embeddings": self.vocab * h,
            "head": 0 if self.tied else self.vocab * h,
            "attention": (self.layers - linear_layers) * self.attention_params_per_layer,
            "linear_attention": linear_layers * self.linear_params_per_layer,
            "mlp": (self.layers - moe_layers) * 3 * h * self.ffn,
            "experts": 0,
            "shared_experts": 0,
            "router": 0,
            "vision": self.vision_params,
        }
        layer_ffn = 3 * h * self.ffn
        if experts is not None:
            parts["experts"] = moe_layers * experts.number * 3 * h * experts.width
            parts["shared_experts"] = moe_layers * 3 * h * experts.shared_width
            parts["router"] = moe_layers * h * experts.number
            layer_ffn = 3 * h * (experts.number * experts.width + experts.shared_width) + h * experts.number
        parts["mtp"] = self.mtp_layers * (self.attention_params_per_layer + layer_ffn + 2 * h * h)
        return parts

    @cached_property
    def total_params(self) -> int:
        """Parameters of the checkpoint's language model and vision tower, without multi-token prediction layers."""
        return sum(count for part, count in self.params.items() if part != "mtp")

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token's forward pass multiplies with: embeddings looked up, not multiplied, left out."""
        parts = self.params
        always = ("head", "attention", "linear_attention", "mlp", "shared_experts", "router")
        active = sum(parts[part] for part in always) + (parts["embeddings"] if self.tied else 0)
        if self.experts is not None:
            active += parts["experts"] * self.experts.per_token // self.experts.number
        return active

    def bytes_per_weight(self, component: str) -> float:
        """Stored bytes of one weight of a component of ``params``."""
        own = DTYPE_BYTES[self.dtype]
        if self.quantization is None or component in self.quantization.kept:
            return own
        return self.quantization.bytes_per_weight

    def weight_bytes(self, *, text_only: bool = False, mtp: bool = False) -> int:
        """Bytes of all weights on one device: vision tower and multi-token prediction as asked for."""
        left_out = {part for part, wanted in (("vision", not text_only), ("mtp", mtp)) if not wanted}
        return round(sum(n * self.bytes_per_weight(part) for part, n in self.params.items() if part not in left_out))

    def weight_bytes_per_rank(self, tensor: int = 1, pipeline: int = 1, *, text_only: bool = False, mtp: bool = False) -> int:
        """Bytes of the weights on the fullest rank.

        Tensor parallelism divides every matrix but the routers and MLA's down projections; key and value heads are
        replicated once there are more ranks than heads. Pipeline parallelism divides the layers (rounded up) and leaves
        embeddings and head on the end ranks.
        """
        if tensor == pipeline == 1:
            return self.weight_bytes(text_only=text_only, mtp=mtp)
        share = -(-self.layers // pipeline) / self.layers
        total = 0.0
        for part, number in self.params.items():
            if (part == "vision" and text_only) or (part == "mtp" and not mtp):
                continue
            size = number * self.bytes_per_weight(part)
            if part in ("embeddings", "head", "vision"):
                total += size / tensor if pipeline == 1 or part == "embeddings" else 0.0
            elif part == "attention":
                total += share * (size / tensor + self._replicated(tensor) * self.bytes_per_weight(part))
            else:
                total += share * (size if part == "router" else size / tensor)
        return round(total)

    def _replicated(self, tensor: int) -> float:
        """Attention parameters that a rank holds beyond its even share, all layers together."""
        layers = self.layers - self.count(LayerKind.LINEAR)
        if self.latent is not None:
            down = self.hidden * (self.latent.kv_rank + self.latent.rope_dim + (self.latent.q_rank or 0))
            return layers * down * (1 - 1 / tensor)
        extra_heads = max(1.0, self.kv_heads / tensor) - self.kv_heads / tensor
        return layers * 2 * self.hidden * self.head_dim * extra_heads

    def summary(self) -> dict[str, Any]:
        """What a report says of a model."""
        return {
            "name": self.name,
            "model_type": self.model_type,
            "layers": {kind.value: self.count(kind) for kind in LayerKind if self.count(kind)},
            "parameters": self.total_params,
            "active_parameters": self.active_params,
            "weight_bytes": self.weight_bytes(),
            "quantization": self.quantization.method if self.quantization else None,
            "mtp_layers": self.mtp_layers,
            "max_position": self.max_position,
            "multimodal": self.multimodal,
        }
