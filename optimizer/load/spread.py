"""One load from several client processes, for rates that one event loop cannot carry.

Each client drives its share of the plan (``shares``) and keeps it full; when the measured window opens, doubles and closes is
one decision for all, taken here on what they saw together (``lockstep``). All times count from one zero on the clock that
the processes of a host share (``CLOCK_MONOTONIC``, which ``time.perf_counter`` reads on Linux).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import astuple
from multiprocessing.connection import Connection, wait
from typing import Any

from vopt.objectives.records import ClientHealth, CounterSample, LoadResult, LoadStatus, LoadWindow
from vopt.optimizer.engine.base import OnTick
from vopt.optimizer.load.arrivals import planned_requests
from vopt.optimizer.load.client import HttpEngine
from vopt.optimizer.load.drive import ENDED_WELL, drive
from vopt.optimizer.load.lockstep import LEAD_S, Begin, Conductor, LedWindow, Order, Prepared, Stop
from vopt.optimizer.load.plan import LoadPlan, Tick
from vopt.optimizer.load.shares import CLIENT_PROCESSES, Share, possible_clients, share_of
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.target import Target
from vopt.optimizer.load.window import NO_STEADY_WINDOW

STARTUP_S = 120.0
GRACE_S = 30.0
_WORST_FIRST = (
    LoadStatus.ENGINE_DIED,
    LoadStatus.REPEATED_ERRORS,
    LoadStatus.DEADLINE,
    LoadStatus.STOPPED_EARLY,
    LoadStatus.OVERLOADED,
    LoadStatus.UNSTEADY,
    LoadStatus.COMPLETE,
)


def spread(
    target: Target, source: RequestSource, plan: LoadPlan, on_tick: OnTick | None, clients: int, *, owned: bool = False
) -> LoadResult:
    """``drive`` from ``clients`` processes (from fewer where there are fewer users); ``owned`` as for ``HttpEngine``.

    Raises ``ChildProcessError`` when a client is lost, and what a client raised.
    """
    clients = possible_clients(plan, clients)
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for client in range(clients):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            share, part = share_of(source, plan, client, clients)
            process = context.Process(target=_client, args=(theirs, astuple(target), share, part, owned), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
        return merge(_Leader(pipes, plan, on_tick).run(), source, plan)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()


def _expect(pipe: Connection, timeout_s: float) -> Any:
    """The next message; an exception that came as one is raised."""
    if not pipe.poll(timeout_s):
        raise ChildProcessError(f"a client process said nothing for {timeout_s:g} s")
    try:
        message = pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise ChildProcessError("a client process ended before its load did") from error
    if isinstance(message, BaseException):
        raise message
    return message


class _Leader:
    """Leads the clients from their common zero to their common end."""

    def __init__(self, pipes: Sequence[Connection], plan: LoadPlan, on_tick: OnTick | None) -> None:
        self._pipes, self._plan = pipes, plan
        self._conductor = Conductor(plan, len(pipes))
        self._ticks = _Ticks(len(pipes), on_tick)
        self._origin_s = 0.0
        self._results: dict[int, LoadResult] = {}

    def run(self) -> list[LoadResult]:
        """The result of each client."""
        for pipe in self._pipes:
            assert isinstance(_expect(pipe, STARTUP_S), Prepared)
        self._origin_s = time.perf_counter() + LEAD_S
        self._tell(Begin(self._origin_s))
        while len(self._results) < len(self._pipes):
            for client in self._wait():
                self._heard(client, _expect(self._pipes[client], GRACE_S))
            if not self._ticks.go_on():
                self._tell(Stop())
        return [self._results[client] for client in range(len(self._pipes))]

    def _wait(self) -> list[int]:
        """The clients that have said something."""
        going = {id(pipe): client for client, pipe in enumerate(self._pipes) if client not in self._results}
        left_s = self._origin_s + self._plan.deadline_s + GRACE_S - time.perf_counter()
        ready = wait([self._pipes[client] for client in going.values()], max(0.0, left_s))
        if not ready:
            raise ChildProcessError("a client process outlived the load's deadline")
        return [going[id(pipe)] for pipe in ready]

    def _heard(self, client: int, message: Any) -> None:
        if isinstance(message, LoadResult):
            self._results[client] = message
            if message.status not in ENDED_WELL:
                self._tell(Stop())  # with one client less it is not the load that was planned
        elif isinstance(message, Tick):
            self._ticks.heard(client, message)
        else:
            for order in self._conductor.heard(client, message, time.perf_counter() - self._origin_s):
                self._tell(order)

    def _tell(self, order: Order) -> None:
        for client, pipe in enumerate(self._pipes):
            if client not in self._results:
                with contextlib.suppress(OSError):  # a client that is gone is noticed when it should say something
                    pipe.send(order)


class _Ticks:
    """Passes on the clients' ticks as one, once for each round of theirs."""

    def __init__(self, clients: int, on_tick: OnTick | None) -> None:
        self._clients, self._on_tick = clients, on_tick
        self._round: dict[int, Tick] = {}

    def heard(self, client: int, tick: Tick) -> None:
        self._round[client] = tick

    def go_on(self) -> bool:
        """Whether the load goes on; asked whenever a client may have told something."""
        if self._on_tick is None or len(self._round) < self._clients:
            return True
        ticks, self._round = list(self._round.values()), {}
        if self._on_tick(_sum(ticks)):
            return True
        self._on_tick = None
        return False


