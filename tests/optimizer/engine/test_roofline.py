"""Step times and estimates: published decode times, monotonicity, and the ranking that seeds a search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import CHAT, DENSE, HYBRID, MOE, closed, model, run_load, tokens_per_s

from vopt.optimizer.engine.hardware import hardware, hardware_names
from vopt.optimizer.engine.roofline import StepTime, acceptance_length, estimate
from vopt.optimizer.errors import UsageError
from vopt.search_spaces.defaults import resolve

H200 = hardware("h200")


def step_time(name: str, **arguments: object) -> StepTime:
    shape = model(name)
    return StepTime(shape, H200, resolve(shape, H200.gpu, arguments), eager=bool(arguments.get("enforce_eager")))


@pytest.mark.parametrize("batch, milliseconds", [(16, 5.56), (32, 8.26), (64, 11.6), (128, 15.3), (256, 21.1)])
def test_decode_steps_of_the_hybrid_moe_are_near_the_published_estimate(batch: int, milliseconds: float) -> None:
    """AIConfigurator's H200 constants put these on Qwen3.5-35B-A3B-FP8; ours are measured on other models."""
    assert step_time(MOE)(batch, batch * 1000.0) * 1e3 == pytest.approx(milliseconds, rel=0.35)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 16384))
def test_more_work_never_takes_less_time(few: int, more: int, prompt: int) -> None:
    step = step_time(HYBRID)
    small, large = sorted((few, more))
    assert step(small, small * 500.0, prompt) <= step(large, large * 500.0, prompt) + 0.02  # a graph padded to its size
    assert step(small, small * 500.0) <= step(small, small * 500.0, prompt)


def test_what_makes_steps_slower() -> None:
    base = step_time(DENSE)(32, 16000.0)
    assert step_time(DENSE, enforce_eager=True)(32, 16000.0) > base
    assert step_time(DENSE, async_scheduling=False)(32, 16000.0) > base
    assert step_time(DENSE, max_cudagraph_capture_size=16)(32, 16000.0) > base
    assert step_time(DENSE, kv_cache_dtype="fp8")(32, 160_000.0) < step_time(DENSE)(32, 160_000.0)
    assert step_time(HYBRID, mamba_ssm_cache_dtype="bfloat16")(512, 1e5) < step_time(HYBRID)(512, 1e5)
    assert step_time(DENSE, tensor_parallel_size=2)(32, 16000.0) < base


@pytest.mark.parametrize("tokens, stated, length", [(1, None, 1.75), (4, None, 3.05), (2, 2.1, 2.1), (2, 9.0, 3.0)])
def test_acceptance_length(tokens: int, stated: float | None, length: float) -> None:
    assert acceptance_length("mtp", tokens, stated) == pytest.approx(length, rel=0.01)


@pytest.mark.parametrize("name, concurrency", [(MOE, 256), (MOE, 512), (DENSE, 256), (HYBRID, 64)])
def test_the_estimate_is_near_the_simulation(name: str, concurrency: int) -> None:
    simulated = run_load(name, {}, closed(concurrency), version="0.33.0")
    predicted = estimate(model(name), H200, {}, CHAT.lengths, concurrency)
    assert predicted.tokens_per_s == pytest.approx(tokens_per_s(simulated), rel=0.15)
    assert predicted.resident == concurrency


def test_candidates_are_ranked_by_what_the_simulation_confirms() -> None:
    candidates = [{"max_num_seqs": 64}, {}, {"max_num_seqs": 256}, {"performance_mode": "throughput"}, {"enforce_eager": True}]
    estimates = [estimate(model(MOE), H200, one, CHAT.lengths, 512).tokens_per_s for one in candidates]
    order = sorted(range(5), key=lambda i: -estimates[i])
    rates = [tokens_per_s(run_load(MOE, one, closed(512, 20.0), version="0.33.0")) for one in candidates]
    assert order[0] == max(range(5), key=lambda i: rates[i])
    assert order[-1] == min(range(5), key=lambda i: rates[i]) == 0


def test_what_cannot_hold_one_request_has_no_rate() -> None:
    nothing = estimate(model(DENSE), hardware("l4"), {"gpu_memory_utilization": 0.5}, CHAT.lengths, 16)
    assert (nothing.tokens_per_s, nothing.resident) == (0.0, 0.0)


def test_devices_are_found_by_name() -> None:
    assert hardware("H200") is H200
    assert {"h200", "h100", "a100", "l40s", "b200"} <= set(hardware_names())
    with pytest.raises(UsageError, match="no such device") as caught:
        hardware("h2000")
    assert "h200" in caught.value.hint
