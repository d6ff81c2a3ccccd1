"""What a latency search answers: by whole studies of simulated requests, and what it says of rate and number of requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from calibration import normal, study
from latency_calibration import GOAL, HOSTS, SEARCHED, Requests, answered

from vopt.objectives.metrics import Metrics
from vopt.optimizer.history import FailureSummary, Stage, TrialRecord
from vopt.optimizer.judge import change_text
from vopt.optimizer.recommend import Recommendation, Verdict
from vopt.optimizer.trial import FailureKind, Phase

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("host", "studies"),
    [("plain", 3), *(pytest.param(host, 60, marks=SLOW) for host in HOSTS if host != "1 % fail")],
)
def test_a_true_gain_is_found_and_nothing_is_made_up(host: str, studies: int) -> None:
    """60 studies: 5 % of them and two standard deviations are six."""
    found = [answered(HOSTS[host], gain, seed).verdict for gain in (-0.02, 0.0) for seed in range(studies)]
    assert found[:studies].count(Verdict.BETTER) <= studies // 30
    assert found[studies:].count(Verdict.BETTER) <= studies // 10
    if host != "hops 10 %":
        gained = [answered(HOSTS[host], 0.15, seed).verdict for seed in range(studies // 3)]
        assert gained.count(Verdict.BETTER) >= 0.9 * len(gained)


def said(rate: float, served_rate: float, requests: int, died: str = "") -> Recommendation:
    """A study whose trials were measured at ``rate`` and whose served commands at ``served_rate``; the start ``died`` did so
    before its rate was settled."""
    made = Requests(HOSTS["plain"], 0.1, 3)

    def start(record: TrialRecord, rng: np.random.Generator) -> TrialRecord:
        shown = made.start(record, rng)
        assert shown.metrics is not None
        served = record.stage is not Stage.SEARCH
        if record.label == died:
            failure = FailureSummary(Phase.LOAD, FailureKind.ENGINE_DIED, "died")
            metrics = Metrics({"requests_per_s": 0.1}, succeeded=3)
            return replace(record, metrics=metrics, failure=failure, served=True, environment={"load_plan": {"rate": rate}})
        plan = {"rate": served_rate if served else rate}
        metrics = replace(shown.metrics, succeeded=requests)
        if not served:  # faster in-process, as far as anybody can say
            metrics = replace(metrics, values={**metrics.values, "mean_e2e_s": 0.5 * metrics["mean_e2e_s"]})
        return replace(shown, metrics=metrics, served=served, environment={"load_plan": plan})

    rng = np.random.default_rng(1)
    return study(normal(0.0), 0.0, rng, 3, goal=GOAL, change=start, searched_by=SEARCHED)[0]


def test_another_rate_behind_the_server_is_said_and_its_latency_not_compared() -> None:
    lowered = said(8.0, 6.0, 480)
    assert lowered.verdict is Verdict.BETTER
    assert any("confirmed at 6 requests/s: at the 8 of the search" in note for note in lowered.notes)
    assert not any("ranked by" in note for note in lowered.notes), "the difference is the rate's"
    after_a_death = said(8.0, 6.0, 480, died="confirm-1-baseline")
    assert any("confirmed at 6 requests/s: at the 8 of the search" in note for note in after_a_death.notes)
    assert not any("ranked by" in note or "rest on as few as" in note for note in after_a_death.notes)
    same = said(8.0, 8.0, 480)
    assert not any("confirmed at" in note for note in same.notes)
    assert any("ranked by" in note for note in same.notes)


@pytest.mark.parametrize(("requests", "told"), [(24, True), (199, True), (200, False)])
def test_figures_of_few_requests_say_so(requests: int, told: bool) -> None:
    notes = [note for note in said(8.0, 8.0, requests).notes if "rest on as few as" in note]
    assert len(notes) == told
    assert all(f"{requests} requests" in note and "--window" in note for note in notes)


def test_a_lead_is_told_as_the_change_of_the_metric() -> None:
    assert change_text(0.1, GOAL) == "mean_e2e_s -9.5%", "a latency that is better falls"
    assert change_text(-0.1, GOAL) == "mean_e2e_s +10.5%"
