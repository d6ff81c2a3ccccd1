"""What a running trial owns, written down where a later command can find it. Standard library only.

A supervisor cleans up by itself, even when the search is killed. Only when the supervisor is killed too, or the power
fails, does a manifest stay behind; ``vopt doctor`` lists those and ``vopt clean`` sweeps them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vopt.optimizer.engine.held import Held, files_held, files_there, unlink_held
from vopt.optimizer.engine.kin import Identity, TrackersLast, alive, descendants, every_process, identity, send_signal


def run_directory() -> Path:
    """Where this user's locks and manifests lie on this host; emptied by a reboot where the system does so."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path("/tmp")  # not TMPDIR: all searches must agree
    path = base / f"vopt-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.lstat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return path


def boot_id() -> str:
    """Names this boot: pids and start times from another boot mean nothing."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@dataclass(slots=True)
class Manifest:
    """A trial's supervisor, its processes so far, the files that they hold, and its private temporary directory."""

    path: Path
    supervisor: Identity
    leader: Identity | None = None
    earlier: frozenset[Held] = field(default_factory=files_there)
    boot: str = field(default_factory=boot_id)
    kin: set[Identity] = field(default_factory=set)
    held: set[Held] = field(default_factory=set)
    private_directory: str | None = None
    log: str = ""

    def write(self) -> None:
        data = {
            "supervisor": _pair(self.supervisor),
            "leader": _pair(self.leader) if self.leader else None,
            "earlier": [[entry.path, entry.inode] for entry in sorted(self.earlier)],
            "boot": self.boot,
            "kin": sorted(_pair(who) for who in self.kin),
            "held": [[entry.path, entry.inode] for entry in sorted(self.held)],
            "private_directory": self.private_directory,
            "log": self.log,
        }
        draft = self.path.with_suffix(".draft")
        with contextlib.suppress(OSError):  # a full disk costs the record, not the trial
            draft.write_text(json.dumps(data))
            os.replace(draft, self.path)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises ``ValueError`` or ``OSError`` for what is no manifest."""
        data: dict[str, Any] = json.loads(path.read_text())
        try:
            return cls(
                path=path,
                supervisor=Identity(*data["supervisor"]),
                leader=Identity(*data["leader"]) if data["leader"] else None,
                earlier=frozenset(Held(*entry) for entry in data.get("earlier", ())),
                boot=data["boot"],
                kin={Identity(*pair) for pair in data["kin"]},
                held={Held(*entry) for entry in data["held"]},
                private_directory=data["private_directory"],
                log=data["log"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error

    def living(self) -> tuple[Identity, ...]:
        """The trial's processes that still run: those written down, the rest of their session, whoever bears the trial's mark
        (it may have left the session, and its parent, since the last note), and what all of these started."""
        if self.boot != boot_id():
            return ()
        known = {who for who in self.kin if alive(who)}
        known |= set(self._of_the_session(known)) | set(self._marked())
        known |= {entry.identity for who in tuple(known) for entry in descendants(who.pid)}
        return tuple(who for who in known if alive(who))

    def _of_the_session(self, known: set[Identity]) -> Iterator[Identity]:
        """A session keeps its number from all others as long as one of its members lives: one that is known vouches for the
        rest. When none is left, the number may be that of a stranger's session by now."""
        if self.leader is None:
            return
        members = [entry.identity for entry in every_process() if entry.session == self.leader.pid]
        if not known.isdisjoint(members):
            yield from members

    def _marked(self) -> Iterator[Identity]:
        """Whoever has the trial's private directory as its TMPDIR or writes to the output there: nobody else knows its name."""
        if self.private_directory is None:
            return
        mark = f"TMPDIR={self.private_directory}".encode()
        for entry in every_process():
            if _bears(entry.identity.pid, mark, self.private_directory):
                yield entry.identity


def _bears(pid: int, mark: bytes, directory: str) -> bool:
    with contextlib.suppress(OSError):
        if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return True
    for fd in (1, 2):  # a program that writes its title over its environment still has these
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(f"{directory}/"):
                return True
    return False


def _pair(who: Identity) -> list[int]:
    return [who.pid, who.start_ticks]


def begin(log: Path) -> Manifest:
    """A manifest for the calling supervisor."""
    me = identity(os.getpid())
    assert me is not None
    folder = run_directory() / "trials"
    folder.mkdir(exist_ok=True)
    return Manifest(path=folder / f"{me.pid}-{me.start_ticks}.json", supervisor=me, log=str(log))


def dead_trials() -> tuple[Manifest, ...]:
    """Manifests whose supervisor no longer runs: leftovers of a search that died together with its supervisor."""
    found = []
    for path in sorted((run_directory() / "trials").glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            manifest = Manifest.read(path)
            if manifest.boot != boot_id() or not alive(manifest.supervisor):
                found.append(manifest)
    return tuple(found)


def sweep(manifest: Manifest, *, patience_s: float = 10.0) -> tuple[str, ...]:
    """Kill what lives of a dead trial, unlink what it held, remove its directory; the names of what stayed."""
    until = time.monotonic() + patience_s
    order = TrackersLast()
    while living := manifest.living():
        manifest.held |= files_held((who.pid for who in living), earlier=manifest.earlier)
        for who in order.choose(living):
            with contextlib.suppress(PermissionError):
                send_signal(who, signal.SIGKILL)
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    stayed = [f"process {who.pid} does not end" for who in living]
    stayed += remove_files(manifest)
    if not stayed:
        manifest.path.unlink(missing_ok=True)
    return tuple(stayed)


def remove_files(manifest: Manifest) -> list[str]:
    """Unlink the shared memory and sockets of a trial that is gone, and its private directory; what could not be removed."""
    stayed = unlink_held(manifest.held)
    if manifest.private_directory:
        shutil.rmtree(manifest.private_directory, ignore_errors=True)
        if os.path.exists(manifest.private_directory):
            stayed.append(manifest.private_directory)
    return stayed


LONGEST_PRIVATE_PATH = 70
"""vLLM puts its sockets under TMPDIR; a socket's path may have 107 bytes, and vLLM's names need the rest."""


def private_directory() -> str:
    """A fresh directory for one trial's TMPDIR, its path at most 70 bytes long."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > LONGEST_PRIVATE_PATH - 20:
        base = "/tmp"
    return tempfile.mkdtemp(prefix="vopt-", dir=base)
