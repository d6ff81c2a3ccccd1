"""However a stream is split, its events are the same, and they are those of the grammar."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.optimizer.load.sse import SseParser


def parse(*chunks: bytes) -> list[bytes]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.close()


def reference(stream: bytes) -> list[bytes]:
    """The grammar of the HTML standard, a line at a time, over the whole stream."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events, data, is_error = [], [], False
    for line in [*text.split(b"\n"), b""]:
        name, _, value = line.partition(b":")
        if not line and data:
            events.append(as_error(b"\n".join(data)) if is_error else b"\n".join(data))
            data = []
        elif name == b"data":
            data.append(value[1:] if value[:1] == b" " else value)
        elif name == b"event":
            is_error = value in (b"error", b" error")
        is_error = is_error and bool(line)
    return events


def as_error(data: bytes) -> bytes:
    """What an event named ``error`` is delivered as."""
    try:
        said = json.loads(data)
    except ValueError:
        said = data.decode("utf-8", "replace")
    told = isinstance(said, dict) and said.get("error")
    return data if told else json.dumps({"error": said or "an event named error, without words"}).encode()


LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINES = st.one_of(
    st.just(b'data: {"choices":[{"text":" a"}]}'),
    st.just(b""),
    st.just(b"data"),
    st.just(b"data:"),
    st.just(b": comment"),
    st.just(b"event: message"),
    st.just(b"event: error"),
    st.just(b"datax: no"),
    st.binary(max_size=6).map(lambda data: b"data:" + data.replace(b"\r", b"").replace(b"\n", b"")),
)
STREAMS = st.tuples(st.sampled_from([b"", b"\xef\xbb\xbf"]), st.lists(st.tuples(LINES, LINE_ENDS), max_size=12)).map(
    lambda parts: parts[0] + b"".join(line + end for line, end in parts[1])
)
PLAIN = st.lists(st.sampled_from([b"data: one\n\n", b"data: \n\n", b"data: two\n\n", b": ping\n\n", b"\n"]), max_size=12).map(
    b"".join
)


@given(st.one_of(STREAMS, PLAIN, st.binary(max_size=40)), st.lists(st.integers(0, 200), max_size=8))
def test_any_split_gives_the_events_of_the_grammar(stream: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert parse(*(stream[start:stop] for start, stop in itertools.pairwise(edges))) == reference(stream)


@given(st.one_of(STREAMS, PLAIN))
def test_one_byte_at_a_time(stream: bytes) -> None:
    assert parse(*(bytes([byte]) for byte in stream)) == reference(stream)


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b": ping\n\ndata: a\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: [DONE]", [b"[DONE]"]),
        (b"data: [DONE]\n", [b"[DONE]"]),
        (b"data:no space\n\n", [b"no space"]),
        (b"data:  two spaces\n\n", [b" two spaces"]),
        (b"event: error\nid: 7\nretry: 10\n\n", []),
        (b"event: error\ndata: boom\n\ndata: a\n\n", [b'{"error": "boom"}', b"a"]),
        (b'data: {"code":500}\nevent:error\n\n', [b'{"error": {"code": 500}}']),
        (b'event: error\ndata: {"error":"x"}\n\n', [b'{"error":"x"}']),
        (b"event: error\n\ndata: a\n\n", [b"a"]),
        (b"event: error\ndata: {}\n\n", [b'{"error": "an event named error, without words"}']),
        (b"event: message\ndata: a\n\n", [b"a"]),
        (b"", []),
    ],
)
def test_the_grammar(stream: bytes, events: list[bytes]) -> None:
    assert parse(stream) == events


def test_a_line_of_many_reads_is_joined_once() -> None:
    parser = SseParser()
    parser.feed(b"data: ")
    for _ in range(10_000):
        assert parser.feed(b"x" * 10) == []
    assert parser.feed(b"\n\n") == [b"x" * 100_000]


def test_many_events_in_one_read_after_a_torn_one() -> None:
    parser = SseParser()
    parser.feed(b"data: first\n\ndata: to")
    assert parser.feed(b"rn\n\n" + b": ping\n\n" * 5000 + b"data: x\n\n" * 5000) == [b"torn", *[b"x"] * 5000]
