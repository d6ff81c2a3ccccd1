"""What a client learns of its server beside the answers: counters, models, health."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asking_client import OK, REQUEST, failed
from support.fault_server import (
    End,
    Script,
    serving,
    status,
)

from vopt.objectives.records import RequestFailureKind as Kind
from vopt.optimizer.load.client import HttpEngine
from vopt.optimizer.load.target import Endpoint, parse_target

METRICS_PAGE = """
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:generation_tokens_total{engine="0"} 1.2e+06
vllm:prefix_cache_queries_total{engine="0"} NaN
"""


async def test_counters_come_from_the_metrics_page_at_most_once_a_second() -> None:
    async with serving([status("200 OK", METRICS_PAGE)]) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        first = await engine.counters(origin_s=engine.now())
        again = await engine.counters(origin_s=engine.now())
        assert len(server.requests) == 1
    assert again is first
    assert (first.running, first.kv_usage, first.generation_tokens) == (7, 0.5, 1_200_000)
    assert (first.prefix_queries, first.waiting) == (None, None)


async def test_no_metrics_page_is_asked_for_once() -> None:
    async with serving([status("404 Not Found")]) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        for _ in range(2):
            sample = await engine.counters(origin_s=0.0)
            engine._last_sample_at = float("-inf")
        assert len(server.requests) == 1
    assert sample.running is None


async def test_models() -> None:
    page = status("200 OK", '{"object": "list", "data": [{"id": "one"}, {"id": "two"}]}')
    async with serving([page]) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        assert await engine.models() == ("one", "two")
    async with serving([status("401 Unauthorized")]) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        with pytest.raises(ValueError, match="401"):
            await engine.models()


async def test_an_owned_server_whose_health_says_so_is_dead() -> None:
    def answer(path: str, body: dict[str, Any]) -> Script:
        return [status("503 Service Unavailable")] if path == "/health" else [status("500 Internal Server Error")]

    async with serving(answer) as server, HttpEngine(parse_target(server.url, "m"), owned=True) as engine:
        failed(await engine.run(REQUEST, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=5.0), Kind.ENGINE_DIED, "503")
        assert engine.dead is not None
        before = len(server.requests)
        failed(await engine.run(REQUEST, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=5.0), Kind.ENGINE_DIED)
        assert len(server.requests) == before, "nothing is sent to a dead engine"


async def test_a_foreign_server_is_never_declared_dead() -> None:
    async with serving([status("503 Service Unavailable")]) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        failed(await engine.run(REQUEST, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=5.0), Kind.HTTP_STATUS)
        assert engine.dead is None


async def test_requests_in_flight_fail_when_the_engine_is_marked_dead() -> None:
    async with serving([*OK[:3], End.HANG]) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        task = asyncio.create_task(engine.run(REQUEST, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=20.0))
        while engine.partial(0) is None:  # noqa: ASYNC110 - progress is asked for, not told
            await asyncio.sleep(0.005)
        engine.mark_dead("exit status 1")
        failed(await task, Kind.ENGINE_DIED, "exit status 1")


async def test_a_workload_that_does_not_fit_the_endpoint_is_not_sent() -> None:
    async with serving(OK) as server:
        async with HttpEngine(parse_target(server.url, "m", endpoint=Endpoint.CHAT)) as engine:
            failed(await engine.run(REQUEST, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=5.0), Kind.NOT_SENT)
        assert not server.requests
