"""A command that is supervised: everything that it starts ends with it, its output is bounded, nothing outlives the search."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vopt.optimizer.engine.kin import Identity, identity
from vopt.optimizer.engine.leftovers import Manifest, run_directory, sweep
from vopt.optimizer.engine.package import trial_package
from vopt.optimizer.engine.wire import Channel, ChannelClosed, Message

LOG_CAP_BYTES = 16 << 20
TAIL_BYTES = 1 << 20
GRACE_S = 10.0

_SUPERVISE = "import sys; sys.path.insert(0, sys.argv[1]); from vopt.optimizer.engine.supervisor import main; sys.exit(main())"


class SupervisedProcess:
    """One command in a session of its own, with everything that it starts, until all of that is gone.

    Its output lands in ``log`` (bounded, secrets struck out). If this process dies in any way, so does the command. Used
    from one thread at a time. ``pass_fds`` belong to the command from here on: they are closed in this process.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        grace_s: float = GRACE_S,
        log_cap_bytes: int = LOG_CAP_BYTES,
    ) -> None:
        self.log = log.absolute()  # the supervisor works elsewhere
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.spawn_error: str | None = None
        self.disturbed: tuple[int, str] | None = None
        """Why this ended that has nothing to do with the command: (errno or 0, words)."""
        self._leader: Identity | None = None
        self._directory: str | None = None
        self._leftovers: tuple[str, ...] | None = None
        control_read, control_write = os.pipe()
        status_read, status_write = os.pipe()
        try:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SUPERVISE, str(trial_package())],
                stdin=control_read,
                stdout=status_write,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal is the search's to handle
                pass_fds=tuple(pass_fds),
                cwd="/",
            )
        finally:
            for fd in (control_read, status_write, *pass_fds):
                os.close(fd)
        self._identity = identity(self._supervisor.pid) or Identity(self._supervisor.pid, 0)
        self._channel = Channel(status_read, control_write)
        with contextlib.suppress(ChannelClosed):  # a supervisor that could not start shows as an end in `poll`
            self._channel.send(
                {
                    "argv": list(argv),
                    "environment": dict(environment),
                    "cwd": str(cwd or Path.cwd()),
                    "log": str(self.log),
                    "pass_fds": list(pass_fds),
                    "grace_s": grace_s,
                    "log_cap_bytes": log_cap_bytes,
                }
            )

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """The command's exit status (negative: signal) once it ended, waiting at most ``timeout_s`` for news."""
        until = time.monotonic() + timeout_s
        while self.exit_code is None:
            try:
                message = self._channel.receive(max(0.0, until - time.monotonic()))
            except ChannelClosed:
                if self._leftovers is None:
                    self._supervisor_died()
                break
            if message is None:
                break
            self._take(message)
        return self.exit_code

    def _take(self, message: Message) -> None:
        match message["event"]:
            case "spawned":
                self.pid = message["pid"]
                self._leader, self._directory = identity(message["pid"]), message["directory"]
            case "ended":
                self.exit_code = message["code"]
                self.spawn_error = message.get("error")
                if "no_place" in message:
                    self.disturbed = (message["no_place"][0], message["no_place"][1])
            case "gone":
                self._leftovers = tuple(message["leftovers"])
            case unknown:
                raise AssertionError(f"the supervisor never says {unknown}")

    def _supervisor_died(self) -> None:
        """Somebody killed the supervisor itself: do its work from what it wrote down."""
        code = self._supervisor.wait()
        self._leftovers = sweep(self._manifest())
        if self.exit_code is None:
            self.exit_code = -9
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
            self.disturbed = (0, f"the supervisor of the trial {how}")

    def _manifest(self) -> Manifest:
        """What the supervisor wrote down, or, where it could not, the little that it told."""
        name = f"{self._identity.pid}-{self._identity.start_ticks}.json"
        try:
            path = run_directory() / "trials" / name
            with contextlib.suppress(OSError, ValueError):
                return Manifest.read(path)
        except OSError:
            path = Path("/nonexistent") / name
        kin = {self._leader} if self._leader is not None else set()
        return Manifest(path, self._identity, self._leader, kin=kin, private_directory=self._directory, log=str(self.log))

    def stop(self, grace_s: float | None = None) -> tuple[str, ...]:
        """End the command and everything below it; returns when all is gone, with the names of what is not. Idempotent."""
        if self._leftovers is None:
            with contextlib.suppress(ChannelClosed):
                self._channel.send({"do": "stop"} | ({} if grace_s is None else {"grace_s": grace_s}))
            self._await_gone((GRACE_S if grace_s is None else grace_s) + 60.0)
        self._channel.close()
        self._supervisor.wait()
        return self._leftovers or ()

    def _await_gone(self, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        while self._leftovers is None:
            try:
                message = self._channel.receive(1.0)
            except ChannelClosed:
                self._supervisor_died()
                return
            if message is not None:
                self._take(message)
            elif time.monotonic() > until:
                self._supervisor.kill()  # it outlived every bound of its own
                self._supervisor_died()

    def move_log(self, path: Path) -> None:
        """Let the log go on at another place of the same file system; what was written moves along."""
        path = path.absolute()
        os.replace(self.log, path)
        self.log = path
        with contextlib.suppress(ChannelClosed):
            self._channel.send({"do": "log", "path": str(path)})

    def log_lines(self, most: int = 400) -> tuple[str, ...]:
        """The last lines of the log so far."""
        return tail(self.log, most)


def tail(log: Path, most: int) -> tuple[str, ...]:
    """The last lines of a text file; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-most:])
    except OSError:
        return ()
