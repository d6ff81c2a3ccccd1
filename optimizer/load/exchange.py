"""One request and its streamed answer, from the first byte to the verdict on it."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from dataclasses import dataclass

from vopt.objectives.records import RequestFailure, RequestFailureKind, RequestRecord
from vopt.optimizer.load.chunks import PLAIN_TEXTS, StreamState, error_message, is_plain_text, spread_tokens
from vopt.optimizer.load.http1 import LINES, HttpViolation, ResponseParser
from vopt.optimizer.load.ledger import Progress
from vopt.optimizer.load.plan import Request
from vopt.optimizer.load.sse import SseParser

MESSAGE_CHARS = 500
LAST_BYTES_S = 0.1
"""How long the end of the HTTP body may take behind the stream's own end marker. The answer is whole by then, and a client
that reads it goes on: a server or proxy that keeps the connection open does not keep the user."""
SPECIAL_TOKENS = 2
"""How many tokens a server may add to a prompt of token ids (begin and end of text) without being contradicted."""
MAX_PLAIN_BODY = 64 * 1024
_TAILS: dict[bytes, bytes] = {}
"""One object for what all streams have in common: 512 copies would be out of the cache whenever they are needed."""
MOST_TAILS = 64


class Exchange:
    """What one answer has brought so far. All times are on the engine's clock; ``finished`` resolves at its end."""

    __slots__ = (
        "_around",
        "_body",
        "_expected",
        "_http",
        "_sse",
        "_streaming",
        "_template",
        "done_at",
        "ended_at",
        "failure",
        "finished",
        "idle_timeout_s",
        "last_at",
        "origin_s",
        "sent_at",
        "state",
    )

    def __init__(self, *, chat: bool, sent_at: float, idle_timeout_s: float, origin_s: float = 0.0) -> None:
        self._http, self._sse = ResponseParser(), SseParser()
        self._streaming: bool | None = None
        self._body = bytearray()
        self._expected: tuple[bytes, bytes, list[float]] | None = None
        self._template: tuple[bytes, bytes] | None = None
        self._around = b"", b""
        self.state = StreamState(chat)
        self.sent_at = self.last_at = sent_at
        self.origin_s = origin_s
        self.done_at: float | None = None
        self.ended_at = sent_at
        self.idle_timeout_s = idle_timeout_s
        self.failure: RequestFailure | None = None
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request."""
        return self.failure is None and self._http.complete and self._http.keep_alive

    @property
    def begun(self) -> bool:
        return bool(self.state.times)

    @property
    def waiting_for_headers(self) -> bool:
        return not self._http.status

    def received(self, data: bytes, now: float) -> None:
        self.last_at = now
        if (expected := self._expected) is not None:
            # Reads that are whole chunks with one plain token each, by far the most frequent: what the three parsers would
            # find is settled without a call into any of them. Most often it is one chunk.
            prefix, tail, times = expected
            length = len(data)
            line = LINES.get(length)
            if line is not None and data.startswith(line) and data.endswith(tail):
                begin = len(line)
                if data.startswith(prefix, begin) and data[begin + len(prefix) : length - len(tail)] in PLAIN_TEXTS:
                    times.append(now)
                    return
            if plain := plain_chunks(data, prefix, tail):
                times.extend((now,) * plain)
                return
        http = self._http
        try:
            body = http.feed(data)
        except HttpViolation as violation:
            self.fail(RequestFailureKind.CONNECTION, str(violation), now)
            return
        if self._streaming is None:
            if not http.status:
                return
            self._streaming = http.status == 200 and "json" not in http.headers.get("content-type", "")
        if self._streaming:
            events = self._sse.feed(body)
            if http.complete:
                events = events + self._sse.close()
            if events:
                self._events(events, now)
        else:
            self._body += body[: MAX_PLAIN_BODY - len(self._body)]
        if http.complete:
            self.finish(now)
        self._expected = self._expectation()

    def _expectation(self) -> tuple[bytes, bytes, list[float]] | None:
        """What a chunk with one plain token has between its size and its text, and behind its text, and where to note its
        time, if all three parsers stand between two of them."""
        http, state = self._http, self.state
        if not (http.between_chunks and self._sse.clean and state.template is not None) or state.done or self.finished.done():
            return None
        if self._template is not state.template:
            self._template = state.template
            prefix, suffix = state.template
            tail = suffix + b"\n\n\r\n"
            self._around = b"\r\ndata: " + prefix, _TAILS.setdefault(tail, tail)
            if len(_TAILS) > MOST_TAILS:
                _TAILS.clear()
        return *self._around, state.times

    def _events(self, events: list[bytes], now: float) -> None:
        state = self.state
        state.feed(events, now)
        if state.done and self.done_at is None:
            self.done_at = now
            if not self._http.complete:
                late = asyncio.get_running_loop().call_later(LAST_BYTES_S, self.finish, now + LAST_BYTES_S)
                self.finished.add_done_callback(lambda _: late.cancel())
        if state.error is not None:
            self.fail(RequestFailureKind.STREAM_ERROR, state.error, now)

    def lost(self, error: Exception | None, now: float) -> None:
        """The connection is gone before the answer was complete, or its close is what completes it. Noticed at ``now``: that
        is when a request fails, not when its last byte came, which may be before a window opened."""
        if error is not None:
            self.fail(RequestFailureKind.CONNECTION, f"connection lost: {error}", now)
        elif self._http.eof():
            if self._streaming and (events := self._sse.close()):
                self._events(events, now)
            self.finish(now)
        elif not self._http.status:
            self.fail(RequestFailureKind.CONNECTION, "the server closed the connection without an answer", now)
        else:
            self.fail(RequestFailureKind.TRUNCATED, "the server closed the connection in the middle of the answer", now)

    def fail(self, kind: RequestFailureKind, message: str, now: float) -> None:
        """End it as a failure; only what the stream itself says can undo an answer that its end marker has made whole."""
        whole = self.state.done and kind is not RequestFailureKind.STREAM_ERROR
        if self.failure is None and not self.finished.done() and not whole:
            self.failure = RequestFailure(kind, message[:MESSAGE_CHARS])
        self.finish(now)

    def finish(self, now: float) -> None:
        if not self.finished.done():
            self.ended_at = now
            self.finished.set_result(None)

    def partial(self) -> tuple[float, tuple[float, ...], tuple[int, ...]]:
        """(sent, chunk times, chunk tokens) so far, in seconds since ``origin_s``; a chunk that declares no count has one
        token."""
        state, origin_s = self.state, self.origin_s
        chunks = len(state.times)
        total = sum(state.declared.values()) + chunks - len(state.declared)
        times = tuple([at - origin_s for at in state.times])
        return self.sent_at - origin_s, times, spread_tokens(chunks, state.declared, total)

    def progress(self, since_s: float) -> Progress:
        """``partial`` summed up, at a cost that does not grow with the chunks."""
        times, declared = self.state.times, self.state.declared
        first = bisect_left(times, since_s + self.origin_s)
        tokens = len(times) - first
        if declared and tokens:
            tokens = sum([declared.get(chunk, 1) for chunk in range(first, len(times))])
        last_s = times[-1] - self.origin_s if times else None
        return Progress(self.sent_at - self.origin_s, last_s, tokens, bool(times) and first == 0)

    def verdict(self, request: Request) -> RequestFailure | None:
        """Why the finished exchange is no success, or ``None``. The definition of success: a stream that ended normally,
        no error object, a ``finish_reason`` of ``stop`` or ``length``, the end marker, a usage block, completion tokens
        above 0, and as many as asked for when ``ignore_eos`` is on."""
        if self.failure is not None:
            return self.failure
        if not self._streaming:
            return self._plain_answer()
        state, kind = self.state, RequestFailureKind
        if not state.done:
            return RequestFailure(kind.TRUNCATED, "the stream ended without its end marker ([DONE])")
        if state.finish_reason is None:
            return RequestFailure(kind.TRUNCATED, "the stream ended without a finish_reason")
        if state.usage is None:
            return RequestFailure(kind.TRUNCATED, "the stream ended without a usage block")
        tokens = _count(state.usage.get("completion_tokens"))
        asked = request.max_tokens
        if not tokens:
            return RequestFailure(kind.SHORT_OUTPUT, "the usage block counts no completion tokens")
        if request.ignore_eos and tokens != asked:
            return RequestFailure(kind.SHORT_OUTPUT, f"{tokens} completion tokens instead of the {asked} asked for")
        if tokens > asked:
            return RequestFailure(kind.STREAM_ERROR, f"the usage block counts {tokens} tokens where {asked} were the limit")
        if not state.times:
            return RequestFailure(kind.STREAM_ERROR, f"the usage block counts {tokens} tokens, but no chunk carried one")
        declared = sum(state.declared.values())
        if declared > tokens or (len(state.declared) == len(state.times) and declared != tokens):
            return RequestFailure(kind.STREAM_ERROR, f"chunks declared {declared} tokens, the usage block {tokens}")
        return None

    def _plain_answer(self) -> RequestFailure:
        status = self._http.status
        try:
            document = json.loads(self._body)
        except ValueError:
            document = None
        words = error_message(document) if isinstance(document, dict) else None
        if status == 200:
            message = words or "the server answered in one piece instead of streaming"
            return RequestFailure(RequestFailureKind.STREAM_ERROR, message[:MESSAGE_CHARS])
        if words is None:
            words = self._http.headers.get("location") or self._body[:MESSAGE_CHARS].decode("utf-8", "replace").strip()
        return RequestFailure(RequestFailureKind.HTTP_STATUS, f"HTTP {status}: {words}"[:MESSAGE_CHARS])

    def record(self, request: Request, *, origin_s: float, scheduled_s: float, failure: RequestFailure | None) -> RequestRecord:
        """The record of the finished exchange. A failed one keeps when chunks came and is credited with no tokens."""
        state = self.state
        usage = state.usage or {}
        chunks = len(state.times)
        tokens = 0 if failure is not None else _count(usage.get("completion_tokens"))
        prompt_tokens, counted = self._prompt_tokens(request)
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        ended = self.ended_at if self.done_at is None or failure is not None else self.done_at
        return RequestRecord(
            index=request.index,
            scheduled_s=scheduled_s,
            sent_s=self.sent_at - origin_s,
            ended_s=ended - origin_s,
            prompt_tokens=prompt_tokens,
            requested_output_tokens=request.max_tokens,
            output_tokens=tokens,
            chunk_times_s=tuple([at - origin_s for at in state.times]),
            chunk_tokens=(0,) * chunks if failure is not None else spread_tokens(chunks, state.declared, tokens),
            first_content_s=None if state.first_content is None else state.first_content - origin_s,
            finish_reason=state.finish_reason,
            failure=failure,
            prompt_sha256=request.prompt_sha256,
            cached_prompt_tokens=cached if isinstance(cached, int) else None,
            session=request.session,
            counted_prompt_tokens=counted,
        )

    def _prompt_tokens(self, request: Request) -> tuple[int, int | None]:
        """(tokens to credit, the server's count where it contradicts what was sent). A prompt of token ids has as many as were
        sent; a server may have read fewer of them, never more. Only the server can count those of chat messages."""
        told = (self.state.usage or {}).get("prompt_tokens")
        if self.state.chat:
            return _count(told) or request.prompt_tokens, None
        sent = len(request.prompt_token_ids)
        if not isinstance(told, int) or isinstance(told, bool) or sent <= told <= sent + SPECIAL_TOKENS:
            return sent, None
        return told if 0 < told < sent else sent, told


def plain_chunks(data: bytes, prefix: bytes, tail: bytes) -> int:
    """How many chunks ``data`` is, each of one plain token, nothing before, between or behind them; 0 when it is not that.

    ``prefix`` is what stands between a chunk's size and its text, ``tail`` what stands behind the text, from its closing quote
    on. A plain text has no line end, so that the frames' own line ends divide the chunks.
    """
    *chunks, rest = data.split(b"\n\n\r\n")
    if rest:
        return 0
    end = tail[:-4]
    before, cut = len(prefix), -len(end)
    for chunk in chunks:
        line = LINES.get(len(chunk) + 4)
        if line is None or not (chunk.startswith(line) and chunk.startswith(prefix, len(line)) and chunk.endswith(end)):
            return 0
        text = chunk[len(line) + before : cut]
        if text not in PLAIN_TEXTS and not is_plain_text(text):
            return 0
    return len(chunks)


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


@dataclass(frozen=True, slots=True)
class Unsent:
    """A request that never reached a server: when it was tried, and why it failed."""

    at: float
    ended_at: float
    failure: RequestFailure

    def record(self, request: Request, *, origin_s: float, scheduled_s: float) -> RequestRecord:
        return RequestRecord(
            index=request.index,
            scheduled_s=scheduled_s,
            sent_s=self.at - origin_s,
            ended_s=self.ended_at - origin_s,
            prompt_tokens=request.prompt_tokens,
            requested_output_tokens=request.max_tokens,
            output_tokens=0,
            failure=self.failure,
            prompt_sha256=request.prompt_sha256,
            session=request.session,
        )
