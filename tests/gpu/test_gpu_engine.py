"""On a GPU host: the engine contract on the real engine, one trial through the product's session, one short search.

Off by default: ``pytest --gpu tests/gpu``. ``VOPT_GPU_MODEL`` is the model's directory (no weights are needed),
``VOPT_GPU_SET`` what it is started with, as ``NAME=JSON`` words (default: dummy weights, 8,192 tokens of context).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.engine_contract import EngineContract, Execute
from support.sessions import eventually, named, plan, source

from vopt.objectives.metrics import compute_metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer import gpus
from vopt.optimizer.engine.base import Engine
from vopt.optimizer.engine.kin import descendants
from vopt.optimizer.engine.process import ProcessSession, engine_environment
from vopt.optimizer.trial import Deadlines, EngineConfig, TrialSpec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500), pytest.mark.filterwarnings("ignore")]  # vLLM's own warnings

SETTINGS = os.environ.get("VOPT_GPU_SET", "load_format=dummy max_model_len=8192").split()


@pytest.fixture(scope="module")
def model() -> str:
    found = os.environ.get("VOPT_GPU_MODEL")
    if not found:
        pytest.skip("VOPT_GPU_MODEL names no model directory")
    return found


def arguments() -> dict[str, Any]:
    """``VOPT_GPU_SET`` as engine arguments: JSON where it parses, else text."""
    given: dict[str, Any] = {}
    for setting in SETTINGS:
        name, _, value = setting.partition("=")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    return given


def spec(model: str, directory: Path) -> TrialSpec:
    """On the first free GPU; the one that the engine before it was on becomes free a moment after its end."""

    def free() -> list[str] | None:
        seen = gpus.visible(gpus.inventory())
        return [gpu.uuid for gpu in seen if gpu.free][:1] or (None if seen else [])

    eventually(lambda: free() is not None, 60.0)
    return TrialSpec(
        "0", model, EngineConfig(arguments()), directory, sys.executable, gpus=tuple(free() or ()), deadlines=Deadlines(900)
    )


class TestContractOnTheRealEngine(EngineContract):
    """One engine in this process for all of them; the last test kills it."""

    too_long = 100_000

    @pytest.fixture(scope="class")
    def engine_loop(self, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
        with pytest.MonkeyPatch.context() as patch:
            environment, _ = engine_environment(spec(model, tmp_path_factory.mktemp("contract")))
            for name in environment.keys() - os.environ.keys() | {"CUDA_VISIBLE_DEVICES"} & environment.keys():
                patch.setenv(name, environment[name])
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, daemon=True)
            thread.start()

            async def build() -> Any:
                from vopt.optimizer.engine.vllm import VllmEngine

                return VllmEngine.build(model, arguments())

            engine = asyncio.run_coroutine_threadsafe(build(), loop).result()
            yield engine, loop
            engine._llm.shutdown()
            loop.call_soon_threadsafe(loop.stop)
            thread.join(20.0)

    @pytest.fixture
    def execute(self, engine_loop: tuple[Any, Any]) -> Execute:
        engine, loop = engine_loop

        def run(check: Callable[[Engine], Awaitable[Any]]) -> Any:
            async def checked() -> Any:
                return await check(engine)

            return asyncio.run_coroutine_threadsafe(checked(), loop).result(300.0)

        return run

    def kill(self, engine: Any) -> None:
        for process in named("VLLM::EngineCor"):
            os.kill(process.identity.pid, signal.SIGKILL)


def test_a_trial_gives_its_memory_back(model: str, tmp_path: Path) -> None:
    own = spec(model, tmp_path)  # what another program does on another GPU of this host is not looked at
    before = gpus.used_bytes(own.gpus)
    others = descendants(os.getpid())  # of the engine that was in this process: its resource tracker
    session = ProcessSession(own)
    started = session.start(lambda phase, words: None)
    assert (started.kv_cache_tokens or 0) > 0
    load = session.load(source(), plan(), lambda tick: True)
    assert load.status in (LoadStatus.COMPLETE, LoadStatus.UNSTEADY)
    metrics = compute_metrics(load)
    assert metrics["success_rate"] == 1.0
    assert metrics.contradictory == 0
    assert session.close() == ()
    assert {entry.identity for entry in descendants(os.getpid())} <= {entry.identity for entry in others}
    for gpu in gpus.select(own.gpus):
        assert gpu.used_bytes <= before[gpu.uuid] + 2**30
    facts = {"kv_cache_tokens": started.kv_cache_tokens, "start_class": started.start_class, **started.start_parts_s}
    print(f"\ntrial: {facts}\n       {dict(metrics.values)}")


def test_one_short_search(model: str, tmp_path: Path) -> None:
    words = ["--goal", "throughput", "--trials", "3", "--rounds", "1", "--soak", "0", "--window", "5s", "--concurrency", "32"]
    words += ["--no-serve", "--no-guard", "--workload", "throughput", "--vary", "max_num_seqs=16,32,256", "--json"]
    for setting in SETTINGS:
        words += ["--set", setting]
    command = [sys.executable, "-m", "vopt.optimizer", "search", "--model", os.path.abspath(model), *words]
    others = {entry.identity for entry in descendants(os.getpid())}
    path = os.pathsep.join(os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)
    # What it says as it goes stays on standard error: with -s a detached run can be followed.
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    answer = json.loads(done.stdout)
    assert answer["verdict"] in ("better", "no_gain", "unconfirmed")
    assert answer["trials"]["measured"] >= 3
    assert not answer["simulated"]
    eventually(lambda: {entry.identity for entry in descendants(os.getpid())} <= others, 20.0)
    print(f"\nsearch: {answer['reason']}\n        {answer['command']}\n        {answer['trials']}")
