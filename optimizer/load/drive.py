"""Runs one load against any engine: closed loop at a concurrency, or open loop at scheduled times.

The window, its halves, and who is censored or stalled follow the throughput definition of ``vopt.objectives``. Works on a
real event loop and on a virtual-time one: it waits with ``loop.time()`` and stamps with ``engine.now()``, which must run at
the same speed. Standard library only: this module travels into trial processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

from vopt.objectives.records import CounterSample, LoadResult, LoadStatus, RequestFailure, RequestFailureKind, RequestRecord
from vopt.optimizer.engine.base import Engine, OnTick
from vopt.optimizer.load.arrivals import arrival_times, check_plan, planned_requests
from vopt.optimizer.load.health import HealthWatch
from vopt.optimizer.load.ledger import Flight, Ledger, progress_from, recounted
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Request, Tick
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.window import WindowWatch

ENDED_WELL = (LoadStatus.COMPLETE, LoadStatus.UNSTEADY, LoadStatus.OVERLOADED)
"""Windows are by time, so a load that came to its end has left nothing unsent."""
PREPARED = 1024
"""Requests of a closed loop that are made before its clock starts: cutting long prompts must not delay the first sends."""


async def drive(
    engine: Engine, source: RequestSource, plan: LoadPlan, on_tick: OnTick | None = None, window: WindowWatch | None = None
) -> LoadResult:
    """Load ``engine`` with ``source`` as ``plan`` says and return everything that was seen.

    Ends within ``plan.deadline_s`` whatever the engine does. Every request that was sent has exactly one record; of those
    planned but never sent there is the count, when the load did not come to its end. ``ValueError`` for a plan that cannot
    be meant; ``StoodStill`` when this process was stopped meanwhile; what ``engine.run`` raises is the engine's defect and
    comes out here. ``window``: another watch than the plan's own, for a load that is one of several.
    """
    load = _Load(engine, source, plan, on_tick, window or WindowWatch(plan))
    try:
        return await load.run()
    finally:
        load.abandon()


class _Load:
    """One load. ``ending`` is unset while it goes on; whoever sets it first decides how the load ended."""

    def __init__(
        self, engine: Engine, source: RequestSource, plan: LoadPlan, on_tick: OnTick | None, window: WindowWatch
    ) -> None:
        check_plan(plan, source)
        loop = asyncio.get_running_loop()
        self._engine, self._source, self._plan, self._on_tick = engine, source, plan, on_tick
        self._closed_loop = plan.arrivals is Arrivals.CLOSED
        self._ledger = Ledger()
        self._progress = progress_from(engine)
        self._window = window
        self._health = HealthWatch(loop)
        self._samples: list[CounterSample] = []
        self._visits: set[asyncio.Task[None]] = set()
        self._dispatcher: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        window.changed = self._changed.set
        self._ending: tuple[LoadStatus, str] | None = None
        self._flags: list[str] = []
        self._defect: BaseException | None = None
        self._next_visit = 0
        self._taken = 0
        self._limit_s = plan.limit_s
        ready = min(plan.concurrency or 0, PREPARED, plan.max_requests or PREPARED) if self._closed_loop else 0
        self._prepared = {index: source.request(index) for index in (source.visit(number)[0] for number in range(ready))}
        self._origin_s = 0.0

    async def run(self) -> LoadResult:
        self._origin_s = await self._window.begin(self._engine.now)
        self._health.start()
        if self._engine.dead is not None:
            self._end(LoadStatus.ENGINE_DIED, self._engine.dead)
        elif self._closed_loop:
            for _ in range(self._plan.concurrency or 0):
                self._begin_visit(None)
        else:
            self._dispatcher = asyncio.create_task(self._dispatch())
            self._dispatcher.add_done_callback(self._noticed)
        await self._watch()
        return await self._finish()

    def abandon(self) -> None:
        """Leave nothing running: after an end, a defect, or a cancelled ``drive``."""
        self._end(LoadStatus.STOPPED_EARLY, "abandoned")  # or each cancelled visit would make room for another
        self._health.stop()
        for task in (*self._visits, *([self._dispatcher] if self._dispatcher else [])):
            task.cancel()

    # Sending

    def _begin_visit(self, scheduled_s: float | None) -> None:
        """Start the next user, unless the load is over or the cap is reached."""
        if self._over() or self._defect is not None or not self._room():
            return
        visit = asyncio.create_task(self._visit(self._next_visit, scheduled_s))
        self._next_visit += 1
        self._visits.add(visit)
        visit.add_done_callback(self._visit_ended)

    async def _visit(self, number: int, scheduled_s: float | None) -> None:
        """One request, or the turns of a session: each sent a think time after the one before it ended."""
        for index in self._source.visit(number):
            request = self._prepared.pop(index, None) or self._source.request(index)
            if request.turn:
                scheduled_s = self._now() + request.think_s
                await asyncio.sleep(request.think_s)
            if self._over() or not self._room():
                return
            self._taken += 1
            began_s = self._now()
            record = await self._send(request, began_s if scheduled_s is None else scheduled_s)
            if record.failure is not None:
                if not self._over() and record.ended_s - began_s < self._plan.tick_s:
                    await asyncio.sleep(self._plan.tick_s)  # an engine that refuses at once must not be hammered
                return

    async def _send(self, request: Request, scheduled_s: float) -> RequestRecord:
        task = asyncio.current_task()
        assert task is not None  # only ever awaited by a visit's task
        self._ledger.send(Flight(request, scheduled_s, self._now(), task))
        if not self._closed_loop and not request.turn:
            self._health.sent(scheduled_s, self._now())
        record = await self._engine.run(
            request, origin_s=self._origin_s, scheduled_s=scheduled_s, idle_timeout_s=self._plan.idle_timeout_s
        )
        self._ledger.end(record)
        self._after(record)
        return record

    def _after(self, record: RequestRecord) -> None:
        """What one ended request may change: a dead engine, errors that repeat, a window that may open."""
        plan, ledger = self._plan, self._ledger
        if self._engine.dead is not None:
            self._end(LoadStatus.ENGINE_DIED, self._engine.dead)
            return
        many = plan.repeated_errors if not ledger.succeeded else max(10 * plan.repeated_errors, 2 * (plan.concurrency or 0))
        if record.failure is not None and ledger.equal_errors >= many:
            where = "at the start" if not ledger.succeeded else f"in a row, after {ledger.succeeded} successes"
            words = f"{ledger.equal_errors} equal errors {where}: {record.failure.kind}: {record.failure.message}"
            self._end(LoadStatus.REPEATED_ERRORS, words)
        elif self._window.may_open(ledger.ended, self._now(), self._samples):
            self._changed.set()

    def _visit_ended(self, visit: asyncio.Task[None]) -> None:
        self._visits.discard(visit)
        self._noticed(visit)
        if self._closed_loop:
            self._begin_visit(None)
        if self._window.settled:
            self._changed.set()

    def _noticed(self, task: asyncio.Task[None]) -> None:
        """An exception of a task of this load is raised by ``run``."""
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._defect = self._defect or defect
            self._changed.set()

    async def _dispatch(self) -> None:
        """Begin the visits of an open loop when they are due, whether or not earlier ones have ended."""
        for at_s in arrival_times(self._plan, self._source):
            await asyncio.sleep(max(0.0, at_s - self._now()))
            if self._ending is not None or not self._room():
                return
            self._begin_visit(at_s)
        self._exhaust()

    def _room(self) -> bool:
        """Whether one more request may be sent; the first time it may not, sending has ended."""
        if self._plan.max_requests is None or self._taken < self._plan.max_requests:
            return True
        self._exhaust()
        return False

    def _exhaust(self) -> None:
        self._window.exhaust(self._now())
        self._changed.set()

    # Watching

    async def _watch(self) -> None:
        """Ticks, and decides; wakes early when something changed."""
        due_s = self._plan.tick_s
        while self._ending is None and self._defect is None:
            await self._sleep_until(min(due_s, self._window.wakes_s, self._limit_s))
            self._health.check()
            if self._defect is not None:
                raise self._defect
            if self._now() >= due_s:
                await self._tick()
                due_s = max(due_s + self._plan.tick_s, self._now())
            if self._ending is None:
                self._decide()
        if self._engine.dead is None:
            self._health.check()
        if self._defect is not None:
            raise self._defect

    async def _sleep_until(self, at_s: float) -> None:
        if self._changed.is_set() or at_s <= self._now():
            await asyncio.sleep(0)
        else:
            with contextlib.suppress(TimeoutError):  # the usual case: nothing happened until the next tick
                async with asyncio.timeout(at_s - self._now()):
                    await self._changed.wait()
        self._changed.clear()

    async def _tick(self) -> None:
        try:
            async with asyncio.timeout(max(1.0, self._plan.tick_s)):
                self._samples.append(await self._engine.counters(origin_s=self._origin_s))
        except TimeoutError:
            pass  # a busy engine: the load goes on with one sample less, and a hung one is seen by its silence
        if self._engine.dead is not None:
            self._end(LoadStatus.ENGINE_DIED, self._engine.dead)
            return
        tokens = self._look_at_flights()
        if self._on_tick is None or self._ending is not None:
            return
        now_s, ledger, opened_s = self._now(), self._ledger, self._window.opened_s
        tick = Tick(
            at_s=now_s,
            window_open_s=opened_s,
            sent=ledger.sent,
            succeeded=ledger.succeeded,
            failed=ledger.failed,
            running=len(ledger.in_flight),
            window_tokens=ledger.window_tokens + tokens,
            window_s=0.0 if opened_s is None else now_s - opened_s,
            kv_usage=self._samples[-1].kv_usage if self._samples else None,
        )
        if not self._on_tick(tick):
            self._end(LoadStatus.STOPPED_EARLY, f"stopped after {now_s:.1f} s")

    def _look_at_flights(self) -> float:
        """Give up requests that are over a timeout, notice a silent engine; the tokens of the window still in flight."""
        plan, ledger, now_s, tokens = self._plan, self._ledger, self._now(), 0.0
        idle: list[Flight] = []
        overdue: list[Flight] = []
        waiting = len(ledger.in_flight)
        told = False
        opened_s = self._window.opened_s
        since_s = math.inf if opened_s is None else opened_s
        for flight in list(ledger.in_flight.values()):
            # No records here: this runs for every request in flight and every tick.
            seen = self._progress(flight.request.index, since_s)
            sent_s = last_s = flight.sent_s if seen is None else seen.sent_s
            if seen is not None and seen.last_s is not None:
                told, last_s = True, seen.last_s
                ledger.progress_s = max(ledger.progress_s, last_s)
                tokens += seen.tokens + (flight.request.prompt_tokens if seen.first_since else 0)
            if now_s - last_s > plan.idle_timeout_s + plan.tick_s:
                idle.append(flight)  # the engine should have given up first
            elif plan.total_timeout_s is not None and now_s - sent_s > plan.total_timeout_s:
                overdue.append(flight)
        words = f"no token for {plan.idle_timeout_s:g} s"
        ledger.give_up(self._engine, now_s, RequestFailure(RequestFailureKind.TIMEOUT_IDLE, words), idle)
        words = f"not finished after {plan.total_timeout_s} s"
        ledger.give_up(self._engine, now_s, RequestFailure(RequestFailureKind.TIMEOUT_TOTAL, words), overdue)
        silent_s = now_s - ledger.progress_s
        if waiting and silent_s > plan.idle_timeout_s + plan.tick_s and (told or idle or ledger.timed_out):
            self._flags.append("hung")
            self._end(LoadStatus.ENGINE_DIED, f"hung: {waiting} requests in flight and no token for {silent_s:.0f} s")
        return tokens

    def _decide(self) -> None:
        """Open the window, close it, let what it needs run out, or run out of time."""
        now_s, ledger, window = self._now(), self._ledger, self._window
        if window.may_open(ledger.ended, now_s, self._samples):
            window.open(now_s)
            ledger.window_opened_s = window.opened_s
        if window.due(now_s):
            window.close(ledger.standing(self._engine, now_s), latest_s=self._limit_s)
        if window.settled and not self._needed() and window.may_end():
            self._end(*window.verdict(ledger))
        elif now_s >= self._limit_s:
            if window.settled:
                self._flags.append("deadline_after_window")
                self._end(*window.verdict(ledger))
            else:
                self._end(LoadStatus.DEADLINE, f"the load's deadline of {self._plan.deadline_s:g} s came first")

    def _needed(self) -> bool:
        """Whether requests in flight still belong to the figures after the window closed.

        All of them when sending ended by itself; in an open loop those due in the window, for leaving out what takes longest
        would flatter the latencies: until they ended or stalled, or (where that is not known yet) a window or a silence long.
        """
        window = self._window
        if window.exhausted_s is not None:
            return bool(self._visits)
        tail_s = self._plan.stall_after_s or max(self._plan.window_s, self._plan.idle_timeout_s)
        if self._closed_loop or window.is_overloaded or self._now() > window.closed_s + tail_s:
            return False
        return any(flight.scheduled_s < window.closed_s for flight in self._ledger.in_flight.values())

    # Ending

    def _end(self, status: LoadStatus, detail: str) -> None:
        if self._ending is None:
            self._ending = (status, detail)
            self._changed.set()

    async def _finish(self) -> LoadResult:
        assert self._ending is not None  # _watch returns for no other reason
        (status, detail), failure = self._ending, None
        if self._dispatcher is not None:
            self._dispatcher.cancel()
        if status is LoadStatus.ENGINE_DIED:
            failure = RequestFailure(RequestFailureKind.ENGINE_DIED, detail)
            if self._visits and "hung" not in self._flags:  # a dead engine returns its own records at once
                await asyncio.wait(list(self._visits), timeout=min(1.0, 0.01 * self._plan.deadline_s))
        self._ledger.close(self._engine, now_s := self._now(), failure=failure, stall_after_s=self._plan.stall_after_s)
        for visit in (visits := list(self._visits)):
            visit.cancel()
        if visits and (await asyncio.wait(visits, timeout=self._plan.deadline_s - self._limit_s))[1]:
            self._flags.append("requests_not_aborted")
        if self._defect is not None:
            raise self._defect
        return LoadResult(
            records=tuple(recounted(self._engine, self._ledger.records)),
            window=self._window.result(now_s),
            status=status,
            detail=detail,
            samples=tuple(self._samples),
            concurrency=self._plan.concurrency,
            rate=self._plan.rate,
            not_sent=0 if status in ENDED_WELL else max(0, self._planned() - self._ledger.sent),
            client=self._health.report(),
            flags=(*self._flags, *self._window.flags),
        )

    def _planned(self) -> int:
        window = self._window
        return planned_requests(self._plan, self._source, None if window.opened_s is None else window.closes_s)

    def _over(self) -> bool:
        """Whether the load has an end; a method, because it changes while a coroutine waits."""
        return self._ending is not None

    def _now(self) -> float:
        """Seconds since the load began, on the engine's clock."""
        return self._engine.now() - self._origin_s
