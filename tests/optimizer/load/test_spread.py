"""Several client processes send what one would have sent, and their results add up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
from counted import tokens_in
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_engine import QueueEngine
from support.fault_server import FaultServer, Script, good, serving, status

from vopt.objectives.records import CAPPED, LoadResult, LoadStatus, LoadWindow, RequestRecord
from vopt.optimizer.load.arrivals import arrival_times
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.lockstep import Begin, Conductor, LedWindow, Order, Prepared, Told
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Tick
from vopt.optimizer.load.shares import client_processes, possible_clients, share_of
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.spread import merge, spread
from vopt.optimizer.load.target import parse_target
from vopt.optimizer.load.virtual_time import run_virtual

SOURCE = RequestSource(lengths=((8, 4),) * 64, bodies=(tuple(range(20, 40)),), digit_ids=tuple(range(10)))
PLAN = LoadPlan(
    arrivals=Arrivals.CLOSED, window_s=0.5, concurrency=5, min_requests=3, max_doublings=0, deadline_s=30.0, tick_s=0.1
)


@contextmanager
def server() -> Iterator[FaultServer]:
    """A server in a thread of its own, because ``spread`` blocks."""

    def answer(path: str, body: dict[str, Any]) -> Script:
        return [status("404 Not Found")] if path == "/metrics" else [0.005, *good(4)]

    ready, over = threading.Event(), threading.Event()
    found: list[FaultServer] = []

    async def run() -> None:
        async with serving(answer) as faulty:
            found.append(faulty)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    ready.wait(10)
    try:
        yield found[0]
    finally:
        over.set()
        thread.join()


def test_shares_deal_out_every_visit_once() -> None:
    shares = [share_of(SOURCE, PLAN, client, 3) for client in range(3)]
    visits = sorted(index for share, _ in shares for number in range(10) for index in share.visit(number))
    assert visits == list(range(30))
    assert sum(plan.concurrency or 0 for _, plan in shares) == 5
    rates = [share_of(SOURCE, LoadPlan(Arrivals.POISSON, 1.0, rate=9.0), client, 3)[1] for client in range(3)]
    assert sum(plan.rate or 0 for plan in rates) == pytest.approx(9.0)
    assert len({plan.seed for plan in rates}) == 3, "equal arrivals would come in bursts"


def test_shares_of_a_replay_keep_their_times() -> None:
    source = RequestSource(lengths=((8, 4),) * 4, scheduled_s=(0.0, 1.0, 2.0, 3.0))
    share, _ = share_of(source, LoadPlan(Arrivals.REPLAY, 1.0), 1, 2)
    assert (share.scheduled_s, share.visit(0), share.visit(1)) == ((1.0, 3.0), range(1, 2), range(3, 4))


def test_two_processes_load_one_server() -> None:
    ticks: list[Tick] = []

    def on_tick(tick: Tick) -> bool:
        ticks.append(tick)
        return True

    with server() as faulty:
        load = spread(parse_target(faulty.url, "m"), SOURCE, PLAN, on_tick, 2)
        prompts = [tuple(body["prompt"]) for method, _, _, body in faulty.requests if method == "POST"]
    assert load.status in (LoadStatus.COMPLETE, LoadStatus.UNSTEADY)
    assert (load.concurrency, "client_processes_2" in load.flags) == (5, True)
    indices = [record.index for record in load.records]
    assert len(set(indices)) == len(indices)
    assert {index % 2 for index in indices} == {0, 1}
    assert len(set(prompts)) == len(prompts)
    assert load.window is not None
    assert any(record.succeeded and record.ended_s > load.window.opened_s for record in load.records)
    assert ticks
    assert all(later.at_s > earlier.at_s for earlier, later in pairwise(ticks)), "one for each round"
    assert min(record.sent_s for record in load.records) >= 0
    assert max(record.ended_s for record in load.records) < 30, "times count from the load's own beginning"
    assert load.window.length_s == pytest.approx(PLAN.window_s, abs=1e-6)


def test_a_stop_reaches_all_processes() -> None:
    with server() as faulty:
        load = spread(parse_target(faulty.url, "m"), SOURCE, PLAN, lambda tick: False, 2)
    assert load.status is LoadStatus.STOPPED_EARLY


def test_fewer_users_or_requests_than_processes() -> None:
    assert possible_clients(PLAN, 9) == 5
    assert possible_clients(replace(PLAN, max_requests=2), 9) == 2
    assert possible_clients(LoadPlan(Arrivals.POISSON, 1.0, rate=1.0), 3) == 3


def test_the_number_of_processes_is_settled_by_plan_and_cores_alone() -> None:
    def number(concurrency: int, cpus: int) -> int:
        return client_processes(LoadPlan(Arrivals.CLOSED, 1.0, concurrency=concurrency), cpus)

    assert [number(streams, 16) for streams in (1, 256, 257, 512, 1024, 9999)] == [1, 1, 2, 2, 4, 4]
    assert [number(1024, cpus) for cpus in (1, 2, 3, 4, 5, 6)] == [1, 1, 1, 2, 3, 4]
    assert [client_processes(LoadPlan(Arrivals.POISSON, 1.0, rate=rate), 16) for rate in (0.5, 64.0, 65.0, 900.0)] == [
        1,
        1,
        2,
        4,
    ]
    assert client_processes(LoadPlan(Arrivals.REPLAY, 1.0), 16) == 1


def test_even_arrivals_stay_even() -> None:
    whole = LoadPlan(Arrivals.CONSTANT, 1.0, rate=3.0)
    dealt = [arrival_times(plan, share) for share, plan in (share_of(SOURCE, whole, client, 3) for client in range(3))]
    together = sorted(at_s for times in dealt for at_s in islice(times, 4))
    assert together == pytest.approx(list(islice(arrival_times(whole, SOURCE), 12)))


def part(opened: float, closed: float, status: LoadStatus = LoadStatus.COMPLETE, index: int = 0) -> LoadResult:
    record = RequestRecord(index, 1.0, 1.0, 3.0, 8, 4, 4, (2.0, 3.0), (2, 2), first_content_s=2.0, finish_reason="length")
    return LoadResult((record,), LoadWindow(opened, closed), status, concurrency=2, not_sent=1)


def test_a_load_that_ended_inside_its_window_counts_until_its_first_client_ended() -> None:
    merged = merge([part(2.0, 9.0, LoadStatus.DEADLINE), part(2.0, 7.5, LoadStatus.ENGINE_DIED, 1)], SOURCE, PLAN)
    assert merged.window == LoadWindow(2.0, 7.5)
    assert (merged.status, merged.concurrency) == (LoadStatus.ENGINE_DIED, 5)
    assert merged.not_sent == PLAN.min_requests - 2


class Crowd:
    """Several virtual engines, each loaded by one client under one ``Conductor``, on one virtual clock."""

    def __init__(self, plan: LoadPlan, clients: int, engines: list[QueueEngine]) -> None:
        self.plan, self.clients, self.engines = plan, clients, engines
        self.conductor = Conductor(plan, clients)
        self.windows: dict[int, LedWindow] = {}
        self.prepared = 0

    def tell(self, client: int, told: Told) -> None:
        """As a pipe would: later, and to all."""
        asyncio.get_running_loop().call_later(0.003 * (client + 1), self.decide, client, told)

    def decide(self, client: int, told: Told) -> None:
        orders: tuple[Order, ...] = self.conductor.heard(client, told, self.engines[0].now())
        if isinstance(told, Prepared):
            self.prepared += 1
            orders = (Begin(0.0),) if self.prepared == self.clients else ()
        for order in orders:
            for other, window in self.windows.items():
                asyncio.get_running_loop().call_later(0.002 * (other + 1), window.heard, order)

    async def load(self) -> list[LoadResult]:
        async def one(client: int) -> LoadResult:
            share, own = share_of(SOURCE, self.plan, client, self.clients)
            self.windows[client] = LedWindow(own, lambda told: self.tell(client, told))
            return await drive(self.engines[client], share, own, None, self.windows[client])

        return list(await asyncio.gather(*(one(client) for client in range(self.clients))))


def crowd(plan: LoadPlan, engines: list[QueueEngine]) -> tuple[LoadResult, list[LoadResult]]:
    loads = run_virtual(Crowd(plan, len(engines), engines).load())
    return merge(loads, SOURCE, plan), loads


def always_busy(load: LoadResult, loads: list[LoadResult]) -> None:
    """Every client has requests in flight through the whole common window."""
    assert load.window is not None
    for own in loads:
        assert own.window == load.window
        edges = sorted({load.window.opened_s, load.window.closed_s - 1e-6, *(r.ended_s for r in own.records)})
        for at_s in (edge + 1e-6 for edge in edges if load.window.opened_s <= edge < load.window.closed_s - 2e-6):
            assert any(r.sent_s <= at_s <= r.ended_s + 0.02 for r in own.records), at_s


LONG = LoadPlan(arrivals=Arrivals.CLOSED, window_s=20.0, concurrency=24, min_requests=10, max_doublings=1, deadline_s=300.0)


@settings(deadline=None, max_examples=8)
@given(st.integers(2, 4), st.integers(0, 3), st.integers(0, 3))
def test_clients_together_see_what_one_sees(clients: int, fewer: int, slower: int) -> None:
    """Whatever the clients' speeds: one window, full load in it, each request once, and the tokens of one client."""
    plan = replace(LONG, concurrency=24 - fewer)
    steps = [0.5 + 0.1 * slower * client for client in range(clients)]
    load, loads = crowd(plan, [QueueEngine(slots=24, step_s=step) for step in steps])
    assert load.status is LoadStatus.COMPLETE, load.detail
    always_busy(load, loads)
    indices = [record.index for record in load.records]
    assert len(set(indices)) == len(indices)
    assert load.not_sent == 0
    assert min(record.sent_s for record in load.records) >= 0
    assert max(record.ended_s for record in load.records) < load.window.closed_s + 1.0  # type: ignore[union-attr]  # always_busy
    if not slower:
        alone = run_virtual(drive(QueueEngine(slots=24, step_s=0.5), SOURCE, plan))
        assert alone.window is not None
        assert load.window is not None
        mine, its = (tokens_in(one.records, one.window.opened_s, one.window.closed_s) for one in (load, alone) if one.window)
        assert mine == pytest.approx(its, rel=0.03)


