"""What a latency study says: the rate, the requests that its figures rest on, falls as falls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import golden
from support.sample_study import study

from vopt.objectives.metrics import Metrics
from vopt.optimizer.history import Arm, FailureSummary, Stage, StudyRecord, TrialRecord
from vopt.optimizer.recommend import Gain
from vopt.optimizer.report.blocks import plain_text
from vopt.optimizer.report.comparison import few_for
from vopt.optimizer.report.load_said import load_said
from vopt.optimizer.report.page import page
from vopt.optimizer.report.show import answer_blocks
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.trial import FailureKind, Phase

PLAN = {"arrivals": "poisson", "concurrency": None, "rate": 12.0, "window_s": 40.0, "sustained_per_s": 20.0}


def latency(requests: int = 480, served_rate: float = 12.0) -> StudyRecord:
    """The sample study as one of latency at a rate; the winner is a fifth faster, and its p99 TTFT is half as long again."""
    record = study()
    assert record.recommendation is not None
    config = record.recommendation.winner_config

    def at_rate(trial: TrialRecord) -> TrialRecord:
        if trial.metrics is None:
            return trial
        fast = 0.8 if trial.config == config else 1.0
        values = {**trial.metrics.values, "mean_e2e_s": 4.0 * fast, "p95_e2e_s": 9.0 * fast}
        values |= {"p95_ttft_s": 0.42, "p50_ttft_s": 0.21, "mean_ttft_s": 0.25, "p99_ttft_s": 0.6 if fast == 1.0 else 0.9}
        values |= {"tokens_per_s": 7000.0, "output_tokens_per_s": 3000.0, "requests_per_s": 11.9}
        values |= {name: trial.metrics[name] * fast for name in values if name.endswith("tpot_s")}
        rate = served_rate if trial.stage is Stage.CONFIRMATION else 12.0
        environment = {**trial.environment, "load_plan": {**PLAN, "rate": rate}}
        return replace(trial, metrics=Metrics(values, succeeded=requests), environment=environment)

    goal = {**record.setup["goal"], "name": "latency", "metric": "mean_e2e_s", "direction": "minimize", "limits": []}
    answer = replace(record.recommendation, gain=Gain(1.25, 1.2, 1.3, 1.025), rejected=(), overrides=())
    return replace(
        record,
        name="qwen3.5-35b-a3b-fp8-latency-1",
        setup={**record.setup, "goal": goal, "mode": "interactivity"},
        trials=tuple(at_rate(trial) for trial in record.trials if not trial.failure),
        recommendation=answer,
    )


def test_the_answer_of_a_latency_study() -> None:
    golden.check("answer-latency.txt", plain_text(answer_blocks(StudyView.of(latency()))))


def test_a_fall_that_could_have_been_seen_is_a_fall() -> None:
    said = plain_text(answer_blocks(StudyView.of(latency())))
    assert "Change" in said
    assert "−20.0 %" in said
    assert "a fall of 2.4 % or more" in said, "a ratio of 1.025 is a fall of 2.4 %"
    assert "Gain" not in said
    shown = page(latency())
    assert "the smallest fall that this study could have seen" in shown


def test_the_load_names_rate_share_and_requests() -> None:
    said = load_said(StudyView.of(latency()))
    assert said.startswith("12 requests/s at random times, the same in every start, 0.6 of what the baseline sustained; ")
    assert said.endswith("windows of 40 s, 480 requests counted a start")
    lowered = load_said(StudyView.of(latency(served_rate=9.0)))
    assert "9 requests/s" in lowered
    assert "(in the search 12, at which the served baseline's queue grew)" in lowered
    assert load_said(StudyView.of(replace(latency(), trials=()))) == ""
    searched = replace(latency(), trials=latency().trials[:2])
    died = replace(searched.trials[1], failure=FailureSummary(Phase.LOAD, FailureKind.ENGINE_DIED, "died"))
    assert died.metrics is not None
    died = replace(died, metrics=replace(died.metrics, succeeded=3))
    beside = load_said(StudyView.of(replace(searched, trials=(searched.trials[0], died))))
    assert beside.endswith("windows of 40 s, 480 requests counted a start"), "what died is no figure"


@pytest.mark.parametrize(("requests", "named"), [(100, False), (480, True)])
def test_a_percentile_of_few_requests_is_no_cost(requests: int, named: bool) -> None:
    """The winner's p99 TTFT is half as long again; three starts of 100 requests have three above it."""
    view = StudyView.of(latency(requests))
    (row,) = (row for row in view.compared() if row.metric == "p99_ttft_s")
    assert row.few is not named
    assert any(cost.metric == "p99_ttft_s" for cost in view.costs()) is named


@pytest.mark.parametrize(
    ("name", "requests", "few"),
    [
        *(("p99_ttft_s", 999, True), ("p99_ttft_s", 1000, False), ("p95_e2e_s", 199, True), ("p95_e2e_s", 200, False)),
        *(("mean_e2e_s", 1, False), ("preemptions", 1, False)),
    ],
)
def test_ten_requests_lie_above_a_percentile_that_counts(name: str, requests: int, few: bool) -> None:
    start = next(trial for trial in study().trials if trial.arm is Arm.BASELINE and trial.metrics)
    assert start.metrics is not None
    assert few_for(name, (replace(start, metrics=replace(start.metrics, succeeded=requests)),)) is few
