"""Served engines (``base.Session``): ``vllm serve`` started for one trial, or a server that somebody else runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from vopt.objectives.records import LoadResult, LoadStatus
from vopt.optimizer import caches, gpus, room
from vopt.optimizer.engine.base import OnPhase, OnTick
from vopt.optimizer.engine.failures import LINES_KEPT, Ending, classify, clean, disturbed, root_cause
from vopt.optimizer.engine.interpreter import probe
from vopt.optimizer.engine.ports import LOOPBACK, free_port, listened, listens
from vopt.optimizer.engine.process import engine_environment
from vopt.optimizer.engine.readahead import Readahead, weight_files
from vopt.optimizer.engine.startup_log import read_start_log
from vopt.optimizer.engine.supervised import GRACE_S, SupervisedProcess, tail
from vopt.optimizer.load.client import HttpEngine, RefusedByServer
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import STOOD_STILL_S, LoadPlan, StoodStill
from vopt.optimizer.load.shares import client_processes
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.spread import spread
from vopt.optimizer.load.target import API_KEY_VARIABLES, Target
from vopt.optimizer.trial import EngineFailure, Failed, FailureKind, Phase, Started, TrialSpec

READY_POLL_S = 0.5
CHILD_POLL_S = 0.2
BROKEN_ANSWERS = 5
BROKEN_AFTER_S = 10.0
"""A server of ours that answers every question with an HTTP error for so long is broken, not late: vLLM listens only once
its engine is up. Seen on an H200 host with vLLM 0.22.1, where a broken dependency of the HTTP server made every route answer
500 while the engine was well."""
_PLACE_FLAGS = (
    "--host",
    "--port",
    "--uds",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--ssl-ca-certs",
    "--ssl-cert-reqs",
    "--root-path",
)


class ServerSession:
    """``vllm serve`` for one trial: spawned, loaded over HTTP and stopped.

    ``argv`` is the command that a user would run (``vllm serve MODEL ...``). It runs with the trial's interpreter, on a free
    port of 127.0.0.1 whatever host, port or TLS it names. It is ready when our own child is alive, the port is held by a
    process of ours, and ``/v1/models`` lists the expected name: a foreign server on the port never gets a request.
    ``clients`` processes load it; ``None``: as many as ``client_processes`` says for each plan.
    """

    def __init__(self, spec: TrialSpec, argv: Sequence[str], *, clients: int | None = None) -> None:
        if tuple(argv[:2]) != ("vllm", "serve"):
            raise ValueError(f"not a vllm serve command: {' '.join(argv[:3])}")
        self._spec = spec
        self._words = tuple(without_place(argv[2:]))
        self._process: SupervisedProcess | None = None
        self._port = 0
        self._environment: dict[str, str] = {}
        self._idle: dict[str, int] = {}
        self._started: Started | None = None
        self._closed: tuple[str, ...] | None = None
        self._interrupted = False
        self._clients = clients
        self._oom_kills = room.oom_kills()
        self._readahead = Readahead(())

    @property
    def served_name(self) -> str:
        return self._spec.served_model_name or self._spec.model

    @property
    def target(self) -> Target:
        key = next((self._environment[name] for name in API_KEY_VARIABLES[:1] if self._environment.get(name)), None)
        return Target("http", LOOPBACK, self._port, self.served_name, api_key=key)

    def start(self, on_phase: OnPhase) -> Started:
        spec = self._spec
        on_phase(Phase.START, "starting vllm serve")
        spec.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        environment, cache = engine_environment(spec)
        self._environment = environment | {"PYTHONSAFEPATH": "1"}  # the working directory is no place for modules
        self._idle = gpus.used_bytes(spec.gpus)
        before = caches.cache_state(cache)
        caches.lend_inspections(cache)
        self._port = free_port()
        self._readahead = Readahead(weight_files(spec.model, spec.arguments))
        began = time.monotonic()
        self._process = SupervisedProcess(
            [
                spec.python,
                "-m",
                "vllm.entrypoints.cli.main",
                "serve",
                *self._words,
                "--host",
                LOOPBACK,
                "--port",
                str(self._port),
            ],
            environment=self._environment,
            log=spec.directory / "engine.log",
            grace_s=spec.deadlines.stop_s,
        )
        asyncio.run(self._until_ready(began + spec.deadlines.start_s))
        ahead = self._readahead.settle()
        log = read_start_log(self._lines(20_000))
        self._started = Started(
            vllm_version=probe(spec.python).vllm_version or "unknown",
            resolved=spec.arguments.to_json(),
            kv_cache_tokens=log.kv_cache_tokens,
            kv_cache_bytes=log.kv_cache_bytes,
            start_class=caches.start_class(before, caches.cache_state(cache)),
            start_parts_s={
                **log.parts_s,
                "ready": time.monotonic() - began,
                **({"weights_ahead": ahead.took_s} if ahead.read_bytes else {}),
            },
            messages=log.messages,
        )
        return self._started

    async def _until_ready(self, until: float) -> None:
        process = self._process
        assert process is not None
        async with HttpEngine(self.target) as engine:
            refusals, refused_since = 0, 0.0
            while True:
                if process.poll(0.0) is not None:
                    self._fail(Phase.START)
                ours = process.pid is not None and listens(process.pid, self._port)
                if time.monotonic() >= until:
                    self._fail_late(strangers=not ours and bool(listened(self._port)))
                if ours:
                    try:
                        names = await engine.models()
                    except RefusedByServer as refusal:
                        refused_since = refused_since if refusals else time.monotonic()
                        refusals += 1
                        if refusals >= BROKEN_ANSWERS and time.monotonic() - refused_since >= BROKEN_AFTER_S:
                            self._fail_broken(str(refusal))
                    except (OSError, TimeoutError, ValueError):
                        refusals = 0
                    else:
                        refusals = 0
                        if self.served_name in names:
                            return
                        if names:
                            self._fail(Phase.START, exception=f"the server offers {', '.join(names)}, not {self.served_name}")
                asleep_at = time.monotonic()
                await asyncio.sleep(READY_POLL_S)
                stood_still_s = time.monotonic() - asleep_at - READY_POLL_S
                if stood_still_s > STOOD_STILL_S:
                    until += stood_still_s  # with us, maybe the server too was stopped

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        try:
            with quiet_collector():
                clients = client_processes(plan) if self._clients is None else self._clients
                if clients > 1:
                    result = spread(self.target, source, plan, on_tick, clients, owned=True)
                else:
                    result = asyncio.run(self._load(source, plan, on_tick))
        except (StoodStill, ChildProcessError) as error:  # of the client; the server is not at fault
            self._fail(Phase.LOAD, disturbance=(0, f"{type(error).__name__}: {error}"))
        if result.status is LoadStatus.ENGINE_DIED:
            self._fail(Phase.LOAD, exception=result.detail, load=result)
        return result

    async def _load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        async with HttpEngine(self.target, total_timeout_s=plan.total_timeout_s, owned=True) as engine:
            watch = asyncio.create_task(self._watch_child(engine))
            try:
                return await drive(engine, source, plan, on_tick)
            finally:
                watch.cancel()

    async def _watch_child(self, engine: HttpEngine) -> None:
        assert self._process is not None
        while (code := self._process.poll(0.0)) is None:  # noqa: ASYNC110 - a pipe is asked; nothing here sets an event
            await asyncio.sleep(CHILD_POLL_S)
        engine.mark_dead(f"vllm serve ended during the load: {Ending(code).words()}")

    def _fail(
        self,
        phase: Phase,
        *,
        exception: str | None = None,
        hang: bool = False,
        load: LoadResult | None = None,
        disturbance: tuple[int, str] | None = None,
    ) -> NoReturn:
        """End the server, then say what happened: only then is its log complete."""
        assert self._process is not None
        ending, disturbance = Ending(self._process.exit_code), disturbance or self._process.disturbed
        leftovers = self.close()
        failed = classify(
            phase,
            ending,
            exception or self._process.spawn_error,
            self._lines(4000),
            hang=hang,
            oom_killed=room.oom_kills() > self._oom_kills,
        )
        if disturbance is not None:
            failed = disturbed(failed, disturbance)
        held = [name for name in leftovers if name.startswith("GPU")]
        if held:
            failed = dataclasses.replace(failed, detail=f"{failed.detail}; {'; '.join(held)}")
        raise EngineFailure(dataclasses.replace(failed, started=self._started, load=load))

    def _fail_late(self, *, strangers: bool) -> NoReturn:
        """Its time is over; where strangers listen on its port (vLLM shares it with them), it may be up and is not to blame."""
        if strangers:
            self._fail(Phase.START, exception=f"Address already in use: others listen on port {self._port}")
        self._fail(Phase.START, hang=True)

    def _fail_broken(self, answer: str) -> NoReturn:
        """The engine is up and the HTTP server before it answers errors only: the installation's fault, whatever is tried."""
        self.close()
        log_tail = self._lines(LINES_KEPT)
        last = root_cause(log_tail) or next((line for line in reversed(log_tail) if line.strip()), "nothing")
        words = f"the server listens, but {answer} (for {BROKEN_AFTER_S:g} s and more); its log's last error: {clean(last)}"
        raise EngineFailure(Failed(Phase.START, FailureKind.DRIVER, words[:1000], log_tail=log_tail))

    def _lines(self, most: int) -> tuple[str, ...]:
        return tail(self._spec.directory / "engine.log", most)

    def close(self) -> tuple[str, ...]:
        if self._closed is None:
            grace_s = min(GRACE_S, self._spec.deadlines.stop_s) if not self._interrupted else 2.0
            self._interrupted = True  # until it has returned: what interrupts it leaves the next call to kill
            self._readahead.settle()
            leftovers = () if self._process is None else self._process.stop(grace_s)
            self._closed = leftovers + gpus.wait_until_idle(self._idle)
        return self._closed


