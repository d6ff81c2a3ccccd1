"""``vllm serve`` of the real vLLM for the CPU, started, loaded over HTTP and stopped as a trial."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.sessions import SMALL, eventually, named, plan, source, spec

from vopt.objectives.metrics import compute_metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer.engine.kin import descendants
from vopt.optimizer.engine.process import engine_environment
from vopt.optimizer.engine.server import ServerSession, UrlSession
from vopt.optimizer.load.client import read_metrics
from vopt.optimizer.load.metrics_text import parse
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.target import request_fields
from vopt.optimizer.trial import Blame, EngineFailure, FailureKind, Phase

pytestmark = pytest.mark.vllm

WORDS = ("--load-format", "dummy", "--enforce-eager", "--max-model-len", "2048", "--gpu-memory-utilization", "0.08")


def session(directory: Path, model: Path, python: str, cache: Path, *words: str) -> ServerSession:
    argv = ("vllm", "serve", str(model), *WORDS, *words, "--host", "0.0.0.0", "--port", "8000")
    return ServerSession(spec(directory, model, python, cache), argv, clients=1)


def no_phase(phase: Phase, words: str) -> None: ...


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, vllm_python: str, tiny_models: tuple[Path, Path], engine_cache: Path
) -> Iterator[ServerSession]:
    server = session(tmp_path_factory.mktemp("served"), tiny_models[0], vllm_python, engine_cache)
    server.start(no_phase)
    yield server
    assert server.close() == ()
    assert descendants(os.getpid()) == ()


def counted(server: ServerSession, name: str) -> float:
    return sum(parse(read_metrics(server.target)).get(name, {}).values())


COUNTERS = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def test_counts_equal_those_of_the_server(served: ServerSession) -> None:
    before = {name: counted(served, name) for name in COUNTERS}
    load = served.load(source(), replace(plan(window_s=30.0), max_requests=96), lambda tick: True)
    ours = (len(load.records), sum(r.prompt_tokens for r in load.records), sum(r.output_tokens for r in load.records))
    assert all(record.succeeded for record in load.records)
    assert ours == tuple(counted(served, name) - before[name] for name in COUNTERS)
    assert len(load.records) == 96
    assert compute_metrics(load).contradictory == 0
    assert load.samples[-1].generation_tokens


def test_a_window_of_a_served_engine(served: ServerSession) -> None:
    load = served.load(replace(source(), first_number=50_000), plan(window_s=12.0), lambda tick: True)
    metrics = compute_metrics(load)
    assert load.status in (LoadStatus.COMPLETE, LoadStatus.UNSTEADY)
    assert metrics.values["success_rate"] == 1.0
    assert metrics.values["prefix_hit_rate"] < 0.01


def yield_to_the_client() -> None:
    """Core and worker of a tiny model spin for each other on both cores of a small machine; long answers starve the client for
    up to 15 s there (Linux 6.18), which it tells as a standstill of its own."""
    for engine in named("VLLM"):
        for thread in os.listdir(f"/proc/{engine.identity.pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), 15)


def test_a_server_that_sends_eight_tokens_a_chunk_is_not_slower_for_it(
    tmp_path: Path, vllm_python: str, tiny_models: tuple[Path, Path], engine_cache: Path
) -> None:
    """One token a chunk for requests in flight would lack a quarter of all."""
    lengths = tuple((40, output) for output in (300, 500, 700, 400, 900, 600))
    requests = RequestSource(lengths=lengths, bodies=(tuple(range(20, 400)),), digit_ids=tuple(range(8, 18)))
    window = LoadPlan(Arrivals.CLOSED, 8.0, concurrency=16, min_requests=0, max_doublings=0, deadline_s=90.0)
    server = session(tmp_path, tiny_models[0], vllm_python, engine_cache, "--stream-interval", "8")
    server.start(no_phase)
    yield_to_the_client()
    try:
        for _ in range(3):  # a window in which this machine was busy elsewhere may close on requests without a token
            before = counted(server, "vllm:generation_tokens_total")
            load = server.load(requests, window, lambda tick: True)
            told = counted(server, "vllm:generation_tokens_total") - before
            in_flight = [record.chunk_tokens for record in load.records if record.censored and record.chunk_tokens]
            if in_flight:
                break
    finally:
        server.close()
    # From above by the server's counter, which runs on until it has noticed that we left; from below by its eight a chunk.
    assert sum(sum(record.chunk_tokens) for record in load.records) <= 1.02 * told
    assert in_flight
    assert sum(map(sum, in_flight)) >= 0.8 * 8 * sum(len(tokens) - 1 for tokens in in_flight)


def test_a_running_server_is_measured_and_left_alone(served: ServerSession) -> None:
    other = UrlSession(served.target, clients=1)
    assert other.start(no_phase).vllm_version == "0.32.0"
    load = other.load(replace(source(), first_number=90_000), replace(plan(window_s=20.0), max_requests=20), lambda tick: True)
    assert sum(record.succeeded for record in load.records) == 20
    assert other.close() == ()
    assert "vllm:" in read_metrics(served.target)
    with pytest.raises(EngineFailure, match="not another"):
        UrlSession(replace(served.target, model="another")).start(no_phase)


IN_PROCESS = """
    import asyncio, json, sys
    from vopt.optimizer.engine.vllm import VllmEngine, sampling
    from vopt.optimizer.load.source import RequestSource

    async def main():
        order = json.load(sys.stdin)
        engine = VllmEngine.build(order["model"], order["arguments"])
        source = RequestSource.from_json(order["source"])
        for index in order["indices"]:
            request, tokens = source.request(index), []
            prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
            async for output in engine._llm.generate(prompt, sampling(request), request_id=str(index)):
                tokens += output.outputs[0].token_ids
            print("tokens", json.dumps(tokens), flush=True)
        engine._llm.shutdown()

    asyncio.run(main())
