from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from counted import tokens_in
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_engine import QueueEngine
from support.imports import foreign_imports

from vopt.objectives.records import CounterSample, LoadResult, LoadStatus, RequestFailureKind, RequestRecord
from vopt.optimizer.engine.base import Engine, OnTick
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.lengths import shuffled_blocks
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Request, Tick
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.virtual_time import run_virtual
from vopt.optimizer.load.workload import CHAT

SHORT = RequestSource(lengths=((100, 50), (40, 20), (300, 120), (10, 8)))
CLOSED = LoadPlan(Arrivals.CLOSED, window_s=30, concurrency=8, min_requests=10)
POISSON = LoadPlan(Arrivals.POISSON, window_s=60, rate=4, min_requests=10)


def load(engine: QueueEngine, plan: LoadPlan, source: RequestSource = SHORT, on_tick: OnTick | None = None) -> LoadResult:
    async def run() -> LoadResult:
        result = await drive(engine, source, plan, on_tick)
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not engine.ignores_cancel]
        assert not left, f"tasks outlived the load: {left}"
        return result

    return run_virtual(run())


def keep(ticks: list[Tick]) -> OnTick:
    def on_tick(tick: Tick) -> bool:
        ticks.append(tick)
        return True

    return on_tick


def kinds(result: LoadResult) -> Counter[str]:
    return Counter(r.failure.kind.value if r.failure else "censored" if r.censored else "ok" for r in result.records)


def assert_accounted(engine: QueueEngine, result: LoadResult) -> None:
    """Each request that reached the engine has exactly one record, and each record is one thing only."""
    assert Counter(record.index for record in result.records) == Counter(engine.sent)
    for record in result.records:
        assert [record.succeeded, record.failure is not None, record.censored].count(True) == 1
        assert record.scheduled_s <= record.sent_s <= record.ended_s
        assert record.output_tokens == sum(record.chunk_tokens)


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


# Open loop


def test_poisson_arrivals_are_sent_at_their_times_and_are_the_same_for_every_engine() -> None:
    slow, fast = load(QueueEngine(slots=8), POISSON), load(QueueEngine(slots=64, step_s=0.001), POISSON)
    assert slow.status is fast.status is LoadStatus.COMPLETE
    times = {record.index: record.scheduled_s for record in slow.records}
    assert all(times.get(record.index, record.scheduled_s) == record.scheduled_s for record in fast.records)
    assert all(record.sent_s == pytest.approx(record.scheduled_s) for record in slow.records)
    assert slow.client.requested_rate == pytest.approx(4, rel=0.2)
    assert slow.client.achieved_rate == pytest.approx(slow.client.requested_rate)
    assert not slow.client.limited
    assert load(QueueEngine(), replace(POISSON, seed=1)).records[0].scheduled_s != slow.records[0].scheduled_s


def test_what_was_due_in_the_window_is_measured_to_its_end() -> None:
    """Censoring at the close would leave out the longest answers and flatter the mean."""
    result = load(QueueEngine(slots=64, step_s=0.5), replace(POISSON, window_s=20))
    assert result.window is not None
    due = [record for record in result.records if result.window.opened_s <= record.scheduled_s < result.window.closed_s]
    assert due
    assert all(record.succeeded for record in due)
    assert any(record.scheduled_s > result.window.closed_s for record in result.records), "the load was kept up meanwhile"


def test_a_rate_above_what_the_engine_can_do_is_overloaded() -> None:
    engine = QueueEngine(slots=8)
    result = load(engine, replace(POISSON, rate=12))
    assert result.status is LoadStatus.OVERLOADED
    assert "rise" in result.detail
    assert_accounted(engine, result)


def test_constant_arrivals_are_even() -> None:
    result = load(QueueEngine(slots=64), replace(POISSON, arrivals=Arrivals.CONSTANT, rate=5, max_requests=50))
    assert sorted(record.scheduled_s for record in result.records) == pytest.approx([number / 5 for number in range(50)])
    assert kinds(result) == {"ok": 50}


def test_a_replay_sends_at_the_recorded_times_and_ends_with_the_recording() -> None:
    times = tuple(0.5 * number for number in range(40))
    source = replace(SHORT, scheduled_s=times)
    result = load(QueueEngine(slots=64), replace(POISSON, arrivals=Arrivals.REPLAY, rate=None, warmup_s=2), source)
    assert sorted(record.scheduled_s for record in result.records) == pytest.approx(list(times))
    assert kinds(result) == {"ok": 40}
    assert result.window is not None
    assert result.window.closed_s == pytest.approx(19.5, abs=0.1)


def test_a_death_in_an_open_loop_counts_what_was_due_until_the_windows_end() -> None:
    engine = QueueEngine(slots=64, dies_at=50)
    plan = replace(POISSON, arrivals=Arrivals.CONSTANT, rate=4)
    result = load(engine, plan)
    assert result.status is LoadStatus.ENGINE_DIED
    assert len(result.records) + result.not_sent == pytest.approx(4 * 65, abs=5)


# Sessions


def test_the_turns_of_a_session_follow_each_other_after_a_think_time() -> None:
    source = RequestSource(lengths=((50, 20), (120, 20), (190, 20)), turns=(3,), think_s=(2.0,))
    engine = QueueEngine(slots=8)
    result = load(engine, replace(CLOSED, concurrency=4, max_requests=60), source)
    by_session: dict[str, list[RequestRecord]] = {}
    for record in sorted(result.records, key=lambda record: record.index):
        by_session.setdefault(record.session or "", []).append(record)
    assert len(by_session) >= 20
    for turns in by_session.values():
        for earlier, later in pairwise(turns):
            assert later.sent_s == pytest.approx(earlier.ended_s + 2.0)
            assert later.scheduled_s == pytest.approx(earlier.ended_s + 2.0)


def test_a_session_ends_when_a_turn_fails() -> None:
    source = RequestSource(lengths=((50, 20), (120, 20), (190, 20)), turns=(3,))
    result = load(QueueEngine(errors={0: "no"}), replace(CLOSED, concurrency=1, max_requests=10), source)
    assert [record.session for record in result.records].count("s0") == 1


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
