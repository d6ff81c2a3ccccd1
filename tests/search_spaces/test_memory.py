"""Memory arithmetic: published start-up logs to the token, and verdicts that only exact arithmetic turns into a no."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.search_spaces.defaults import batch_defaults, capture_sizes, resolve
from vopt.search_spaces.kv_cache import kv_layout, token_bytes
from vopt.search_spaces.memory import GIB, Calibration, Gpu, Possible, can_start, memory_plan
from vopt.search_spaces.model import ModelShape, known_model
from vopt.search_spaces.shape import LayerKind

H200 = Gpu("NVIDIA H200", 150_754_820_096)
H100 = Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984)
A100 = Gpu("NVIDIA A100-SXM4-80GB", 85_094_825_984)
B200 = Gpu("NVIDIA B200", 191_514_083_328)


def shape(name: str) -> ModelShape:
    found = known_model(name)
    assert found is not None
    return found


HYBRID_MOE = "Qwen/Qwen3.5-35B-A3B"


@pytest.mark.parametrize("gib, blocks, tokens, concurrency", [(5.98, 299, 567_978, 4.33), (6.01, 300, 569_878, 4.35)])
def test_published_log_of_the_hybrid_moe_with_prefix_caching(gib: float, blocks: int, tokens: int, concurrency: float) -> None:
    """club-3090#612 and #652: fp8 KV, length 131072, prefix caching on."""
    arguments = {
        "kv_cache_memory_bytes": round(gib * GIB),
        "kv_cache_dtype": "fp8",
        "max_model_len": 131072,
        "enable_prefix_caching": True,
    }
    plan = memory_plan(shape(HYBRID_MOE), H200, arguments)
    assert (plan.layout.block_size, plan.blocks, plan.logged_tokens) == (2096, blocks, tokens)
    assert round(plan.max_concurrency, 2) == concurrency


def test_published_log_of_the_hybrid_moe_without_prefix_caching() -> None:
    """home-ops#13226: 95 blocks hold 1.44 requests."""
    arguments = {
        "num_gpu_blocks_override": 95,
        "kv_cache_dtype": "fp8",
        "max_model_len": 131072,
        "enable_prefix_caching": False,
    }
    assert round(memory_plan(shape(HYBRID_MOE), H200, arguments).max_concurrency, 2) == 1.44


@pytest.mark.parametrize(
    "name, dtype, block",
    [
        ("Qwen/Qwen3.5-27B", "auto", 784),
        ("Qwen/Qwen3.5-9B", "auto", 528),
        ("Qwen/Qwen3.5-9B", "fp8", 1056),
        (HYBRID_MOE, "auto", 1056),
        (HYBRID_MOE, "fp8", 2096),
        ("Qwen/Qwen3-8B", "auto", 16),
        ("deepseek-ai/DeepSeek-V3", "auto", 64),
    ],
)
def test_block_sizes(name: str, dtype: str, block: int) -> None:
    model = shape(name)
    assert kv_layout(model, resolve(model, H200, {"kv_cache_dtype": dtype})).block_size == block


def test_state_page_of_the_27b_is_padded_by_an_eighth_of_a_percent() -> None:
    model = shape("Qwen/Qwen3.5-27B")
    layout = kv_layout(model, resolve(model, H200, {}))
    assert layout.page_bytes / 3_207_168 == pytest.approx(1.0013, abs=0.0001)
    assert layout.group_layers == 16


@pytest.mark.parametrize(
    "length, dtype, caching, resident",
    [
        (512, "auto", True, 638),
        (512, "auto", False, 1117),
        (1536, "auto", True, 558),
        (9216, "auto", False, 372),
        (32768, "auto", True, 118),
        (512, "fp8", True, 643),
        (9216, "fp8", True, 409),
        (32768, "fp8", False, 237),
    ],
)
def test_resident_requests_of_the_hybrid_at_ninety_gib(length: int, dtype: str, caching: bool, resident: int) -> None:
    arguments = {"kv_cache_memory_bytes": 90 * GIB, "kv_cache_dtype": dtype, "enable_prefix_caching": caching}
    plan = memory_plan(shape(HYBRID_MOE), H200, arguments)
    assert round(plan.layout.max_concurrency(plan.blocks, length)) == resident
    assert plan.resident(length) in (resident, resident - 1)


def test_cache_size_of_a_dense_model_is_the_measured_one() -> None:
    """vLLM 0.22.1 on an H200 logged 814 368 tokens (cold) and 816 640 (warm)."""
    plan = memory_plan(shape("Qwen/Qwen3-8B"), H200, {"max_model_len": 32768}, "0.22.1")
    assert plan.logged_tokens == pytest.approx(814_368, rel=0.02)


