"""What the load client makes of servers that misbehave: the kind of failure, the tokens credited, and the times."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest
from asking_client import CHAT, JSON, NATURAL, OK, REQUEST, ask, failed
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

from vopt.objectives.records import RequestFailureKind as Kind
from vopt.optimizer.engine.base import Engine
from vopt.optimizer.load.client import HttpEngine
from vopt.optimizer.load.plan import Request
from vopt.optimizer.load.target import Dialect, parse_target

DECLARES_THREE = [HEAD, token(token_ids=[1, 2]), token("", "length", token_ids=[3]), usage(4), DONE, LAST_CHUNK]


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
