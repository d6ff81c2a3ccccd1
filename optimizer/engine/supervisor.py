"""The small process that stands between a search and one trial, and outlives everything in it. Standard library only.

    search --(pipe)--> supervisor --(child, own session and process group)--> trial process --> engine core --> workers

The search holds the only write end of a pipe to the supervisor. Whatever ends the search, SIGKILL included, closes it, and
the supervisor ends the whole trial. A parent-death signal alone would not do: it reaches the leader, and orphans the
engine core. As subreaper the supervisor becomes the parent of every orphan below it, so nothing can hide by outliving its
parent or by starting a session of its own, and nothing outside can be hit: only descendants are ever signalled.

Spoken on stdin: one order ``{"argv", "environment", "cwd", "log", ...}``, then ``{"do": "stop", "grace_s": S}``, and before
it ``{"do": "log", "path": P}`` when the log was moved.
Told on stdout: ``spawned``, ``ended`` (the leader, with its status), ``gone`` (everything, with leftovers).
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vopt.optimizer.engine.drain import Drain, secrets_in
from vopt.optimizer.engine.held import files_held, segment_names
from vopt.optimizer.engine.kin import (
    Identity,
    TrackersLast,
    become_subreaper,
    descendants,
    die_with_parent,
    identity,
    send_signal,
)
from vopt.optimizer.engine.leftovers import Manifest, begin, private_directory, remove_files
from vopt.optimizer.engine.wire import Channel, ChannelClosed, Message

POLL_S = 0.2
RECORD_S = 2.0
KILL_PATIENCE_S = 20.0
ORPHAN_GRACE_S = 1.0
TRIAL_OOM_SCORE = 500  # of 1000: the kernel takes the trial, not the search that would record its death


@dataclass(slots=True)
class Supervisor:
    """One trial from spawn to the last of its processes."""

    channel: Channel
    manifest: Manifest
    grace_s: float
    drain: Drain
    leader: Identity
    ended: Message | None = None
    recorded_at: float = 0.0
    segments: frozenset[str] = frozenset()
    searcher_gone: bool = False

    def run(self, wake_fd: int) -> tuple[str, ...]:
        """Watch until the leader ends or an order to stop comes; then end the rest. Returns what could not be cleaned up."""
        self.tell({"event": "spawned", "pid": self.leader.pid, "directory": self.manifest.private_directory})
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN | select.POLLHUP)
        poll.register(wake_fd, select.POLLIN)
        stopping = False
        while self.ended is None and not stopping:
            poll.poll(POLL_S * 1000)
            stopping = self.ordered_to_stop() or _drain_wakeups(wake_fd)
            self.reap()
            self.drain.step()
            self.record()
        self.record(now=True)
        leftovers = self.end_everything()
        self.drain.close()
        leftovers += remove_files(self.manifest)
        if not leftovers:
            self.manifest.path.unlink(missing_ok=True)
        return tuple(leftovers)

    def ordered_to_stop(self) -> bool:
        try:
            message = self.channel.receive(0)
        except ChannelClosed:
            self.searcher_gone = True
            self.grace_s = min(self.grace_s, ORPHAN_GRACE_S)
            return True
        if message is None:
            return False
        if message["do"] == "log":
            self.drain.follow(Path(message["path"]))
            return False
        self.grace_s = float(message.get("grace_s", self.grace_s))
        return True

    def reap(self) -> None:
        """Collect the dead, orphans included; the leader's status is told as ``ended``."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.leader.pid:
                    code = os.waitstatus_to_exitcode(status)
                    self.ended = {"event": "ended", "code": code}
                    self.tell(self.ended)

    def record(self, *, now: bool = False) -> None:
        """Write down who belongs to the trial and what they hold: it is needed when they are dead.

        Now and then, and whenever a segment of shared memory is new on this machine: its maker may not live until the next
        look, and then nothing tells whose it was.
        """
        segments = segment_names()
        if not now and segments <= self.segments and time.monotonic() - self.recorded_at < RECORD_S:
            return
        self.segments = segments
        kin = {entry.identity for entry in descendants(os.getpid())}
        held = files_held((who.pid for who in kin), earlier=self.manifest.earlier)
        if not kin <= self.manifest.kin or not held <= self.manifest.held:
            self.manifest.kin |= kin
            self.manifest.held |= held
            self.manifest.write()
        self.recorded_at = time.monotonic()

    def end_everything(self) -> list[str]:
        """SIGTERM to every descendant, grace, SIGKILL until none is left or patience ends; names of what stayed."""
        if self.ended is not None:
            self.grace_s = min(self.grace_s, ORPHAN_GRACE_S)
        self.signal_all(signal.SIGTERM)
        if self.wait_until_alone(None):
            return []
        until = time.monotonic() + KILL_PATIENCE_S
        order = TrackersLast()
        while time.monotonic() < until:
            self.record(now=True)
            self.signal_all(signal.SIGKILL, order)
            if self.wait_until_alone(0.5):
                return []
        self.signal_all(signal.SIGKILL)  # trackers too
        if self.wait_until_alone(0.5):
            return []
        return [f"process {entry.identity.pid} ({entry.name}) does not end" for entry in descendants(os.getpid())]

    def signal_all(self, number: signal.Signals, order: TrackersLast | None = None) -> None:
        everyone = [entry.identity for entry in descendants(os.getpid())]
        for who in order.choose(everyone) if order is not None else everyone:
            with contextlib.suppress(PermissionError):
                send_signal(who, number)

    def wait_until_alone(self, patience_s: float | None) -> bool:
        """Whether nothing is left. ``None``: for the grace, which another order, or the search's death, makes shorter, never
        longer: once the leader is gone, what it left has no reason to be waited for."""
        began = time.monotonic()
        while True:
            if patience_s is None and not self.searcher_gone:
                grace_s = self.grace_s
                self.ordered_to_stop()
                self.grace_s = min(grace_s, self.grace_s)
            self.reap()
            self.drain.step()
            if not descendants(os.getpid()):
                return True
            if time.monotonic() >= began + (self.grace_s if patience_s is None else patience_s):
                return False
            self.record()  # what is ending may still make something
            time.sleep(0.02)

    def tell(self, message: Message) -> None:
        with contextlib.suppress(ChannelClosed):
            self.channel.send(message)


