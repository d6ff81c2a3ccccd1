"""What a load leaves open is found on the first engine, with prompts of its own for every probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from vopt.objectives.records import LoadResult, LoadStatus, LoadWindow, RequestFailure, RequestFailureKind, RequestRecord
from vopt.optimizer.engine.base import OnTick
from vopt.optimizer.errors import UsageError
from vopt.optimizer.first_load import NUMBERS_APART, NumberedLoads, first_load
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.measurement import Asked
from vopt.optimizer.second_load import found_plan
from vopt.optimizer.trial import EngineFailure

SOURCE = RequestSource(lengths=((10, 4),) * 64, first_number=7)


def record(index: int, sent: float, took: float) -> RequestRecord:
    times = tuple(sent + took * part for part in (0.25, 0.5, 0.75, 1.0))
    return RequestRecord(index, sent, sent, sent + took, 10, 4, 4, times, (1, 1, 1, 1), times[0], "stop")


def finished(plan: LoadPlan, per_s: float, took: float = 1.0) -> LoadResult:
    count = int(per_s * plan.window_s)
    records = tuple(record(index, index / per_s, took) for index in range(count))
    window = LoadWindow(0.0, plan.window_s + took)
    return LoadResult(records, window, LoadStatus.COMPLETE, concurrency=plan.concurrency, rate=plan.rate)


class Engine:
    """Saturates at 128 in flight; remembers its loads."""

    def __init__(self, took: float = 1.0) -> None:
        self.plans: list[LoadPlan] = []
        self.numbers: list[int] = []
        self.took = took

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        self.plans.append(plan)
        self.numbers.append(source.first_number)
        per_s = plan.rate or min(plan.concurrency or 0, 128) / 16
        return finished(plan, per_s, self.took)

    def once(self) -> Callable[[LoadPlan], LoadResult]:
        return NumberedLoads(SOURCE, lambda tick: True).on(self.load)


def test_probes_and_loads_share_no_prompt() -> None:
    engine, said = Engine(), []
    found = first_load(Asked(Arrivals.CLOSED, window_s=30.0), engine.once(), said.append)
    assert found.load.concurrency == 128
    assert said[0].startswith("concurrency: 128")
    assert engine.numbers == [7 + n * NUMBERS_APART for n in range(len(engine.numbers))]
    assert len(engine.numbers) == len(found.probes) + 1
    assert all(plan.max_requests is None for plan in engine.plans[:-1])


def test_what_was_given_needs_one_load_with_the_sources_own_numbers() -> None:
    engine = Engine()
    found = first_load(Asked(Arrivals.CLOSED, concurrency=16, window_s=30.0, max_requests=99), engine.once(), print)
    assert (engine.numbers, found.probes) == ([7], ())
    assert engine.plans[0].max_requests == 99
    assert found.measurement is not None
    assert found.measurement.plan.stall_after_s == pytest.approx(3.0)
    assert set(found.measurement.observed_output_tokens.values()) == {4}


def test_a_window_shorter_than_two_requests_is_measured_again() -> None:
    engine = Engine(took=50.0)
    found = first_load(Asked(Arrivals.CLOSED, concurrency=16), engine.once(), print)
    assert [plan.window_s for plan in engine.plans] == [60.0, pytest.approx(100.0)]
    assert len(found.probes) == 1


def test_an_open_loop_without_a_rate_gets_a_share_of_what_is_sustained() -> None:
    engine, said = Engine(), []
    found = first_load(Asked(Arrivals.POISSON, window_s=30.0), engine.once(), said.append)
    sustained = 8.0 * 30.0 / 31.0
    assert found.load.rate == pytest.approx(0.6 * sustained, rel=0.02)
    assert found.load.concurrency is None
    assert "rate" in said[-1]


@pytest.mark.parametrize("doublings", [0, 1])
def test_all_loads_at_a_rate_have_the_window_that_the_baselines_needed(doublings: int) -> None:
    """A slower engine ends fewer requests in a window: if each load counted its own, arms would be measured over others."""

    def load(plan: LoadPlan) -> LoadResult:
        made = finished(plan, plan.rate or 8.0)
        assert made.window is not None
        return replace(made, window=replace(made.window, doublings=doublings))

    found = first_load(Asked(Arrivals.POISSON, rate=4.0, window_s=20.0), load, print)
    assert found.measurement is not None
    assert found.measurement.plan.window_s == 20.0 * 2**doublings
    assert found.measurement.plan.min_requests == 0
    closed = first_load(Asked(Arrivals.CLOSED, concurrency=8, window_s=20.0), load, print)
    assert closed.measurement is not None
    assert (closed.measurement.plan.window_s, closed.measurement.plan.min_requests) == (20.0, 400)


@pytest.mark.parametrize(("window_s", "probe_s"), [(60.0, 20.0), (20.0, 10.0), (4.0, 4.0)])
def test_probes_are_long_enough_to_rank(window_s: float, probe_s: float) -> None:
    engine = Engine()
    first_load(Asked(Arrivals.POISSON, window_s=window_s), engine.once(), print)
    probes = [plan for plan in engine.plans[:-2] if plan.concurrency]
    assert [plan.window_s for plan in probes] == [probe_s] * len(probes)
    assert len(probes) >= 2


def test_a_replay_is_taken_as_it_is() -> None:
    plans: list[LoadPlan] = []

    def load(plan: LoadPlan) -> LoadResult:
        plans.append(plan)
        return finished(plan, 2.0, took=50.0)

    first_load(Asked(Arrivals.REPLAY, window_s=30.0), load, print)
    assert [(plan.rate, plan.concurrency, plan.window_s) for plan in plans] == [(None, None, 30.0)]


def test_a_probe_without_an_answer_is_a_failure_in_words() -> None:
    def broken(source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        failure = RequestFailure(RequestFailureKind.HTTP_STATUS, "HTTP 500: no way")
        bad = RequestRecord(0, 0.0, 0.0, 0.1, 10, 4, 0, failure=failure)
        return LoadResult((bad,), None, LoadStatus.REPEATED_ERRORS)

    with pytest.raises(EngineFailure, match="concurrency 64 finished no request: 1 x http_status: HTTP 500: no way"):
        first_load(Asked(Arrivals.CLOSED), NumberedLoads(SOURCE, lambda tick: True).on(broken), print)


def test_a_p99_gets_a_window_with_a_thousand_requests() -> None:
    engine = Engine()
    found = first_load(Asked(Arrivals.POISSON, rate=10.0, least_successes=1000), engine.once(), print)
    assert engine.plans[0].window_s == 60.0
    assert 100.0 < engine.plans[1].window_s < 130.0
    assert found.measurement is not None
    frozen = found.measurement.plan
    assert frozen == replace(engine.plans[1], stall_after_s=frozen.stall_after_s, min_requests=0)
    first_load(Asked(Arrivals.POISSON, rate=10.0, window_s=20.0), engine.once(), print)
    assert engine.plans[-1].window_s == 20.0, "a window that was typed is taken as it is"


def test_a_p99_that_would_take_hours_is_refused_with_what_to_type() -> None:
    engine = Engine()
    with pytest.raises(UsageError, match="would take windows of") as refused:
        first_load(Asked(Arrivals.POISSON, rate=0.5, least_successes=1000), engine.once(), print)
    assert "--window" in str(refused.value.hint)


class Bounded(Engine):
    """Answers in time below ``misses_from`` requests per second; above it one request in five comes late. Its queue grows from
    ``grows_from`` on."""

    def __init__(self, misses_from: float, grows_from: float = 1e9) -> None:
        super().__init__()
        self.misses_from, self.grows_from = misses_from, grows_from

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        load = super().load(source, plan, on_tick)
        if plan.rate is None:
            return load
        records = load.records
        if plan.rate >= self.misses_from:
            records = tuple(record(r.index, r.sent_s, 9.0 if r.index % 5 == 0 else 1.0) for r in records)
        status = LoadStatus.OVERLOADED if plan.rate >= self.grows_from else LoadStatus.COMPLETE
        return replace(load, records=records, status=status)


BOUNDS = {"e2e_s": 2.0}


@pytest.mark.parametrize(("misses_from", "share"), [(0.1, 0.6), (5.0, 0.7), (6.0, 0.8)])
def test_a_goodput_goal_is_loaded_where_the_baseline_begins_to_miss_its_bounds(misses_from: float, share: float) -> None:
    engine, said = Bounded(misses_from), []
    found = first_load(Asked(Arrivals.POISSON, window_s=60.0, slos=BOUNDS), engine.once(), said.append)
    assert found.load.rate == pytest.approx(share * 8.0 * 60 / 61, rel=0.02)
    assert "80% of the requests are within the bounds" in said[-1]
    assert not any("--rate" in text for text in said)
    assert found.load.rate == engine.plans[-2].rate, "the rate was tried before it was taken"


def test_a_baseline_that_misses_nothing_at_any_rate_is_loaded_as_for_latency_and_says_what_to_type() -> None:
    engine, said = Bounded(1e9, grows_from=6.0), []
    found = first_load(Asked(Arrivals.POISSON, window_s=60.0, slos=BOUNDS), engine.once(), said.append)
    assert found.load.rate == pytest.approx(0.6 * 8.0 * 60 / 61, rel=0.02)
    assert "keeps every bound for 100% of its requests" in said[-1]
    assert "--rate" in said[-1]


def test_a_typed_goodput_rate_is_taken_as_it_is_and_said_to_show_nothing_when_no_bound_is_missed() -> None:
    engine, said = Bounded(1e9), []
    found = first_load(Asked(Arrivals.POISSON, rate=2.0, window_s=60.0, slos=BOUNDS), engine.once(), said.append)
    assert [plan.rate for plan in engine.plans] == [2.0]
    assert found.load.rate == 2.0
    assert "--rate" in said[-1]


def test_a_found_rate_at_which_the_queue_grows_after_all_is_lowered() -> None:
    engine, said = Bounded(1e9, grows_from=4.0), []
    found = first_load(Asked(Arrivals.POISSON, window_s=60.0), engine.once(), said.append)
    assert found.load.rate == pytest.approx(0.45 * 8.0 * 60 / 61, rel=0.02)
    assert found.measurement is not None
    assert "queue grew" in said[-1]
    found = first_load(Asked(Arrivals.POISSON, rate=9.0, window_s=60.0), engine.once(), said.append)
    assert found.measurement is None, "a typed rate is the user's"


@pytest.mark.parametrize(("slos", "factor"), [({}, 0.75), (BOUNDS, 0.9)])
def test_a_second_load_is_lowered_by_what_its_goal_allows(slos: dict[str, float], factor: float) -> None:
    engine = Bounded(1e9, grows_from=4.5)
    closed = finished(LoadPlan(Arrivals.CLOSED, 60.0, concurrency=128), 8.0)
    load, plan = found_plan(Asked(Arrivals.POISSON, window_s=60.0, slos=slos), closed, engine.once(), lambda text: None)
    assert plan is not None
    assert load.rate == pytest.approx(0.6 * factor * 8.0 * 60 / 61, rel=0.02)


def test_a_closed_loop_is_not_said_to_need_a_higher_rate() -> None:
    engine, said = Bounded(1e9), []
    first_load(Asked(Arrivals.CLOSED, concurrency=128, window_s=60.0, slos=BOUNDS), engine.once(), said.append)
    assert not any("--rate" in text for text in said)
