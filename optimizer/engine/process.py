"""A trial's processes as the search holds them: a supervised process of any kind, and the in-process vLLM session."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from vopt.objectives.records import LoadResult, LoadStatus, RequestRecord
from vopt.optimizer import caches, gpus
from vopt.optimizer.engine.base import OnPhase, OnTick
from vopt.optimizer.engine.failures import Ending, classify
from vopt.optimizer.engine.interpreter import probe
from vopt.optimizer.engine.kin import Identity, alive, identity
from vopt.optimizer.engine.leftovers import Manifest, run_directory, sweep
from vopt.optimizer.engine.package import trial_package
from vopt.optimizer.engine.startup_log import read_start_log
from vopt.optimizer.engine.wire import Channel, ChannelClosed, Message, plan_to_json, tick_from_json
from vopt.optimizer.load.plan import LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.trial import EngineFailure, FailureKind, Phase, Started, TrialSpec

LOG_CAP_BYTES = 16 << 20
TAIL_BYTES = 1 << 20
GRACE_S = 10.0
SILENCE_S = 90.0
"""A load that tells no progress for so long has a blocked trial process: ticks come once a second."""

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
        self.log = log
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.spawn_error: str | None = None
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
                    "log": str(log),
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
            case "ended":
                self.exit_code = message["code"]
                self.spawn_error = message.get("error")
            case "gone":
                self._leftovers = tuple(message["leftovers"])
            case unknown:
                raise AssertionError(f"the supervisor never says {unknown}")

    def _supervisor_died(self) -> None:
        """Somebody killed the supervisor itself: do its work from what it wrote down."""
        self._supervisor.wait()
        leftovers: tuple[str, ...] = ()
        path = run_directory() / "trials" / f"{self._identity.pid}-{self._identity.start_ticks}.json"
        with contextlib.suppress(OSError, ValueError):
            leftovers = sweep(Manifest.read(path))
        self._leftovers = leftovers
        if self.exit_code is None:
            self.exit_code = -9

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

    @property
    def supervisor_alive(self) -> bool:
        return alive(self._identity)

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


class ProcessSession:
    """The in-process vLLM of one trial (``base.Session``): spawned, started, loaded and stopped in a process of its own."""

    def __init__(self, spec: TrialSpec) -> None:
        self._spec = spec
        self._process: SupervisedProcess | None = None
        self._channel: Channel | None = None
        self._ready = False
        self._loads = 0
        self._idle: dict[str, int] = {}
        self._cache: Path | None = None
        self._started: Started | None = None
        self._closed: tuple[str, ...] | None = None
        self._closing = threading.Lock()

    @property
    def log(self) -> Path:
        return self._spec.directory / "engine.log"

    def prestart(self) -> None:
        """Spawn the trial process and let it import vLLM; it touches no GPU before ``start``. Idempotent."""
        if self._process is None:
            self._spawn()

    def _spawn(self) -> None:
        spec = self._spec
        spec.directory.mkdir(parents=True, exist_ok=True)
        command_read, command_write = os.pipe()
        event_read, event_write = os.pipe()
        self._channel = Channel(event_read, command_write)
        self._process = SupervisedProcess(
            [spec.python, "-m", "vopt.optimizer.engine.trial_process", str(command_read), str(event_write)],
            environment=self.environment(),
            log=self.log,
            pass_fds=(command_read, event_write),
        )

    def environment(self) -> dict[str, str]:
        """The whole environment of the trial process."""
        environment, self._cache = engine_environment(self._spec)
        path = [str(trial_package()), *filter(None, [environment.get("PYTHONPATH")])]
        return environment | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}

    def start(self, on_phase: OnPhase) -> Started:
        spec = self._spec
        on_phase(Phase.START, "importing vLLM")
        self.prestart()
        until = time.monotonic() + spec.deadlines.start_s
        if not self._ready:
            self._await({"ready"}, Phase.START, until)
            self._ready = True
        self._idle = gpus.used_bytes(spec.gpus)
        assert self._cache is not None
        before = caches.cache_state(self._cache)
        on_phase(Phase.START, "starting the engine")
        order = {"do": "start", "model": spec.model, "arguments": spec.arguments.to_json(), "revision": spec.revision}
        self._order(order, Phase.START)
        event = self._await({"started"}, Phase.START, until)
        log = read_start_log(self._lines(20_000))
        self._started = Started(
            vllm_version=event["vllm_version"],
            resolved=event["resolved"],
            kv_cache_tokens=event["kv_cache_tokens"] or log.kv_cache_tokens,
            kv_cache_bytes=log.kv_cache_bytes,
            num_gpu_blocks=event["num_gpu_blocks"],
            start_class=caches.start_class(before, caches.cache_state(self._cache)),
            start_parts_s={**log.parts_s, **event["start_parts_s"]},
            messages=log.messages,
        )
        return self._started

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        self._loads += 1
        directory, number = self._spec.directory, self._loads
        source_file = directory / f"source-{number}.json"
        records_file = directory / f"records-{number}.jsonl.gz"
        source_file.write_text(json.dumps(source.to_json()))
        self._order(
            {"do": "load", "source": str(source_file), "plan": plan_to_json(plan), "records": str(records_file)}, Phase.LOAD
        )
        until = time.monotonic() + self._spec.deadlines.load_s
        stopping = False
        try:
            while True:
                silence_until = min(until, time.monotonic() + max(SILENCE_S, 3 * plan.tick_s))
                event = self._await({"tick", "loaded"}, Phase.LOAD, silence_until)
                if event["event"] == "loaded":
                    break
                del event["event"]
                if not on_tick(tick_from_json(event)) and not stopping:
                    stopping = True
                    self._order({"do": "stop_load"}, Phase.LOAD)
        finally:
            source_file.unlink(missing_ok=True)  # prompts are not kept
        result = LoadResult.from_json(event["result"], read_records(records_file))
        if result.status is LoadStatus.ENGINE_DIED:
            self._fail(Phase.LOAD, exception=event.get("dead") or result.detail, load=result)
        return result

    def _order(self, message: Message, phase: Phase) -> None:
        assert self._channel is not None
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._fail(phase)

    def _await(self, wanted: set[str], phase: Phase, until: float) -> Message:
        """The next event of these kinds; raises ``EngineFailure`` for a failure, a death, or the deadline."""
        assert self._channel is not None
        assert self._process is not None
        while True:
            try:
                event = self._channel.receive(min(0.5, max(0.0, until - time.monotonic())))
            except ChannelClosed:
                self._process.poll(5.0)
                self._fail(phase)
            if event is None:
                if self._process.poll() is not None:
                    self._fail(phase)
                if time.monotonic() >= until:
                    self._fail(phase, hang=True)
            elif event["event"] == "failed":
                self._fail(phase, exception=f"{event['type']}: {event['message']}")
            elif event["event"] in wanted:
                return event

    def _fail(
        self, phase: Phase, *, exception: str | None = None, hang: bool = False, load: LoadResult | None = None
    ) -> NoReturn:
        """End the trial, then say what happened: only then is its log complete."""
        assert self._process is not None
        ending = Ending(self._process.exit_code)
        leftovers = self._end(polite=False)
        failed = classify(phase, ending, exception or self._process.spawn_error, self._lines(4000), hang=hang)
        if exception is None and not hang and ending.code is None:
            failed = dataclasses.replace(failed, detail=f"{failed.detail} ({Ending(self._process.exit_code).words()})")
        held = [name for name in leftovers if name.startswith("GPU")]
        if held and failed.kind is FailureKind.ENGINE_DIED:
            failed = dataclasses.replace(failed, detail=f"{failed.detail}; {'; '.join(held)}")
        raise EngineFailure(dataclasses.replace(failed, started=self._started, load=load))

    def _lines(self, most: int) -> tuple[str, ...]:
        return tail(self.log, most)

    def close(self) -> tuple[str, ...]:
        return self._end(polite=True)

    def _end(self, *, polite: bool) -> tuple[str, ...]:
        with self._closing:
            if self._closed is None:
                self._closed = self._stop(polite=polite)
            return self._closed

    def _stop(self, *, polite: bool) -> tuple[str, ...]:
        process, channel = self._process, self._channel
        if process is None or channel is None:
            return ()
        if polite and process.poll() is None:
            with contextlib.suppress(ChannelClosed):
                channel.send({"do": "stop"})
                process.poll(self._spec.deadlines.stop_s)
        leftovers = process.stop(GRACE_S if polite else 2.0)
        channel.close()
        return leftovers + gpus.wait_until_idle(self._idle)


def engine_environment(spec: TrialSpec) -> tuple[dict[str, str], Path]:
    """(environment of an engine of this trial, its cache folder), for trials and for served engines alike."""
    interpreter = probe(spec.python)
    chosen = gpus.select(spec.gpus) or gpus.visible(gpus.inventory())[:1]
    name = "cpu" if interpreter.cpu_build or not chosen else chosen[0].name
    cache = caches.engine_cache(spec.cache_root or caches.cache_root(), name, interpreter.vllm_version or "none")
    offline = Path(spec.model).is_dir() or spec.revision is not None
    environment = caches.inherited_environment(offline)
    environment |= caches.engine_environment(
        cache, cpu_build=interpreter.cpu_build, offline=offline, start_s=spec.deadlines.start_s
    )
    environment |= gpus.cuda_environment(spec.gpus)
    return environment | dict(spec.environment), cache


def read_records(path: Path) -> tuple[RequestRecord, ...]:
    """The records that a trial process wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return tuple(RequestRecord.from_json(json.loads(line)) for line in lines)
