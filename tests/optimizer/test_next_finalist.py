"""One finalist after another: what a failure, a refused soak or more rounds lead to, and which one the answer is about."""

from __future__ import annotations

from dataclasses import replace

import pytest
from landscapes import MemoryStudy, small_landscape
from reopened import BEST, FINALIST, best_next, dying, first_setup, more, ran, scaled

from vopt.optimizer.bench_duel import find_duel
from vopt.optimizer.history import Arm, Stage, StudyRecord, TrialRequest
from vopt.optimizer.recommend import Recommendation, Verdict
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.setup import Pinned
from vopt.optimizer.trial import EngineConfig


def test_a_winner_whose_soak_died_makes_room_for_the_next_one() -> None:
    landscape = small_landscape(noise=0.002)

    def dies(request: TrialRequest) -> bool:
        return request.stage is Stage.SOAK and request.config == FINALIST

    def factor(request: TrialRequest) -> float:
        return 2.0 if request.config == FINALIST else 1.0

    study, evaluate = MemoryStudy(), dying(landscape, dies, factor)
    setup = replace(first_setup(landscape, soak_s=60.0), explain=True)
    first, made = ran(setup, study, evaluate)
    assert first.verdict is Verdict.NO_GAIN
    assert first.reason.startswith("the best configuration failed in its soak")
    assert Stage.EXPLAIN not in {record.stage for record in made}
    answer, made = ran(best_next(more(setup, study, reopened=True, trials=3)), study, evaluate)
    assert (answer.verdict, answer.winner_config) == (Verdict.BETTER, BEST)
    assert [(record.label, record.config) for record in made if record.stage is Stage.SOAK] == [("soak-s2", BEST)]
    assert {record.label for record in made if record.stage is Stage.CONFIRMATION} >= {"confirm-1-finalist-s2"}


def test_finalists_that_failed_before_take_no_try_of_those_that_more_trials_bring() -> None:
    landscape = small_landscape(noise=0.002)
    second, third = EngineConfig({"max_num_seqs": 128}), BEST
    speeds = {EngineConfig(): 1.0, FINALIST: 9.0, second: 9.0, third: 2.0}

    def dies(request: TrialRequest) -> bool:
        return request.stage is Stage.CONFIRMATION and request.config in (FINALIST, second)

    study = MemoryStudy()
    evaluate = dying(landscape, dies, lambda request: speeds.get(request.config, 0.5))
    pinned = (Pinned(FINALIST, "first"), Pinned(second, "second"))
    setup = replace(first_setup(landscape, trials=8), pinned=pinned, space=replace(landscape.space, seeds=()))
    setup = replace(setup, budget=replace(setup.budget, patience=1))
    first, made = ran(setup, study, evaluate)
    assert first.reason.startswith("no finalist came through")
    assert {record.config for record in made if record.arm is Arm.FINALIST} == {FINALIST, second}
    again = replace(more(setup, study, reopened=True, trials=12), pinned=(*pinned, Pinned(third, "third")))
    answer, made = ran(again, study, evaluate)
    assert {record.config for record in made if record.arm is Arm.FINALIST} == {third}
    assert (answer.verdict, answer.winner_config) == (Verdict.BETTER, third)


def test_lite_that_wins_with_more_rounds_is_soaked_and_explained_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    lite = EngineConfig({"max_num_seqs": 512, "performance_mode": "throughput"})
    monkeypatch.setattr("vopt.optimizer.progress.lite_config", lambda *words: lite)
    landscape = small_landscape(noise=0.002)
    speeds = {BEST: 2.0, lite: 2.0}
    study, evaluate = MemoryStudy(), scaled(landscape, lambda request: speeds.get(request.config, 1.0))
    setup = replace(first_setup(landscape, rounds=1, soak_s=60.0), pinned=(Pinned(BEST, "first"),), explain=True)
    first, made = ran(setup, study, evaluate)
    assert (first.verdict, first.winner_config) == (Verdict.UNCONFIRMED, BEST)
    assert [(record.label, record.config) for record in made if record.stage is Stage.SOAK] == [("soak", BEST)]
    answer, made = ran(more(setup, study, rounds=3), study, evaluate)
    assert (answer.verdict, answer.winner_config) == (Verdict.BETTER, lite)
    assert [(record.label, record.config) for record in made if record.stage is Stage.SOAK] == [("soak-s2", lite)]
    explained = [record for record in made if record.stage is Stage.EXPLAIN]
    assert {record.config for record in explained} == {lite.without(name) for name in lite}
    values = [record.metrics["tokens_per_s"] for record in explained if record.config == EngineConfig({"max_num_seqs": 512})]
    worth = next(row.worth for row in answer.overrides if row.name == "performance_mode")
    assert worth is not None
    assert worth.ratio == pytest.approx(answer.winner_metrics["tokens_per_s"] / (sum(values) / len(values)), rel=1e-3)


