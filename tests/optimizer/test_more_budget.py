"""A study that is given more: rounds, trials, a soak. What is measured anew, what is kept, and which answer stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
from landscapes import MemoryStudy, small_landscape
from reopened import BEST, FINALIST, best_next, first_setup, more, ran, scaled

from vopt.optimizer.arms import Arms, arms_of, round_of, series_of
from vopt.optimizer.history import Arm, Stage, TrialRequest
from vopt.optimizer.judge import judge
from vopt.optimizer.progress import Progress
from vopt.optimizer.recommend import Verdict
from vopt.optimizer.setup import Pinned
from vopt.optimizer.trial import EngineConfig
from vopt.optimizer.verdict import confirmation


def test_more_trials_bring_a_new_finalist_that_is_confirmed_on_fresh_starts_alone() -> None:
    landscape = small_landscape(noise=0.002)
    study, evaluate = MemoryStudy(), landscape.evaluator(0)
    setup = first_setup(landscape)
    first, _ = ran(setup, study, evaluate)
    assert (first.verdict, first.winner_config) == (Verdict.BETTER, FINALIST)
    answer, made = ran(best_next(more(setup, study, reopened=True, trials=3)), study, evaluate)
    assert answer.winner_config == BEST
    assert made[0].config == BEST
    confirmed = [record for record in made if record.stage is Stage.CONFIRMATION]
    assert {record.config for record in confirmed if record.arm is Arm.BASELINE} == {EngineConfig()}
    assert all(series_of(record.label) == 2 for record in confirmed)
    assert len({record.label for record in study.records()}) == len(study.records()), "a label names one start"
    labels = {record.label: record.metrics["tokens_per_s"] for record in study.records() if record.metrics}
    fresh = [labels[f"confirm-{n}-baseline-s2"] for n in (1, 2)]
    assert answer.baseline_metrics["tokens_per_s"] == pytest.approx(sum(fresh) / 2)


def test_more_trials_that_find_nothing_better_repeat_no_confirmation() -> None:
    landscape = small_landscape(noise=0.002)
    study, evaluate = (
        MemoryStudy(),
        scaled(landscape, lambda request: 1.0 if request.config in (EngineConfig(), FINALIST) else 0.8),
    )
    setup = first_setup(landscape)
    first, _ = ran(setup, study, evaluate)
    answer, made = ran(more(setup, study, reopened=True, trials=6), study, evaluate)
    assert {record.stage for record in made} <= {Stage.SEARCH, Stage.SCREENING}
    assert len([record for record in made if record.stage is Stage.SEARCH]) == 3
    assert (answer.gain, answer.winner_config) == (first.gain, first.winner_config)


def test_a_better_answer_stands_when_the_new_finalist_is_not_better() -> None:
    landscape = small_landscape(noise=0.002)

    def factor(request: TrialRequest) -> float:
        return 0.8 if request.config == BEST and request.stage is Stage.CONFIRMATION else 1.0

    study, evaluate = MemoryStudy(), scaled(landscape, factor)
    setup = first_setup(landscape, soak_s=60.0)
    first, _ = ran(setup, study, evaluate)
    answer, made = ran(best_next(more(setup, study, reopened=True, trials=3)), study, evaluate)
    assert [record.label for record in made if record.arm is Arm.FINALIST] == ["confirm-1-finalist-s2", "confirm-2-finalist-s2"]
    assert (answer.verdict, answer.winner_config, answer.gain) == (Verdict.BETTER, FINALIST, first.gain)
    assert Stage.SOAK not in {record.stage for record in made}, "the winner was soaked"


def test_a_new_winner_is_soaked_and_explained_itself() -> None:
    landscape = small_landscape(noise=0.002)
    study, evaluate = MemoryStudy(), landscape.evaluator(0)
    setup = replace(first_setup(landscape, soak_s=60.0), explain=True)
    ran(setup, study, evaluate)
    answer, made = ran(best_next(more(setup, study, reopened=True, trials=3)), study, evaluate)
    assert [(record.label, record.config) for record in made if record.stage is Stage.SOAK] == [("soak-s2", BEST)]
    explained = {record.label for record in made if record.stage is Stage.EXPLAIN}
    assert len(explained) == 6
    assert all(row.worth is not None for row in answer.overrides if row.kept)


def test_more_patience_comes_with_more_trials() -> None:
    landscape = small_landscape(noise=0.002)
    study, evaluate = MemoryStudy(), landscape.evaluator(0)
    setup = replace(first_setup(landscape, trials=30, patience=3), pinned=(Pinned(BEST, "the best at once"),))
    ran(setup, study, evaluate)
    searched = [record for record in study.records() if record.stage is Stage.SEARCH]
    assert len(searched) < 20, "patience ended the search"
    _, made = ran(more(setup, study, reopened=True, trials=34), study, evaluate)
    assert len([record for record in made if record.stage is Stage.SEARCH]) >= 3


def even(request: TrialRequest) -> float:
    """All arms alike in the confirmation, whatever the search saw."""
    return 1 / 1.04 if request.stage is Stage.CONFIRMATION and request.config.get("max_num_seqs") == 512 else 1.0


def test_an_answer_never_rests_on_fewer_rounds_than_were_measured() -> None:
    landscape = small_landscape({"max_num_seqs=512": 0.04})
    study, evaluate = MemoryStudy(), scaled(landscape, even)
    setup = first_setup(landscape, rounds=5)
    first, _ = ran(setup, study, evaluate)
    assert first.verdict is Verdict.NO_GAIN
    assert sum(record.arm is Arm.BASELINE for record in study.records()) == 5
    again, made = ran(first_setup(landscape, rounds=3), study, evaluate)
    assert made == []
    assert (again.gain, again.success, again.verdict) == (first.gain, first.success, first.verdict)


def test_a_look_that_was_not_planned_needs_more() -> None:
    """A finalist that would pass at 0.03 after four rounds but not at 0.01: planned with four rounds it is better, asked for a
    fourth round after three it is not."""
    gains = {1: 1.0, 2: 1.002, 3: 0.998, 4: 1.0}

    def factor(request: TrialRequest) -> float:
        if request.stage is not Stage.CONFIRMATION:
            return 1.0
        lift = 1.0085 if request.arm is Arm.FINALIST and round_of(request.label) < 4 else 1.0
        lift = 1.013 if request.arm is Arm.FINALIST and round_of(request.label) == 4 else lift
        return lift * gains[round_of(request.label)] / (1.04 if request.config.get("max_num_seqs") == 512 else 1.0)

    quiet = small_landscape({"max_num_seqs=512": 0.0392207}, noise=1e-9)
    planned, _ = ran(first_setup(quiet, rounds=4), MemoryStudy(), scaled(quiet, factor))
    study, setup = MemoryStudy(), first_setup(quiet, rounds=3)
    first, _ = ran(setup, study, scaled(quiet, factor))
    assert first.verdict is Verdict.NO_GAIN
    asked, made = ran(more(setup, study, rounds=4), study, scaled(quiet, factor))
    assert {round_of(record.label) for record in made} == {4}
    assert (planned.verdict, asked.verdict) == (Verdict.BETTER, Verdict.NO_GAIN)
    assert planned.gain is not None
    assert asked.gain is not None
    assert planned.gain.ratio == asked.gain.ratio


def test_an_arm_is_the_starts_of_its_own_configuration() -> None:
    """What a label says an arm is, and another configuration was started: an earlier version took both for one arm."""
    landscape = small_landscape(noise=0.002)
    study, evaluate = MemoryStudy(), landscape.evaluator(0)
    setup = first_setup(landscape, rounds=3)
    ran(setup, study, evaluate)
    other = EngineConfig({"max_num_seqs": 1024})
    history = [
        judge(replace(record, config=other) if record.label == "confirm-2-baseline" else record, setup.goal, None)
        for record in study.records()
    ]
    seen = confirmation(Progress(setup, tuple(history)))
    assert seen is not None
    assert (len(seen.baseline.values), len(seen.finalist.values)) == (2, 3)
    assert {start.record.config for start in seen.baseline.starts} == {EngineConfig()}


def test_a_rounds_start_of_another_configuration_is_made_again() -> None:
    landscape = small_landscape(noise=0.002)
    study, evaluate = MemoryStudy(), landscape.evaluator(0)
    setup = first_setup(landscape, rounds=3)
    ran(setup, study, evaluate)
    other = EngineConfig({"max_num_seqs": 1024})
    study._records = [
        replace(record, config=other) if record.label == "confirm-2-baseline" else record for record in study._records
    ]
    _, made = ran(setup, study, evaluate)
    assert [(record.label, record.config) for record in made] == [("confirm-2-baseline", EngineConfig())]


@pytest.mark.parametrize("arm", list(Arm))
@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("series", [1, 2, 12])
def test_labels_say_round_and_series(arm: Arm, attempt: int, series: int) -> None:
    arms = Arms(FINALIST, None, attempt, series)
    label = arms.label(4, arm)
    assert (round_of(label), series_of(label)) == (4, series)
    start = replace(small_landscape().evaluator(0)(TrialRequest(label, FINALIST, Stage.CONFIRMATION, arm)), arm=arm)
    assert arms_of([start]) == ((arms,) if arm is Arm.FINALIST else ())


def test_other_labels_are_of_no_confirmation() -> None:
    assert [(round_of(label), series_of(label)) for label in ("7", "soak", "soak-s2", "drift")] == [(0, 0)] * 4