def _sum(ticks: Sequence[Tick]) -> Tick:
    opened = [tick.window_open_s for tick in ticks if tick.window_open_s is not None]
    all_open = len(opened) == len(ticks)
    return Tick(
        at_s=max(tick.at_s for tick in ticks),
        window_open_s=max(opened) if all_open else None,
        sent=sum(tick.sent for tick in ticks),
        succeeded=sum(tick.succeeded for tick in ticks),
        failed=sum(tick.failed for tick in ticks),
        running=sum(tick.running for tick in ticks),
        window_tokens=sum(tick.window_tokens for tick in ticks) if all_open else 0.0,
        window_s=min(tick.window_s for tick in ticks),
        kv_usage=max((tick.kv_usage for tick in ticks if tick.kv_usage is not None), default=None),
    )


def merge(loads: Sequence[LoadResult], source: RequestSource, plan: LoadPlan) -> LoadResult:
    """One result of each client's, all on one clock. Counters are those of the first client, which alone asks for them.

    The window is the common one; of a load that ended inside it, until the first client ended.
    """
    records = tuple(sorted((record for load in loads for record in load.records), key=lambda record: record.sent_s))
    status = min((load.status for load in loads), key=_WORST_FIRST.index)
    detail = next(load.detail for load in loads if load.status is status)
    flags = dict.fromkeys(flag for load in loads for flag in load.flags)
    window = _common([load.window for load in loads])
    if NO_STEADY_WINDOW in flags and status in ENDED_WELL:
        window = LoadWindow(records[0].sent_s, max(record.ended_s for record in records)) if records else window
        detail = f"{len(records)} requests are too few for a window; the figures are of the whole run"
    closes_s = None if window is None else window.opened_s + plan.window_s * 2**window.doublings
    return LoadResult(
        records=records,
        window=window,
        status=status,
        detail=detail,
        samples=loads[0].samples,
        concurrency=plan.concurrency,
        rate=plan.rate,
        not_sent=0 if status in ENDED_WELL else max(0, planned_requests(plan, source, closes_s) - len(records)),
        client=_together([load.client for load in loads]),
        flags=(*flags, f"{CLIENT_PROCESSES}{len(loads)}"),
    )


def _common(windows: Sequence[LoadWindow | None]) -> LoadWindow | None:
    known = [window for window in windows if window is not None]
    if len(known) < len(windows):
        return None
    opened, closed = max(window.opened_s for window in known), min(window.closed_s for window in known)
    return LoadWindow(opened, closed, max(window.doublings for window in known)) if closed > opened else None


def _together(health: Sequence[ClientHealth]) -> ClientHealth:
    def total(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    shares = [client.cpu_share for client in health if client.cpu_share is not None]
    return ClientHealth(
        max_lag_s=max(client.max_lag_s for client in health),
        cpu_share=max(shares, default=None),
        requested_rate=total([client.requested_rate for client in health]),
        achieved_rate=total([client.achieved_rate for client in health]),
        limited=any(client.limited for client in health),
    )


class _Uncounted(HttpEngine):
    """Asks for no counters: one client's are enough, and each question costs the server."""

    async def counters(self, *, origin_s: float) -> CounterSample:
        return CounterSample(at_s=self.now() - origin_s)


def _client(pipe: Connection, target: Sequence[Any], share: Share, plan: LoadPlan, owned: bool) -> None:
    """The life of one client process."""
    with contextlib.suppress(EOFError, ConnectionError, asyncio.CancelledError):  # the parent gave up
        try:
            pipe.send(asyncio.run(_led(pipe, Target(*target), share, plan, owned)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent raises it
            pipe.send(error)


async def _led(pipe: Connection, target: Target, share: Share, plan: LoadPlan, owned: bool) -> LoadResult:
    window = LedWindow(plan, pipe.send)
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    assert me is not None

    def hear() -> None:
        try:
            while pipe.poll():
                window.heard(pipe.recv())
        except (EOFError, ConnectionError):
            loop.remove_reader(pipe.fileno())
            me.cancel()

    def on_tick(tick: Tick) -> bool:
        pipe.send(tick)
        return not window.stopped

    loop.add_reader(pipe.fileno(), hear)
    gc.collect()
    gc.freeze()  # a full collection would stop all streams for tens of milliseconds
    kind = HttpEngine if share.client == 0 else _Uncounted
    async with kind(target, total_timeout_s=plan.total_timeout_s, owned=owned) as engine:
        return await drive(engine, share, plan, on_tick, window)
