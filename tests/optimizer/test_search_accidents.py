"""What goes wrong in a search: accidents, a baseline that does not start, configurations that may not win."""

from __future__ import annotations

from dataclasses import replace

import pytest
from landscapes import small_landscape
from searched import infrastructure, run

from vopt.objectives.goals import built_in_goal, parse_limit
from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.history import Stage, TrialRecord, TrialRequest
from vopt.optimizer.recommend import Verdict
from vopt.optimizer.trial import EngineConfig, FailureKind


def test_an_accident_is_not_charged_to_the_configuration() -> None:
    landscape, unlucky = small_landscape(), []

    def evaluate(request: TrialRequest) -> TrialRecord:
        if dict(request.config) == {"max_num_seqs": 512} and request.attempt == 1 and request.stage is Stage.SEARCH:
            unlucky.append(request.label)
            return infrastructure(request, FailureKind.PORT)
        return landscape.evaluator(0)(request)

    answer, study = run(landscape, evaluate=evaluate)
    tries = [r for r in study.records() if dict(r.config) == {"max_num_seqs": 512} and r.stage is Stage.SEARCH]
    assert [r.attempt for r in tries] == [1, 2]
    assert len(unlucky) == 1
    assert not any(dict(row.config) == {"max_num_seqs": 512} and row.kind == "port" for row in answer.rejected)
    assert sum(r.stage is Stage.SEARCH for r in study.records()) <= 14


@pytest.mark.parametrize(
    "kind, error",
    [(FailureKind.GPU_LOST, EnvironmentLacks), (FailureKind.TOO_LONG, UsageError), (FailureKind.PORT, EnvironmentLacks)],
)
def test_what_no_configuration_can_mend_stops_the_study(kind: FailureKind, error: type[Exception]) -> None:
    calls = []

    def evaluate(request: TrialRequest) -> TrialRecord:
        calls.append(request)
        return infrastructure(request, kind)

    with pytest.raises(error):
        run(small_landscape(), evaluate=evaluate)
    assert len(calls) <= 2


def test_a_baseline_that_cannot_start_is_repaired_by_the_engines_own_words() -> None:
    landscape = small_landscape()

    def evaluate(request: TrialRequest) -> TrialRecord:
        if request.config.get("max_num_seqs", 256) > 128:
            record = infrastructure(request, FailureKind.MAMBA_BLOCKS)
            assert record.failure is not None
            return replace(record, failure=replace(record.failure, hint={"max_num_seqs": {"at_most": 200}}))
        return landscape.evaluator(0)(request)

    answer, study = run(landscape, evaluate=evaluate)
    configs = [dict(record.config) for record in study.records()]
    assert configs[:2] == [{}, {"max_num_seqs": 128}]
    assert any("repaired baseline" in note for note in answer.notes)
    assert answer.verdict in (Verdict.BETTER, Verdict.NO_GAIN)


def test_a_baseline_beyond_repair_ends_after_three_repairs() -> None:
    calls = []

    def evaluate(request: TrialRequest) -> TrialRecord:
        calls.append(dict(request.config))
        return infrastructure(request, FailureKind.OOM_START)

    answer, _ = run(small_landscape(), evaluate=evaluate)
    assert answer.verdict is Verdict.NOTHING_FEASIBLE
    assert answer.argv is None
    assert 2 <= len(calls) <= 4
    assert "the baseline fails" in answer.reason


def test_limits_that_nothing_keeps_say_what_came_nearest() -> None:
    landscape = small_landscape()
    goal = built_in_goal("throughput", limits=(parse_limit("tokens_per_s>=20000"),), guard=False)
    answer, _ = run(landscape, goal=goal)
    assert answer.verdict is Verdict.NOTHING_FEASIBLE
    assert answer.argv is None
    assert any("highest tokens_per_s seen" in note for note in answer.notes)
    assert any("least violating" in note for note in answer.notes)


def test_a_winner_that_fails_its_soak_is_not_recommended() -> None:
    landscape = small_landscape()

    def evaluate(request: TrialRequest) -> TrialRecord:
        if request.stage is Stage.SOAK:
            return infrastructure(request, FailureKind.ENGINE_DIED)
        return landscape.evaluator(0)(request)

    answer, _ = run(landscape, evaluate=evaluate)
    assert answer.verdict is Verdict.NO_GAIN
    assert "soak" in answer.reason


def test_a_finalist_that_fails_in_confirmation_gives_way_to_the_next() -> None:
    landscape = small_landscape()
    failed: list[EngineConfig] = []

    def evaluate(request: TrialRequest) -> TrialRecord:
        if request.label == "confirm-1-finalist":
            failed.append(request.config)
            return infrastructure(request, FailureKind.ENGINE_DIED)
        return landscape.evaluator(0)(request)

    answer, study = run(landscape, evaluate=evaluate)
    assert answer.winner_config not in failed
    assert any(record.label.startswith("confirm-1-finalist-2") for record in study.records())
    assert any(row.config in failed for row in answer.rejected)


def test_an_artefact_of_dummy_weights_cannot_win() -> None:
    landscape = small_landscape(broken=1.0)

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        return replace(record, flags=("artefact_acceptance",)) if "speculative_config" in request.config else record

    answer, _ = run(landscape, evaluate=evaluate)
    assert answer.winner_config is None or "speculative_config" not in answer.winner_config
    assert any(row.kind == "artefact_acceptance" for row in answer.rejected)
