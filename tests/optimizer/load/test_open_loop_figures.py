"""The figures of an open loop are of the requests that were due in the window, followed to their end."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from queue_engine import QueueEngine

from vopt.objectives.metrics import compute_metrics
from vopt.objectives.records import LoadResult, LoadStatus
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.virtual_time import run_virtual

# Half of the requests take 2 s, half 18 s: a second for each 50 tokens, and a slot for everyone.
MIXED = RequestSource(lengths=((1, 100), (1, 900)) * 32)
TRUTH_S = fmean((2.0001, 18.0001))
PLAN = LoadPlan(Arrivals.POISSON, window_s=30, rate=6, warmup_s=20, min_requests=0, max_doublings=0)


def roomy(hangs: frozenset[int] = frozenset()) -> QueueEngine:
    return QueueEngine(slots=10_000, step_s=1.0, chunk=50, hangs=hangs)


def load(engine: QueueEngine, plan: LoadPlan = PLAN, source: RequestSource = MIXED) -> LoadResult:
    return run_virtual(drive(engine, source, plan, None))


def test_what_takes_longest_is_not_left_out_of_the_latencies() -> None:
    due, ended = [], []
    for seed in range(6):
        result = load(roomy(), replace(PLAN, seed=seed, warmup_s=2.0))
        assert result.window is not None
        metrics = compute_metrics(result, resamples=10)
        due.append(metrics["mean_e2e_s"])
        closed = [r.scheduled_e2e_s for r in result.records if r.succeeded and 2 <= r.ended_s <= result.window.closed_s]
        ended.append(fmean(closed))
        assert metrics.censored == 0
    assert fmean(ended) < 0.9 * TRUTH_S
    assert fmean(due) == pytest.approx(TRUTH_S, rel=0.03)


def test_every_request_due_in_the_window_counts_once() -> None:
    result = load(roomy())
    assert result.window is not None
    opened, closed = result.window.opened_s, result.window.closed_s
    due = [r for r in result.records if opened <= r.scheduled_s < closed]
    metrics = compute_metrics(result, slos={"e2e_s": 10.0}, resamples=10)
    assert (metrics.succeeded, metrics.failed, metrics.censored) == (len(due), 0, 0)
    assert metrics["requests_per_s"] == pytest.approx(len(due) / 30)
    assert metrics["goodput_per_s"] == pytest.approx(sum(r.scheduled_e2e_s <= 10 for r in due) / 30)


def test_a_failure_belongs_to_the_window_that_its_request_was_due_in() -> None:
    """Requests that hang fail 8 s after they were sent: those due just before an edge of the window fail behind it."""
    calm = load(roomy())
    assert calm.window is not None
    opened, closed = calm.window.opened_s, calm.window.closed_s
    order = {r.index: r.scheduled_s for r in calm.records}
    before = frozenset(i for i, at in order.items() if opened - 4 <= at < opened)
    inside = frozenset(i for i, at in order.items() if closed - 4 <= at < closed)
    assert before
    assert inside
    result = load(roomy(before | inside), replace(PLAN, idle_timeout_s=8.0))
    metrics = compute_metrics(result, resamples=10)
    due = sum(opened <= at < closed for at in order.values())
    assert metrics.failed == len(inside)
    assert metrics["success_rate"] == pytest.approx(1 - len(inside) / due)
    assert f"{len(before)} requests failed before the window opened and are in no figure" in metrics.notes


def test_a_recording_counts_to_its_last_request() -> None:
    times = tuple(0.5 * i for i in range(100))
    source = replace(MIXED, lengths=((1, 100),), scheduled_s=times)
    result = load(roomy(), LoadPlan(Arrivals.REPLAY, window_s=600, warmup_s=10, min_requests=0), source)
    assert result.status is not LoadStatus.ENGINE_DIED
    assert compute_metrics(result, resamples=10).succeeded == sum(at >= 10 for at in times)


def test_a_load_without_a_window_counts_all_of_it() -> None:
    result = load(roomy(), replace(PLAN, max_requests=20))
    assert "no_steady_window" in result.flags
    assert compute_metrics(result, resamples=10).succeeded == 20


def test_a_closed_loop_counts_what_ended_in_its_window() -> None:
    plan = LoadPlan(Arrivals.CLOSED, window_s=60, concurrency=8, min_requests=0)
    result = load(QueueEngine(slots=8, step_s=1.0, chunk=50), plan)
    assert result.window is not None
    ended = [r for r in result.records if r.succeeded and result.window.opened_s <= r.ended_s <= result.window.closed_s]
    assert compute_metrics(result, resamples=10).succeeded == len(ended)
