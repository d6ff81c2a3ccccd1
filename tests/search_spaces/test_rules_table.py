"""Every configuration that vLLM refuses when it builds its config is refused here, by a named rule with its values."""

from __future__ import annotations

from typing import Any

import pytest

from vopt.search_spaces.rules import forbidden_violations, rule_violations
from vopt.search_spaces.rules_engine import AT_LEAST_ONE

MODEL = {
    "q_heads": 32,
    "kv_heads": 8,
    "hybrid": False,
    "moe": False,
    "mla": False,
    "mtp_layers": 0,
    "quantization": None,
    "dtype": "bfloat16",
    "max_position": 40960,
}
HYBRID = {**MODEL, "hybrid": True, "mtp_layers": 1, "moe": True}
RESOLVED = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "max_model_len": 40960, "enable_prefix_caching": True}


def facts(model: dict[str, Any] | None = None, version: str = "0.32.0", gpus: int = 8) -> dict[str, Any]:
    return {"version": version, "model": model or MODEL, "gpus": gpus, "resolved": RESOLVED, "hybrid_block": 528}


def spec(**entries: Any) -> dict[str, Any]:
    return {"speculative_config": entries}


DENSE_CASES = [
    ({"max_num_batched_tokens": 128, "max_num_seqs": 256}, "tokens_below_sequences"),
    ({"max_num_seqs": 16384}, "tokens_below_sequences"),
    ({"max_num_batched_tokens": 4096, "enable_chunked_prefill": False}, "tokens_below_length"),
    ({"max_num_active_seqs": 2048}, "active_above_sequences"),
    ({"long_prefill_token_threshold": 50000}, "long_prefill_above_length"),
    ({"gpu_memory_utilization": 1.2}, "utilization_out_of_range"),
    ({"gpu_memory_utilization": 0.0}, "utilization_out_of_range"),
    ({"stream_interval": 0}, "size_below_one"),
    ({"block_size": 0}, "size_below_one"),
    ({"max_num_seqs": -3}, "size_below_one"),
    ({"max_model_len": 50000}, "length_above_model"),
    ({"scheduling_policy": "lof"}, "unknown_policy"),
    ({"mamba_block_size": 512, "enable_prefix_caching": False}, "state_block_without_caching"),
    ({"enable_mamba_cache_stochastic_rounding": True}, "rounding_needs_half"),
    ({"max_cudagraph_capture_size": 64, "compilation_config": {"max_cudagraph_capture_size": 64}}, "capture_given_twice"),
    ({"cudagraph_capture_sizes": [1, 2], "compilation_config": {"cudagraph_capture_sizes": [1]}}, "capture_given_twice"),
    ({"cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 8}, "capture_inconsistent"),
    ({"attention_backend": "FLASHINFER", "attention_config": {"backend": "FLASH_ATTN"}}, "backend_given_twice"),
    ({"tensor_parallel_size": 4, "data_parallel_size": 4}, "more_ranks_than_gpus"),
    ({"tensor_parallel_size": 3}, "heads_not_divisible"),
    ({"enable_expert_parallel": True}, "expert_parallel_on_dense"),
    ({"enable_eplb": True, "tensor_parallel_size": 2}, "eplb_alone"),
    ({"decode_context_parallel_size": 2, "tensor_parallel_size": 8}, "context_parallel_heads"),
    ({"numa_bind_nodes": [0]}, "numa_without_bind"),
    ({"enable_dbo": True, "dbo_decode_token_threshold": 1}, "small_dbo_threshold"),
    ({"kv_cache_dtype": "float16"}, "kv_dtype_unlike_model"),
    ({"moe_backend": "deep_gemm"}, "deep_gemm_needs_fp8"),
    ({"language_model_only": True, "compilation_config": {"cudagraph_mm_encoder": True}}, "text_only_with_encoder_graphs"),
    (
        {"kv_transfer_config": {"kv_connector": "X"}, "env:PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        "expandable_segments_with_connector",
    ),
    (spec(method="ngram"), "tokens_missing"),
    (spec(method="draft_model", num_speculative_tokens=2), "draft_model_missing"),
    (spec(method="ngram", num_speculative_tokens=3, prompt_lookup_min=5, prompt_lookup_max=2), "lookup_out_of_order"),
    (spec(method="mtp", num_speculative_tokens=1), "no_mtp_layers"),
    (spec(method="ngram", num_speculative_tokens=2, tensor_parallel_size=2), "tensor_size_inside"),
    (
        spec(method="ngram", num_speculative_tokens=2, rejection_sample_method="synthetic", synthetic_acceptance_length=4),
        "synthetic_acceptance",
    ),
    (spec(method="ngram", num_speculative_tokens=2, rejection_sample_method="synthetic"), "synthetic_acceptance"),
    (spec(method="ngram", num_speculative_tokens=2, synthetic_acceptance_length=2), "synthetic_acceptance"),
    (
        spec(
            method="ngram", num_speculative_tokens=2, rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.2, 0.9]
        ),
        "synthetic_acceptance",
    ),
    ({**spec(method="suffix"), "async_scheduling": True}, "async_with_speculation"),
    (
        {**spec(method="ngram", num_speculative_tokens=16), "max_num_batched_tokens": 16, "max_num_seqs": 8},
        "tokens_below_lookahead",
    ),
    ({**spec(method="ngram", num_speculative_tokens=9), "enable_lora": True}, "lora_with_speculation"),
    ({**spec(method="ngram", num_speculative_tokens=3), "max_cudagraph_capture_size": 2}, "no_graph_left"),
    ({"per_request_spec_decode_metrics": "summary"}, "metrics_without_speculation"),
    ({**spec(method="ngram", num_speculative_tokens=3), "spec_tokens": 3}, "speculation_given_twice"),
    (
        {**spec(method="eagle3", model="m", num_speculative_tokens=3), "kv_sharing_fast_prefill": True},
        "fast_prefill_with_eagle",
    ),
]


@pytest.mark.parametrize(("config", "name"), DENSE_CASES)
def test_what_vllm_refuses_is_refused_by_name(config: dict[str, Any], name: str) -> None:
    assert name in [violation.rule for violation in rule_violations(config, facts())]


@pytest.mark.parametrize(("config", "name"), DENSE_CASES)
def test_repairs_settle_the_rule_that_named_them(config: dict[str, Any], name: str) -> None:
    violation = next(v for v in rule_violations(config, facts()) if v.rule == name)
    if violation.repair is None:
        return
    repaired = {key: value for key, value in {**config, **violation.repair}.items() if value is not None}
    assert name not in [v.rule for v in rule_violations(repaired, facts())]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 65536}, "hybrid_caching_unchunked"),
        ({"max_num_batched_tokens": 512}, "hybrid_block_above_tokens"),
        ({"long_prefill_token_threshold": 256}, "hybrid_block_above_threshold"),
        ({"block_size": 16}, "block_size_on_hybrid"),
    ],
)
def test_hybrids_have_rules_of_their_own(config: dict[str, Any], name: str) -> None:
    assert name in [violation.rule for violation in rule_violations(config, facts(HYBRID))]
    assert name not in [violation.rule for violation in rule_violations(config, facts())]


