"""The confirmation of a search: its order, what it says of the client and of a drifting machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from landscapes import small_landscape
from searched import run

from vopt.optimizer.history import Stage, TrialRecord, TrialRequest
from vopt.optimizer.recommend import Verdict
from vopt.optimizer.setup import Budget


def test_without_rounds_the_answer_is_unconfirmed() -> None:
    answer, study = run(small_landscape(), budget=Budget(trials=16, rounds=0, time_s=None, soak_s=0))
    assert answer.verdict is Verdict.UNCONFIRMED
    assert answer.winner_config is not None
    assert not any(record.stage is Stage.CONFIRMATION for record in study.records())


def test_a_confirmation_that_the_client_bounded_is_in_the_notes() -> None:
    landscape = small_landscape()

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        return replace(record, flags=("client_limited",)) if request.label == "confirm-2-baseline" else record

    answer, _ = run(landscape, evaluate=evaluate)
    assert any("client, not the engine, was the limit in confirm-2-baseline" in note for note in answer.notes), answer.notes
    assert not any("client" in note for note in run(landscape)[0].notes)


@pytest.mark.parametrize("served", [True, False])
def test_a_confirmation_whose_requests_were_outside_the_engine_is_in_the_notes(served: bool) -> None:
    landscape = small_landscape()

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        if request.label != "confirm-2-baseline":
            return record
        assert record.metrics is not None
        metrics = replace(record.metrics, values={**record.metrics.values, "front_end_share": 0.42})
        return replace(record, flags=("front_end_limited",), metrics=metrics, served=served)

    answer, _ = run(landscape, evaluate=evaluate)
    found = [note for note in answer.notes if "in confirm-2-baseline, 42% to 42%" in note]
    assert len(found) == 1
    assert ("--api-server-count 2" in found[0]) is served
    assert not any("in flight were" in note for note in run(landscape)[0].notes)


def test_confirmation_alternates_its_order_over_fresh_starts() -> None:
    _, study = run(small_landscape())
    labels = [record.label for record in study.records() if record.stage is Stage.CONFIRMATION]
    rounds = [[label.split("-")[2] for label in labels if label.startswith(f"confirm-{n}-")] for n in (1, 2, 3)]
    assert rounds[0][0] == "baseline"
    assert rounds[1] == rounds[0][::-1]
    assert rounds[2] == rounds[0]
    assert len(labels) == len(set(labels))


def test_a_drifting_machine_is_named_and_widens_the_interval() -> None:
    landscape = small_landscape(noise=0.001)

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        slower = request.stage is Stage.CONFIRMATION
        metrics = record.metrics
        if slower and metrics is not None:
            metrics = replace(metrics, values={**metrics.values, "tokens_per_s": metrics["tokens_per_s"] * 0.93})
        return replace(record, metrics=metrics, environment={"clock_mhz": 1200 if slower else 1980})

    answer, _ = run(landscape, evaluate=evaluate)
    note = next(note for note in answer.notes if "drifted" in note)
    assert "clock_mhz: 1980 -> 1200" in note
    assert answer.gain is not None
    assert answer.gain.low is not None
    assert answer.gain.low < answer.gain.ratio / 1.06


@pytest.mark.parametrize(
    ("trials", "labels"), [(6, []), (16, ["drift"]), pytest.param(32, ["drift-midway", "drift"], marks=pytest.mark.slow)]
)
def test_the_baseline_is_measured_again_where_the_confirmation_is_another_thing(trials: int, labels: list[str]) -> None:
    landscape = small_landscape(noise=0.001)

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        late = request.stage is Stage.DRIFT
        metrics = record.metrics
        if late and metrics is not None:
            metrics = replace(metrics, values={**metrics.values, "tokens_per_s": metrics["tokens_per_s"] * 0.9})
        facts = {"gpu0_sm_clock_mhz": 1200 if late else 1980, "gpu0_power_w": 700.5 if late else 690.0, "load_plan": late}
        return replace(record, metrics=metrics, served=request.stage is Stage.CONFIRMATION, environment=facts)

    budget = Budget(trials=trials, rounds=2, time_s=None, soak_s=0, patience=99)
    answer, study = run(landscape, evaluate=evaluate, drift_check=True, budget=budget)
    assert [record.label for record in study.records() if record.stage is Stage.DRIFT] == labels
    stages = [record.stage for record in study.records()]
    notes = [note for note in answer.notes if "drifted" in note]
    if not labels:
        assert notes == []
        return
    assert "gpu0_sm_clock_mhz: 1980 -> 1200)" in notes[0], "what moved within its noise is not named"
    assert answer.gain is not None
    assert answer.gain.low is not None
    assert answer.gain.low < answer.gain.ratio / 1.1
    assert stages.index(Stage.DRIFT) < stages.index(Stage.CONFIRMATION)
    if len(labels) == 2:
        assert Stage.SEARCH in stages[stages.index(Stage.DRIFT) :], "the search goes on after the middle"
