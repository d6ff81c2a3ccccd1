"""Rules of speculative decoding (``vllm/config/speculative.py`` and ``vllm/config/vllm.py``)."""

from __future__ import annotations

from vopt.search_spaces.parameter import Violation
from vopt.search_spaces.settings import Rule, Settings, collector

RULES: list[Rule] = []
rule = collector(RULES)

OFF = {"speculative_config": None}
V1_WITHOUT_ASYNC = ("ngram", "suffix", "draft_model")


@rule
def tokens_missing(s: Settings) -> Violation | None:
    if s.method in ("ngram", "ngram_gpu", "draft_model") and s.draft_tokens <= 0:
        return Violation("tokens_missing", f"{s.method} needs num_speculative_tokens above 0", OFF)
    return None


@rule
def draft_model_missing(s: Settings) -> Violation | None:
    if s.method in ("draft_model", "eagle", "eagle3") and not s.speculation.get("model"):
        return Violation("draft_model_missing", f"{s.method} needs a draft model", OFF)
    return None


@rule
def lookup_out_of_order(s: Settings) -> Violation | None:
    low, high = s.speculation.get("prompt_lookup_min"), s.speculation.get("prompt_lookup_max")
    if low is not None and high is not None and low > high:
        return Violation("lookup_out_of_order", f"prompt_lookup_min {low} is above prompt_lookup_max {high}", OFF)
    return None


@rule
def no_mtp_layers(s: Settings) -> Violation | None:
    if s.method == "mtp" and s.model.get("mtp_layers") == 0:
        return Violation("no_mtp_layers", "the model has no multi-token prediction layers", OFF)
    return None


@rule
def draft_not_divisible(s: Settings) -> Violation | None:
    """Several MTP layers draft in turn: more tokens than layers must be a multiple of them."""
    layers = s.model.get("mtp_layers")
    if s.method != "mtp" or not layers or s.draft_tokens <= layers or s.draft_tokens % layers == 0:
        return None
    detail = f"{s.draft_tokens} speculative tokens are not a multiple of the {layers} prediction layers"
    fitting = {**s.speculation, "num_speculative_tokens": layers}
    return Violation("draft_not_divisible", detail, {"speculative_config": fitting})


@rule
def tensor_size_inside(s: Settings) -> Violation | None:
    if "tensor_parallel_size" in s.speculation:
        return Violation("tensor_size_inside", "inside speculative_config it is draft_tensor_parallel_size", OFF)
    draft, tensor = s.speculation.get("draft_tensor_parallel_size"), int(s.value("tensor_parallel_size", 1))
    if draft not in (None, 1, tensor):
        return Violation("tensor_size_inside", f"draft_tensor_parallel_size {draft} is neither 1 nor {tensor}", OFF)
    return None


@rule
def synthetic_acceptance(s: Settings) -> Violation | None:
    spec = s.speculation
    rates, length = spec.get("synthetic_acceptance_rates"), spec.get("synthetic_acceptance_length")
    synthetic = spec.get("rejection_sample_method") == "synthetic"
    if not synthetic:
        given = rates is not None or length is not None
        why = "synthetic acceptance needs rejection_sample_method synthetic"
        return Violation("synthetic_acceptance", why, OFF) if given else None
    if (rates is None) == (length is None):
        return Violation("synthetic_acceptance", "synthetic needs either rates or a length", OFF)
    if length is not None and s.draft_tokens and not 1 <= length <= s.draft_tokens + 1:
        detail = f"synthetic_acceptance_length {length} is not in [1, {s.draft_tokens + 1}]"
        fitting = {**spec, "synthetic_acceptance_length": min(max(length, 1.0), s.draft_tokens + 1.0)}
        return Violation("synthetic_acceptance", detail, {"speculative_config": fitting})
    if rates is not None:
        falling = all(0 <= b <= a <= 1 for a, b in zip([1.0, *rates], rates, strict=False))
        if len(rates) != s.draft_tokens or not falling:
            detail = f"synthetic_acceptance_rates {rates} are not {s.draft_tokens} falling shares"
            return Violation("synthetic_acceptance", detail, OFF)
    return None


