"""The contract of engines over HTTP and in a simulation, and one clock for requests in flight and the window they are in."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.engine_contract import EngineContract, Execute

from vopt.objectives.metrics import compute_metrics
from vopt.optimizer.engine.base import Engine
from vopt.optimizer.engine.hardware import hardware
from vopt.optimizer.engine.roofline import StepTime
from vopt.optimizer.engine.simulated_engine import DIED, SimulatedEngine
from vopt.optimizer.engine.simulated_scheduler import Scheduler
from vopt.optimizer.load.client import HttpEngine
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.target import parse_target
from vopt.optimizer.load.virtual_time import run_virtual
from vopt.optimizer.trial import FailureKind
from vopt.search_spaces.memory import memory_plan
from vopt.search_spaces.model import known_model

SERVER = Path(__file__).parents[2] / "support" / "stream_server.py"
EVERY_S = 0.02


@pytest.fixture
def bundle() -> int:
    """Tokens in a chunk."""
    return 1


@pytest.fixture
def server(bundle: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(URL, process) of a server that streams one chunk each 20 ms."""
    command = [sys.executable, str(SERVER), "--every", str(EVERY_S), "--bundle", str(bundle)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}", process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


class TestOverHttp(EngineContract):
    @pytest.fixture
    def execute(self, server: tuple[str, subprocess.Popen[str]]) -> Execute:
        url, self.process = server

        def run(check: Callable[[Engine], Awaitable[Any]]) -> Any:
            async def main() -> Any:
                async with HttpEngine(parse_target(url, "mock"), owned=True) as engine:
                    return await check(engine)

            return asyncio.run(main())

        return run

    def kill(self, engine: Any) -> None:
        self.process.kill()
        self.process.wait()


class TestOverHttpInBundles(TestOverHttp):
    """A server that does not say how many tokens its chunks hold, as under speculation or a stream interval."""

    @pytest.fixture
    def bundle(self) -> int:
        return 4


def simulated() -> SimulatedEngine:
    shape = known_model("Qwen/Qwen3-8B")
    assert shape is not None
    plan = memory_plan(shape, hardware("h200").gpu, {"max_model_len": 4096})
    step = StepTime(shape, hardware("h200"), plan.resolved)
    return SimulatedEngine(Scheduler(plan.resolved, plan.layout, plan.blocks, step), max_model_len=4096)


class TestInASimulation(EngineContract):
    too_long = 4_200

    @pytest.fixture
    def execute(self) -> Execute:
        engine = simulated()

        def run(check: Callable[[Engine], Awaitable[Any]]) -> Any:
            async def main() -> Any:
                engine.attach(asyncio.get_running_loop())
                try:
                    return await check(engine)
                finally:
                    engine.detach()

            return run_virtual(main())

        return run

    def kill(self, engine: Any) -> None:
        engine._die(DIED, FailureKind.ENGINE_DIED)


SOURCE = RequestSource(lengths=((40, 1_500),) * 8, bodies=(tuple(range(20, 400)),), digit_ids=tuple(range(8, 18)))
PLAN = LoadPlan(
    Arrivals.CLOSED, 1.0, concurrency=4, warmup_factor=0.0, min_requests=0, max_doublings=0, tick_s=0.2, deadline_s=30.0
)
"""None of these requests ends before the window closes: every token of the window belongs to a request in flight."""


async def check_in_flight(engine: Engine, per_s: float | None) -> None:
    """``per_s``: the tokens per second that the four streams bring; ``None``: some."""
    before_s = engine.now()
    load = await drive(engine, SOURCE, PLAN)
    took_s = engine.now() - before_s
    assert load.window is not None
    assert len(load.records) == 4
    for record in load.records:
        assert record.censored
        assert 0 <= record.sent_s <= record.chunk_times_s[0] <= record.chunk_times_s[-1] <= took_s
        assert record.chunk_times_s[-1] > load.window.opened_s
    rate = compute_metrics(load).values["output_tokens_per_s"]
    assert rate == pytest.approx(per_s, rel=0.25) if per_s else rate > 0


def test_requests_in_flight_are_in_the_window_of_their_load_over_http(server: tuple[str, subprocess.Popen[str]]) -> None:
    """On the host's own clock, which is far from the load's zero, none of their tokens would be in it."""

    async def main() -> None:
        async with HttpEngine(parse_target(server[0], "mock")) as engine:
            await check_in_flight(engine, 4 / EVERY_S)

    asyncio.run(main())


def test_requests_in_flight_are_in_the_window_of_their_load_in_a_simulation() -> None:
    """The second load of an engine: its clock went on, and the loop's began anew."""
    engine = simulated()

    async def one() -> None:
        engine.attach(asyncio.get_running_loop())
        await check_in_flight(engine, None)
        engine.detach()

    run_virtual(one())
    assert engine.now() > 1.0
    run_virtual(one())