def test_key_and_value_bytes_by_family() -> None:
    assert token_bytes(shape("Qwen/Qwen3-8B"), "bfloat16") == 4096
    assert token_bytes(shape("Qwen/Qwen3-8B"), "bfloat16", 8) == token_bytes(shape("Qwen/Qwen3-8B"), "bfloat16", 16) == 512
    latent = shape("deepseek-ai/DeepSeek-V3")
    assert token_bytes(latent, "bfloat16") == token_bytes(latent, "bfloat16", 8) == 1152


def test_sliding_window_caps_what_a_request_holds() -> None:
    model = shape("openai/gpt-oss-20b")
    layout = kv_layout(model, resolve(model, H200, {"max_num_batched_tokens": 2048, "async_scheduling": False}))
    assert (layout.full_groups, layout.sliding_groups, layout.group_layers) == (1, 1, 12)
    assert layout.blocks_for(100_000) == 6250 + (-(-(127 + 2048) // 16) + 1)
    assert layout.blocks_for(160) == 10 + 11


def test_speculation_gives_the_drafter_a_cache_and_more_state() -> None:
    model = shape("Qwen/Qwen3.5-9B")
    plain = memory_plan(model, H200, {})
    mtp = memory_plan(model, H200, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}})
    assert mtp.layout.group_layers == plain.layout.group_layers + 1
    assert mtp.layout.state_blocks == plain.layout.state_blocks + 2
    assert mtp.weight_bytes > plain.weight_bytes
    assert mtp.blocks < plain.blocks


@pytest.mark.parametrize(
    "gpu, version, seqs, tokens",
    [
        (H200, "0.33.0", 1024, 8192),
        (H100, "0.22.1", 1024, 8192),
        (A100, "0.33.0", 256, 2048),
        (B200, "0.33.0", 1024, 16384),
        (B200, "0.27.0", 1024, 8192),
        (Gpu("NVIDIA L40S", 48 * GIB), "0.33.0", 256, 2048),
    ],
)
def test_batch_defaults_of_vllm_serve(gpu: Gpu, version: str, seqs: int, tokens: int) -> None:
    assert batch_defaults(gpu, version) == (seqs, tokens)


def test_throughput_mode_doubles_only_what_is_unset() -> None:
    model = shape("Qwen/Qwen3-8B")
    both = resolve(model, H200, {"performance_mode": "throughput"})
    one = resolve(model, H200, {"performance_mode": "throughput", "max_num_seqs": 256})
    assert (both.max_num_seqs, both.max_num_batched_tokens) == (2048, 16384)
    assert (one.max_num_seqs, one.max_num_batched_tokens) == (256, 16384)


@pytest.mark.parametrize("mode, number", [("balanced", 51), ("interactivity", 76)])
def test_number_of_default_capture_sizes(mode: str, number: int) -> None:
    assert len(capture_sizes(512, mode)) == number


@pytest.mark.parametrize(
    "version, model, caching",
    [("0.27.0", HYBRID_MOE, False), ("0.28.0", HYBRID_MOE, True), ("0.20.0", "Qwen/Qwen3-8B", True)],
)
def test_prefix_caching_of_hybrids_came_on_with_0_28(version: str, model: str, caching: bool) -> None:
    assert resolve(shape(model), H200, {}, version).prefix_caching is caching


@pytest.mark.parametrize(
    "name, gpu, arguments, possible, words",
    [
        ("Qwen/Qwen3-8B", H200, {}, Possible.CAN, "left for the KV cache"),
        ("meta-llama/Llama-3.1-70B-Instruct", H200, {}, Possible.CANNOT, "weights take"),
        ("meta-llama/Llama-3.1-70B-Instruct", H200, {"tensor_parallel_size": 2}, Possible.CAN, "left"),
        ("Qwen/Qwen3.5-35B-A3B", H100, {}, Possible.CANNOT, "state blocks"),
        ("Qwen/Qwen3.5-35B-A3B", H100, {"max_num_seqs": 350}, Possible.UNKNOWN, "state blocks"),
        ("Qwen/Qwen3.5-35B-A3B", H100, {"gpu_memory_utilization": 0.85}, Possible.CANNOT, "max_model_len"),
        (
            "Qwen/Qwen3-32B",
            H100,
            {"max_model_len": 40960, "gpu_memory_utilization": 0.82},
            Possible.CANNOT,
            "max_model_len 40960",
        ),
        ("deepseek-ai/DeepSeek-V3", H200, {"tensor_parallel_size": 8}, Possible.CAN, "left"),
    ],
)
def test_verdicts(name: str, gpu: Gpu, arguments: dict[str, Any], possible: Possible, words: str) -> None:
    verdict = can_start(shape(name), gpu, arguments)
    assert (verdict.possible, words in verdict.reason) == (possible, True), verdict


