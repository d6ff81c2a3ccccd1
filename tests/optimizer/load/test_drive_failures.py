"""Engines that die, hang, refuse and answer late: what becomes of the load and of each request."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from driven import CLOSED, POISSON, SHORT, assert_accounted, kinds, load
from queue_engine import QueueEngine

from vopt.objectives.records import CounterSample, LoadStatus, RequestFailureKind, RequestRecord
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import Request, Tick
from vopt.optimizer.load.virtual_time import run_virtual

# Failures


def test_a_dead_engine_ends_the_load_at_once() -> None:
    engine = QueueEngine(slots=8, dies_at=100)
    result = load(engine, replace(CLOSED, min_requests=400))
    assert result.status is LoadStatus.ENGINE_DIED
    assert "illegal memory access" in result.detail
    assert kinds(result)["engine_died"] == 8
    assert result.not_sent == 400 - len(result.records)
    assert_accounted(engine, result)


def test_an_engine_that_dies_with_nothing_in_flight_is_noticed_at_the_next_tick() -> None:
    engine = QueueEngine()

    def kill(tick: Tick) -> bool:
        if tick.at_s > 10:
            engine.dead = "killed"
        return True

    result = load(engine, replace(POISSON, rate=0.01, warmup_s=0), on_tick=kill)
    assert result.status is LoadStatus.ENGINE_DIED
    assert result.detail == "killed"


def test_an_engine_that_is_dead_before_the_load_receives_nothing() -> None:
    engine = QueueEngine(dead="gone")
    result = load(engine, CLOSED)
    assert result.status is LoadStatus.ENGINE_DIED
    assert result.records == ()
    assert result.not_sent == 10


@pytest.mark.parametrize("ignores_idle", [False, True])
def test_an_engine_that_says_nothing_any_more_is_hung(ignores_idle: bool) -> None:
    engine = QueueEngine(slots=8, hangs=frozenset(range(100, 10_000)), ignores_idle=ignores_idle)
    result = load(engine, replace(CLOSED, window_s=600, idle_timeout_s=30))
    assert result.status is LoadStatus.ENGINE_DIED
    assert "hung" in result.flags
    assert max(record.ended_s for record in result.records) < 60
    assert_accounted(engine, result)


def test_single_requests_without_a_token_time_out_and_the_load_goes_on() -> None:
    engine = QueueEngine(slots=10, hangs=frozenset({30, 31}), ignores_idle=True)
    result = load(engine, replace(CLOSED, idle_timeout_s=5))
    assert kinds(result)["timeout_idle"] == 2
    assert result.status is LoadStatus.COMPLETE
    assert_accounted(engine, result)


def test_the_total_timeout_gives_up_slow_requests() -> None:
    result = load(QueueEngine(slots=8), replace(CLOSED, total_timeout_s=1.5))
    failed = [record for record in result.records if record.failure]
    assert {record.failure.kind for record in failed if record.failure} == {RequestFailureKind.TIMEOUT_TOTAL}
    assert {record.requested_output_tokens for record in failed} == {120}


def test_equal_errors_at_the_start_stop_the_load() -> None:
    engine = QueueEngine(errors={k: f"request {k} has too many tokens" for k in range(1000)})
    result = load(engine, replace(CLOSED, repeated_errors=20))
    assert result.status is LoadStatus.REPEATED_ERRORS
    assert result.detail.startswith("20 equal errors at the start: stream_error: request ")
    assert len(result.records) == 20
    assert_accounted(engine, result)


def test_different_errors_do_not_count_as_equal() -> None:
    engine = QueueEngine(errors={k: "odd" if k % 2 else "even" for k in range(60)})
    result = load(engine, CLOSED)
    assert result.status is not LoadStatus.REPEATED_ERRORS
    assert kinds(result)["stream_error"] == 60
    assert kinds(result)["ok"] > 100


def test_an_engine_that_refuses_at_once_is_not_hammered() -> None:
    engine = QueueEngine(errors={k: "odd" if k % 2 else "even" for k in range(50, 100_000)})
    load(engine, replace(CLOSED, max_doublings=0))
    assert engine.runs < 50 + 8 * 60


def test_errors_that_never_end_stop_the_load_later_too() -> None:
    engine = QueueEngine(errors=dict.fromkeys(range(100, 100000), "full"))
    result = load(engine, replace(CLOSED, repeated_errors=10))
    assert result.status is LoadStatus.REPEATED_ERRORS
    assert "100 equal errors in a row, after 100 successes" in result.detail


def test_the_deadline_ends_everything() -> None:
    engine = QueueEngine(slots=8, step_s=50)
    result = load(engine, replace(CLOSED, deadline_s=40))
    assert result.status is LoadStatus.DEADLINE
    assert result.window is None
    assert all(record.censored and record.ended_s <= 40 for record in result.records)


def test_an_engine_that_ignores_cancelling_cannot_hold_the_load() -> None:
    engine = QueueEngine(slots=8, ignores_cancel=True)
    result = load(engine, CLOSED)
    assert_accounted(engine, result)
    assert kinds(result)["censored"] == 8


def test_an_exception_of_the_engine_is_a_defect_and_comes_out() -> None:
    class Broken(QueueEngine):
        async def run(self, request: Request, *, origin_s: float, scheduled_s: float, idle_timeout_s: float) -> RequestRecord:
            if request.index == 30:
                raise KeyError("defect")
            return await super().run(request, origin_s=origin_s, scheduled_s=scheduled_s, idle_timeout_s=idle_timeout_s)

    with pytest.raises(KeyError, match="defect"):
        load(Broken(), CLOSED)


def test_a_cancelled_load_leaves_no_request_behind() -> None:
    engine = QueueEngine(slots=8)

    async def cancel() -> int:
        task = asyncio.create_task(drive(engine, SHORT, CLOSED))
        await asyncio.sleep(10)
        in_flight = 8
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(1)
        assert len(asyncio.all_tasks()) == 1
        return in_flight

    assert len(engine.aborted) == 0
    assert run_virtual(cancel()) == len(engine.aborted)


def test_counters_that_hang_cost_samples_only() -> None:
    class Silent(QueueEngine):
        async def counters(self, *, origin_s: float) -> CounterSample:
            await asyncio.sleep(1000)
            return await super().counters(origin_s=origin_s)

    result = load(Silent(slots=8), CLOSED)
    assert result.status is LoadStatus.COMPLETE
    assert result.samples == ()
