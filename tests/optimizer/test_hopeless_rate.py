"""A typed rate that nothing can meet: one start, what the baseline sustained, and what to type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sample_study
from typer.testing import CliRunner

from vopt.objectives.goals import built_in_goal
from vopt.objectives.metrics import Metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer.cli import app
from vopt.optimizer.errors import NothingFeasible
from vopt.optimizer.history import TrialRecord
from vopt.optimizer.hopeless import beyond_reach, overloaded_at
from vopt.optimizer.judge import Judged, judge

GOAL = built_in_goal("latency")


def baseline(status: LoadStatus, success: float = 1.0, finished: float = 20.0) -> Judged:
    values = {"mean_e2e_s": 1.0, "success_rate": success, "requests_per_s": finished, "tokens_per_s": 1000.0}
    values |= {"p95_ttft_s": 0.1, "p95_tpot_s": 0.01}
    record: TrialRecord = replace(sample_study.study().trials[0], metrics=Metrics(values), status=status)
    return judge(record, GOAL, None)


def test_an_overload_far_above_what_the_baseline_sustains_is_beyond_reach_and_says_what_to_type() -> None:
    said = beyond_reach(baseline(LoadStatus.OVERLOADED), 500.0, 50.0)
    assert said is not None
    assert "it sustains about 20 requests/s" in said
    assert "--rate 12 is 0.6 of that" in said


@pytest.mark.parametrize("status", [LoadStatus.COMPLETE, LoadStatus.UNSTEADY])
def test_requests_that_time_out_in_a_queue_are_an_overload_too(status: LoadStatus) -> None:
    assert beyond_reach(baseline(status, success=0.07), 500.0, 50.0) is not None


def test_what_ended_in_a_short_window_is_less_than_what_was_served() -> None:
    said = beyond_reach(baseline(LoadStatus.OVERLOADED, finished=0.0), 500.0, 50.0)
    assert said is not None, "1,000 tokens/s of 50 tokens a request"
    assert "it sustains about 20 requests/s" in said


def test_what_a_better_configuration_may_reach_is_searched_and_only_noted() -> None:
    near = baseline(LoadStatus.OVERLOADED)
    assert beyond_reach(near, 40.0, 50.0) is None
    assert "Lower it" in (overloaded_at(near, 40.0, 50.0) or "")


@pytest.mark.parametrize(
    ("judged", "rate"),
    [
        (baseline(LoadStatus.COMPLETE), 20.5),
        (baseline(LoadStatus.COMPLETE), None),
        (baseline(LoadStatus.OVERLOADED), None),
        (baseline(LoadStatus.COMPLETE, success=0.97), 500.0),
    ],
)
def test_other_faults_are_no_overload(judged: Judged, rate: float | None) -> None:
    assert overloaded_at(judged, rate, 50.0) is None


def test_a_search_at_a_hopeless_rate_ends_after_its_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["search", "--goal", "latency", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--rate", "300", "--window", "5"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == NothingFeasible.exit_code
    assert done.stdout == ""
    assert "Lower it: --rate" in done.stderr
    assert "in 1 start:" in done.stderr
    assert "{}" not in done.stderr


def test_a_start_that_was_ended_before_its_window_opened_says_what_failed() -> None:
    record = replace(
        sample_study.study().trials[0],
        status=LoadStatus.STOPPED_EARLY,
        metrics=Metrics({"tokens_per_s": 9.0}, notes=("725 requests failed before the window opened and are in no figure",)),
    )
    judged = judge(record, GOAL, Metrics({"tokens_per_s": 10.0, "mean_e2e_s": 1.0, "success_rate": 1.0}))
    assert judged.reason == "ended early; 725 requests failed before the window opened and are in no figure"
