"""Rules that depend on what the model is: hybrid state, quantization, vision."""

from __future__ import annotations

from vopt.search_spaces.on_load import refusal
from vopt.search_spaces.parameter import Violation
from vopt.search_spaces.settings import Rule, Settings, collector

RULES: list[Rule] = []
rule = collector(RULES)

SIXTEEN_BITS = ("float16", "bfloat16")


@rule
def state_block_without_caching(s: Settings) -> Violation | None:
    if s.given("mamba_block_size") is None or s.value("enable_prefix_caching", False):
        return None
    detail = "mamba_block_size needs enable_prefix_caching"
    return Violation("state_block_without_caching", detail, {"mamba_block_size": None})


@rule
def hybrid_caching_unchunked(s: Settings) -> Violation | None:
    if not s.model.get("hybrid") or not s.value("enable_prefix_caching", False) or s.value("enable_chunked_prefill", True):
        return None
    detail = "prefix caching on a hybrid model needs chunked prefill"
    return Violation("hybrid_caching_unchunked", detail, {"enable_prefix_caching": False})


@rule
def hybrid_block_above_tokens(s: Settings) -> Violation | None:
    """In align mode a step must hold a block (``config/vllm.py``, checked after the block was enlarged, at engine start)."""
    block, tokens = s.facts.get("hybrid_block"), s.value("max_num_batched_tokens")
    if not s.model.get("hybrid") or not s.value("enable_prefix_caching", False) or block is None or tokens is None:
        return None
    if tokens < block:
        detail = f"max_num_batched_tokens {tokens} is below the hybrid block of {block} tokens, with prefix caching on"
        return Violation("hybrid_block_above_tokens", detail, {"max_num_batched_tokens": _power_above(block)})
    return None


@rule
def hybrid_block_above_threshold(s: Settings) -> Violation | None:
    block, threshold = s.facts.get("hybrid_block"), s.given("long_prefill_token_threshold")
    if not s.model.get("hybrid") or not s.value("enable_prefix_caching", False) or block is None or not threshold:
        return None
    if threshold < block:
        detail = f"long_prefill_token_threshold {threshold} is below the hybrid block of {block} tokens"
        return Violation("hybrid_block_above_threshold", detail, {"long_prefill_token_threshold": 0})
    return None


@rule
def block_size_on_hybrid(s: Settings) -> Violation | None:
    if s.model.get("hybrid") and s.given("block_size") is not None:
        detail = "a hybrid's block size follows from its state; a given one breaks the alignment"
        return Violation("block_size_on_hybrid", detail, {"block_size": None})
    return None


@rule
def rounding_needs_half(s: Settings) -> Violation | None:
    if s.given("enable_mamba_cache_stochastic_rounding") and s.given("mamba_ssm_cache_dtype") != "float16":
        detail = "enable_mamba_cache_stochastic_rounding needs mamba_ssm_cache_dtype float16"
        return Violation("rounding_needs_half", detail, {"enable_mamba_cache_stochastic_rounding": False})
    return None


@rule
def state_dtype_too_new(s: Settings) -> Violation | None:
    for name in ("mamba_ssm_cache_dtype", "mamba_cache_dtype"):
        if s.given(name) == "bfloat16" and s.release < (0, 22, 0):
            return Violation("state_dtype_too_new", f"{name} bfloat16 came with 0.22", {name: "auto"})
    return None


@rule
def quantized_twice(s: Settings) -> Violation | None:
    method, asked = s.model.get("quantization"), s.given("quantization")
    if not method or not refusal(method, _quantization(s)):
        return None
    detail = f"the checkpoint is quantized with {method}; quantization {asked!r} cannot be put on it"
    return Violation("quantized_twice", detail, {"quantization": None})


@rule
def quantization_without_checkpoint(s: Settings) -> Violation | None:
    """``get_quant_config`` (``model_loader/weight_utils.py``), called while the configuration is made."""
    if not s.model or s.model.get("quantization") or not (words := refusal(None, _quantization(s))):
        return None
    detail = (
        f"the checkpoint's weights are not quantized, and quantization {s.given('quantization')!r} needs one that is ({words})"
    )
    return Violation("quantization_without_checkpoint", detail, {"quantization": None})


def _quantization(s: Settings) -> dict[str, object]:
    return {name: s.given(name) for name in ("quantization", "quantization_config", "allow_deprecated_quantization")}


@rule
def deep_gemm_needs_fp8(s: Settings) -> Violation | None:
    """DeepGEMM multiplies 8-bit blocks alone."""
    quantized = s.given("quantization") or s.model.get("quantization")
    for name in ("moe_backend", "linear_backend"):
        if s.given(name) == "deep_gemm" and s.model and "fp8" not in str(quantized):
            return Violation("deep_gemm_needs_fp8", f"{name} deep_gemm needs FP8 weights", {name: "auto"})
    return None


@rule
def kv_dtype_unlike_model(s: Settings) -> Violation | None:
    dtype, own = s.given("kv_cache_dtype"), s.model.get("dtype")
    if dtype in SIXTEEN_BITS and own is not None and dtype != own and s.given("dtype") in (None, "auto", own):
        return Violation(
            "kv_dtype_unlike_model", f"kv_cache_dtype {dtype} is not the model's {own}", {"kv_cache_dtype": "auto"}
        )
    return None


@rule
def text_only_with_encoder_graphs(s: Settings) -> Violation | None:
    if s.given("language_model_only") and s.nested("compilation_config", "cudagraph_mm_encoder"):
        detail = "language_model_only excludes cudagraph_mm_encoder: there is no encoder"
        return Violation("text_only_with_encoder_graphs", detail, {"language_model_only": False})
    return None


@rule
def expandable_segments_with_connector(s: Settings) -> Violation | None:
    setting = str(s.given("env:PYTORCH_CUDA_ALLOC_CONF") or s.given("env:PYTORCH_ALLOC_CONF") or "")
    if s.given("kv_transfer_config") is not None and "expandable_segments:true" in setting.lower():
        return Violation("expandable_segments_with_connector", "a KV connector excludes expandable_segments")
    return None


def _power_above(number: int) -> int:
    return 1 << (int(number) - 1).bit_length()
