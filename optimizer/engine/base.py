"""What an engine is: the protocol that the load driver speaks, and the session that a search holds.

Standard library only: this module travels into trial processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from vopt.objectives.records import CounterSample, LoadResult, RequestRecord
from vopt.optimizer.load.plan import LoadPlan, Request, Tick
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.trial import Phase, Started


@runtime_checkable
class Engine(Protocol):
    """One engine inside the event loop that loads it. It stamps token times and owns the clock.

    ``run`` never raises for what a request or the engine does wrong: that is in the record's ``failure``. Once the engine
    is dead, ``dead`` says why, and every ``run`` returns at once with ``ENGINE_DIED``. Cancelling ``run`` aborts the
    request in the engine; the driver then makes the censored record itself from ``partial(index)``.
    """

    @property
    def dead(self) -> str | None: ...

    def now(self) -> float:
        """Seconds on the engine's clock (monotonic; virtual for a simulation)."""
        ...

    async def run(self, request: Request, *, origin_s: float, scheduled_s: float, idle_timeout_s: float) -> RequestRecord:
        """Send one request and wait for its end. All times of the record are ``now() - origin_s``."""
        ...

    def partial(self, index: int) -> tuple[float, tuple[float, ...], tuple[int, ...]] | None:
        """(sent_s, chunk times, chunk tokens) so far of a request in flight; ``None`` when unknown.

        Seconds since the ``origin_s`` that ``run`` got, like the times of its record.
        """
        ...

    async def counters(self, *, origin_s: float) -> CounterSample:
        """The engine's own counters now; cheap enough for once a second."""
        ...


OnTick = Callable[[Tick], bool]
"""Sees progress once a second; returning ``False`` ends the load early (status ``stopped_early``)."""

OnPhase = Callable[[Phase, str], None]
"""Told when a phase begins, with words for a person."""


class Session(Protocol):
    """One engine from start to stop, as the search sees it. Used once, from one thread.

    ``start`` and ``load`` raise ``EngineFailure``. ``close`` is idempotent, never raises, and returns only when every
    process of the trial is gone (or is named in its answer) and the GPU's memory is back.
    """

    def start(self, on_phase: OnPhase) -> Started: ...

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult: ...

    def close(self) -> tuple[str, ...]:
        """Stop the engine; the names of whatever could not be cleaned up (empty: clean)."""
        ...
