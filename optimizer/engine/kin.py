"""Processes by identity: pid and start time, their descendants, in which order they are killed. Linux, standard library only.

A pid alone names nobody for long: pids are used again. Everything here that signals checks the start time through a pidfd
first, so that a bystander can never be hit.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


@dataclass(frozen=True, slots=True)
class Identity:
    """One process for all time on this boot: ``start_ticks`` is field 22 of /proc/PID/stat."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Status:
    identity: Identity
    parent: int
    session: int
    state: str
    name: str


def status(pid: int) -> Status | None:
    """What /proc/PID/stat says; ``None`` when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")  # the name may hold spaces and parentheses
    fields = tail.split()
    return Status(
        identity=Identity(pid, int(fields[19])),
        parent=int(fields[1]),
        session=int(fields[3]),
        state=fields[0],
        name=head.partition("(")[2],
    )


def identity(pid: int) -> Identity | None:
    found = status(pid)
    return None if found is None else found.identity


def alive(who: Identity) -> bool:
    """Whether exactly this process still runs; a zombie does not."""
    found = status(who.pid)
    return found is not None and found.identity == who and found.state not in ("Z", "X")


def children(pid: int) -> tuple[int, ...]:
    """Direct children by the kernel's own list, which costs less than a walk over /proc; that walk where there is none."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found.extend(int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except FileNotFoundError:
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
            return tuple(entry.identity.pid for entry in every_process() if entry.parent == pid)
    except OSError:
        pass
    return tuple(found)


def every_process() -> Iterator[Status]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (found := status(int(entry))) is not None:
            yield found


def descendants(pid: int) -> tuple[Status, ...]:
    """Everything below ``pid``, zombies included, parents first."""
    found: list[Status] = []
    queue = list(children(pid))
    while queue:
        child = status(queue.pop(0))
        if child is not None:
            found.append(child)
            queue.extend(children(child.identity.pid))
    return tuple(found)


def send_signal(who: Identity, number: signal.Signals) -> bool:
    """Signal exactly this process; ``False`` when it is gone. Raises ``PermissionError`` for a process of another user."""
    try:
        fd = os.pidfd_open(who.pid)
    except OSError:
        return False
    try:
        if identity(who.pid) != who:  # the pidfd pins the process: checked after it was opened, no reuse can slip in between
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's, so none can hide."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """The calling process gets SIGKILL when the thread that started it ends. It does not hold for its own children."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_resource_tracker(pid: int) -> bool:
    """Whether this is the helper of multiprocessing (or of loky) that unlinks, at the end of all processes that share it, what
    they registered and did not unlink themselves."""
    try:
        return b"resource_tracker import main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


TRACKER_S = 5.0  # a tracker needs some tens of milliseconds on an idle machine


@dataclass(slots=True)
class TrackersLast:
    """Whom to kill now: everybody but resource trackers, and those when they have been alone for ``TRACKER_S``.

    A tracker knows the shared memory that nobody can be seen to hold any more: killed together with the processes that made
    it, it leaves all of that behind.
    """

    others_at: float = -math.inf

    def choose(self, living: Iterable[Identity]) -> tuple[Identity, ...]:
        everyone = tuple(living)
        others = tuple(who for who in everyone if not is_resource_tracker(who.pid))
        if others or self.others_at == -math.inf:
            self.others_at = time.monotonic()
        return others if others or time.monotonic() < self.others_at + TRACKER_S else everyone
