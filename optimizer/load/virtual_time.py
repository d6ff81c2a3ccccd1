"""An asyncio event loop whose clock jumps to the next timer, so that an hour of simulated load takes seconds.

Deterministic: nothing but timers and coroutines decides the order of events. There is no selector and no self-pipe, so
sockets, subprocesses and threads (``run_in_executor``, ``call_soon_threadsafe`` from another thread) cannot be awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeftToAwait(RuntimeError):
    """Every coroutine waits for something that no timer will bring: on a real loop this would hang for ever."""


class _NoSockets:
    """Stands where an event loop keeps its selector: waiting means moving the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise NothingLeftToAwait("the virtual-time loop has no timer left while its coroutine still waits")
        if timeout > 0:
            self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """``loop.time()`` starts at 0 and moves only when every coroutine waits for a timer."""

    virtual = True

    def __init__(self) -> None:
        super().__init__()
        # BaseEventLoop runs timers that lie within one clock resolution of now: that absorbs the rounding of now + wait.
        self._clock = _NoSockets()
        self._selector = self._clock

    def time(self) -> float:
        return self._clock.now_s

    def _process_events(self, event_list: list[Any]) -> None:
        """No sockets, so no events."""

    def _write_to_self(self) -> None:
        """Nothing sleeps in a system call, so nothing needs waking (called after a signal)."""


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` to its end on a fresh virtual-time loop and return its result.

    Like ``asyncio.run``: left-over tasks are cancelled and async generators closed. Must not be called from a coroutine.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
