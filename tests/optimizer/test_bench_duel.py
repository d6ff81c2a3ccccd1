"""What ``vopt bench --study`` says of two arms: whether the recommendation holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from vopt.objectives.goals import Goal, Limit, built_in_goal
from vopt.objectives.metrics import Metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer.bench_duel import Answer, Duel, judge_duel, order
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.history import FailureSummary, Stage, TrialRecord
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase

GOAL = built_in_goal("throughput", guard=False)
DUEL = Duel("winner", {"baseline": EngineConfig(), "winner": EngineConfig({"max_num_seqs": 512})}, 1.2)


def start(
    label: str,
    tokens_per_s: float,
    success: float = 1.0,
    flags: tuple[str, ...] = (),
    failure: Any = None,
    ttft: float | None = None,
    status: LoadStatus = LoadStatus.COMPLETE,
) -> TrialRecord:
    values = {"tokens_per_s": tokens_per_s, "success_rate": success} | ({"p95_ttft_s": ttft} if ttft is not None else {})
    return TrialRecord(
        label=label,
        config=EngineConfig(),
        stage=Stage.CONFIRMATION,
        arm=None,
        attempt=1,
        status=status,
        metrics=Metrics(values),
        failure=failure,
        argv=(),
        resolved={},
        kv_cache_tokens=None,
        start_class=None,
        phase_s={},
        start_parts_s={},
        began_at="",
        directory="",
        flags=flags,
    )


def judged(baseline: Sequence[TrialRecord], winner: Sequence[TrialRecord], gate: float | None, goal: Goal = GOAL) -> Answer:
    starts: Mapping[str, Sequence[TrialRecord]] = {"baseline": baseline, "winner": winner}
    return judge_duel(DUEL, starts, goal, gate)


def test_the_gate_compares_leads() -> None:
    base = [start("a", 100.0), start("b", 101.0)]
    kept = judged(base, [start("c", 119.0), start("d", 120.0)], 0.03)
    assert kept.holds
    assert kept.lost == pytest.approx(1 - kept.now.ratio / 1.2 if kept.now else 0)
    assert kept.now is not None
    assert kept.now.low is not None
    lost = judged(base, [start("c", 114.0), start("d", 115.0)], 0.03)
    assert not lost.holds
    assert judged(base, [start("c", 114.0), start("d", 115.0)], 0.08).holds


def test_an_upgrade_that_makes_both_faster_alike_loses_nothing() -> None:
    assert judged([start("a", 200.0)], [start("b", 240.0)], 0.0).lost == pytest.approx(0.0)


def test_a_recommendation_that_fails_or_breaks_a_limit_does_not_hold() -> None:
    died = FailureSummary(Phase.LOAD, FailureKind.ENGINE_DIED, "gone")
    failed = judged([start("a", 100.0)], [start("b", 130.0, failure=died)], 0.9)
    assert not failed.holds
    assert "engine_died" in failed.reason
    broken = judged([start("a", 100.0)], [start("b", 130.0, success=0.9)], 0.9)
    assert not broken.holds
    assert "success_rate" in broken.reason


GUARDED = built_in_goal("throughput", limits=[Limit("p95_ttft_s", "<=", 1.5, relative_to_baseline=True)], guard=False)


@pytest.mark.parametrize(
    ("baseline", "winner", "holds"),
    [
        # means of 0.367 and 0.47: 1.28 times, though 1.57 times the first start of the baseline
        ([(0.30, 1.0), (0.40, 1.0), (0.40, 1.0)], [(0.47, 1.0), (0.47, 1.0), (0.47, 1.0)], True),
        ([(0.40, 1.0), (0.30, 1.0), (0.30, 1.0)], [(0.55, 1.0), (0.55, 1.0), (0.55, 1.0)], False),
        # one start at 98 % in a mean of 99.3 %
        ([(0.40, 1.0)] * 3, [(0.40, 1.0), (0.40, 0.98), (0.40, 1.0)], True),
        ([(0.40, 1.0)] * 3, [(0.40, 0.98), (0.40, 0.98), (0.40, 1.0)], False),
    ],
)
def test_the_gate_judges_limits_by_means_as_the_study_does(
    baseline: list[tuple[float, float]], winner: list[tuple[float, float]], holds: bool
) -> None:
    arms = [[start(str(n), 100.0, rate, ttft=ttft) for n, (ttft, rate) in enumerate(arm)] for arm in (baseline, winner)]
    for order_ in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        said = judged([arms[0][n] for n in order_], [arms[1][n] for n in order_], 0.5, GUARDED)
        assert said.holds is holds, said.reason


def test_a_recommended_start_that_was_overloaded_does_not_hold_and_one_of_the_baseline_is_no_reference() -> None:
    calm = [start("a", 100.0, ttft=0.4), start("b", 100.0, ttft=0.4)]
    piled = [start("c", 100.0, ttft=9.0, status=LoadStatus.OVERLOADED), *calm]
    assert "overloaded" in judged(calm, piled, 0.5, GUARDED).reason
    assert not judged(piled, [start("d", 100.0, ttft=0.7)], 0.5, GUARDED).holds


def test_it_holds_where_the_alternative_does_not_even_run() -> None:
    died = FailureSummary(Phase.START, FailureKind.OOM_START, "no memory")
    assert judged([start("a", 1.0, failure=died)], [start("b", 1.0)], 0.0).holds


def test_a_client_that_was_the_limit_allows_no_claim() -> None:
    with pytest.raises(EnvironmentLacks, match="client"):
        judged([start("a", 100.0, flags=("client_limited",))], [start("b", 120.0)], 0.03)


def test_arms_alternate() -> None:
    assert [name[0] for _, name in order(DUEL, 3)] == list("bwwbbw")
