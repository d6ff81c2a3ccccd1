"""What a study's figures rest on: the load that was frozen, whose starts are compared, which start broke a limit."""

from __future__ import annotations

from dataclasses import replace

from sample_study import no_gain, study

from vopt.optimizer.history import Arm, Stage, StudyRecord
from vopt.optimizer.recommend import Rejected
from vopt.optimizer.report.document import study_document
from vopt.optimizer.report.show import finalist_table
from vopt.optimizer.report.view import StudyView


def with_plan(record: StudyRecord) -> StudyRecord:
    plan = {"concurrency": 192, "rate": None, "window_s": 20.0}
    trials = tuple(replace(trial, environment={**trial.environment, "load_plan": plan}) for trial in record.trials)
    return replace(record, trials=trials)


def test_the_load_is_the_one_that_the_baseline_froze() -> None:
    view = StudyView.of(with_plan(study()))
    assert "192 in flight" in view.workload
    assert any("windows of 20 s" in row for row in view.below_defaults())


def test_without_a_gain_the_confirmed_finalist_is_compared_and_costs_nothing() -> None:
    view = StudyView.of(no_gain())
    assert view.challenger == "finalist"
    (row,) = (row for row in view.compared() if row.metric == "tokens_per_s")
    assert row.winner is not None
    assert row.winner.starts == sum(trial.arm is Arm.FINALIST for trial in view.trials)
    assert view.costs() == ()
    assert study_document(view)["compared_with"] == "finalist"
    assert StudyView.of(study()).challenger == "winner"


def test_one_start_of_a_confirmation_over_a_limit_says_whose_it_was() -> None:
    record = study()
    start = next(trial for trial in record.trials if trial.stage is Stage.CONFIRMATION and trial.arm is Arm.FINALIST)
    assert record.recommendation is not None
    row = Rejected(start.label, start.config, "limit:p95_tpot_s", "p95_tpot_s 35 ms is above the limit 31 ms")
    answer = replace(record.recommendation, rejected=(*record.recommendation.rejected, row))
    found = StudyView.of(replace(record, recommendation=answer)).why_not(start)
    assert found == ("limit:p95_tpot_s", f"finalist arm, one start; its mean decides: {row.reason}")


def test_a_soak_has_no_figure_beside_those_of_other_requests() -> None:
    rows = {row[0]: row for row in finalist_table(StudyView.of(study())).rows}
    assert rows["soak"][3] == "–"


def test_every_start_leads_to_its_evidence() -> None:
    for start in study_document(StudyView.of(study()))["starts"]:
        if start["directory"]:
            assert start["evidence"]["records"] == f"{start['directory']}/records.jsonl.gz"
            assert start["evidence"]["log"] == f"{start['directory']}/engine.log"
        assert start["argv"][:2] == ["vllm", "serve"]