"""


def test_greedy_requests_are_the_same_over_both_transports(
    served: ServerSession, vllm_python: str, tiny_models: tuple[Path, Path], tmp_path: Path, engine_cache: Path
) -> None:
    """One request at a time: batching changes the order of additions, and with it near ties."""
    greedy = replace(source(), sampling={"temperature": 0.0})
    indices = [0, 1, 2, 3]

    async def over_http() -> list[list[int]]:
        answers = []
        async with aiohttp.ClientSession() as http:
            for index in indices:
                body = request_fields(served.target, greedy.request(index)) | {"return_token_ids": True, "stream": False}
                del body["stream_options"]
                async with http.post(served.target.base_url + served.target.route, json=body) as response:
                    document: Any = await response.json()
                    answers.append(document["choices"][0]["token_ids"])
        return answers

    expected = asyncio.run(over_http())
    environment, _ = engine_environment(spec(tmp_path, tiny_models[0], vllm_python, engine_cache))
    names = str(Path(sys.modules["vopt.optimizer.engine.server"].__file__ or "").parents[3])
    done = subprocess.run(
        [vllm_python, "-c", textwrap.dedent(IN_PROCESS)],
        input=json.dumps({"model": str(tiny_models[0]), "arguments": SMALL, "source": greedy.to_json(), "indices": indices}),
        capture_output=True,
        text=True,
        timeout=240,
        env=environment | {"PYTHONPATH": os.pathsep.join([names, environment.get("PYTHONPATH", "")])},
        check=False,
    )
    lines = [json.loads(line.removeprefix("tokens ")) for line in done.stdout.splitlines() if line.startswith("tokens ")]
    assert lines == expected, done.stderr[-2000:]
    assert len({tuple(answer) for answer in expected}) > 1


@pytest.mark.fault("served: engine core killed under load")
def test_an_engine_that_dies_under_load(
    tmp_path: Path, vllm_python: str, tiny_models: tuple[Path, Path], engine_cache: Path
) -> None:
    server = session(tmp_path, tiny_models[0], vllm_python, engine_cache)
    try:
        server.start(no_phase)
        assert server._process is not None
        leader = server._process.pid
        core = eventually(lambda: named("VLLM::EngineCor", leader))[0]  # the shared server has one too
        killer = threading.Timer(3.0, os.kill, (core.identity.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(EngineFailure) as failure:
            server.load(source(), plan(window_s=40.0), lambda tick: True)
        killer.join()
        failed = failure.value.failed
        assert (failed.phase, failed.kind) == (Phase.LOAD, FailureKind.ENGINE_DIED)
        assert failed.load is not None
        assert failed.load.status is LoadStatus.ENGINE_DIED
        assert any(record.succeeded for record in failed.load.records)
    finally:
        assert server.close() == ()


@pytest.mark.fault("port taken by a foreign listener")
def test_a_port_that_is_taken_is_no_fault_of_the_configuration(
    tmp_path: Path,
    vllm_python: str,
    tiny_models: tuple[Path, Path],
    engine_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        foreign.setblocking(False)
        monkeypatch.setattr("vopt.optimizer.engine.server.free_port", lambda: foreign.getsockname()[1])
        refused = session(tmp_path, tiny_models[0], vllm_python, engine_cache)
        with pytest.raises(EngineFailure) as failure:
            refused.start(no_phase)
        with pytest.raises(BlockingIOError):
            foreign.accept()  # nobody ever asked it anything
    failed = failure.value.failed
    assert (failed.phase, failed.kind, failed.kind.blame) == (Phase.START, FailureKind.PORT, Blame.INFRASTRUCTURE), (
        failed.detail
    )
    assert refused.close() == ()


@pytest.mark.fault("served: flag refused")
def test_a_flag_that_vllm_refuses(tmp_path: Path, vllm_python: str, tiny_models: tuple[Path, Path], engine_cache: Path) -> None:
    server = session(tmp_path, tiny_models[0], vllm_python, engine_cache, "--scheduling-policy", "lof")
    with pytest.raises(EngineFailure) as failure:
        server.start(no_phase)
    assert (failure.value.failed.phase, failure.value.failed.kind) == (Phase.START, FailureKind.INVALID_CONFIG)
    assert server.close() == ()
