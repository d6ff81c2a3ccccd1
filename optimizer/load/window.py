"""When a load's window opens and closes, and what its end says. Standard library only: travels into trial processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vopt.objectives.records import CAPPED, CounterSample, LoadStatus, LoadWindow, RequestRecord
from vopt.objectives.steadiness import kv_levelled, overloaded, rates_agree, sub_window_edges, tokens_between
from vopt.optimizer.load.ledger import Ledger
from vopt.optimizer.load.plan import Arrivals, LoadPlan

KV_WAIT_SHARE = 0.5
"""Most of a window's length that its opening waits for the KV plateau: a cache that never levels is the workload's nature."""


KV_NOT_LEVELLED = "kv_not_levelled"
NO_STEADY_WINDOW = "no_steady_window"


@dataclass(frozen=True, slots=True)
class Seen:
    """What decides about a window at its end: requests that ended in it, the tokens of each of its ten parts, and, in an
    open loop, the records."""

    ended: int
    tokens: tuple[float, ...]
    records: tuple[RequestRecord, ...]


class WindowWatch:
    """The measured part of one load. Opens once, closes once; in between its length may double.

    Closed loop: opens when ``warmup_factor`` x concurrency requests have ended and KV usage has levelled. Open loop: opens
    after ``warmup_s``. When sending ends first (a cap, or a recording that is over), the window closes there.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._closed_loop = plan.arrivals is Arrivals.CLOSED
        self._length_s = plan.window_s
        self._doublings = 0
        self._ready_s: float | None = None
        self._closed: LoadWindow | None = None
        self._status = LoadStatus.COMPLETE
        self._detail = ""
        self.flags: list[str] = []
        self.opened_s: float | None = None
        self.exhausted_s: float | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called when something outside of the load's own doing may have changed what is due."""

    async def begin(self, now: Callable[[], float]) -> float:
        """Awaited when all is ready to send: the load's zero, on the engine's clock."""
        return now()

    @property
    def wakes_s(self) -> float:
        """When the load should look at its window next, whatever happens until then."""
        return self.closes_s

    def may_end(self) -> bool:
        """Whether a settled load, of which nothing in flight is needed any more, ends now."""
        return True

    @property
    def closes_s(self) -> float:
        """When the open window closes by itself; infinite before it opens and after it closed."""
        return math.inf if self.opened_s is None or self._closed is not None else self.opened_s + self._length_s

    @property
    def closed_s(self) -> float:
        return math.inf if self._closed is None else self._closed.closed_s

    @property
    def settled(self) -> bool:
        """Nothing more to measure: it closed, or sending ended before it could open."""
        return self._closed is not None or (self.opened_s is None and self.exhausted_s is not None)

    @property
    def is_overloaded(self) -> bool:
        return self._status is LoadStatus.OVERLOADED

    def exhaust(self, now_s: float) -> None:
        """Sending ended by itself at ``now_s``."""
        if self.exhausted_s is None:
            self.exhausted_s = now_s

    def may_open(self, ended: int, now_s: float, samples: Sequence[CounterSample]) -> bool:
        """Whether the warm-up is over: ``ended`` requests have succeeded or failed so far."""
        if self.opened_s is not None or self.exhausted_s is not None:
            return False
        if not self._closed_loop:
            return now_s >= self._plan.warmup_s
        if ended < self._plan.warmup_factor * (self._plan.concurrency or 0):
            return False
        if self._ready_s is None:
            self._ready_s = now_s
        return self.waited_for_kv(now_s) or kv_levelled(samples)

    def waited_for_kv(self, now_s: float) -> bool:
        """Whether the opening has waited for the KV plateau for as long as it may."""
        return self._ready_s is not None and now_s - self._ready_s >= KV_WAIT_SHARE * self._plan.window_s

    def open(self, now_s: float) -> None:
        self.opened_s = self.opening_s(now_s)
        if self.waited_for_kv(now_s):
            self.flags.append(KV_NOT_LEVELLED)

    def opening_s(self, now_s: float) -> float:
        """Where a window begins that is found open at ``now_s``. In an open loop at the warm-up's end, not at the look that
        noticed it: the same requests must be due in the window of every start."""
        return now_s if self._closed_loop else min(now_s, self._plan.warmup_s)

    def due(self, now_s: float) -> bool:
        """Whether the open window has reached its end."""
        if self.opened_s is None or self._closed is not None:
            return False
        return now_s >= self.closes_s or self.exhausted_s is not None

    def close(self, records: Sequence[RequestRecord], *, latest_s: float) -> None:
        """Judge the window by ``records`` (those in flight as they stand), then close it or double its length.

        Doubles when it may and when twice the length still ends before ``latest_s``.
        """
        self.settle(self.seen(records), latest_s=latest_s)

    @property
    def due_window(self) -> LoadWindow:
        """The open window as it would be closed now; cut where sending ended."""
        assert self.opened_s is not None  # due() said so
        end_s = self.opened_s + self._length_s
        return LoadWindow(self.opened_s, end_s if self.exhausted_s is None else min(end_s, self.exhausted_s), self._doublings)

    def seen(self, records: Sequence[RequestRecord]) -> Seen:
        window = self.due_window
        ended = sum(1 for record in records if not record.censored and window.opened_s <= record.ended_s <= window.closed_s)
        if not self._closed_loop:
            return Seen(ended, (), tuple(records))
        if window.length_s <= 0:
            return Seen(ended, (), ())
        return Seen(ended, tuple(tokens_between(records, sub_window_edges(window.opened_s, window.closed_s))), ())

    def settle(self, seen: Seen, *, latest_s: float) -> None:
        """``close`` by what was seen; that of several clients may be put together."""
        window = self.due_window
        assert self.opened_s is not None  # due() said so
        capped = window.closed_s < self.opened_s + self._length_s
        steady, detail = self._judge(seen, window)
        few = seen.ended < self._plan.min_requests
        again = (few or not steady) and not capped
        if again and self._doublings < self._plan.max_doublings and self.opened_s + 2 * self._length_s <= latest_s:
            self._doublings += 1
            self._length_s *= 2
            self._status = LoadStatus.COMPLETE  # a busy spell looks like the beginning of an overload: the longer window tells
            return
        self._closed, self._detail = window, detail
        if not steady and not self.is_overloaded:
            self._status = LoadStatus.UNSTEADY
        if few:
            self.flags.append("few_requests")
        if capped:
            self.flags.append(CAPPED)

    def _judge(self, seen: Seen, window: LoadWindow) -> tuple[bool, str]:
        if window.length_s <= 0:
            return False, "sending ended as the window opened"
        if self._closed_loop:
            return rates_agree(seen.tokens)
        too_much, detail = overloaded(seen.records, window)
        if too_much:
            self._status = LoadStatus.OVERLOADED
        return not too_much, detail

    @property
    def outcome(self) -> tuple[LoadStatus, str]:
        """What the closed window says."""
        return self._status, self._detail

    def verdict(self, ledger: Ledger) -> tuple[LoadStatus, str]:
        """How a settled load ended, in words. Without a window the whole run stands in for it, marked unsteady."""
        if self._closed is not None:
            return self._status, self._detail
        began = (record.sent_s if self._closed_loop else record.scheduled_s for record in ledger.records)
        first = min(began, default=0.0)
        last = max((record.ended_s for record in ledger.records), default=first)
        self._closed = LoadWindow(first, last)
        self.flags.append(NO_STEADY_WINDOW)
        return LoadStatus.UNSTEADY, f"{ledger.sent} requests are too few for a window; the figures are of the whole run"

    def result(self, now_s: float) -> LoadWindow | None:
        """The window, cut at ``now_s`` when the load ended inside it; ``None`` when it never opened."""
        if self._closed is not None or self.opened_s is None:
            return self._closed
        return LoadWindow(self.opened_s, max(self.opened_s, now_s), self._doublings)