def test_what_was_explained_without_a_confirmation_is_told() -> None:
    landscape = small_landscape(noise=0.002)
    study = MemoryStudy()
    answer, made = ran(replace(first_setup(landscape, rounds=0), explain=True), study, landscape.evaluator(0))
    assert (answer.verdict, answer.winner_config) == (Verdict.UNCONFIRMED, FINALIST)
    assert len([record for record in made if record.stage is Stage.EXPLAIN]) == 2
    (row,) = answer.overrides
    assert answer.gain is not None
    assert row.worth is not None
    assert row.worth.ratio == pytest.approx(answer.gain.ratio, rel=0.02)


def of_answer(answer: Recommendation, study: MemoryStudy) -> StudyRecord:
    stored = Recommendation.from_json(answer.to_json())
    return StudyRecord("s", "2026-01-01T00:00:00Z", {"goal": {"metric": "tokens_per_s"}}, tuple(study.records()), stored)


def slow(request: TrialRequest) -> float:
    """What looked good in the search is slower in every confirmation."""
    return 0.5 if request.stage is Stage.CONFIRMATION and request.config else 1.0


def test_the_comparison_and_the_duel_are_about_the_finalist_of_the_answer() -> None:
    landscape = small_landscape(noise=0.002)

    def dies(request: TrialRequest) -> bool:
        return request.config == BEST and request.label.startswith("confirm-2-finalist")

    study, evaluate = MemoryStudy(), dying(landscape, dies, slow)
    setup = first_setup(landscape)
    ran(setup, study, evaluate)
    answer, made = ran(best_next(more(setup, study, reopened=True, trials=3)), study, evaluate)
    assert BEST in {record.config for record in made if record.arm is Arm.FINALIST}
    assert answer.verdict is Verdict.NO_GAIN
    record = of_answer(answer, study)
    assert [start.label for start in StudyView.of(record).challenger_starts()] == ["confirm-1-finalist", "confirm-2-finalist"]
    duel = find_duel(record)
    assert duel.arms["finalist"] == FINALIST
    assert answer.gain is not None
    assert duel.then == pytest.approx(1 / answer.gain.ratio)
    older = {name: value for name, value in answer.to_json().items() if name != "finalist_config"}
    assert find_duel(replace(record, recommendation=Recommendation.from_json(older))).arms["finalist"] == BEST


def test_the_comparison_never_pools_two_finalists_of_one_series() -> None:
    landscape = small_landscape(noise=0.002)

    def dies(request: TrialRequest) -> bool:
        return request.label == "confirm-2-finalist"

    study, evaluate = MemoryStudy(), dying(landscape, dies, slow)
    setup = replace(first_setup(landscape, trials=8), pinned=(Pinned(BEST, "first"), Pinned(FINALIST, "second")))
    answer, made = ran(setup, study, evaluate)
    assert len({record.config for record in made if record.arm is Arm.FINALIST}) == 2
    assert answer.verdict is Verdict.NO_GAIN
    record = of_answer(answer, study)
    older = replace(answer, finalist_config=None)
    for view in (StudyView.of(record), StudyView.of(replace(record, recommendation=older))):
        assert [start.label for start in view.challenger_starts()] == ["confirm-1-finalist-2", "confirm-2-finalist-2"]
