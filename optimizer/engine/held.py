"""Shared memory and named sockets of a trial: seen while its processes hold them, unlinked when those are gone.

Linux, standard library only. A file under /dev/shm says nothing of who made it; a process that has it open or mapped does.
So only what a process of the trial was seen to hold is ever unlinked, and only as long as it is that very file (by inode,
which tmpfs uses once) and nobody else holds it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SHARED_MEMORY = "/dev/shm/"
SHARED_MEMORY_NAMES = ("psm_", "sem.mp-", "sem.loky-", "vllm", "torch_", "nccl-")
"""How multiprocessing, torch, NCCL and vLLM begin the names of what they put under /dev/shm."""


@dataclass(frozen=True, slots=True, order=True)
class Held:
    """One file that a process held."""

    path: str
    inode: int


def segment_names() -> frozenset[str]:
    """Names under /dev/shm that begin as those of a trial do, whoever made them."""
    with contextlib.suppress(OSError):
        return frozenset(name for name in os.listdir(SHARED_MEMORY) if name.startswith(SHARED_MEMORY_NAMES))
    return frozenset()


def files_there() -> frozenset[Held]:
    """Everything of these names under /dev/shm now: what is there before a trial begins is not its own. No time of a file could
    tell that: clocks are set back."""
    found = set()
    for name in segment_names():
        with contextlib.suppress(OSError):
            found.add(Held(SHARED_MEMORY + name, os.lstat(SHARED_MEMORY + name).st_ino))
    return frozenset(found)


def files_held(pids: Iterable[int], *, earlier: frozenset[Held]) -> frozenset[Held]:
    """Shared-memory files and named sockets that these processes hold, but for those that were there ``earlier``.

    Only names under /dev/shm that multiprocessing, torch, NCCL or vLLM give, owned by this user: what others made and a
    trial merely opened is not ours to unlink. A socket with a path is held by who bound it, or who was started by that one.
    """
    segments: set[Held] = set()
    sockets: set[str] = set()
    for pid in pids:
        segments.update(_open_segments(pid, sockets))
        segments.update(_mapped_segments(pid))
    ours = {held for held in segments if os.path.basename(held.path).startswith(SHARED_MEMORY_NAMES)}
    return frozenset(held for held in (ours | _named_sockets(sockets)) - earlier if _made_by_us(held))


def _open_segments(pid: int, sockets: set[str]) -> Iterator[Held]:
    """What a process has open under /dev/shm; the inodes of its sockets go into ``sockets``."""
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
                elif target.startswith(SHARED_MEMORY):
                    yield Held(target, os.stat(f"/proc/{pid}/fd/{fd}").st_ino)


def _mapped_segments(pid: int) -> Iterator[Held]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as maps:
        for line in maps:
            if SHARED_MEMORY in line:
                fields = line.rstrip("\n").split(maxsplit=5)  # range, permissions, offset, device, inode, path
                yield Held(fields[5], int(fields[4]))


def _named_sockets(inodes: set[str]) -> set[Held]:
    found: set[Held] = set()
    with contextlib.suppress(OSError), open("/proc/net/unix", errors="replace") as table:
        for line in table:
            fields = line.split(maxsplit=7)
            if len(fields) == 8 and fields[6] in inodes and fields[7].startswith("/"):
                path = fields[7].strip()
                with contextlib.suppress(OSError):
                    found.add(Held(path, os.lstat(path).st_ino))  # the file's; the table has the socket's
    return found


def _made_by_us(held: Held) -> bool:
    try:
        found = os.lstat(held.path)
    except OSError:
        return False
    kind = stat.S_ISREG(found.st_mode) or stat.S_ISSOCK(found.st_mode)
    return kind and found.st_ino == held.inode and found.st_uid == os.getuid()


def unlink_held(held: Iterable[Held]) -> list[str]:
    """Unlink what is still there and held by nobody; what could not be removed, each with the reason.

    The processes that held it are gone. Whoever holds it now is a stranger, who will have a use for the name as well.
    """
    there = {entry for entry in held if _is(entry)}
    stayed = []
    for entry in sorted(there - _held_by_anybody(there)):
        try:
            os.unlink(entry.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            stayed.append(f"{entry.path}: {error.strerror}")
    return stayed


def _is(held: Held) -> bool:
    """Whether the path still names that file, and not a newer one of the same name."""
    try:
        return os.lstat(held.path).st_ino == held.inode
    except OSError:
        return False


def _held_by_anybody(wanted: set[Held]) -> set[Held]:
    found: set[Held] = set()
    for pid in os.listdir("/proc") if any(held.path.startswith(SHARED_MEMORY) for held in wanted) else ():
        if pid.isdigit():
            found |= wanted & {*_open_segments(int(pid), set()), *_mapped_segments(int(pid))}
    return found
