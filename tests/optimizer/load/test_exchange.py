"""One answer, however its bytes are cut: the short cuts see what the parsers see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.optimizer.load import chunks
from vopt.optimizer.load.exchange import Exchange, plain_chunks
from vopt.optimizer.load.ledger import progress_from

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TEXTS = st.one_of(
    st.sampled_from([" word", " a", " other", 'say "so"', "\n", "\\", "é", "", "\r\n", "\n\n\r\n", "data: ", "x" * 80]),
    st.text(max_size=6),
)


def event(text: str, ascii_only: bool, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **more}
    return json.dumps({"id": "cmpl-1", "choices": [choice]}, separators=(",", ":"), ensure_ascii=ascii_only).encode()


def framed(data: bytes, digits: str = "x") -> bytes:
    """``data`` as one event in one HTTP chunk, its size written in hexadecimal as ``digits`` says."""
    body = b"data: " + data + b"\n\n"
    return f"{len(body):{digits}}\r\n".encode() + body + b"\r\n"


async def read(reads: Sequence[bytes], step: float = 1.0) -> Exchange:
    exchange = Exchange(chat=False, sent_at=0.0, idle_timeout_s=9.0)
    for number, data in enumerate(reads, 1):
        exchange.received(data, step * number)
    return exchange


def told(exchange: Exchange) -> tuple[Any, ...]:
    state = exchange.state
    return len(state.times), state.declared, state.finish_reason, state.error, state.done, exchange.failure, exchange.reusable


@given(
    st.lists(st.tuples(TEXTS, st.sampled_from([{}, {}, {}, {"token_ids": [1, 2]}, {"finish_reason": "length"}])), max_size=12),
    st.booleans(),
    st.sampled_from(["x", "X", "04x"]),
    st.data(),
)
def test_however_the_bytes_are_cut(
    tokens: list[tuple[str, dict[str, Any]]], ascii_only: bool, digits: str, data: st.DataObject
) -> None:
    frames = [framed(event(text, ascii_only, **more), digits) for text, more in tokens]
    stream = HEAD + b"".join([*frames, framed(b"[DONE]", digits), b"0\r\n\r\n"])
    whole_frames = asyncio.run(read([HEAD, *frames, framed(b"[DONE]", digits), b"0\r\n\r\n"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    pieces = [stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True) if begin < end]
    bytewise = asyncio.run(read([stream[at : at + 1] for at in range(len(stream))]))
    assert told(asyncio.run(read(pieces))) == told(bytewise)
    assert told(whole_frames) == told(bytewise)


@pytest.mark.parametrize(
    "wrong",
    [
        framed(event(" word", True)).replace(b" word", b' wo"d'),
        framed(event(" word", True)).replace(b" word", b" wo\\d"),
        framed(event(" word", True)).replace(b" word", b" wo\nd"),
        framed(event(" word", True)).replace(b" word", b" wo\xffd"),
        framed(event(" word", True)).replace(b"\r\n", b"\n\r", 1),
    ],
)
def test_what_only_looks_like_a_token_is_an_error(wrong: bytes) -> None:
    good = framed(event(" word", True))
    assert len(wrong) == len(good)
    exchange = asyncio.run(read([HEAD, good, good, wrong]))
    assert len(exchange.state.times) == 2
    assert exchange.failure is not None


def test_a_token_costs_no_parsing_once_its_shape_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" one", " two", " three", " four", " seven"]
    frames = [framed(event(text, True)) for text in texts]

    async def run() -> Exchange:
        exchange = await read([HEAD, *frames])
        monkeypatch.setattr(chunks.json, "loads", None)
        monkeypatch.setattr(type(exchange._http), "feed", None)
        for number in range(3):
            for frame in frames:
                exchange.received(frame, 10.0 + number)
            exchange.received(b"".join(frames), 20.0 + number)
        return exchange

    exchange = asyncio.run(run())
    assert len(exchange.state.times) == 5 + 3 * 10
    assert exchange.failure is None
    assert exchange.state.times[5:15] == [10.0] * 5 + [20.0] * 5


def test_plain_chunks_counts_whole_ones_only() -> None:
    prefix, suffix = b'{"text":"', b'"}'
    one = framed(prefix + b" a" + suffix)
    heads = {len(one): one[: one.index(b" a")]}
    tail = suffix + b"\n\n\r\n"
    assert plain_chunks(one * 3, heads, tail) == 3
    assert plain_chunks(one * 3 + b"1", heads, tail) == 0
    assert plain_chunks(one[:-1], heads, tail) == 0
    assert plain_chunks(one + one.replace(b" a", b'"a'), heads, tail) == 0
    assert plain_chunks(b"", heads, tail) == 0


def test_the_texts_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PLAIN_TEXTS", set())
    monkeypatch.setattr(chunks, "MOST_PLAIN_TEXTS", 3)
    for text in (b"a", b"b", b"x" * 1000, b"c", b"d", b"a"):
        assert chunks.is_plain_text(text)
    assert {b"a", b"b", b"c"} == chunks.PLAIN_TEXTS
    assert not chunks.is_plain_text(b"")


@given(
    st.lists(st.integers(0, 10).map(float), max_size=10),
    st.dictionaries(st.integers(0, 9), st.integers(0, 5), max_size=4),
    st.sampled_from([-1.0, 0.0, 2.5, 5.0, 9.0, 12.0]),
    st.sampled_from([0.0, 3.0]),
)
def test_progress_is_partial_summed_up(times: list[float], declared: dict[int, int], since: float, origin: float) -> None:
    async def run() -> None:
        exchange = Exchange(chat=False, sent_at=origin, idle_timeout_s=9.0, origin_s=origin)
        exchange.state.times = sorted(at + origin for at in times)
        exchange.state.declared = {chunk: count for chunk, count in declared.items() if chunk < len(times)}

        class Partial:
            def partial(self, index: int) -> Any:
                return exchange.partial()

        by_partial: Any = Partial()
        assert exchange.progress(since) == progress_from(by_partial)(0, since)

    asyncio.run(run())