@rule
def async_with_speculation(s: Settings) -> Violation | None:
    """Refused on the V1 runner, the default before 0.29; suffix decoding falls back to it in every version."""
    if not s.given("async_scheduling") or s.method not in V1_WITHOUT_ASYNC:
        return None
    if s.release >= (0, 29, 0) and s.method != "suffix" and str(s.given("env:VLLM_USE_V2_MODEL_RUNNER")) != "0":
        return None
    detail = f"async_scheduling cannot be forced with {s.method} speculation"
    return Violation("async_with_speculation", detail, {"async_scheduling": None})


@rule
def tokens_below_lookahead(s: Settings) -> Violation | None:
    """A step must hold more than the drafted tokens; draft models reserve a slot per sequence (0.20 to 0.28)."""
    tokens = s.value("max_num_batched_tokens")
    if tokens is None or not s.draft_tokens:
        return None
    if s.method == "draft_model" and s.release < (0, 29, 0):
        seqs = int(s.value("max_num_seqs", 0))
        if tokens <= seqs:
            detail = f"max_num_batched_tokens {tokens} leaves nothing beside the draft slots of {seqs} sequences"
            return Violation("tokens_below_lookahead", detail, {"max_num_seqs": max(1, tokens // 2)})
    if tokens <= s.draft_tokens:
        return Violation("tokens_below_lookahead", f"max_num_batched_tokens {tokens} is below the drafted tokens", OFF)
    return None


@rule
def lora_with_speculation(s: Settings) -> Violation | None:
    tokens, seqs = s.value("max_num_batched_tokens"), s.value("max_num_seqs")
    if not s.given("enable_lora") or not s.draft_tokens or tokens is None or seqs is None:
        return None
    if tokens < seqs * (s.draft_tokens + 1):
        detail = f"LoRA with speculation: max_num_batched_tokens {tokens} is below {seqs} x {s.draft_tokens + 1}"
        return Violation("lora_with_speculation", detail, {"max_num_seqs": tokens // (s.draft_tokens + 1)})
    return None


@rule
def no_graph_left(s: Settings) -> Violation | None:
    """Capture sizes are rounded to multiples of the query length (``config/compilation.py``)."""
    largest = s.given("max_cudagraph_capture_size")
    if s.draft_tokens and largest is not None and largest < s.draft_tokens + 1 and not s.given("enforce_eager"):
        detail = f"max_cudagraph_capture_size {largest} is below a query of {s.draft_tokens + 1} tokens"
        return Violation("no_graph_left", detail, {"max_cudagraph_capture_size": None})
    return None


@rule
def metrics_without_speculation(s: Settings) -> Violation | None:
    if s.given("per_request_spec_decode_metrics") not in (None, "none") and not s.speculation and not s.given("spec_method"):
        detail = "per_request_spec_decode_metrics needs speculation"
        return Violation("metrics_without_speculation", detail, {"per_request_spec_decode_metrics": "none"})
    return None


@rule
def speculation_given_twice(s: Settings) -> Violation | None:
    pairs = (("spec_method", "method"), ("spec_model", "model"), ("spec_tokens", "num_speculative_tokens"))
    for name, key in pairs:
        if s.given(name) is not None and key in s.speculation:
            return Violation("speculation_given_twice", f"{name} and {key} in speculative_config are both given", {name: None})
    return None


@rule
def fast_prefill_with_eagle(s: Settings) -> Violation | None:
    if s.given("kv_sharing_fast_prefill") and s.method in ("eagle", "eagle3"):
        return Violation("fast_prefill_with_eagle", "kv_sharing_fast_prefill excludes EAGLE", OFF)
    return None
