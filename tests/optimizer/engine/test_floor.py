"""The physical floor under latencies: what no configuration can be faster than, and the refusal of limits below it."""

from __future__ import annotations

import pytest

from vopt.objectives.goals import built_in_goal, parse_limit
from vopt.optimizer.engine.floor import check_limits, floor
from vopt.optimizer.engine.hardware import hardware, hardware_names
from vopt.optimizer.engine.roofline import estimate
from vopt.optimizer.errors import UsageError
from vopt.search_spaces.model import known_model
from vopt.search_spaces.shape import ModelShape

H200 = hardware("h200")
LENGTHS = ((100, 10), (200, 50), (300, 240))


def shape(name: str = "Qwen/Qwen3-8B") -> ModelShape:
    found = known_model(name)
    assert found is not None
    return found


def test_a_dense_model_reads_all_its_weights_for_each_token() -> None:
    least = floor(shape(), H200, 1, LENGTHS)
    embeddings = shape().params["embeddings"] * 2
    assert least.pass_bytes == pytest.approx(shape().weight_bytes() - embeddings, rel=0.01)
    assert least.pass_s == pytest.approx(least.pass_bytes / H200.bandwidth_bytes_per_s)
    assert least.metrics["mean_e2e_s"] == pytest.approx(100 * least.pass_s)
    assert least.metrics["p50_e2e_s"] == pytest.approx(50 * least.pass_s)
    assert least.requests["e2e_s"] == pytest.approx(10 * least.pass_s)


def test_experts_speculation_and_more_gpus_lower_it() -> None:
    dense, sparse = floor(shape(), H200, 1, LENGTHS), floor(shape("Qwen/Qwen3.5-35B-A3B-FP8"), H200, 1, LENGTHS)
    assert sparse.pass_bytes < dense.pass_bytes
    two = floor(shape(), H200, 2, LENGTHS)
    assert two.pass_s == pytest.approx(dense.pass_s / 2)
    drafted = floor(shape(), H200, 1, LENGTHS, per_pass=4)
    assert drafted.metrics["mean_tpot_s"] == pytest.approx(dense.metrics["mean_tpot_s"] / 4)
    assert drafted.metrics["mean_ttft_s"] == dense.metrics["mean_ttft_s"]


@pytest.mark.parametrize("device", hardware_names())
@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "Qwen/Qwen3.5-35B-A3B-FP8"])
def test_no_simulated_engine_is_below_it(device: str, name: str) -> None:
    found = estimate(shape(name), hardware(device), {}, LENGTHS, 1)
    least = floor(shape(name), hardware(device), 1, LENGTHS)
    assert found.tpot_s > least.metrics["mean_tpot_s"]
    assert found.ttft_s > least.metrics["mean_ttft_s"]


def test_a_limit_below_it_is_refused_with_the_floor_and_why() -> None:
    least = floor(shape(), H200, 1, LENGTHS)
    lowest = least.metrics["mean_e2e_s"]
    check_limits(built_in_goal("latency", limits=(parse_limit(f"mean_e2e_s<={1.01 * lowest}"),)), least)
    check_limits(built_in_goal("latency", limits=(parse_limit("mean_e2e_s<=0.9*baseline"),)), least)
    with pytest.raises(UsageError, match=f"physical floor of {lowest:.3g} s") as refused:
        check_limits(built_in_goal("latency", limits=(parse_limit(f"mean_e2e_s<={0.99 * lowest}"),)), least)
    assert "GB of weights" in refused.value.message
    assert "mean_e2e_s<=" in refused.value.hint