def test_all_clients_double_together_when_together_they_saw_too_few() -> None:
    load, loads = crowd(replace(LONG, min_requests=1_200), [QueueEngine(slots=24, step_s=0.5) for _ in range(3)])
    assert load.window is not None
    assert load.window.doublings == 1
    assert load.window.length_s == pytest.approx(40.0)
    assert {own.window for own in loads} == {load.window}
    assert ("few_requests" in load.flags) == (
        sum(r.ended_s >= load.window.opened_s for r in load.records if r.succeeded) < 1_200
    )


def test_a_cap_closes_the_window_where_the_first_share_ends_and_all_requests_are_sent() -> None:
    plan = replace(LONG, max_requests=301)
    load, loads = crowd(plan, [QueueEngine(slots=24, step_s=step) for step in (0.1, 0.15, 0.2)])
    assert sorted(record.index for record in load.records) == list(range(301))
    assert all(record.succeeded for record in load.records)
    assert CAPPED in load.flags
    assert load.not_sent == 0
    assert load.window is not None
    last_sent = min(max(record.sent_s for record in own.records) for own in loads)
    assert load.window.closed_s == pytest.approx(last_sent, abs=1.0)
    always_busy(load, loads)


def test_a_cap_before_any_window() -> None:
    load, _ = crowd(replace(LONG, max_requests=20), [QueueEngine(slots=24) for _ in range(2)])
    assert sorted(record.index for record in load.records) == list(range(20))
    assert load.status is LoadStatus.UNSTEADY
    assert "no_steady_window" in load.flags
    assert load.window == LoadWindow(min(r.sent_s for r in load.records), max(r.ended_s for r in load.records))


@pytest.mark.parametrize(("slots", "status"), [(24, LoadStatus.COMPLETE), (1, LoadStatus.OVERLOADED)])
def test_an_open_loop_is_judged_on_all_records(slots: int, status: LoadStatus) -> None:
    plan = replace(LONG, arrivals=Arrivals.POISSON, concurrency=None, rate=12.0, window_s=60.0)
    load, loads = crowd(plan, [QueueEngine(slots=slots, step_s=0.3) for _ in range(3)])
    assert load.window is not None
    assert load.window.opened_s == plan.warmup_s, "the same requests are due in it, whatever moments clients looked at"
    assert load.status is status, load.detail
    assert load.rate == 12.0
    assert {own.window for own in loads} == {load.window}
