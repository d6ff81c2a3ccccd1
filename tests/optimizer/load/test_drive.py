"""The load of an engine: the closed loop and its window, what is told on the way, and the rules of a plan."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from counted import tokens_in
from driven import CLOSED, POISSON, SHORT, assert_accounted, keep, kinds, load
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_engine import QueueEngine
from support.imports import foreign_imports

from vopt.objectives.records import CounterSample, LoadResult, LoadStatus
from vopt.optimizer.engine.base import Engine
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.lengths import shuffled_blocks
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Request, Tick
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.virtual_time import run_virtual
from vopt.optimizer.load.workload import CHAT

# Closed loop


def test_a_closed_loop_keeps_its_concurrency_and_censors_what_is_in_flight() -> None:
    engine = QueueEngine(slots=8)
    ticks: list[Tick] = []
    result = load(engine, CLOSED, on_tick=keep(ticks))
    assert result.status is LoadStatus.COMPLETE
    assert {tick.running for tick in ticks} == {8}
    assert kinds(result)["censored"] == 8
    assert result.window is not None
    assert result.window.length_s == pytest.approx(30)
    assert result.concurrency == 8
    assert result.not_sent == 0
    assert_accounted(engine, result)
    censored = [record for record in result.records if record.censored]
    assert all(record.ended_s >= result.window.closed_s for record in censored)
    assert any(record.chunk_times_s for record in censored), "partial chunks are kept"


def test_the_window_opens_only_after_the_warm_up_requests_and_the_kv_plateau() -> None:
    result = load(QueueEngine(slots=8), CLOSED)
    assert result.window is not None
    before = sum(1 for record in result.records if record.ended_s <= result.window.opened_s)
    assert before >= 1.5 * 8
    assert sum(sample.at_s <= result.window.opened_s for sample in result.samples) >= 6


def test_a_cache_that_never_levels_delays_the_window_by_half_its_length_at_most() -> None:
    class Filling(QueueEngine):
        async def counters(self, *, origin_s: float) -> CounterSample:
            sample = await super().counters(origin_s=origin_s)
            return replace(sample, kv_usage=min(1.0, sample.at_s / 100))

    result = load(Filling(slots=8), CLOSED)
    assert result.window is not None
    assert 15 <= result.window.opened_s <= 20
    assert "kv_not_levelled" in result.flags


def test_a_window_from_the_first_full_moment_counts_prompts_without_their_ends_and_ours_does_not() -> None:
    slots, step_s, prefill_s, chunk = 64, 0.4, 0.0001, 20
    lengths = shuffled_blocks(CHAT.lengths.block(), 16, seed=1)
    engine = QueueEngine(slots=slots, step_s=step_s, prefill_s=prefill_s, chunk=chunk)
    plan = replace(CLOSED, concurrency=slots, window_s=120, max_doublings=0)
    result = load(engine, plan, RequestSource(lengths=lengths))
    service_s = sum(prefill_s * prompt + step_s * -(-output // chunk) for prompt, output in lengths)
    truth = slots * sum(map(sum, lengths)) / service_s  # renewal-reward theorem
    assert result.window is not None
    ours = tokens_in(result.records, result.window.opened_s, result.window.closed_s) / result.window.length_s
    naive = tokens_in(result.records, 0, 30) / 30
    assert abs(ours / truth - 1) < 0.02
    assert naive / truth - 1 > 0.06


def test_halves_that_disagree_double_the_window_once_and_then_say_unsteady() -> None:
    class Rising(QueueEngine):
        """Every token slower than the one before, for ever."""

        async def _generate(self, request: Request, order: int, origin_s: float) -> None:
            self.step_s = 0.1 * (1 + (self.now() - origin_s) / 20)
            await super()._generate(request, order, origin_s)

    result = load(Rising(slots=8), CLOSED)
    assert result.status is LoadStatus.UNSTEADY
    assert "differ" in result.detail
    assert result.window is not None
    assert result.window.doublings == 1
    assert result.window.length_s == pytest.approx(60)


def test_too_few_requests_double_the_window_once() -> None:
    result = load(QueueEngine(slots=8), replace(CLOSED, min_requests=10_000))
    assert result.window is not None
    assert result.window.doublings == 1
    assert result.status is LoadStatus.COMPLETE
    assert result.flags == ("few_requests",)


def test_no_doubling_that_the_deadline_would_cut_off() -> None:
    result = load(QueueEngine(slots=8), replace(CLOSED, min_requests=10_000, deadline_s=60))
    assert result.status is LoadStatus.COMPLETE
    assert result.window is not None
    assert result.window.doublings == 0


def test_old_requests_in_flight_at_the_close_have_stalled() -> None:
    engine = QueueEngine(slots=9, hangs=frozenset({20}), ignores_idle=True)
    result = load(engine, replace(CLOSED, stall_after_s=10))
    assert kinds(result)["stalled"] == 1
    assert kinds(result)["censored"] == 7
    stalled = next(record for record in result.records if record.failure)
    assert "the limit is 10.0 s" in (stalled.failure.message if stalled.failure else "")


def test_a_cap_ends_sending_and_lets_the_rest_finish() -> None:
    engine = QueueEngine(slots=8)
    result = load(engine, replace(CLOSED, max_requests=100))
    assert kinds(result) == {"ok": 100}
    assert result.status is LoadStatus.COMPLETE
    assert "capped" in result.flags
    assert result.window is not None
    assert result.window.closed_s < max(record.ended_s for record in result.records)


def test_a_cap_below_the_warm_up_reports_the_whole_run_as_unsteady() -> None:
    result = load(QueueEngine(slots=8), replace(CLOSED, max_requests=5))
    assert kinds(result) == {"ok": 5}
    assert result.status is LoadStatus.UNSTEADY
    assert result.flags == ("no_steady_window",)
    assert result.window is not None
    assert (result.window.opened_s, result.window.closed_s) == (0, max(record.ended_s for record in result.records))


def test_the_listener_can_stop_the_load() -> None:
    result = load(QueueEngine(slots=8), CLOSED, on_tick=lambda tick: tick.at_s < 20)
    assert result.status is LoadStatus.STOPPED_EARLY
    assert result.window is not None
    assert result.window.closed_s == pytest.approx(20, abs=1)


def test_ticks_count_the_tokens_of_the_window_as_the_metrics_do() -> None:
    ticks: list[Tick] = []
    result = load(QueueEngine(slots=8), CLOSED, on_tick=keep(ticks))
    last = ticks[-1]
    assert last.window_open_s is not None
    end_s = last.window_open_s + last.window_s
    assert last.window_tokens == pytest.approx(tokens_in(result.records, last.window_open_s, end_s + 1e-9), rel=1e-6)


# The client itself


def test_a_trial_process_needs_nothing_but_the_standard_library() -> None:
    assert foreign_imports("vopt.optimizer.load.drive") == set()


def test_the_same_driver_runs_on_a_real_event_loop() -> None:
    plan = replace(CLOSED, window_s=0.5, tick_s=0.05, max_doublings=0, min_requests=1)

    async def run() -> LoadResult:
        return await drive(QueueEngine(slots=8, step_s=0.002), SHORT, plan)

    result = asyncio.run(run())
    assert result.window is not None
    assert result.window.length_s == pytest.approx(0.5)
    seen = kinds(result)
    assert seen["ok"] > 8
    assert 0 < seen["censored"] <= 8, "all in flight at the end, less those that ended in that very moment"
    assert seen.total() == seen["ok"] + seen["censored"]
    assert result.client.cpu_share is not None
    assert 0 < result.client.cpu_share <= 1.5


def test_a_client_that_cannot_keep_up_says_so() -> None:
    class Blocking(QueueEngine):
        async def counters(self, *, origin_s: float) -> CounterSample:
            time.sleep(0.15)  # noqa: ASYNC251  (the point: it holds up the event loop)
            return await super().counters(origin_s=origin_s)

    plan = replace(POISSON, rate=50, window_s=0.8, warmup_s=0.2, tick_s=0.1, max_doublings=0)

    async def run() -> LoadResult:
        return await drive(Blocking(slots=64, step_s=0.001), SHORT, plan)

    result = asyncio.run(run())
    assert result.client.limited
    assert result.client.max_lag_s > 0.05
    assert any(record.sent_s - record.scheduled_s > 0.05 for record in result.records), "lateness shows in the records"


# Rules


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (replace(CLOSED, concurrency=0), "concurrency of 1 or more, not 0"),
        (replace(POISSON, rate=0), "above 0 requests per second, not 0"),
        (replace(POISSON, rate=float("nan")), "not nan"),
        (replace(POISSON, rate=-1), "not -1"),
        (replace(POISSON, arrivals=Arrivals.REPLAY), "recorded times"),
        (replace(CLOSED, window_s=0), "window_s must be above 0"),
        (replace(CLOSED, max_requests=0), "max_requests must be 1 or more"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(plan: LoadPlan, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(QueueEngine(), plan)


def test_the_test_engine_is_an_engine() -> None:
    async def check() -> bool:
        return isinstance(QueueEngine(), Engine)

    assert run_virtual(check())


def test_a_load_repeats_exactly() -> None:
    assert load(QueueEngine(slots=6), CLOSED) == load(QueueEngine(slots=6), CLOSED)


@settings(max_examples=80, deadline=None)
@given(
    closed=st.booleans(),
    concurrency=st.integers(1, 12),
    slots=st.integers(1, 12),
    dies_at=st.none() | st.integers(0, 60),
    hangs=st.frozensets(st.integers(0, 60), max_size=8),
    errors=st.dictionaries(st.integers(0, 60), st.sampled_from(["a", "b"]), max_size=40),
    cap=st.none() | st.integers(1, 80),
    stops_at=st.none() | st.integers(1, 40),
    deadline_s=st.sampled_from([5.0, 30.0, 200.0]),
    ignores_idle=st.booleans(),
    ignores_cancel=st.booleans(),
    turns=st.sampled_from([(), (2, 2), (4,)]),
)
def test_every_request_is_accounted_for_exactly_once_whatever_goes_wrong(
    closed: bool,
    concurrency: int,
    slots: int,
    dies_at: int | None,
    hangs: frozenset[int],
    errors: dict[int, str],
    cap: int | None,
    stops_at: int | None,
    deadline_s: float,
    ignores_idle: bool,
    ignores_cancel: bool,
    turns: tuple[int, ...],
) -> None:
    engine = QueueEngine(
        slots=slots, dies_at=dies_at, hangs=hangs, errors=errors, ignores_idle=ignores_idle, ignores_cancel=ignores_cancel,
        chunk=10, step_s=0.2,
    )  # fmt: skip
    arrivals = Arrivals.CLOSED if closed else Arrivals.POISSON
    plan = LoadPlan(
        arrivals, window_s=10, concurrency=concurrency if closed else None, rate=None if closed else 2.0, min_requests=5,
        max_requests=cap, deadline_s=deadline_s, idle_timeout_s=4, repeated_errors=6, stall_after_s=3,
    )  # fmt: skip
    result = load(engine, plan, replace(SHORT, turns=turns), None if stops_at is None else lambda tick: tick.at_s < stops_at)
    assert_accounted(engine, result)
    assert all(record.ended_s <= deadline_s for record in result.records)
    assert cap is None or len(result.records) <= cap
    if result.status in (LoadStatus.COMPLETE, LoadStatus.UNSTEADY, LoadStatus.OVERLOADED):
        assert result.not_sent == 0
        assert result.window is not None
    elif closed:
        assert len(result.records) + result.not_sent >= (cap or 5)
