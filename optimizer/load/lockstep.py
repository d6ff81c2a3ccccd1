"""One decision for a load by several clients: what they tell, what they are told, and who decides.

A client (``LedWindow``) says when its own warm-up is over, what it saw of a window, that its share is sent, and that it needs
nothing more; it opens, closes and ends only when told to. The ``Conductor`` hears all of them and decides by the rules of
``WindowWatch`` on what they saw together. All times are seconds since the load's common zero. Nothing here waits or sends:
messages go through ``tell`` and ``heard``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vopt.objectives.records import CounterSample, LoadStatus, LoadWindow, RequestRecord
from vopt.optimizer.load.plan import LoadPlan
from vopt.optimizer.load.window import KV_NOT_LEVELLED, Seen, WindowWatch

LEAD_S = 0.1
"""Between telling clients to open and the common opening: longer than a pipe and a busy event loop need."""


# What a client tells


@dataclass(frozen=True, slots=True)
class Prepared:
    """Nothing is sent yet, and everything is ready for it."""


@dataclass(frozen=True, slots=True)
class MayOpen:
    """This client's share of the warm-up is over; ``waited``: though its KV usage has not levelled."""

    waited: bool = False


@dataclass(frozen=True, slots=True)
class Exhausted:
    """This client's share is sent."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing that this client has in flight is needed any more."""


Told = Prepared | MayOpen | Exhausted | Seen | Done


# What a client is told


@dataclass(frozen=True, slots=True)
class Begin:
    """The common zero, on the clock that all processes of a host share."""

    origin_s: float


@dataclass(frozen=True, slots=True)
class Open:
    at_s: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Sending has ended somewhere: the window ends there (``None``: it never opens)."""

    at_s: float | None


@dataclass(frozen=True, slots=True)
class Double:
    """The window goes on for as long again."""


@dataclass(frozen=True, slots=True)
class Close:
    """The window is closed, and this came out."""

    window: LoadWindow
    status: LoadStatus
    detail: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class End:
    """No client needs anything more."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody wants the load to stop, or one client has ended."""


Order = Begin | Open | Cut | Double | Close | End | Stop


class LedWindow(WindowWatch):
    """The window of one client: its own until something is to be decided."""

    def __init__(self, plan: LoadPlan, tell: Callable[[Told], None]) -> None:
        super().__init__(plan)
        self._tell = tell
        self._began: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._opens_s = math.inf
        self._cut_s: float | None = None
        self._never = False
        self._waits = False
        self._said: set[type[object]] = set()
        self._may_end = False
        self.stopped = False

    def heard(self, order: Order) -> None:
        match order:
            case Begin(origin_s):
                if not self._began.done():
                    self._began.set_result(origin_s)
            case Open(at_s):
                self._opens_s = at_s
            case Cut(at_s):
                self._never = at_s is None
                self._cut_s = at_s
            case Double():
                self._doublings += 1
                self._length_s *= 2
                self._waits = False
            case Close(window, status, detail, flags):
                self._closed, self._status, self._detail = window, status, detail
                self.flags = list(flags)
            case End():
                self._may_end = True
            case Stop():
                self.stopped = True
        self.changed()

    def _say(self, told: Told) -> None:
        """Once for each kind of message."""
        if type(told) not in self._said:
            self._said.add(type(told))
            self._tell(told)

    async def begin(self, now: Callable[[], float]) -> float:
        self._say(Prepared())
        origin_s = await self._began
        await asyncio.sleep(max(0.0, origin_s - now()))
        return origin_s

    @property
    def wakes_s(self) -> float:
        return self._opens_s if self.opened_s is None else self.closes_s

    @property
    def closes_s(self) -> float:
        return math.inf if self._waits else super().closes_s

    @property
    def settled(self) -> bool:
        """After a cut each client still sends the rest of its share."""
        if self._cut_s is not None and self.exhausted_s is None:
            return False
        return self._closed is not None or (self._never and self.exhausted_s is not None)

    @property
    def due_window(self) -> LoadWindow:
        whole = replace(super().due_window, closed_s=(self.opened_s or 0.0) + self._length_s)
        return whole if self._cut_s is None else replace(whole, closed_s=min(whole.closed_s, self._cut_s))

    def exhaust(self, now_s: float) -> None:
        super().exhaust(now_s)
        self._say(Exhausted(now_s))

    def may_open(self, ended: int, now_s: float, samples: Sequence[CounterSample]) -> bool:
        if self.opened_s is not None or self._never:
            return False
        if super().may_open(ended, now_s, samples):
            self._say(MayOpen(self.waited_for_kv(now_s)))
        return now_s >= self._opens_s

    def open(self, now_s: float) -> None:
        self.opened_s = self._opens_s

    def due(self, now_s: float) -> bool:
        if self.opened_s is None or self._closed is not None or self._waits:
            return False
        return now_s >= self.closes_s or self._cut_s is not None

    def close(self, records: Sequence[RequestRecord], *, latest_s: float) -> None:
        seen = self.seen(records)
        self._waits = True
        self._tell(replace(seen, records=tuple(_thin(record) for record in seen.records)))

    def may_end(self) -> bool:
        self._say(Done())
        return self._may_end


