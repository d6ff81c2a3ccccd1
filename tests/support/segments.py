"""Which shared memory the trials of a test made, and what is left of it; other engines may run beside the test."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from vopt.optimizer.engine.kin import Identity, alive, descendants

SHARED_MEMORY = "/dev/shm"


class SegmentWatch:
    """Notes who of the processes below this one holds what under /dev/shm, all the time; independent of what vopt notes.

    A process that was once below stays watched with everything below it: a supervisor outlives its search. Whatever none of
    these was seen to hold belongs to somebody else.
    """

    def __init__(self, every_s: float = 0.02) -> None:
        self._every_s = every_s
        self._kin: set[Identity] = set()
        self._names: set[str] = set()
        self._seen: dict[int, str] = {}  # by inode
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    @property
    def made(self) -> int:
        """How many segments were seen in the hands of this test's own."""
        return len(self._seen)

    def left(self, patience_s: float = 10.0) -> list[str]:
        """Own segments that are still there when ``patience_s`` is over: a killed search's supervisor takes a moment."""
        until = time.monotonic() + patience_s
        while (there := self._there()) and time.monotonic() < until:
            time.sleep(0.05)
        return there

    def _there(self) -> list[str]:
        found = []
        for inode, path in dict(self._seen).items():  # the thread may add to it
            with contextlib.suppress(OSError):
                if os.lstat(path).st_ino == inode:
                    found.append(f"{path} of {os.lstat(path).st_size / 1e6:.0f} MB")
        return sorted(found)

    def _watch(self) -> None:
        looked = 0.0
        while not self._over.wait(self._every_s):
            names = set(os.listdir(SHARED_MEMORY))
            if names - self._names or time.monotonic() > looked + 0.5:
                self._look()
                looked = time.monotonic()
            self._names = names

    def _look(self) -> None:
        below = {entry.identity for entry in descendants(os.getpid())}
        for who in self._kin:
            below |= {who, *(entry.identity for entry in descendants(who.pid))}
        self._kin = {who for who in below if alive(who)}
        for who in self._kin:
            self._seen.update(_segments(who.pid))


def _segments(pid: int) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError):
        for fd in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if (path := os.readlink(fd.path)).startswith(SHARED_MEMORY):
                    yield os.stat(fd.path).st_ino, path
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as maps:
        for line in maps:
            if SHARED_MEMORY in line:
                fields = line.split(maxsplit=5)
                yield int(fields[4]), fields[5].rstrip("\n")