@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["dense", "hybrid"])
@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_no_other_rule_computes_with_a_size_that_is_none(name: str, size: int, model: dict[str, Any]) -> None:
    assert [violation.rule for violation in rule_violations({name: size}, facts(model))] == ["size_below_one"]


def test_versions_decide() -> None:
    ngram = {**spec(method="ngram", num_speculative_tokens=3), "async_scheduling": True}
    assert [v.rule for v in rule_violations(ngram, facts(version="0.26.0"))] == ["async_with_speculation"]
    assert rule_violations(ngram, facts(version="0.32.0")) == []
    draft = {**spec(method="draft_model", model="m", num_speculative_tokens=2), "max_num_batched_tokens": 1024}
    assert [v.rule for v in rule_violations(draft, facts(version="0.20.0"))] == ["tokens_below_lookahead"]
    state = {"mamba_ssm_cache_dtype": "bfloat16"}
    assert [v.rule for v in rule_violations(state, facts(HYBRID, "0.20.0"))] == ["state_dtype_too_new"]


def test_several_mtp_layers_draft_in_turn() -> None:
    model = {**MODEL, "mtp_layers": 2}
    found = rule_violations(spec(method="mtp", num_speculative_tokens=3), facts(model))
    assert [v.rule for v in found] == ["draft_not_divisible"]
    assert found[0].repair == spec(method="mtp", num_speculative_tokens=2)
    assert rule_violations(spec(method="mtp", num_speculative_tokens=4), facts(model)) == []


def test_a_quantized_checkpoint_takes_no_other_quantization() -> None:
    model = {**MODEL, "quantization": "fp8"}
    assert [v.rule for v in rule_violations({"quantization": "awq"}, facts(model))] == ["quantized_twice"]
    assert rule_violations({"quantization": "fp8"}, facts(model)) == []


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_seqs": 2048, "max_num_batched_tokens": 16384},
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 4096},
        {"max_model_len": 65536, "env:VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
        {"tensor_parallel_size": 8},
        {"cudagraph_capture_sizes": [1, 2, 8], "max_cudagraph_capture_size": 8},
        spec(method="ngram", num_speculative_tokens=3),
        spec(method="suffix"),
    ],
)
def test_what_vllm_takes_is_left_alone(config: dict[str, Any]) -> None:
    assert rule_violations(config, facts()) == []


def test_rules_stay_silent_without_a_shape() -> None:
    bare = {"version": "0.32.0", "model": {}, "gpus": 1, "resolved": {}}
    assert rule_violations({"max_model_len": 10**6, **spec(method="mtp", num_speculative_tokens=1)}, bare) == []


def test_a_users_rule_forbids_a_combination() -> None:
    rules = [{"conditions": {"max_num_seqs": {"at_least": 1024}, "speculation": "mtp:2"}, "why": "crashed last year"}]
    assert forbidden_violations({"max_num_seqs": 2048, "speculation": "mtp:2"}, rules)[0].detail == (
        "max_num_seqs = 2048, speculation = 'mtp:2': crashed last year"
    )
    assert forbidden_violations({"max_num_seqs": 512, "speculation": "mtp:2"}, rules) == []
    assert forbidden_violations({"max_num_seqs": 2048, "speculation": "off"}, rules) == []
