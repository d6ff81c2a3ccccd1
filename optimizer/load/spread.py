"""One load from several client processes, for rates that one event loop cannot carry.

Visits are dealt out like cards (visit *v* belongs to client ``v % n``), so that the requests are the same ones as from one
client. Each client runs its share of the plan on its own; the results are put on one clock (``CLOCK_MONOTONIC`` is the same for
all processes of a host) and merged. Poisson arrivals at a share of the rate add up to Poisson arrivals at the whole rate.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from vopt.objectives.records import ClientHealth, LoadResult, LoadStatus, LoadWindow, RequestRecord
from vopt.optimizer.engine.base import OnTick
from vopt.optimizer.load.client import HttpEngine
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Request, Tick
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.target import Target

STARTUP_S = 120.0
GRACE_S = 30.0
MOST_CLIENTS = 8
AGAIN_NUMBERS = 500_000
_WORST_FIRST = (
    LoadStatus.ENGINE_DIED,
    LoadStatus.REPEATED_ERRORS,
    LoadStatus.DEADLINE,
    LoadStatus.STOPPED_EARLY,
    LoadStatus.OVERLOADED,
    LoadStatus.UNSTEADY,
    LoadStatus.COMPLETE,
)


@dataclass(frozen=True, slots=True)
class Share(RequestSource):
    """The visits of one client of ``of``."""

    client: int = 0
    of: int = 1

    def visit(self, number: int) -> range:
        return RequestSource.visit(self, number * self.of + self.client)


def share_of(source: RequestSource, plan: LoadPlan, client: int, of: int) -> tuple[Share, LoadPlan]:
    """What client number ``client`` of ``of`` sends, and how."""
    values = {entry.name: getattr(source, entry.name) for entry in fields(source)}
    if plan.arrivals is Arrivals.REPLAY:
        values["scheduled_s"] = tuple(sorted(source.scheduled_s)[client::of])
    share = Share(**values, client=client, of=of)

    def dealt(total: int) -> int:
        return total // of + (client < total % of)

    return share, replace(
        plan,
        concurrency=None if plan.concurrency is None else dealt(plan.concurrency),
        rate=None if plan.rate is None else plan.rate / of,
        max_requests=None if plan.max_requests is None else max(1, dealt(plan.max_requests)),
        min_requests=max(1, dealt(plan.min_requests)),
        seed=plan.seed * of + client,
    )


def clients_for(health: ClientHealth, cpus: int | None = None) -> int:
    """How many processes to try next after a load by one: as many as there are cores but one, if the client was the limit."""
    available = len(os.sched_getaffinity(0)) if cpus is None else cpus
    return max(1, min(MOST_CLIENTS, available - 1)) if health.limited else 1


@dataclass(slots=True)
class Clients:
    """How many processes load a server: ``n``, or as many as turn out to be needed (``None``), remembered from load to load."""

    n: int | None = None

    def load(
        self,
        single: Callable[[RequestSource], LoadResult],
        several: Callable[[RequestSource, int], LoadResult],
        source: RequestSource,
    ) -> LoadResult:
        """One load. If one process turns out to be the limit itself, its result is dropped and the load repeated by several,
        with prompts of its own."""
        if self.n is not None and self.n > 1:
            return several(source, self.n)
        result = single(source)
        if self.n is None and (more := min(clients_for(result.client), result.concurrency or MOST_CLIENTS)) > 1:
            self.n = more
            return several(replace(source, first_number=source.first_number + AGAIN_NUMBERS), more)
        return result


def spread(
    target: Target, source: RequestSource, plan: LoadPlan, on_tick: OnTick | None, clients: int, *, owned: bool = False
) -> LoadResult:
    """``drive`` from ``clients`` processes; ``owned`` as for ``HttpEngine``.

    Raises ``ValueError`` for fewer users than clients, ``ChildProcessError`` when a client is lost.
    """
    if plan.concurrency is not None and plan.concurrency < clients:
        raise ValueError(f"{clients} client processes need a concurrency of {clients} or more, not {plan.concurrency}")
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for client in range(clients):
            ours, theirs = context.Pipe()
            share, part = share_of(source, plan, client, clients)
            process = context.Process(target=_client, args=(theirs, astuple(target), share, part, owned), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            _expect(pipe, STARTUP_S)
        gap_s = 1 / plan.rate if plan.arrivals is Arrivals.CONSTANT and plan.rate else 0.0
        for client, pipe in enumerate(pipes):
            pipe.send(client * gap_s)  # even arrivals stay even: each client begins one gap after the one before
        return merge(_collect(pipes, plan, on_tick))
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()


def _expect(pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise ChildProcessError(f"a client process said nothing for {timeout_s:g} s")
    try:
        return pipe.recv()
    except EOFError as error:
        raise ChildProcessError("a client process ended before its load did") from error


def _collect(pipes: Sequence[Connection], plan: LoadPlan, on_tick: OnTick | None) -> list[tuple[float, LoadResult]]:
    """Pass ticks on, pass a stop back, and gather (origin, result) of each client."""
    ticks: dict[Connection, Tick] = {}
    results: dict[Connection, tuple[float, LoadResult]] = {}
    while len(results) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in results]
        ready = wait(waiting, plan.deadline_s + GRACE_S)
        if not ready:
            raise ChildProcessError("a client process outlived the load's deadline")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            message = _expect(pipe, GRACE_S)
            if isinstance(message, Tick):
                ticks[pipe] = message
            elif isinstance(message, BaseException):
                raise message
            else:
                results[pipe] = message
        if on_tick is not None and len(ticks) == len(pipes) and not on_tick(_sum(list(ticks.values()))):
            on_tick = None
            for pipe in waiting:
                if pipe not in results:
                    pipe.send("stop")
    return [results[pipe] for pipe in pipes]


def _sum(ticks: Sequence[Tick]) -> Tick:
    opened = [tick.window_open_s for tick in ticks]
    return Tick(
        at_s=max(tick.at_s for tick in ticks),
        window_open_s=None if None in opened else max(at for at in opened if at is not None),
        sent=sum(tick.sent for tick in ticks),
        succeeded=sum(tick.succeeded for tick in ticks),
        failed=sum(tick.failed for tick in ticks),
        running=sum(tick.running for tick in ticks),
        window_tokens=sum(tick.window_tokens for tick in ticks),
        window_s=min(tick.window_s for tick in ticks),
        kv_usage=max((tick.kv_usage for tick in ticks if tick.kv_usage is not None), default=None),
    )


def merge(parts: Sequence[tuple[float, LoadResult]]) -> LoadResult:
    """One result of each client's (origin on the common clock, result); its window is when all their windows were open."""
    began = min(origin for origin, _ in parts)
    records: list[RequestRecord] = []
    windows: list[LoadWindow | None] = []
    for origin, part in parts:
        shift = origin - began
        records += [_shifted(record, shift) for record in part.records]
        windows.append(None if part.window is None else _moved(part.window, shift))
    loads = [load for _, load in parts]
    status = min((load.status for load in loads), key=_WORST_FIRST.index)
    first = parts[0][0] - began
    rates = [load.rate for load in loads if load.rate is not None]
    users = [load.concurrency for load in loads if load.concurrency is not None]
    return LoadResult(
        records=tuple(sorted(records, key=lambda record: record.sent_s)),
        window=_common(windows),
        status=status,
        detail=next(load.detail for load in loads if load.status is status),
        samples=tuple(replace(sample, at_s=sample.at_s + first) for sample in loads[0].samples),
        concurrency=sum(users) if users else None,
        rate=sum(rates) if rates else None,
        not_sent=sum(load.not_sent for load in loads),
        client=_together([load.client for load in loads]),
        flags=(*dict.fromkeys(flag for load in loads for flag in load.flags), f"client_processes_{len(loads)}"),
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


def _moved(window: LoadWindow, shift_s: float) -> LoadWindow:
    return replace(window, opened_s=window.opened_s + shift_s, closed_s=window.closed_s + shift_s)


def _shifted(record: RequestRecord, shift_s: float) -> RequestRecord:
    if not shift_s:
        return record
    return replace(
        record,
        scheduled_s=record.scheduled_s + shift_s,
        sent_s=record.sent_s + shift_s,
        ended_s=record.ended_s + shift_s,
        chunk_times_s=tuple([at + shift_s for at in record.chunk_times_s]),
        first_content_s=None if record.first_content_s is None else record.first_content_s + shift_s,
    )


class _Placed(HttpEngine):
    """Remembers where on the common clock the load's zero is."""

    origin_s: float | None = None

    async def run(self, request: Request, *, origin_s: float, scheduled_s: float, idle_timeout_s: float) -> RequestRecord:
        self.origin_s = origin_s
        return await super().run(request, origin_s=origin_s, scheduled_s=scheduled_s, idle_timeout_s=idle_timeout_s)


def _client(pipe: Connection, target: Sequence[Any], share: Share, plan: LoadPlan, owned: bool) -> None:
    """The life of one client process."""
    pipe.send("ready")
    delay_s = pipe.recv()
    stopped = False

    def on_tick(tick: Tick) -> bool:
        nonlocal stopped
        stopped = stopped or pipe.poll()
        pipe.send(tick)
        return not stopped

    async def load() -> tuple[float, LoadResult]:
        await asyncio.sleep(delay_s)
        async with _Placed(Target(*target), total_timeout_s=plan.total_timeout_s, owned=owned) as engine:
            result = await drive(engine, share, plan, on_tick)
            return engine.now() if engine.origin_s is None else engine.origin_s, result

    try:
        pipe.send(asyncio.run(load()))
    except (EOFError, BrokenPipeError):
        pass  # the parent gave up
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent raises it
        pipe.send(error)
