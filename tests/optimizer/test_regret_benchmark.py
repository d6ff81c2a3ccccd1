"""The regret benchmark's own machinery: its families know the truth, and its statistics are what they say."""

from __future__ import annotations

import math

import families
import pytest
import regret
from simulated_families import RESTART_NOISE, simulated_landscape

from vopt.optimizer.history import Stage, TrialRequest
from vopt.optimizer.trial import EngineConfig


def test_every_default_family_exists_and_there_are_eight() -> None:
    assert len(regret.families.DEFAULT) == 8
    assert set(regret.families.DEFAULT) <= set(families.FAMILIES)
    names = set(families.FAMILIES)
    for gpu in ("h200", "h100", "a100"):
        for kind in ("dense", "moe", "hybrid"):
            assert {f"{gpu}-{kind}-{load}" for load in ("chat", "throughput", "long-context", "generation")} <= names


@pytest.mark.parametrize("family", ["small", "h200-0.6b", "9b-throughput"])
def test_recorded_and_drawn_families_know_their_optimum(family: str) -> None:
    landscape = families.FAMILIES[family](0)
    regrets = [landscape.regret(landscape.space.config(p)) for p in landscape.points() if not landscape.space.violations(p)]
    assert min(regrets) == pytest.approx(0.0, abs=1e-9)
    assert all(0.0 <= value <= 1.0 for value in regrets)
    assert landscape.regret(None) == 1.0


def test_methods_are_compared_at_every_budget_and_repeat_themselves() -> None:
    first, again = (regret.run("small", ["random", "coordinate", "auto_tune"], 3, [6, 10]) for _ in range(2))
    assert first == again
    assert [set(row) for row in first] == [{6, 10}] * 3
    for row in first:
        assert row[10].regret <= row[6].regret + 0.05
    lines = regret.table({"small": {"random": [first[0]], "coordinate": [first[1]]}}, [6, 10])
    assert any("coordinate" in line for line in lines)


def test_holm_adjusts_in_order() -> None:
    assert regret.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})


def test_equal_pairs_show_nothing() -> None:
    assert regret.wilcoxon([0.1, 0.2], [0.1, 0.2], "less") == 1.0
    assert regret.wilcoxon([0.1] * 12, [0.2 + 0.01 * i for i in range(12)], "less") < 0.01


@pytest.mark.slow
def test_a_simulated_family_has_a_truth_that_starts_scatter_around() -> None:
    landscape = simulated_landscape("h200", "dense", "chat")
    assert landscape.regret({}) < 0.01
    truth = landscape.truth(EngineConfig({"max_num_batched_tokens": 4096}))
    assert truth.metrics is not None
    assert truth is landscape.truth(EngineConfig({"max_num_batched_tokens": 4096}))
    evaluate = landscape.evaluator(5)
    logs = []
    for label in map(str, range(60)):
        start = evaluate(TrialRequest(label, EngineConfig({"max_num_batched_tokens": 4096}), Stage.SEARCH))
        assert start.metrics is not None
        faster = start.metrics["tokens_per_s"] / truth.metrics["tokens_per_s"]
        assert start.metrics["mean_e2e_s"] * faster == pytest.approx(truth.metrics["mean_e2e_s"])
        logs.append(math.log(faster))
    spread = (sum(value**2 for value in logs) / len(logs)) ** 0.5
    assert 0.7 * RESTART_NOISE < spread < 1.3 * RESTART_NOISE
