"""The fast path of the chunk reader says what parsing every event in full says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.optimizer.load.chunks import StreamState, spread_tokens

TEXTS = st.one_of(st.sampled_from([" word", "", 'say "so"', "\n", "\\", "é", '"text":"', "{}", "[DONE]"]), st.text(max_size=8))
REASONS = st.sampled_from([None, None, None, "stop", "length", "abort"])


def dumps(document: dict[str, Any], compact: bool, ascii_only: bool) -> bytes:
    return json.dumps(document, separators=(",", ":") if compact else None, ensure_ascii=ascii_only).encode()


@st.composite
def completions(draw: st.DrawFn) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": draw(TEXTS), "finish_reason": draw(REASONS)}
    if draw(st.integers(0, 4)) == 0:
        choice["token_ids"] = draw(st.lists(st.integers(0, 9), max_size=4))
    if draw(st.integers(0, 9)) == 0:
        choice["logprobs"] = {"tokens": ["a"] * draw(st.integers(0, 3))}
    document: dict[str, Any] = {"id": "cmpl-1", "choices": [choice], "model": draw(st.sampled_from(["m", "text"]))}
    return draw(st.sampled_from([document, document, document, ANYTHING_ELSE[0], ANYTHING_ELSE[1], ANYTHING_ELSE[2]]))


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(["content", "reasoning", "reasoning_content", "role"]), max_size=2, unique=True))
    delta: dict[str, Any] = {name: draw(TEXTS) for name in names}
    if draw(st.integers(0, 6)) == 0:
        delta["tool_calls"] = [{"index": 0, "function": {"arguments": draw(TEXTS)}}]
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": draw(REASONS)}]}


ANYTHING_ELSE: list[dict[str, Any]] = [
    {"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
    {"error": {"message": "broken"}},
    {"id": "cmpl-1", "choices": [{"index": 0, "text": " a"}], "usage": {"completion_tokens": 2}},
]


def seen(state: StreamState) -> tuple[Any, ...]:
    return (state.times, state.declared, state.first_content, state.finish_reason, state.usage, state.error, state.done)


@given(
    st.booleans(),
    st.data(),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 4), min_size=1, max_size=10),
)
def test_fast_and_full_parse_agree(chat: bool, data: st.DataObject, compact: bool, ascii_only: bool, reads: list[int]) -> None:
    documents = data.draw(st.lists(chats() if chat else completions(), min_size=1, max_size=20))
    events = [dumps(document, compact, ascii_only) for document in documents]
    fast, full = StreamState(chat), StreamState(chat)
    at = now = 0
    for size in reads * len(events):
        fast.feed(events[at : at + size], float(now))
        for event in events[at : at + size]:
            full.template, full._same = None, b""
            full.feed([event], float(now))
        at, now = at + size, now + 1
    assert seen(fast) == seen(full)


def test_the_fast_path_is_taken() -> None:
    def event(text: str) -> bytes:
        return dumps({"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": None}]}, True, False)

    state = StreamState(chat=False)
    state.feed([event(" a")], 0.0)
    learned = state.template
    state.feed([event(" other"), event(" words")], 1.0)
    assert learned is not None
    assert state.template is learned
    assert state.times == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("document", "tokens", "content"),
    [
        ({"role": "assistant"}, 0, False),
        ({"role": "assistant", "content": ""}, 0, False),
        ({"reasoning_content": "hm"}, 1, False),
        ({"reasoning": "hm"}, 1, False),
        ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}, 1, False),
        ({"content": "yes"}, 1, True),
        ({"content": None}, 0, False),
    ],
)
def test_what_a_chat_delta_is(document: dict[str, Any], tokens: int, content: bool) -> None:
    state = StreamState(chat=True)
    state.feed([json.dumps({"choices": [{"index": 0, "delta": document}]}).encode()], 5.0)
    assert len(state.times) == tokens
    assert (state.first_content is not None) is content


def test_reasoning_before_content() -> None:
    state = StreamState(chat=True)
    deltas = [{"role": "assistant", "content": ""}, {"reasoning": "a"}, {"reasoning": "b"}, {"content": "c"}, {"content": "d"}]
    for now, delta in enumerate(deltas):
        state.feed([json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode()], float(now))
    assert (state.times, state.first_content) == ([1.0, 2.0, 3.0, 4.0], 3.0)


@given(st.integers(0, 200), st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=40))
def test_spread_tokens_adds_up(total: int, counts: list[int | None]) -> None:
    declared = {i: count for i, count in enumerate(counts) if count is not None}
    shares = spread_tokens(len(counts), declared, total)
    assert len(shares) == len(counts)
    assert all(share >= 0 for share in shares)
    assert all(shares[i] == count for i, count in declared.items())
    if len(declared) < len(counts):
        assert sum(shares) == max(total, sum(declared.values()))
        silent = [share for i, share in enumerate(shares) if i not in declared]
        assert max(silent) - min(silent) <= 1


def test_fewer_tokens_than_chunks_leave_the_last_chunks_empty() -> None:
    assert spread_tokens(4, {}, 3) == (1, 1, 1, 0)
    assert spread_tokens(3, {}, 7) == (2, 2, 3)
    assert spread_tokens(3, {1: 4}, 6) == (1, 4, 1)
