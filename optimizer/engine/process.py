"""The in-process vLLM of one trial, as the search holds it: a session over a supervised trial process."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vopt.objectives.records import LoadResult, LoadStatus, RequestRecord
from vopt.optimizer import caches, gpus, room
from vopt.optimizer.engine.base import OnPhase, OnTick
from vopt.optimizer.engine.failures import Ending, classify, disturbed
from vopt.optimizer.engine.interpreter import probe
from vopt.optimizer.engine.package import trial_package
from vopt.optimizer.engine.readahead import Readahead, weight_files
from vopt.optimizer.engine.spare import Hosted, Spares, spawn
from vopt.optimizer.engine.startup_log import read_start_log
from vopt.optimizer.engine.supervised import GRACE_S, tail
from vopt.optimizer.engine.wire import ChannelClosed, Message, plan_to_json, tick_from_json
from vopt.optimizer.load.plan import STOOD_STILL_S, LoadPlan, StoodStill
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.trial import EngineFailure, FailureKind, Phase, Started, TrialSpec

LOAD_MARGIN_S = 30.0
"""A load keeps its own deadline; the trial process is given so much longer to say so before it counts as hung."""
SILENCE_S = 90.0
"""A load that tells no progress for so long has a blocked trial process: ticks come once a second."""


class ProcessSession:
    """The in-process vLLM of one trial (``base.Session``): spawned, started, loaded and stopped in a process of its own."""

    def __init__(self, spec: TrialSpec, spares: Spares | None = None) -> None:
        self._spec = spec
        self._spares = spares
        self._hosted: Hosted | None = None
        self._imported_ahead = False
        self._loads = 0
        self._gpus: tuple[gpus.Gpu, ...] = ()
        self._cache: Path | None = None
        self._started: Started | None = None
        self._closed: tuple[str, ...] | None = None
        self._closing = threading.Lock()
        self._interrupted = False
        self._oom_kills = room.oom_kills()
        self._readahead = Readahead(())

    @property
    def _up(self) -> Hosted:
        assert self._hosted is not None, "start comes first"
        return self._hosted

    @property
    def log(self) -> Path:
        return self._spec.directory / "engine.log"

    def prestart(self) -> None:
        """Spawn the trial process and let it import vLLM; it touches no GPU before ``start``. Idempotent."""
        if self._hosted is None:
            self._spec.directory.mkdir(parents=True, exist_ok=True)
            environment, self._cache = trial_environment(self._spec)
            self._hosted = self._spares.take(self._spec.python, environment) if self._spares else None
            if self._hosted is not None:
                self._imported_ahead = True
                self._hosted.process.move_log(self.log)
                assert self._spares is not None
                self._spares.tidy()
            elif self._spares is not None:
                cpu_build = probe(self._spec.python).cpu_build
                self._hosted = self._spares.spawn(self._spec.python, environment, self.log, cpu_build=cpu_build)
            else:
                self._hosted = spawn(self._spec.python, environment, self.log)

    def start(self, on_phase: OnPhase) -> Started:
        spec = self._spec
        on_phase(Phase.START, "importing vLLM")
        self._readahead = Readahead(weight_files(spec.model, spec.arguments))
        self.prestart()
        until = time.monotonic() + spec.deadlines.start_s
        hosted = self._up
        if not hosted.ready:
            self._await({"ready"}, Phase.START, until)
            hosted.ready = True
        self._gpus = gpus.select(spec.gpus)
        assert self._cache is not None
        before = caches.cache_state(self._cache)
        caches.lend_inspections(self._cache)
        on_phase(Phase.START, "starting the engine")
        order = {"do": "start", "model": spec.model, "arguments": spec.arguments.to_json(), "revision": spec.revision}
        self._order(order, Phase.START)
        if self._spares is not None and not probe(spec.python).cpu_build:  # there it would take the engine's own cores
            self._spares.prepare(spec.python, trial_environment(spec)[0], spec.directory.parent)
        event = self._await({"started"}, Phase.START, until)
        if self._spares is not None:
            self._spares.learn(served=event["served"])
        ahead = self._readahead.settle()
        log = read_start_log(self._lines(20_000))
        parts = dict(event["start_parts_s"])
        if self._imported_ahead:
            parts["import_ahead"] = parts.pop("import")  # cost no time of this trial
        if ahead.read_bytes:
            parts["weights_ahead"] = ahead.took_s  # beside the imports
        self._started = Started(
            vllm_version=event["vllm_version"],
            resolved=event["resolved"],
            kv_cache_tokens=event["kv_cache_tokens"] or log.kv_cache_tokens,
            kv_cache_bytes=log.kv_cache_bytes,
            num_gpu_blocks=event["num_gpu_blocks"],
            start_class=caches.start_class(before, caches.cache_state(self._cache)),
            start_parts_s={**log.parts_s, **parts},
            messages=log.messages,
        )
        return self._started

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        if self._spares is not None:
            self._spares.settle()  # nothing imports beside a measured load
        self._loads += 1
        directory, number = self._spec.directory, self._loads
        source_file = directory / f"source-{number}.json"
        records_file = directory / f"records-{number}.jsonl.gz"
        source_file.write_text(json.dumps(source.to_json()))
        self._order(
            {"do": "load", "source": str(source_file), "plan": plan_to_json(plan), "records": str(records_file)}, Phase.LOAD
        )
        until = time.monotonic() + max(self._spec.deadlines.load_s, plan.deadline_s) + LOAD_MARGIN_S
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
            self._fail(Phase.LOAD, exception=event.get("dead") or result.detail, load=result, lost=event.get("lost"))
        return result

    def _order(self, message: Message, phase: Phase) -> None:
        try:
            self._up.channel.send(message)
        except ChannelClosed:
            self._fail(phase)

    def _await(self, wanted: set[str], phase: Phase, until: float) -> Message:
        """The next event of these kinds; raises ``EngineFailure`` for a failure, a death, or the deadline."""
        process, channel = self._up.process, self._up.channel
        while True:
            asked_at, patience_s = time.monotonic(), min(0.5, max(0.0, until - time.monotonic()))
            try:
                event = channel.receive(patience_s)
            except ChannelClosed:
                process.poll(5.0)
                self._fail(phase)
            stood_still_s = time.monotonic() - asked_at - patience_s
            if stood_still_s > STOOD_STILL_S:
                until += stood_still_s  # with us, maybe the engine too was stopped
            if event is None:
                if process.poll() is not None:
                    self._fail(phase)
                if time.monotonic() >= until:
                    self._fail(phase, hang=True)
            elif event["event"] == "failed":
                self._fail(phase, exception=f"{event['type']}: {event['message']}", lost=event.get("lost"))
            elif event["event"] in wanted:
                return event

    def _fail(
        self,
        phase: Phase,
        *,
        exception: str | None = None,
        hang: bool = False,
        load: LoadResult | None = None,
        lost: str | None = None,
    ) -> NoReturn:
        """End the trial, then say what happened: only then is its log complete. ``lost``: how a helper of ours ended, and the
        engine with it; if the kernel did that for lack of memory, the engine took it."""
        process = self._up.process
        ending, disturbance = Ending(process.exit_code), process.disturbed
        leftovers = self._end(polite=False)
        oom_killed = room.oom_kills() > self._oom_kills
        if lost is not None and disturbance is None and not oom_killed:
            disturbance = (0, lost)
        failed = classify(phase, ending, exception or process.spawn_error, self._lines(4000), hang=hang, oom_killed=oom_killed)
        if exception is None and not hang and ending.code is None:
            failed = dataclasses.replace(failed, detail=f"{failed.detail} ({Ending(process.exit_code).words()})")
        if disturbance is None and exception is not None and exception.startswith(StoodStill.__name__):
            disturbance = (0, exception)
        if disturbance is not None:
            failed = disturbed(failed, disturbance)
        if lost := gpus.lost(self._gpus):
            failed = dataclasses.replace(failed, kind=FailureKind.GPU_LOST, detail=f"{lost}; {failed.detail}", hint={})
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
                polite, self._interrupted = polite and not self._interrupted, True
                self._closed = self._stop(polite=polite)  # what interrupts it leaves the next call to kill
            return self._closed

    def _stop(self, *, polite: bool) -> tuple[str, ...]:
        self._readahead.settle()
        if self._hosted is None:
            return ()
        process, channel = self._hosted.process, self._hosted.channel
        if polite and process.poll() is None:
            with contextlib.suppress(ChannelClosed):
                channel.send({"do": "stop"})
                process.poll(self._spec.deadlines.stop_s)
        leftovers = process.stop(GRACE_S if polite else 2.0)
        channel.close()
        return leftovers + gpus.wait_until_idle({gpu.uuid: gpu.used_bytes for gpu in self._gpus})


def trial_environment(spec: TrialSpec) -> tuple[dict[str, str], Path]:
    """(whole environment of a trial process, cache folder): an engine's, and where the trial package is found."""
    environment, cache = engine_environment(spec)
    path = [str(trial_package()), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}, cache