def test_a_repair_starts() -> None:
    model = shape("Qwen/Qwen3-32B")
    arguments = {"max_model_len": 40960, "gpu_memory_utilization": 0.85}
    calibration = Calibration().learn(model, H100, {"gpu_memory_utilization": 0.92}, 8 * GIB)
    verdict = can_start(model, H100, arguments, calibration=calibration)
    assert verdict.possible is Possible.CANNOT
    assert verdict.repair is not None
    repaired = can_start(model, H100, {**arguments, **verdict.repair}, calibration=calibration)
    assert repaired.possible is not Possible.CANNOT


def test_calibration_moves_the_estimate_to_what_engines_reported() -> None:
    model = shape("Qwen/Qwen3.5-9B")
    small, large = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}, {"max_num_batched_tokens": 16384}
    truth = {2048: 107 * GIB, 16384: 105 * GIB}
    calibration = Calibration()
    for arguments in (small, large):
        calibration = calibration.learn(model, H200, arguments, truth[arguments["max_num_batched_tokens"]], "0.22.1")
    for arguments in (small, large):
        plan = memory_plan(model, H200, arguments, "0.22.1", calibration)
        assert plan.calibrated
        assert plan.kv_bytes == pytest.approx(truth[arguments["max_num_batched_tokens"]], rel=0.01)
    fixed = calibration.learn(model, H200, {"kv_cache_memory_bytes": GIB}, GIB)
    assert fixed == calibration


NAMES = st.sampled_from(["Qwen/Qwen3-8B", HYBRID_MOE, "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V2-Lite-Chat"])


@given(NAMES, st.integers(1, 60), st.integers(1, 200_000), st.booleans())
def test_longer_requests_never_hold_fewer_blocks(name: str, gib: int, length: int, caching: bool) -> None:
    model = shape(name)
    plan = memory_plan(model, H200, {"kv_cache_memory_bytes": gib * GIB, "enable_prefix_caching": caching})
    layout = plan.layout
    assert layout.blocks_for(length) <= layout.blocks_for(length + 1)
    longest = layout.longest(plan.blocks, length)
    assert longest == 0 or layout.blocks_for(longest) <= plan.blocks
    assert longest == length or layout.blocks_for(longest + 1) > plan.blocks


@given(st.floats(0.3, 0.98), st.floats(0.3, 0.98))
def test_more_memory_never_turns_a_start_into_a_failure(first: float, second: float) -> None:
    low, high = sorted((first, second))
    order = [Possible.CANNOT, Possible.UNKNOWN, Possible.CAN]
    model = shape(HYBRID_MOE)
    verdicts = [can_start(model, H200, {"gpu_memory_utilization": share}).possible for share in (low, high)]
    assert order.index(verdicts[0]) <= order.index(verdicts[1])
    assert model.count(LayerKind.LINEAR) == 30


COLD, WARM = 814_368, 816_640
"""Tokens of KV cache that two starts of Qwen3-8B reported on an H200 (vLLM 0.22.1), with empty and with full caches."""


def test_a_start_on_an_h200_calibrates_the_next_one() -> None:
    """Before: 2 % off at most. After one start: the same configuration to 0.3 %, what two starts differ by."""
    model, arguments = shape("Qwen/Qwen3-8B"), {"max_model_len": 8192}
    token = token_bytes(model, "bfloat16") * model.layers
    guess = memory_plan(model, H200, arguments, "0.22.1")
    assert guess.logged_tokens == pytest.approx(COLD, rel=0.02)
    learnt = Calibration().learn(model, H200, arguments, COLD * token, "0.22.1")
    after = memory_plan(model, H200, arguments, "0.22.1", learnt)
    assert after.logged_tokens == pytest.approx(COLD, abs=16), "one block"
    assert after.logged_tokens == pytest.approx(WARM, rel=0.003)
    both = memory_plan(model, H200, arguments, "0.22.1", learnt.learn(model, H200, arguments, WARM * token, "0.22.1"))
    assert both.logged_tokens == pytest.approx((COLD + WARM) / 2, abs=16)


def test_a_calibrated_reject_leaves_room_for_what_starts_differ_by() -> None:
    """A tiny cache beside a large process: 5 % of the cache is less than the process varies by from start to start."""
    model, host = shape("Qwen/Qwen3-0.6B"), Gpu("cpu", 24 * GIB)
    arguments = {"gpu_memory_utilization": 0.1, "max_model_len": 8192}
    learnt = Calibration().learn(model, host, arguments, round(0.8 * GIB))
    for length, possible in ((7400, True), (7800, True), (12_000, False)):
        verdict = can_start(model, host, {**arguments, "max_model_len": length}, calibration=learnt)
        assert (verdict.possible is not Possible.CANNOT) is possible, (length, verdict.reason)