def _thin(record: RequestRecord) -> RequestRecord:
    """What a judgement of an open loop needs of a record: thousands of chunk times would hold up the client's sending."""
    return replace(record, chunk_times_s=record.chunk_times_s[:1], chunk_tokens=())


class Conductor:
    """Decides for ``clients`` of them; ``plan`` is that of the whole load."""

    def __init__(self, plan: LoadPlan, clients: int) -> None:
        self._clients = clients
        self._watch = WindowWatch(plan)
        self._latest_s = plan.limit_s
        self._ready: set[int] = set()
        self._done: set[int] = set()
        self._seen: dict[int, Seen] = {}
        self._never = False

    def heard(self, client: int, told: Told, now_s: float) -> tuple[Order, ...]:
        """What to tell all clients now that one has told this."""
        match told:
            case MayOpen(waited):
                self._ready.add(client)
                if waited and KV_NOT_LEVELLED not in self._watch.flags:
                    self._watch.flags.append(KV_NOT_LEVELLED)
                if len(self._ready) == self._clients and self._watch.opened_s is None and not self._never:
                    self._watch.opened_s = self._watch.opening_s(now_s + LEAD_S)
                    return (Open(self._watch.opened_s),)
            case Exhausted(at_s):
                return self._cut(at_s)
            case Seen():
                self._seen[client] = told
                if len(self._seen) == self._clients:
                    return (self._decide(),)
            case Done():
                self._done.add(client)
                if len(self._done) == self._clients:
                    return (End(),)
            case Prepared():
                pass
        return ()

    def _cut(self, at_s: float) -> tuple[Order, ...]:
        """A client has nothing left to send: from now on the load is not full, so the window can only have been before."""
        watch = self._watch
        if watch.exhausted_s is not None or watch.settled:
            return ()
        if self._seen:
            self._latest_s = -math.inf  # its end has come already and is being judged; it cannot go on from there
            return ()
        if watch.opened_s is None:
            watch.exhaust(at_s)
            self._never = True
            return (Cut(None),)
        watch.exhaust(max(at_s, watch.opened_s))
        return (Cut(watch.exhausted_s),)

    def _decide(self) -> Order:
        parts = list(self._seen.values())
        self._seen = {}
        together = Seen(
            sum(part.ended for part in parts),
            tuple(map(sum, zip(*(part.tokens for part in parts), strict=True))),
            tuple(record for part in parts for record in part.records),
        )
        watch = self._watch
        watch.settle(together, latest_s=self._latest_s)
        if not watch.settled:
            return Double()
        status, detail = watch.outcome
        window = watch.result(watch.closed_s)
        assert window is not None
        return Close(window, status, detail, tuple(watch.flags))
