"""Trial processes that have done their imports and wait for their turn.

Importing vLLM takes 13 to 21 s on a GPU host (H200, vLLM 0.22.1) and needs neither the GPU nor the trial's arguments. So
while one engine starts, the next trial's process is spawned and imports; it never does so beside a measured load.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vopt.optimizer.engine.supervised import SupervisedProcess
from vopt.optimizer.engine.wire import Channel, ChannelClosed

SETTLE_S = 60.0
ANSWER_S = 10.0
ENOUGH_CORES = 8
"""On fewer, a second process that imports delays the first."""


@dataclass(slots=True)
class Hosted:
    """A trial process and the channel to it; ``ready`` once vLLM is imported there."""

    process: SupervisedProcess
    channel: Channel
    ready: bool = False

    def wait_ready(self, patience_s: float) -> bool:
        """Whether the imports are done, waiting at most so long; a process that failed in them is not ready."""
        until = time.monotonic() + patience_s
        while not self.ready and self.process.poll() is None:
            try:
                event = self.channel.receive(min(0.2, max(0.0, until - time.monotonic())))
            except ChannelClosed:
                return False
            if event is not None:
                self.ready = event["event"] == "ready"
                return self.ready
            if time.monotonic() >= until:
                return False
        return self.ready

    def answers(self) -> bool:
        """Whether a process that was ready still is: one that died since must not be a trial's failure."""
        self.ready = False
        try:
            self.channel.send({"do": "ping"})
        except ChannelClosed:
            return False
        return self.wait_ready(ANSWER_S)

    def end(self) -> None:
        self.process.stop(0.5)
        self.channel.close()


def spawn(python: str, environment: Mapping[str, str], log: Path, *, server: bool = False) -> Hosted:
    """A trial process on ``python``; it begins to import at once. ``server``: and so does a fork server for its engine core."""
    command_read, command_write = os.pipe()
    event_read, event_write = os.pipe()
    words = [str(command_read), str(event_write), *(["server"] if server else [])]
    process = SupervisedProcess(
        [python, "-m", "vopt.optimizer.engine.trial_process", *words],
        environment=environment,
        log=log,
        pass_fds=(command_read, event_write),
    )
    return Hosted(process, Channel(event_read, command_write))


class Spares:
    """At most one waiting trial process. Used from the thread that runs the trials; ``close`` when no more trials come."""

    def __init__(self) -> None:
        self._waiting: Hosted | None = None
        self._like: tuple[str, dict[str, str]] | None = None
        self._directory: Path | None = None
        self._server_is_idle = False

    def learn(self, *, served: bool) -> None:
        """Whether the engine core of the last start came from a fork server: one that vLLM forks itself never does, nor one for
        which it sets what only a new process heeds."""
        self._server_is_idle = not served

    def spawn(self, python: str, environment: Mapping[str, str], log: Path, *, cpu_build: bool = False) -> Hosted:
        """A trial process for now, with a server for its core unless that came without one, or would take its cores."""
        server = not (cpu_build or self._server_is_idle or len(os.sched_getaffinity(0)) < ENOUGH_CORES)
        return spawn(python, environment, log, server=server)

    def prepare(self, python: str, environment: Mapping[str, str], near: Path) -> None:
        """Spawn the next trial's process, unless one waits. Its log begins under ``near``, the file system of the trials."""
        like = (python, dict(environment))
        if self._waiting is not None and self._like == like:
            return
        self.close()
        self._directory = Path(tempfile.mkdtemp(prefix=".spare-", dir=near))
        self._waiting, self._like = self.spawn(python, environment, self._directory / "engine.log"), like

    def settle(self) -> None:
        """Wait until the waiting process has done its imports; one that cannot is ended, and the trial itself will say why."""
        if self._waiting is not None and not self._waiting.wait_ready(SETTLE_S):
            self.close()

    def take(self, python: str, environment: Mapping[str, str]) -> Hosted | None:
        """The waiting process, if it is one of this kind and still lives."""
        waiting, like = self._waiting, self._like
        if waiting is None or like != (python, dict(environment)):
            self.close()
            return None
        self.settle()
        if self._waiting is None or not waiting.answers():
            self.close()
            return None
        self._waiting = None
        return waiting

    def tidy(self) -> None:
        """Remove the empty directory of a process that was taken."""
        if self._waiting is None and self._directory is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._directory)
            self._directory = None

    def close(self) -> None:
        """End the waiting process, if there is one. Idempotent."""
        if self._waiting is not None:
            self._waiting.end()
            self._waiting = None
        self.tidy()