def engine_environment(spec: TrialSpec) -> tuple[dict[str, str], Path]:
    """(environment of an engine of this trial, its cache folder), for trials and for served engines alike."""
    interpreter = probe(spec.python)
    cache = cache_of(spec.python, spec.gpus, spec.cache_root)
    offline = Path(spec.model).is_dir() or spec.revision is not None
    environment = caches.inherited_environment(offline)
    environment |= caches.engine_environment(
        cache,
        cpu_build=interpreter.cpu_build,
        offline=offline,
        start_s=spec.deadlines.start_s,
        bytecode=interpreter.bytecode,
    )
    environment |= gpus.cuda_environment(spec.gpus)
    return environment | dict(spec.environment), cache


def cache_of(python: str, uuids: Sequence[str], root: Path | None = None) -> Path:
    """The cache folder of the engines that ``python`` starts on these GPUs."""
    interpreter = probe(python)
    chosen = gpus.select(uuids) or gpus.visible(gpus.inventory())[:1]
    name = "cpu" if interpreter.cpu_build or not chosen else chosen[0].name
    return caches.engine_cache(root or caches.cache_root(), name, interpreter.vllm_version or "none")


def asking_environment(python: str, uuids: Sequence[str]) -> dict[str, str]:
    """What the child that is asked about vLLM runs with: a trial's GPUs and no others; what it learns is kept for trials."""
    bytecode = probe(python).bytecode
    return gpus.cuda_environment(uuids) | caches.asking_environment(cache_of(python, uuids), bytecode=bytecode)


def read_records(path: Path) -> tuple[RequestRecord, ...]:
    """The records that a trial process wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return tuple(RequestRecord.from_json(json.loads(line)) for line in lines)
