"""Several client processes send what one would have sent, and their results add up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.fault_server import FaultServer, Script, good, serving, status

from vopt.objectives.records import ClientHealth, LoadResult, LoadStatus, LoadWindow, RequestRecord
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Tick
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.spread import Clients, clients_for, merge, share_of, spread
from vopt.optimizer.load.target import parse_target

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


def test_a_stop_reaches_all_processes() -> None:
    with server() as faulty:
        load = spread(parse_target(faulty.url, "m"), SOURCE, PLAN, lambda tick: False, 2)
    assert load.status is LoadStatus.STOPPED_EARLY


def test_fewer_users_than_processes() -> None:
    with pytest.raises(ValueError, match="concurrency of 6 or more"):
        spread(parse_target("http://127.0.0.1:9", "m"), SOURCE, PLAN, None, 6)


def result(origin: float, opened: float, closed: float, status: LoadStatus = LoadStatus.COMPLETE) -> tuple[float, LoadResult]:
    record = RequestRecord(0, 1.0, 1.0, 3.0, 8, 4, 4, (2.0, 3.0), (2, 2), first_content_s=2.0, finish_reason="length")
    return origin, LoadResult((record,), LoadWindow(opened, closed), status, concurrency=2, not_sent=1)


def test_results_are_put_on_one_clock() -> None:
    merged = merge([result(100.5, 1.0, 10.0), result(100.0, 2.0, 11.0, LoadStatus.UNSTEADY)])
    assert merged.window == LoadWindow(2.0, 10.5)
    assert [(record.sent_s, record.chunk_times_s, record.ended_s) for record in merged.records] == [
        (1.0, (2.0, 3.0), 3.0),
        (1.5, (2.5, 3.5), 3.5),
    ]
    assert (merged.status, merged.concurrency, merged.not_sent) == (LoadStatus.UNSTEADY, 4, 2)


def test_windows_that_never_met_are_no_window() -> None:
    assert merge([result(0.0, 1.0, 2.0), result(5.0, 1.0, 2.0)]).window is None


def test_a_client_that_was_the_limit_is_replaced_by_several() -> None:
    def single(source: RequestSource) -> LoadResult:
        return LoadResult((), None, LoadStatus.COMPLETE, client=ClientHealth(limited=True))

    def several(source: RequestSource, n: int) -> LoadResult:
        assert source.first_number > 0, "prompts of the dropped load would be found in the cache"
        return LoadResult((), None, LoadStatus.COMPLETE, flags=(str(n),))

    assert clients_for(ClientHealth(limited=True), cpus=16) == 8
    assert clients_for(ClientHealth(limited=True), cpus=2) == 1
    assert clients_for(ClientHealth(), cpus=16) == 1
    chosen = Clients(1).load(single, several, SOURCE)
    assert chosen.flags == (), "one means one"
    assert Clients(3).load(single, several, RequestSource(SOURCE.lengths, first_number=1)).flags == ("3",)
