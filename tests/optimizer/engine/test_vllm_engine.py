"""The vLLM engine against a stand-in for vLLM: what is passed on, and what becomes of each way in which a request ends."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.engine_contract import EngineContract, Execute, request, send

from vopt.objectives.metrics import compute_metrics
from vopt.objectives.records import RequestFailureKind
from vopt.optimizer.engine.base import Engine
from vopt.optimizer.engine.vllm import VllmEngine
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource

STUB = Path(__file__).parents[2] / "support" / "stub_vllm"


@pytest.fixture
def stub_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in is ``vllm`` for one test; the real one, if it was imported, comes back after it."""
    own = {name: module for name, module in sys.modules.items() if name == "vllm" or name.startswith("vllm.")}
    for name in own:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(STUB))
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]
    sys.modules.update(own)


@pytest.fixture
def llms(stub_vllm: None) -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for llm in made:
        llm.core.kill()
        llm.core.wait()


class TestVllmEngineOnTheStandIn(EngineContract):
    too_long = 5_000

    @pytest.fixture
    def execute(self, llms: list[Any]) -> Execute:
        def run(check: Callable[[Engine], Awaitable[Any]]) -> Any:
            async def main() -> Any:
                engine = VllmEngine.build("some/model", {})
                llms.append(engine._llm)
                return await check(engine)

            return asyncio.run(main())

        return run

    def kill(self, engine: Any) -> None:
        engine._llm.core.kill()


def test_the_engine_is_built_with_the_defaults_of_vllm_serve(llms: list[Any]) -> None:
    """No run on a CPU could tell: with ``AsyncLLM``'s own usage context an H200 would get 128 sequences, not 1024."""
    given = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    engine = VllmEngine.build("some/model", given, revision="abc")
    llms.append(engine._llm)
    started = engine.started({"import": 1.0})
    assert started.resolved["max_num_seqs"] == 1024
    assert started.resolved["max_num_batched_tokens"] == 8192
    assert started.kv_cache_tokens == 16_000
    assert given == {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, (
        "the caller's values stay as they were"
    )
    assert "hf_token" not in started.resolved


def test_requests_in_flight_are_in_the_window_of_their_load(llms: list[Any]) -> None:
    """They are told on the engine's clock, counted from the load's zero: else none of their tokens would be in its window."""
    source = RequestSource(lengths=((40, 1_500),) * 8, bodies=(tuple(range(20, 400)),), digit_ids=tuple(range(8, 18)))
    window = {"warmup_factor": 0.0, "min_requests": 0, "max_doublings": 0, "tick_s": 0.2, "deadline_s": 30.0}

    async def main() -> Any:
        engine = VllmEngine.build("some/model", {})
        llms.append(engine._llm)
        before_s = engine.now()
        load = await drive(engine, source, LoadPlan(Arrivals.CLOSED, 2.0, concurrency=4, **window))
        return load, engine.now() - before_s

    load, took_s = asyncio.run(main())
    in_flight = [record for record in load.records if record.censored]
    assert len(in_flight) == 4
    for record in in_flight:
        times = [0.0, record.sent_s, *record.chunk_times_s, took_s]  # one that was sent last may have no token yet
        assert times == sorted(times)
        assert times[-2] > load.window.opened_s
    assert any(record.chunk_times_s for record in in_flight)
    assert compute_metrics(load).values["output_tokens_per_s"] > 0


def test_an_argument_that_this_vllm_lacks_is_named(stub_vllm: None) -> None:
    with pytest.raises(TypeError, match="max_num_sequences"):
        VllmEngine.build("some/model", {"max_num_sequences": 4})


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("error_at:7", RequestFailureKind.STREAM_ERROR), ("short_at:7", RequestFailureKind.SHORT_OUTPUT)],
)
def test_a_stream_that_ends_badly_is_no_success(
    llms: list[Any], monkeypatch: pytest.MonkeyPatch, fault: str, kind: RequestFailureKind
) -> None:
    monkeypatch.setenv("STUB_FAULT", fault)

    async def main() -> Any:
        engine = VllmEngine.build("some/model", {})
        llms.append(engine._llm)
        return await send(engine, request(7)), await send(engine, request(8))

    bad, good = asyncio.run(main())
    assert bad.failure is not None
    assert bad.failure.kind is kind
    assert good.succeeded


def test_silence_is_a_timeout(llms: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_FAULT", "hang_load")

    async def main() -> Any:
        engine = VllmEngine.build("some/model", {})
        llms.append(engine._llm)
        return await send(engine, request(1), idle_timeout_s=0.2)

    record = asyncio.run(main())
    assert record.failure is not None
    assert record.failure.kind is RequestFailureKind.TIMEOUT_IDLE
    assert record.output_tokens == 0


def test_a_sampling_parameter_that_vllm_lacks_fails_the_request_not_the_engine(llms: list[Any]) -> None:
    async def main() -> Any:
        engine = VllmEngine.build("some/model", {})
        llms.append(engine._llm)
        return await send(engine, request(1, sampling={"warmth": 1})), engine.dead

    record, dead = asyncio.run(main())
    assert record.failure is not None
    assert "warmth" in record.failure.message
    assert dead is None


def test_steps_that_fill_the_token_budget_are_counted(llms: list[Any]) -> None:
    async def main() -> Any:
        engine = VllmEngine.build("some/model", {"max_num_batched_tokens": 1024, "max_num_seqs": 8})
        llms.append(engine._llm)
        await send(engine, request(1, prompt=1000, output=5))
        return await engine.counters(origin_s=engine.now())

    sample = asyncio.run(main())
    assert (sample.engine_steps, sample.full_budget_steps) == (5, 1)
    assert sample.generation_tokens == 5
