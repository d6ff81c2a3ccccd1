"""What the events of an OpenAI-compatible stream mean. Pure: the data of events in, tokens, usage and errors out.

Parsing JSON for every token is most of what a load client does, and nearly every event of a stream differs from the one
before in one string alone. So an event that was parsed and found plain (one choice, nothing but text in it) becomes a
template: the bytes before its text and the bytes behind it. An event with the same bytes around another text that needs no
escapes (``is_plain_text``) is the same JSON document with another string in that place, hence also plain; nothing is assumed
about names, order or spacing of the fields. An event equal to a plain one byte by byte is plain as well. Everything else is
parsed in full.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DONE = b"[DONE]"
_TEXT_KEYS = tuple(
    f'"{name}":{space}"'.encode() for name in ("text", "content", "reasoning", "reasoning_content") for space in ("", " ")
)
_NO_TEMPLATE = (b"", b"")
_ESCAPED = re.compile(rb'["\\\x00-\x1f]')
PLAIN_TEXTS: set[bytes] = set()
"""Texts of tokens that are known to be plain, shared by all streams: a vocabulary is finite, and one look-up costs less than
looking at the bytes. Add to it through ``is_plain_text`` only; it never holds the empty text."""
MOST_PLAIN_TEXTS = 65_536
LONGEST_PLAIN_TEXT = 64


def is_plain_text(text: bytes) -> bool:
    """Whether ``text`` between quotes is a JSON string as it stands: not empty, UTF-8, nothing that must be escaped."""
    if text in PLAIN_TEXTS:
        return True
    if not text or _ESCAPED.search(text) is not None:
        return False
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    if len(PLAIN_TEXTS) < MOST_PLAIN_TEXTS and len(text) <= LONGEST_PLAIN_TEXT:
        PLAIN_TEXTS.add(text)
    return True


_DELTA_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")


@dataclass(slots=True)
class StreamState:
    """What one stream has said so far. Times are the caller's.

    ``declared[i]`` is the number of tokens that chunk *i* itself declared (``token_ids``, log probabilities or running
    usage); chunks that declared none are absent. ``template`` is (bytes before the text, bytes behind it) of a plain event,
    once one was seen.
    """

    chat: bool
    times: list[float] = field(default_factory=list)
    declared: dict[int, int] = field(default_factory=dict)
    first_content: float | None = None
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    error: str | None = None
    done: bool = False
    template: tuple[bytes, bytes] | None = None
    _same: bytes = b""
    _running_tokens: int = 0
    _running_chunks: int = 0

    def feed(self, events: list[bytes], now: float) -> None:
        """Take in the events that one read brought at time ``now``; those behind an error do not count."""
        if self.error is not None:
            return
        prefix, suffix = self.template or _NO_TEMPLATE
        begin, end, same = len(prefix), -len(suffix), self._same
        plain = 0
        for event in events:
            if (
                begin
                and event.startswith(prefix)
                and event.endswith(suffix)
                and (event[begin:end] in PLAIN_TEXTS or is_plain_text(event[begin:end]))
            ) or event == same:
                plain += 1
                continue
            if plain:
                self._plain(plain, now)
                plain = 0
            if not self._parse(event, now):
                return
            prefix, suffix = self.template or _NO_TEMPLATE
            begin, end, same = len(prefix), -len(suffix), self._same
        if plain:
            self._plain(plain, now)

    def _plain(self, n: int, now: float) -> None:
        if self.done:
            self._fail("a token after the end marker")
        if n == 1:
            self.times.append(now)
        else:
            self.times.extend([now] * n)

    def _fail(self, message: str) -> bool:
        if self.error is None:
            self.error = message
        return False

    def _parse(self, event: bytes, now: float) -> bool:
        """Take in one event; whether the stream is still sound."""
        if event.strip() == DONE:
            self.done = True  # some proxies send it twice
            return True
        try:
            document = json.loads(event)
        except ValueError:
            return self._fail(f"an event that is not JSON: {event[:200]!r}")
        if not isinstance(document, dict):
            return self._fail(f"an event that is not an object: {event[:200]!r}")
        if self.done:
            return self._fail(f"an event after the end marker: {event[:200]!r}")
        usage = document.get("usage")
        if (error := error_message(document, part=isinstance(usage, dict) or "choices" in document)) is not None:
            return self._fail(error)
        if isinstance(usage, dict):
            self.usage = usage
        choices = document.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._choice(event, choices[0], usage if isinstance(usage, dict) else None, now, alone=len(choices) == 1)
        return self.error is None

    def _choice(
        self, event: bytes, choice: Mapping[str, Any], usage: Mapping[str, Any] | None, now: float, *, alone: bool
    ) -> None:
        reason = choice.get("finish_reason")
        text, content, is_token = _chat_delta(choice) if self.chat else _completion_text(choice)
        count = self._declared(choice, usage)
        if count == 0 and not text:
            is_token = False  # vLLM's last chunk may carry a reason to finish and no token
        elif count:
            is_token = True
        if is_token:
            if count is not None:
                self.declared[len(self.times)] = count
            self.times.append(now)
            if self.first_content is None and content:
                self.first_content = now
        if usage is not None:
            self._running_chunks = len(self.times)
        if isinstance(reason, str):
            self.finish_reason = reason
            if reason not in ("stop", "length"):
                self._fail(f"the stream ended with finish_reason {reason!r}")
        elif alone and usage is None and count is None and is_token:
            if not text:
                self._same = event  # a server without a tokenizer sends one and the same event for every token
            elif self.first_content is not None:  # before content, whether a text is content still matters
                self._learn(event, text)

    def _declared(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None) -> int | None:
        """How many tokens the chunk says it carries."""
        if isinstance(ids := choice.get("token_ids"), list):
            return len(ids)
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            for key in ("tokens", "content"):
                if isinstance(entries := logprobs.get(key), list):
                    return len(entries)
        if usage is not None and isinstance(total := usage.get("completion_tokens"), int):
            # The first running count after chunks without one, and the only one of a server that adds it to its last chunk, is
            # of all of them together.
            alone = self._running_chunks == len(self.times)
            count, self._running_tokens = total - self._running_tokens, total
            return max(0, count) if alone else None
        return None

    def _learn(self, event: bytes, text: str) -> None:
        if b"\\" in event:
            return  # without backslashes every quote delimits a string, which is what the rule rests on
        for key in _TEXT_KEYS:
            at = event.find(key)
            if at < 0 or event.find(key, at + 1) >= 0:
                continue
            start = at + len(key)
            stop = event.index(b'"', start)
            if event[start:stop] == text.encode():
                self.template = event[:start], event[stop:]
                return


def error_message(document: Mapping[str, Any], *, part: bool = False) -> str | None:
    """The message of an error object, in the forms that OpenAI-compatible servers and what stands before them use; ``None`` if
    it is none. ``part``: the document is part of an answer (it has choices, or usage), so only an ``error`` makes it one."""
    error = document.get("error") or document.get("errors")
    if error:
        if isinstance(error, dict):
            return str(error.get("message") or json.dumps(error))
        return str(error)
    words = next((document[key] for key in ("message", "detail", "msg") if document.get(key)), None)
    if "error" in (document.get("object"), document.get("type"), document.get("status")):
        return str(words or json.dumps(document))
    if part:
        return None
    codes = [document.get(key) for key in ("code", "status", "status_code")]
    if words or any(isinstance(code, int) and code >= 400 for code in codes):
        return words if isinstance(words, str) else json.dumps(words or document)
    return None


def _completion_text(choice: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """(text, whether it is content, whether it is a token): a completions chunk with a choice is one even without text."""
    text = choice.get("text")
    return (text, bool(text), True) if isinstance(text, str) else ("", False, True)


def _chat_delta(choice: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """As above for chat: reasoning and tool calls are tokens but not content; a role alone is neither."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return "", False, False
    texts = {name: delta[name] for name in _DELTA_TEXTS if isinstance(delta.get(name), str) and delta[name]}
    if delta.get("tool_calls") or len(texts) > 1:
        return "", "content" in texts, True
    text = next(iter(texts.values()), "")
    return text, "content" in texts, bool(text)


def spread_tokens(chunks: int, declared: Mapping[int, int], total: int) -> tuple[int, ...]:
    """Tokens of each of ``chunks`` chunks, adding up to ``total`` (the usage block's count), or to what is declared if more.

    Declared counts stand. The rest of ``total`` is spread evenly over the chunks that declared none, in order and rounded
    cumulatively: one each when chunks are tokens, k or k + 1 each when a chunk holds several (speculation, a stream
    interval). With fewer tokens than such chunks the first ones get one each and the last none: servers add empty chunks
    at the end.
    """
    silent = chunks - len(declared)
    rest = max(0, total - sum(declared.values()))
    if rest == silent and not declared:
        return (1,) * chunks
    shares: list[int] = []
    given = position = 0
    for chunk in range(chunks):
        if chunk in declared:
            shares.append(declared[chunk])
            continue
        position += 1
        upto = min(position, rest) if rest < silent else rest * position // silent
        shares.append(upto - given)
        given = upto
    return tuple(shares)