class UrlSession:
    """A server that runs already: loaded, never started and never stopped. ``close`` leaves it as it is."""

    def __init__(self, target: Target, *, clients: int | None = None) -> None:
        self._target = target
        self._clients = clients

    def start(self, on_phase: OnPhase) -> Started:
        """Ask what it serves. ``EngineFailure`` when it does not answer or does not serve the model."""
        on_phase(Phase.START, f"asking {self._target.base_url}")
        return asyncio.run(self._ask())

    async def _ask(self) -> Started:
        target = self._target
        async with HttpEngine(target) as engine:
            try:
                names = await engine.models()
            except (OSError, TimeoutError, ValueError) as error:
                words = f"{target.base_url}/v1/models: {str(error) or 'no answer in time'}"
                raise EngineFailure(Failed(Phase.START, FailureKind.PORT, words)) from error
            if target.model not in names:
                words = f"{target.base_url} serves {', '.join(names) or 'nothing'}, not {target.model}"
                raise EngineFailure(Failed(Phase.START, FailureKind.BAD_REQUEST, words))
            version = await _server_version(engine)
        return Started(vllm_version=version or "unknown", resolved={})

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        with quiet_collector():
            clients = client_processes(plan) if self._clients is None else self._clients
            try:
                if clients > 1:
                    return spread(self._target, source, plan, on_tick, clients)
                return asyncio.run(self._load(source, plan, on_tick))
            except (StoodStill, ChildProcessError) as error:
                words = f"{type(error).__name__}: {error}"
                raise EngineFailure(Failed(Phase.LOAD, FailureKind.DISTURBED, words)) from error

    async def _load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        async with HttpEngine(self._target, total_timeout_s=plan.total_timeout_s) as engine:
            return await drive(engine, source, plan, on_tick)

    def close(self) -> tuple[str, ...]:
        return ()


async def _server_version(engine: HttpEngine) -> str | None:
    """vLLM's ``/version``; ``None`` from servers that have none."""
    document: Any = await engine.get_json("/version")
    version = document.get("version") if isinstance(document, Mapping) else None
    return version if isinstance(version, str) else None


def without_place(words: Sequence[str]) -> Iterator[str]:
    """The words of a command without those that say where it listens: a measured server is on the loopback alone."""
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in _PLACE_FLAGS:
            skip = True
        elif word.partition("=")[0] not in _PLACE_FLAGS:
            yield word


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep what exists out of garbage collections during a load: a full one would stop all streams for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
