"""Whole searches whose confirmation goes wrong: what the answer then is, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from landscapes import Landscape, MemoryStudy, small_landscape

from vopt.objectives.goals import Goal, built_in_goal, parse_limit
from vopt.optimizer.history import FailureSummary, Stage, TrialRecord, TrialRequest
from vopt.optimizer.recommend import Recommendation, Verdict
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, Pinned, SearchSetup
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase

Evaluate = Callable[[TrialRequest], TrialRecord]


def run(
    landscape: Landscape, evaluate: Evaluate, goal: Goal | None = None, budget: Budget | None = None
) -> tuple[Recommendation, MemoryStudy]:
    setup = SearchSetup(
        goal=goal or landscape.goal,
        space=landscape.space,
        budget=budget or Budget(trials=16, time_s=None, soak_s=60),
        pinned=(Pinned(EngineConfig(landscape.mode), "the bare mode"),),
    )
    study = MemoryStudy()
    return search(setup, study, evaluate, lambda event: None), study


def died(landscape: Landscape, request: TrialRequest) -> TrialRecord:
    failure = FailureSummary(Phase.LOAD, FailureKind.ENGINE_DIED, "illegal memory access")
    return replace(landscape.evaluator(0)(request), status=None, metrics=None, failure=failure)


def test_what_was_faster_but_over_a_limit_is_named_with_the_limit() -> None:
    """A baseline that answers few requests quickly: whatever serves more of them breaks its guard."""
    landscape = small_landscape()
    guarded = built_in_goal("throughput")

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        if record.metrics is None:
            return record
        few = not request.config
        slow = {"p95_ttft_s": 0.3, "p95_tpot_s": 0.006 if few else 0.022}
        rate = {"tokens_per_s": record.metrics["tokens_per_s"] * (0.3 if few else 1.0)}
        return replace(record, metrics=replace(record.metrics, values={**record.metrics.values, **slow, **rate}))

    answer, study = run(landscape, evaluate=evaluate, goal=guarded)
    assert answer.verdict is Verdict.NO_GAIN
    assert answer.gain is None
    assert "no measurable gain within the limits" in answer.reason
    assert "p95_tpot_s 22 ms is above the limit 7.5 ms (1.25 x baseline); --no-guard leaves that limit out" in answer.reason
    baseline = study.records()[0].metrics
    assert baseline is not None
    assert f"the baseline's {baseline['tokens_per_s']:,.0f}" in answer.reason
    typed = built_in_goal("throughput", limits=(parse_limit("p95_tpot_s<=10ms"),))
    own, _ = run(landscape, evaluate=evaluate, goal=typed)
    assert "is above the limit 10 ms" in own.reason
    assert "--no-guard" not in own.reason


def test_two_finalists_that_die_are_named_and_neither_is_the_answer() -> None:
    landscape = small_landscape()

    def evaluate(request: TrialRequest) -> TrialRecord:
        if request.stage is Stage.CONFIRMATION and request.config:
            return died(landscape, request)
        return landscape.evaluator(0)(request)

    for soak_s in (0.0, 60.0):
        answer, study = run(landscape, evaluate=evaluate, budget=Budget(trials=12, time_s=None, soak_s=soak_s))
        assert answer.verdict is Verdict.NO_GAIN
        assert answer.argv == answer.baseline_argv
        assert "confirm-1-finalist: " in answer.reason
        assert "confirm-1-finalist-2: " in answer.reason
        assert not any(record.stage is Stage.SOAK for record in study.records())


def test_where_the_drift_alone_makes_the_interval_hold_no_gain_the_answer_says_so() -> None:
    landscape = small_landscape(noise=0.001)

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        if request.stage is not Stage.CONFIRMATION or record.metrics is None:
            return record
        slower = {"tokens_per_s": record.metrics["tokens_per_s"] * 0.85}
        return replace(record, metrics=replace(record.metrics, values={**record.metrics.values, **slower}))

    answer, _ = run(landscape, evaluate=evaluate)
    assert answer.verdict is Verdict.BETTER
    assert answer.gain is not None
    assert (answer.gain.low or 1) < 1
    assert "only for the machine's drift" in answer.reason
    assert any("takes its arms in turn" in note and "decide the verdict" in note for note in answer.notes)


def test_a_finalist_refused_for_a_limit_is_rejected_by_it_and_the_next_one_is_named() -> None:
    landscape = small_landscape()
    goal = built_in_goal("throughput", limits=(parse_limit("p95_ttft_s<=500ms"),), guard=False)

    def over(baseline: float, confirmed: float) -> Evaluate:
        def evaluate(request: TrialRequest) -> TrialRecord:
            record = landscape.evaluator(0)(request)
            if record.metrics is None:
                return record
            served = confirmed if request.config else baseline
            ttft = served if request.stage is Stage.CONFIRMATION else 0.4
            return replace(record, metrics=replace(record.metrics, values={**record.metrics.values, "p95_ttft_s": ttft}))

        return evaluate

    kept, _ = run(landscape, evaluate=over(0.4, 0.7), goal=goal)
    assert kept.verdict is Verdict.NO_GAIN
    assert [row.kind for row in kept.rejected if row.label == "confirmation"] == ["limit:p95_ttft_s"]
    none, _ = run(landscape, evaluate=over(0.9, 0.7), goal=goal)
    assert none.verdict is Verdict.NOTHING_FEASIBLE
    assert "p95_ttft_s 900 ms is above the limit 500 ms" in none.baseline_breaks
    assert "p95_ttft_s 700 ms is above the limit 500 ms" in none.reason
    for answer in (kept, none):
        assert any("the next best of the search" in note and "vopt export --trial " in note for note in answer.notes)


def test_one_round_shows_neither_a_gain_nor_the_lack_of_one() -> None:
    """A start of each arm has no spread: a lead is told as unconfirmed, after a soak, and no lead as no gain."""
    landscape = small_landscape()
    one = Budget(trials=12, rounds=1, time_s=None, soak_s=60)
    ahead, study = run(landscape, evaluate=landscape.evaluator(0), budget=one)
    assert ahead.verdict is Verdict.UNCONFIRMED
    assert ahead.gain is not None
    assert ahead.gain.ratio > 1.05
    assert ahead.gain.low is None
    assert ahead.winner_config == next(r.config for r in study.records() if r.label == "confirm-1-finalist")
    assert "too few for an interval; vopt resume with --rounds 3" in ahead.reason
    assert [record.stage for record in study.records()].count(Stage.SOAK) == 1

    def slower(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        if record.metrics is None or request.stage is not Stage.CONFIRMATION or not request.config:
            return record
        values = {**record.metrics.values, "tokens_per_s": 1.0}
        return replace(record, metrics=replace(record.metrics, values=values))

    behind, _ = run(landscape, evaluate=slower, budget=one)
    assert behind.verdict is Verdict.NO_GAIN
    assert behind.winner_config is None


def test_what_is_surely_faster_beyond_a_limit_is_named_beside_no_gain() -> None:
    """The answer stays within the limits; what they cost is said, with what leaves them out."""
    landscape = small_landscape()
    guarded = built_in_goal("throughput")

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        if record.metrics is None:
            return record
        faster = request.config.get("max_num_seqs") is not None
        values = {"tokens_per_s": 1300.0 if faster else 1000.0, "p95_ttft_s": 0.9 if faster else 0.3, "p95_tpot_s": 0.01}
        return replace(record, metrics=replace(record.metrics, values={**record.metrics.values, **values}))

    answer, study = run(landscape, evaluate=evaluate, goal=guarded)
    assert answer.verdict is Verdict.NO_GAIN
    assert any(record.stage is Stage.CONFIRMATION for record in study.records())
    found = [note for note in answer.notes if note.startswith("beyond the limits there is more")]
    assert len(found) == 1
    assert "was 30.0% better than the baseline in the search, but p95_ttft_s 900 ms is above the limit 450 ms" in found[0]
    assert found[0].endswith("--no-guard leaves that limit out")
