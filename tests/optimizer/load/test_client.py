"""What the load client makes of servers that misbehave: the kind of failure, the tokens credited, and the times."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counted import tokens_in
from support.fault_server import (
    DONE,
    ERROR,
    HEAD,
    LAST_CHUNK,
    End,
    Script,
    chunk,
    delta,
    event,
    good,
    gzipped,
    serving,
    status,
    token,
    usage,
)

from vopt.objectives.consistency import contradictions
from vopt.objectives.records import RequestFailureKind as Kind
from vopt.objectives.records import RequestRecord
from vopt.optimizer.engine.base import Engine
from vopt.optimizer.load.client import HttpEngine
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Request
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.target import Dialect, Endpoint, parse_target

REQUEST = Request(index=0, prompt_token_ids=(5, 6, 7), prompt_tokens=3, max_tokens=4, sampling={"temperature": 0.0})
NATURAL = replace(REQUEST, ignore_eos=False)
CHAT = replace(REQUEST, prompt_token_ids=(), messages=({"role": "user", "content": "hi"},))
OK = good(4)
JSON = "content-type: application/json"
DECLARES_THREE = [HEAD, token(token_ids=[1, 2]), token("", "length", token_ids=[3]), usage(4), DONE, LAST_CHUNK]


async def ask(
    script: Script, request: Request = REQUEST, *, idle_s: float = 5.0, chat: bool = False, **options: Any
) -> RequestRecord:
    async with serving(script) as server:
        target = parse_target(server.url, "m", endpoint=Endpoint.CHAT if chat else Endpoint.COMPLETIONS)
        async with HttpEngine(target, **options) as engine:
            origin = engine.now()
            record = await engine.run(request, origin_s=origin, scheduled_s=0.0, idle_timeout_s=idle_s)
        posts = [entry for entry in server.requests if entry[0] == "POST"]
        assert len(posts) <= 1, "a load client never tries again"
    assert not contradictions(record)
    return record


def failed(record: RequestRecord, kind: Kind, words: str = "") -> None:
    assert record.failure is not None
    assert (record.failure.kind, words in record.failure.message) == (kind, True), record.failure
    assert (record.output_tokens, sum(record.chunk_tokens)) == (0, 0)
    assert not record.succeeded


async def test_a_good_stream() -> None:
    record = await ask(OK)
    assert record.succeeded
    assert (record.output_tokens, record.chunk_tokens, record.finish_reason) == (4, (1, 1, 1, 1), "length")
    assert (record.prompt_tokens, record.requested_output_tokens) == (3, 4)
    assert record.first_content_s == record.chunk_times_s[0]


def test_the_client_is_an_engine() -> None:
    assert isinstance(HttpEngine(parse_target("http://127.0.0.1:9", "m")), Engine)


@pytest.mark.parametrize("position", range(1, len(OK) - 1))
async def test_an_error_at_every_position_credits_nothing(position: int) -> None:
    """Before the first token, between tokens, behind the usage block, and instead of the end marker."""
    record = await ask([*OK[:position], ERROR, *OK[position:]])
    failed(record, Kind.STREAM_ERROR, "the engine broke")
    assert len(record.chunk_times_s) == min(position - 1, 4)


@pytest.mark.parametrize("position", range(1, len(OK) - 1))
async def test_a_stream_that_is_closed_at_any_position(position: int) -> None:
    failed(await ask([*OK[:position], End.CLOSE]), Kind.TRUNCATED)


@pytest.mark.parametrize("position", range(1, OK.index(DONE)))
async def test_a_stream_that_ends_in_order_but_early(position: int) -> None:
    failed(await ask([*OK[:position], DONE, LAST_CHUNK]), Kind.TRUNCATED)


@pytest.mark.parametrize(
    ("script", "request_", "kind", "words"),
    [
        ([*OK[:-2], LAST_CHUNK], REQUEST, Kind.TRUNCATED, "[DONE]"),
        ([*OK[:3], End.RESET], REQUEST, Kind.CONNECTION, ""),
        ([End.RESET], REQUEST, Kind.CONNECTION, ""),
        ([End.CLOSE], REQUEST, Kind.CONNECTION, "without an answer"),
        ([b"SSH-2.0-x\r\n\r\n", End.CLOSE], REQUEST, Kind.CONNECTION, "not an HTTP/1.1 status line"),
        ([status("429 Too Many Requests", '{"error": {"message": "slow down"}}')], REQUEST, Kind.HTTP_STATUS, "429: slow down"),
        ([status("500 Internal Server Error", "boom")], REQUEST, Kind.HTTP_STATUS, "500: boom"),
        ([status("503 Service Unavailable")], REQUEST, Kind.HTTP_STATUS, "503"),
        ([status("400 Bad Request", '{"object":"error","message":"too long"}')], REQUEST, Kind.HTTP_STATUS, "too long"),
        ([status("307 Temporary Redirect", "", "location: http://127.0.0.1:1/")], REQUEST, Kind.HTTP_STATUS, "307"),
        ([status("200 OK", '{"error": {"message": "late"}}', JSON)], REQUEST, Kind.STREAM_ERROR, "late"),
        ([status("200 OK", '{"choices": []}', JSON)], REQUEST, Kind.STREAM_ERROR, "one piece"),
        (good(3), REQUEST, Kind.SHORT_OUTPUT, "3 completion tokens instead of the 4"),
        ([*OK[:-3], usage(5), DONE, LAST_CHUNK], NATURAL, Kind.STREAM_ERROR, "where 4 were the limit"),
        ([*OK[:-3], usage(0), DONE, LAST_CHUNK], NATURAL, Kind.SHORT_OUTPUT, "no completion tokens"),
        ([HEAD, usage(4), DONE, LAST_CHUNK], REQUEST, Kind.TRUNCATED, "finish_reason"),
        ([HEAD, delta("stop"), usage(4), DONE, LAST_CHUNK], REQUEST, None, ""),
        ([HEAD, token(finish_reason="abort"), usage(4), DONE, LAST_CHUNK], REQUEST, Kind.STREAM_ERROR, "'abort'"),
        (DECLARES_THREE, REQUEST, Kind.STREAM_ERROR, "declared 3"),
        ([HEAD, event("{broken"), LAST_CHUNK], REQUEST, Kind.STREAM_ERROR, "not JSON"),
        ([HEAD, event([1]), LAST_CHUNK], REQUEST, Kind.STREAM_ERROR, "not an object"),
        ([*OK[:-1], token(), LAST_CHUNK], REQUEST, Kind.STREAM_ERROR, "after the end marker"),
        ([HEAD, b"zz\r\n"], REQUEST, Kind.CONNECTION, "not a chunk size"),
    ],
)  # fmt: skip
async def test_failures_by_kind(script: Script, request_: Request, kind: Kind | None, words: str) -> None:
    record = await ask(script, request_)
    if kind is None:
        assert record.succeeded
    else:
        failed(record, kind, words)


async def test_a_stalled_stream_ends_at_the_idle_timeout() -> None:
    began = time.perf_counter()
    record = await ask([*OK[:3], End.HANG], idle_s=0.2)
    failed(record, Kind.TIMEOUT_IDLE, "nothing more for 0.2 s")
    assert len(record.chunk_times_s) == 2
    assert 0.2 <= record.ended_s - record.chunk_times_s[-1] < time.perf_counter() - began


async def test_slow_headers_end_at_the_idle_timeout() -> None:
    failed(await ask([End.HANG], idle_s=0.1), Kind.TIMEOUT_IDLE, "no answer for 0.1 s")


async def test_a_stream_that_trickles_ends_at_the_total_timeout() -> None:
    steps: list[bytes | float] = [token(), 0.02]
    trickle = [HEAD, *steps * 200]
    failed(await ask(trickle, total_timeout_s=0.2), Kind.TIMEOUT_TOTAL, "not finished after 0.2 s")


async def test_a_server_that_does_not_accept() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(8)]  # a full backlog drops further connections
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        async with HttpEngine(parse_target(f"http://127.0.0.1:{address[1]}", "m"), connect_timeout_s=0.2) as engine:
            record = await engine.run(REQUEST, origin_s=engine.now(), scheduled_s=0.0, idle_timeout_s=5.0)
        for filler in fillers:
            filler.close()
    failed(record, Kind.TIMEOUT_CONNECT)


async def test_connection_refused() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    async with HttpEngine(parse_target(f"http://127.0.0.1:{port}", "m")) as engine:
        failed(await engine.run(REQUEST, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=5.0), Kind.CONNECTION, "cannot connect")


async def test_times_are_those_of_the_server() -> None:
    record = await ask(
        [0.1, HEAD, token(), 0.1, token() + token(), 0.1, token(finish_reason="length"), usage(4), DONE, LAST_CHUNK]
    )
    first, second, third, last = record.chunk_times_s
    assert record.succeeded
    assert first - record.sent_s >= 0.1
    assert second - first >= 0.09
    assert second == third
    assert last - third >= 0.09
    assert record.ended_s >= last


async def test_many_tokens_in_a_chunk() -> None:
    record = await ask([HEAD, token(" a b"), token(" c d", "length"), usage(4), DONE, LAST_CHUNK])
    assert (record.output_tokens, record.chunk_tokens) == (4, (2, 2))
    counted = await ask([HEAD, token(token_ids=[1, 2, 3]), token("", "length", token_ids=[4]), usage(4), DONE, LAST_CHUNK])
    assert counted.chunk_tokens == (3, 1)


async def test_empty_text_is_a_token_and_no_content() -> None:
    """``vllm serve --skip-tokenizer-init`` sends nothing but empty texts."""
    record = await ask([HEAD, *[token("")] * 3, token("", "length"), usage(4), DONE, LAST_CHUNK])
    assert (record.succeeded, len(record.chunk_times_s), record.first_content_s) == (True, 4, None)


async def test_chat_reasoning_comes_before_content() -> None:
    script: Script = [
        HEAD, delta(role="assistant", content=""), 0.05, delta(reasoning_content="hm"), 0.05, delta(content="yes"),
        delta(content=" it"), delta("stop", content=" is"), usage(4), DONE, LAST_CHUNK,
    ]  # fmt: skip
    record = await ask(script, CHAT, chat=True)
    assert record.succeeded
    assert record.first_content_s is not None
    assert record.ttft_s is not None
    assert record.ttft_s >= 0.05, "a role alone is no token"
    assert record.first_content_s - record.chunk_times_s[0] >= 0.04


@pytest.mark.parametrize(
    "script",
    [
        [*OK[:-1], DONE, LAST_CHUNK],
        [HEAD, chunk(b": ping\n\n"), *OK[1:]],
        [HEAD, b"".join(OK[1:])],
        [b"".join(OK)],
        [bytes([byte]) for byte in b"".join(OK)],
        gzipped(OK),
    ],
    ids=["done twice", "comments", "one write", "head and body in one", "a byte at a time", "gzip"],
)
async def test_shapes_of_a_good_stream(script: Script) -> None:
    record = await ask(script)
    assert record.succeeded
    assert record.output_tokens == 4


async def test_a_body_that_the_close_delimits() -> None:
    body = b"".join(step.split(b"\r\n", 1)[1][:-2] for step in OK[1:-1])
    record = await ask([b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", body, End.CLOSE])
    assert record.succeeded


async def test_a_hundred_thousand_small_chunks() -> None:
    n = 100_000
    request = replace(REQUEST, max_tokens=n)
    many = [HEAD, *[token() * 500] * (n // 500 - 1), token() * 499, token(finish_reason="length"), usage(n), DONE, LAST_CHUNK]
    record = await ask(many, request)
    assert (record.succeeded, record.output_tokens, len(record.chunk_times_s)) == (True, n, n)


async def test_a_request_larger_than_the_socket_takes() -> None:
    """The server reads the body only when the kernel's buffers are full, so sending has to wait for it."""
    record = await ask(good(4, prompt_tokens=600_000), replace(REQUEST, prompt_token_ids=tuple(range(600_000))))
    assert record.succeeded


async def test_the_request_says_everything_that_the_engine_would_get() -> None:
    async with serving(OK) as server, HttpEngine(parse_target(server.url + "/v1", "m", api_key="k1")) as engine:
        await engine.run(REQUEST, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=5.0)
        method, path, headers, body = server.requests[0]
    assert (method, path, headers["authorization"]) == ("POST", "/v1/completions", "Bearer k1")
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ([5, 6, 7], 4, True, 0.0)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert (body["top_p"], body["top_k"], body["repetition_penalty"]) == (1.0, 0, 1.0), "or the model's own would apply"


async def test_openai_servers_get_no_fields_of_vllm() -> None:
    async with serving(OK) as server, HttpEngine(parse_target(server.url, "m", dialect=Dialect.OPENAI)) as engine:
        await engine.run(NATURAL, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=5.0)
    assert {"ignore_eos", "top_k", "min_p", "repetition_penalty"}.isdisjoint(server.requests[0][3])


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
