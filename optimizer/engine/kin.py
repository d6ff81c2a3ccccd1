"""Processes by identity: pid and start time, their descendants, what they hold open. Linux, standard library only.

A pid alone names nobody for long: pids are used again. Everything here that signals checks the start time through a pidfd
first, so that a bystander can never be hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>

SHARED_MEMORY_NAMES = ("psm_", "sem.mp-", "sem.loky-", "vllm", "torch_", "nccl-")
"""How multiprocessing, torch, NCCL and vLLM begin the names of what they put under /dev/shm."""


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


def files_held(pids: Iterable[int], *, since: float) -> frozenset[str]:
    """Shared-memory files and named sockets that these processes have open and that were made after ``since`` (epoch s).

    Only names under /dev/shm that multiprocessing, torch, NCCL or vLLM give, owned by this user: what others made and a
    trial merely opened is not ours to unlink.
    """
    inodes: set[str] = set()
    paths: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
                    elif target.startswith("/dev/shm/"):
                        paths.add(target)
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as maps:
            paths.update(line[line.index("/dev/shm/") :].rstrip("\n") for line in maps if "/dev/shm/" in line)
    ours = {path for path in paths if os.path.basename(path).startswith(SHARED_MEMORY_NAMES)}
    return frozenset(path for path in ours | _socket_paths(inodes) if _made_by_us(path, since))


def _socket_paths(inodes: set[str]) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError), open("/proc/net/unix", errors="replace") as table:
        for line in table:
            fields = line.split(maxsplit=7)
            if len(fields) == 8 and fields[6] in inodes and fields[7].startswith("/"):
                found.add(fields[7].strip())
    return found


def _made_by_us(path: str, since: float) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    kind = stat.S_ISREG(found.st_mode) or stat.S_ISSOCK(found.st_mode)
    return kind and found.st_uid == os.getuid() and found.st_ctime >= since - 1.0
