"""The client watches itself: when it, not the engine, bounds a load, the result says so.

Standard library only: this module travels into trial processes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from vopt.objectives.records import ClientHealth
from vopt.optimizer.load.plan import STOOD_STILL_S, StoodStill

PROBE_S = 0.1
LATE_S = 0.05
"""A probe or a send later than this is late: a user would see it in a time to first token."""
LATE_SHARE = 0.05
BUSY_SHARE = 0.95
"""CPU share of the client's thread from which on its event loop is taken to be the bottleneck."""


@dataclass(slots=True)
class HealthWatch:
    """Measures event-loop lag by a periodic timer, lateness of scheduled sends, and the thread's CPU time.

    On a virtual-time loop CPU time says nothing about the load, so its share stays ``None`` and results reproducible.
    """

    _loop: asyncio.AbstractEventLoop
    _due_s: float = 0.0
    _began_s: float = 0.0
    _began_cpu_s: float = 0.0
    _timer: asyncio.TimerHandle | None = None
    _probes: int = 0
    _late_probes: int = 0
    _max_lag_s: float = 0.0
    _sends: int = 0
    _late_sends: int = 0
    _last_scheduled_s: float = 0.0
    _last_sent_s: float = 0.0

    def start(self) -> None:
        self._began_s = self._loop.time()
        self._began_cpu_s = time.thread_time()
        self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def sent(self, scheduled_s: float, sent_s: float) -> None:
        """A request of an open loop went out at ``sent_s`` instead of ``scheduled_s``."""
        self._sends += 1
        self._late_sends += sent_s - scheduled_s > LATE_S
        self._last_scheduled_s, self._last_sent_s = scheduled_s, sent_s

    def check(self) -> None:
        """Raises ``StoodStill`` when the loop's process was stopped for longer than any work takes."""
        late_s = max(self._max_lag_s, self._loop.time() - self._due_s if self._due_s else 0.0)
        if late_s > STOOD_STILL_S:
            raise StoodStill(f"the load's own process stood still for {late_s:.0f} s")

    def report(self) -> ClientHealth:
        elapsed_s = self._loop.time() - self._began_s
        virtual = getattr(self._loop, "virtual", False)
        cpu = None if virtual or elapsed_s <= 0 else (time.thread_time() - self._began_cpu_s) / elapsed_s
        rates = self._sends > 1 and self._last_scheduled_s > 0 and self._last_sent_s > 0
        late = self._late_probes > LATE_SHARE * max(self._probes, 20) or self._late_sends > LATE_SHARE * max(self._sends, 20)
        return ClientHealth(
            max_lag_s=self._max_lag_s,
            cpu_share=cpu,
            requested_rate=self._sends / self._last_scheduled_s if rates else None,
            achieved_rate=self._sends / self._last_sent_s if rates else None,
            limited=late or (cpu is not None and cpu > BUSY_SHARE),
        )

    def _arm(self) -> None:
        self._due_s = self._loop.time() + PROBE_S
        self._timer = self._loop.call_at(self._due_s, self._probe)

    def _probe(self) -> None:
        lag_s = max(0.0, self._loop.time() - self._due_s)
        self._probes += 1
        self._late_probes += lag_s > LATE_S
        self._max_lag_s = max(self._max_lag_s, lag_s)
        self._arm()
