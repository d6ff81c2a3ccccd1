"""Locks between searches: one search per study, one trial at a time per GPU of this host.

A lock is an ``flock`` on a small file, so the kernel releases it when its owner ends, however it ends. The file also names
its owner by pid and start time: a lock that only an orphaned child of a dead owner still holds is recognised and taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from vopt.optimizer.engine.kin import Identity, alive, identity
from vopt.optimizer.engine.leftovers import boot_id
from vopt.optimizer.errors import EnvironmentLacks

GPU_LOCKS = Path("/tmp/vopt-gpu-locks")
"""The same for every user of the host: a GPU is shared by all of them. Not under TMPDIR, which may differ."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock, and what for."""

    pid: int
    start_ticks: int
    boot: str
    host: str
    purpose: str
    since_epoch_s: float

    @property
    def dead(self) -> bool:
        """Certainly gone. An owner on another host (a shared file system) cannot be judged from here."""
        if self.host != socket.gethostname():
            return False
        return self.boot != boot_id() or not alive(Identity(self.pid, self.start_ticks))

    def words(self) -> str:
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"{self.purpose} (process {self.pid}{where}, since {time.strftime('%H:%M', time.localtime(self.since_epoch_s))})"


class Locked(EnvironmentLacks):
    """Somebody else holds the lock."""

    def __init__(self, what: str, owner: Owner | None, *, hint: str) -> None:
        super().__init__(f"{what} is in use by {owner.words() if owner else 'another process'}", hint=hint)
        self.owner = owner


class Lock:
    """A lock that is held from ``acquire`` until ``release`` or the end of this process. A context manager."""

    def __init__(self, path: Path, what: str, *, hint: str = "wait until it has ended", shared_by_users: bool = False) -> None:
        self.path, self._what, self._hint, self._shared = path, what, hint, shared_by_users
        self._fd: int | None = None

    def acquire(self, purpose: str) -> Lock:
        """Take it, or raise ``Locked`` at once."""
        for _ in range(3):
            fd = self._open()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                self._bury()
                continue
            if self._still_named(fd):
                self._fd = fd
                self._sign(fd, purpose)
                return self
            os.close(fd)  # replaced between open and flock
        raise Locked(self._what, owner_of(self.path), hint=self._hint)

    def _bury(self) -> None:
        """Put away the file of a dead owner, which a forked child of it still keeps locked; ``Locked`` when the owner lives.

        One at a time: else the second to see the dead owner would put away the file of the first, who has just replaced it.
        """
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # NFS locks nothing that is open for reading alone (flock(2))
                fcntl.flock(folder, fcntl.LOCK_EX)
            owner = owner_of(self.path)
            if owner is None or not owner.dead:
                raise Locked(self._what, owner, hint=self._hint) from None
            with contextlib.suppress(OSError):
                self.path.unlink()
        finally:
            os.close(folder)

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._shared:
            with contextlib.suppress(OSError):  # made by another user: already so
                self.path.parent.chmod(0o1777)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666 if self._shared else 0o600)
        except PermissionError:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)  # another user's file can be locked, not signed
        if self._shared:
            with contextlib.suppress(OSError):
                os.fchmod(fd, 0o666)
        return fd

    def _still_named(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except OSError:
            return False

    def _sign(self, fd: int, purpose: str) -> None:
        me = identity(os.getpid())
        assert me is not None
        owner = Owner(me.pid, me.start_ticks, boot_id(), socket.gethostname(), purpose, time.time())
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(asdict(owner)).encode(), 0)

    def release(self) -> None:
        """Give it back; the file stays, empty. Idempotent."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def owner_of(path: Path) -> Owner | None:
    """Who signed a lock file last; ``None`` when nobody did or it was released."""
    try:
        return Owner(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def lock_study(folder: Path, study: str) -> Lock:
    """The lock of one study, taken: ``Locked`` when another search works on it. ``folder`` is the study's own."""
    lock = Lock(
        folder / "lock",
        f"study {study}",
        hint=f"wait for that search, or stop it with Ctrl-C and go on with: vopt resume {study}",
    )
    return lock.acquire(f"a search of {study}")


def lock_gpus(uuids: Iterable[str], purpose: str, *, folder: Path = GPU_LOCKS) -> tuple[Lock, ...]:
    """Locks of these GPUs, all taken or none. In one order for all, so that two searches cannot each hold half."""
    held: list[Lock] = []
    try:
        for uuid in sorted(uuids):
            lock = Lock(folder / f"{uuid}.lock", f"GPU {uuid}", hint="wait, or choose others with --gpus", shared_by_users=True)
            held.append(lock.acquire(purpose))
    except BaseException:
        for lock in held:
            lock.release()
        raise
    return tuple(held)


def held_gpu_locks(folder: Path = GPU_LOCKS) -> tuple[tuple[str, Owner], ...]:
    """(UUID, owner) of every GPU lock that a living search holds."""
    found = []
    for path in sorted(folder.glob("*.lock")):
        owner = owner_of(path)
        if owner is not None and not owner.dead:
            found.append((path.stem, owner))
    return tuple(found)
