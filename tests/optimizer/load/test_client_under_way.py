"""Many requests of a client at once, and what is under way when it is cancelled or its window closes."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asking_client import OK, REQUEST
from counted import tokens_in
from support.fault_server import (
    DONE,
    ERROR,
    HEAD,
    LAST_CHUNK,
    End,
    Script,
    serving,
    status,
    token,
    usage,
)

from vopt.objectives.records import RequestRecord
from vopt.optimizer.load.client import HttpEngine
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.target import parse_target


async def test_each_request_has_a_connection_of_its_own() -> None:
    """A connection that is kept may be closed by the server just as the next request is sent: a failure of nobody's engine."""
    scripts = iter([OK, OK, [*OK[:2], ERROR, *OK[2:]], OK])
    async with serving(lambda path, body: next(scripts)) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        for index in range(4):
            await engine.run(replace(REQUEST, index=index), origin_s=0.0, scheduled_s=0.0, idle_timeout_s=5.0)
        assert server.connections == 4


async def test_many_streams_at_once() -> None:
    """More than the usual soft limit of open files would let through."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        await many_streams()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def many_streams() -> None:
    async with serving(OK) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        requests = [replace(REQUEST, index=index) for index in range(300)]
        records = await asyncio.gather(
            *(engine.run(request, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=20.0) for request in requests)
        )
    assert all(record.succeeded for record in records)
    assert [record.index for record in records] == list(range(300))


async def test_room_for_descriptors_is_made_before_they_are_needed() -> None:
    """Else the kernel stops the process for 5 to 20 ms when a load opens socket 256, 512, 1024, ..."""
    async with serving(OK) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        await engine.run(REQUEST, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=20.0)
        lines = Path("/proc/self/status").read_text().splitlines()  # noqa: ASYNC240 - no disk is behind it
    room = next(int(line.split()[1]) for line in lines if line.startswith("FDSize:"))
    assert room >= min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


async def test_streams_that_begin_among_many_under_way() -> None:
    """Streams under way are read every two milliseconds, first tokens when they come: none is lost where one goes over."""
    quick = [HEAD, *(step for _ in range(150) for step in (token(), 0.002)), token(finish_reason="length")]
    late = [HEAD, 0.1, token(), token(finish_reason="length"), usage(2), DONE, LAST_CHUNK]

    def answer(path: str, body: dict[str, Any]) -> Script:
        return [*quick, usage(151), DONE, LAST_CHUNK] if body["max_tokens"] == 151 else late

    async with serving(answer) as server, HttpEngine(parse_target(server.url, "m")) as engine:

        async def one(index: int, tokens: int) -> RequestRecord:
            request = replace(REQUEST, index=index, max_tokens=tokens)
            return await engine.run(request, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=20.0)

        records = await asyncio.gather(*(one(index, 151) for index in range(30)), *(one(100 + n, 2) for n in range(10)))
    assert all(record.succeeded for record in records), [record.failure for record in records]
    assert [len(record.chunk_times_s) for record in records] == [151] * 30 + [2] * 10
    for record in records:
        assert list(record.chunk_times_s) == sorted(record.chunk_times_s)


async def test_cancelling_closes_the_connection_and_partial_shows_what_came() -> None:
    async with serving([*OK[:3], End.HANG]) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        task = asyncio.create_task(engine.run(REQUEST, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=20.0))
        partial = None
        while partial is None or len(partial[1]) < 2:
            await asyncio.sleep(0.005)
            partial = engine.partial(0)
        assert partial[2] == (1, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.partial(0) is None


async def test_partial_times_count_from_the_origin_like_those_of_a_record() -> None:
    async with serving([*OK[:3], End.HANG]) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        origin_s = engine.now() - 100.0
        task = asyncio.create_task(engine.run(REQUEST, origin_s=origin_s, scheduled_s=100.0, idle_timeout_s=20.0))
        while (partial := engine.partial(0)) is None or not partial[1]:  # noqa: ASYNC110 - progress is asked for, not told
            await asyncio.sleep(0.005)
        sent_s, times, _ = partial
        assert 100.0 <= sent_s <= times[0] <= times[-1] <= engine.now() - origin_s
        task.cancel()


async def test_what_is_in_flight_as_the_window_closes_counts_with_its_tokens() -> None:
    """Streams that outlive the load: all tokens of the window are in censored records."""
    endless: list[Any] = [OK[0], *[step for _ in range(400) for step in (0.01, OK[1])], End.HANG]
    source = RequestSource(lengths=((8, 500),) * 64, bodies=(tuple(range(20, 40)),), digit_ids=tuple(range(10)))
    no_page = [status("404 Not Found")]
    load_plan = LoadPlan(
        Arrivals.CONSTANT, window_s=0.4, rate=20.0, warmup_s=0.1, min_requests=0, max_doublings=0, deadline_s=3.0, tick_s=0.1
    )

    def script(path: str, body: dict[str, Any]) -> Script:
        return no_page if path == "/metrics" else endless

    async with serving(script) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        load = await drive(engine, source, load_plan)
    assert load.window is not None
    assert load.records
    for record in load.records:
        assert record.censored
        assert 0 <= record.sent_s <= record.ended_s < 5.0
        assert all(record.sent_s <= at <= record.ended_s for at in record.chunk_times_s)
    assert tokens_in(load.records, load.window.opened_s, load.window.closed_s) > 0
