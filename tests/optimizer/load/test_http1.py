"""HTTP answers come out the same however they are split, and violations are named."""

from __future__ import annotations

import gzip
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.optimizer.load.http1 import HttpViolation, ResponseParser

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def feed(parser: ResponseParser, stream: bytes, cuts: list[int]) -> bytes:
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return b"".join(parser.feed(stream[start:stop]) for start, stop in itertools.pairwise(edges) if stop > start)


@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=30), st.just(b"a\r\nb\r\n"), st.just(b"x" * 1500)), max_size=8),
    st.sampled_from(["%x", "%X", "%04x", "%x;name=value"]),
    st.sampled_from([b"", b"x-trailer: 1\r\n"]),
    st.lists(st.integers(0, 6000), max_size=6),
)
def test_any_split_of_a_chunked_body(contents: list[bytes], size: str, trailer: bytes, cuts: list[int]) -> None:
    body = b"".join((size % len(content)).encode() + b"\r\n" + content + b"\r\n" for content in contents)
    parser = ResponseParser()
    assert feed(parser, HEAD + body + b"0\r\n" + trailer + b"\r\n", cuts) == b"".join(contents)
    assert parser.complete
    assert parser.keep_alive


@given(st.binary(max_size=60), st.lists(st.integers(0, 200), max_size=6), st.booleans())
def test_length_and_close_delimited_bodies(body: bytes, cuts: list[int], by_length: bool) -> None:
    length = b"Content-Length: %d\r\n" % len(body) if by_length else b""
    parser = ResponseParser()
    assert feed(parser, b"HTTP/1.1 200 OK\r\n" + length + b"\r\n" + body, cuts) == body
    assert parser.eof()


@pytest.mark.parametrize("size", [7, 4096])
def test_gzip_is_decoded_as_it_comes(size: int) -> None:
    packed = gzip.compress(b"data: x\n\n" * 500)
    head = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    stream = head + b"".join(b"%x\r\n%s\r\n" % (len(packed[i : i + 9]), packed[i : i + 9]) for i in range(0, len(packed), 9))
    parser = ResponseParser()
    assert feed(parser, stream + b"0\r\n\r\n", list(range(0, 4000, size))) == b"data: x\n\n" * 500


def test_interim_answers_are_passed_over() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") == b"ok"
    assert parser.status == 200


def test_bytes_behind_the_answer_spoil_the_connection() -> None:
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK")
    assert parser.complete
    assert not parser.keep_alive


@pytest.mark.parametrize(
    "stream",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\n\r\n",
        HEAD + b"+5\r\nhello\r\n",
        HEAD + b"-5\r\nhello\r\n",
        HEAD + b"1_0\r\nhello\r\n",
        HEAD + b"\r\nhello\r\n",
        HEAD + b"2\r\nhello\r\n",
        HEAD + b"f" * 16 + b"\r\n",
        HEAD + b"9" * 10_000,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
        HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n") + b"5\r\nhello\r\n",
    ],
)
def test_violations(stream: bytes) -> None:
    with pytest.raises(HttpViolation):
        ResponseParser().feed(stream)


def test_a_body_cut_off_is_no_proper_end() -> None:
    for cut in (b"5\r\nhel", b"5\r\nhello", b"5\r\nhello\r\n", b"5\r\nhello\r\n0\r\n"):
        parser = ResponseParser()
        parser.feed(HEAD + cut)
        assert not parser.eof()