def _drain_wakeups(wake_fd: int) -> bool:
    """Whether SIGTERM came; SIGCHLD only wakes the loop."""
    with contextlib.suppress(BlockingIOError):
        return signal.SIGTERM in os.read(wake_fd, 4096)
    return False


def _signals_to_pipe() -> int:
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    return read_fd


def _prepare_leader() -> None:
    """Between fork and exec of the leader: if the supervisor itself is killed, at least the leader follows at once."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def _spawn(order: dict[str, Any], raw_fd: int, directory: str) -> subprocess.Popen[bytes]:
    environment = {**order["environment"], "TMPDIR": directory}
    leader = subprocess.Popen(
        order["argv"],
        env=environment,
        cwd=order["cwd"],
        stdin=subprocess.DEVNULL,
        stdout=raw_fd,
        stderr=raw_fd,
        start_new_session=True,
        pass_fds=order["pass_fds"],
        preexec_fn=_prepare_leader,
    )
    with contextlib.suppress(OSError):
        Path(f"/proc/{leader.pid}/oom_score_adj").write_text(str(TRIAL_OOM_SCORE))
    for fd in order["pass_fds"]:  # held by the trial alone: its death must close them
        os.close(fd)
    return leader


def _prepared(order: dict[str, Any]) -> tuple[Manifest, int, Drain]:
    """What a trial needs before it is spawned; nothing of it stays behind when one part cannot be made (``OSError``)."""
    manifest = begin(Path(order["log"]))
    manifest.private_directory = directory = private_directory()
    try:
        manifest.write()
        raw_fd = os.open(os.path.join(directory, "output"), os.O_CREAT | os.O_APPEND | os.O_RDWR | os.O_CLOEXEC, 0o600)
        return (
            manifest,
            raw_fd,
            Drain(raw_fd, Path(order["log"]), cap_bytes=order["log_cap_bytes"], secrets=secrets_in(order["environment"])),
        )
    except OSError:
        remove_files(manifest)
        manifest.path.unlink(missing_ok=True)
        raise


def main() -> int:
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = Channel(0, 1)
    try:
        order = channel.receive(30.0)
    except ChannelClosed:
        return 0
    if order is None:
        return 1
    become_subreaper()
    wake_fd = _signals_to_pipe()
    try:
        manifest, raw_fd, drain = _prepared(order)
    except OSError as error:  # nothing of the trial's own: no room or no rights where logs and temporary files go
        channel.send({"event": "ended", "code": 127, "no_place": [error.errno or 0, str(error)]})
        channel.send({"event": "gone", "leftovers": []})
        return 0
    try:
        process = _spawn(order, raw_fd, manifest.private_directory or "")
    except OSError as error:
        remove_files(manifest)
        manifest.path.unlink(missing_ok=True)
        channel.send({"event": "ended", "code": 127, "error": str(error)})
        channel.send({"event": "gone", "leftovers": []})
        return 0
    leader = identity(process.pid) or Identity(process.pid, 0)
    process.returncode = 0  # reaped by the supervisor itself, never through Popen
    manifest.leader = leader
    manifest.kin.add(leader)
    manifest.write()
    supervisor = Supervisor(channel, manifest, float(order["grace_s"]), drain, leader)
    leftovers = supervisor.run(wake_fd)
    supervisor.tell({"event": "gone", "leftovers": list(leftovers)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
