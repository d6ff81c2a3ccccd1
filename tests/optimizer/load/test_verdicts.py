"""When an exchange over HTTP is over, and what it was: whole answers, named errors, prompts, and when a failure happened."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fault_server import DONE, ERROR, HEAD, LAST_CHUNK, End, Script, chunk, event, good, serving, status, token, usage

from vopt.objectives.consistency import contradictions
from vopt.objectives.metrics import compute_metrics
from vopt.objectives.records import RequestFailureKind, RequestRecord
from vopt.optimizer.load.client import HttpEngine
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Request
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.target import parse_target

REQUEST = Request(index=0, prompt_token_ids=(5, 6, 7), prompt_tokens=3, max_tokens=4, sampling={"temperature": 0.0})
OK = good(4)
TO_THE_CLOSE = [
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n",
    *(step.split(b"\r\n", 1)[1][:-2] for step in OK[1:-1]),
]


async def ask(script: Script, idle_s: float = 5.0) -> RequestRecord:
    async with serving(script) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        return await engine.run(REQUEST, origin_s=engine.now(), scheduled_s=0.0, idle_timeout_s=idle_s)


@pytest.mark.parametrize("end", [End.CLOSE, End.RESET, End.HANG, 1.0])
@pytest.mark.parametrize("stream", [OK[:-1], TO_THE_CLOSE])
async def test_an_answer_is_whole_at_its_end_marker(stream: list[Any], end: Any) -> None:
    """Whatever becomes of the connection, and without waiting for it: the user has it all and asks the next thing."""
    record = await asyncio.wait_for(ask([*stream, end], idle_s=0.5), 0.9)
    assert record.succeeded, record.failure
    assert record.output_tokens == 4
    assert record.ended_s < 0.4


async def test_the_engines_death_behind_the_end_marker_undoes_no_answer() -> None:
    async with serving([*OK[:-1], End.HANG]) as server, HttpEngine(parse_target(server.url, "m"), owned=True) as engine:
        task = asyncio.create_task(engine.run(REQUEST, origin_s=0.0, scheduled_s=0.0, idle_timeout_s=5.0))
        while (seen := engine.partial(0)) is None or len(seen[1]) < 4:  # noqa: ASYNC110 - progress is asked for, not told
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        engine.mark_dead("it is gone")
        assert (await task).succeeded


@pytest.mark.parametrize("end", [End.RESET, End.CLOSE, ERROR])
@pytest.mark.parametrize("before", [[HEAD], OK[:2], OK[:4], OK[:-2]], ids=lambda steps: str(len(steps)))
async def test_a_failure_is_dated_when_it_happens(before: list[Any], end: Any) -> None:
    """Not at the last byte before it, which may lie before the window that it spoils."""
    record = await ask([*before, 0.3, end, LAST_CHUNK] if end is ERROR else [*before, 0.3, end])
    assert record.failure is not None
    assert 0.3 <= record.ended_s < 2.0


@pytest.mark.parametrize("end", [End.RESET, End.CLOSE])
async def test_without_an_answer_too(end: End) -> None:
    record = await ask([0.3, end])
    assert record.failure is not None
    assert 0.3 <= record.ended_s < 2.0


async def test_requests_that_are_cut_off_in_a_window_are_failures_of_that_window() -> None:
    sent = iter(range(10**6))

    def script(path: str, body: dict[str, Any]) -> Script:
        if path == "/metrics":
            return [status("404 Not Found")]
        return [HEAD, token(), 3.0, End.RESET] if next(sent) < 3 else [*OK[:2], 0.05, *OK[2:]]

    source = RequestSource(lengths=((3, 4),) * 8, bodies=(tuple(range(20, 40)),), digit_ids=tuple(range(10)))
    plan = LoadPlan(Arrivals.CLOSED, window_s=4.0, concurrency=6, min_requests=0, max_doublings=0, deadline_s=20.0)
    async with serving(script) as server, HttpEngine(parse_target(server.url, "m")) as engine:
        load = await drive(engine, source, plan)
    assert load.window is not None
    assert load.window.opened_s < 3.0
    metrics = compute_metrics(load)
    assert metrics.failed == 3
    assert metrics.values["success_rate"] < 1
    assert not [note for note in metrics.notes if "failed before" in note]


NAMED = chunk(b'event: error\ndata: {"message":"engine broke","code":500}\n\n')
IN_USAGE = {"choices": [], "message": "by the way", "usage": {"prompt_tokens": 3, "completion_tokens": 4}}


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (NAMED, "engine broke"),
        (event({"detail": "Internal Server Error"}), "Internal Server Error"),
        (event({"message": "overloaded", "code": 503}), "overloaded"),
        (event({"code": 503, "reason": "busy"}), "busy"),
        (event({"type": "error", "reason": "no"}), "no"),
        (event({"errors": ["one", "two"]}), "one"),
        (event({"detail": [{"loc": ["body"], "msg": "bad field"}]}), "bad field"),
    ],
)
async def test_an_error_in_whatever_form_is_one_though_the_stream_goes_on(odd: bytes, words: str) -> None:
    record = await ask([*OK[:3], odd, *OK[3:]])
    assert record.failure is not None
    assert record.failure.kind is RequestFailureKind.STREAM_ERROR
    assert words in record.failure.message


@pytest.mark.parametrize("odd", [event({"type": "ping"}), event({}), chunk(b": busy\n\n"), chunk(b"event: ping\ndata: {}\n\n")])
async def test_what_says_nothing_of_an_error_is_read_over(odd: bytes) -> None:
    assert (await ask([*OK[:3], odd, *OK[3:]])).succeeded


async def test_a_part_of_an_answer_may_have_a_message() -> None:
    assert (await ask([*OK[:-3], event(IN_USAGE), DONE, LAST_CHUNK])).succeeded


async def test_the_words_of_a_refusal() -> None:
    record = await ask([status("422 Unprocessable", '{"detail": "no such field"}')])
    assert record.failure is not None
    assert record.failure.message == "HTTP 422: no such field"


async def test_a_count_in_the_last_chunk_is_that_of_all_chunks() -> None:
    """Some servers add the usage block to the last chunk instead of sending it behind."""
    choice = {"index": 0, "text": " word", "finish_reason": "length"}
    last = event({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
    record = await ask([HEAD, *[token()] * 3, last, DONE, LAST_CHUNK])
    assert (record.output_tokens, record.chunk_tokens) == (4, (1, 1, 1, 1))


async def test_running_counts_are_those_of_each_chunk() -> None:
    def counted(total: int, **more: Any) -> bytes:
        choice = {"index": 0, "text": " word", "finish_reason": None, **more}
        return event({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": total}})

    record = await ask([HEAD, counted(1), counted(3), counted(4, finish_reason="length"), usage(4), DONE, LAST_CHUNK])
    assert record.chunk_tokens == (1, 2, 1)


@pytest.mark.parametrize(
    ("told", "credited", "flagged"), [(3, 3, False), (4, 3, False), (999_999, 3, True), (2, 2, True), (0, 3, True)]
)
async def test_a_prompt_of_token_ids_has_as_many_as_were_sent(told: int, credited: int, flagged: bool) -> None:
    """A server that counts more would be credited with throughput for it."""
    record = await ask([*OK[:-3], usage(4, prompt_tokens=told), DONE, LAST_CHUNK])
    assert record.succeeded
    assert record.prompt_tokens == credited
    assert [f"counted {told} prompt tokens" in words for words in contradictions(record)] == [True] * flagged
