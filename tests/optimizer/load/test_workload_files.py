from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.text import TextTokenizer
from vopt.optimizer.load.workload import CHAT
from vopt.optimizer.load.workload_files import BrokenLine, parse_workload, read_workload


def lines(*entries: Any) -> str:
    return "\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries)


def conversation(question: str, answer: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


TALKS = [conversation("When does the ferry leave?", "At nine."), conversation("And the train?", "It is delayed.")]


@pytest.mark.parametrize("text", [json.dumps(TALKS), json.dumps(TALKS, indent=2), lines(*TALKS)])
def test_share_gpt_as_array_or_as_lines(tokenizer: TextTokenizer, text: str) -> None:
    read = parse_workload(text, tokenizer)
    assert [entry.text for entry in read.workload.recorded] == ["When does the ferry leave?", "And the train?"]
    assert [entry.output_tokens for entry in read.workload.recorded] == [
        len(tokenizer.encode(a)) for a in ("At nine.", "It is delayed.")
    ]
    assert read.broken == ()


def test_the_name_of_the_file_decides_nothing(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    path = tmp_path / "dataset.json"
    path.write_text(lines(*TALKS))
    assert len(read_workload(path, tokenizer).workload.recorded) == 2


def test_every_broken_line_is_named_with_its_reason(tokenizer: TextTokenizer) -> None:
    text = lines(
        {"prompt": "fine", "output_tokens": 5},
        "{not json",
        "",
        [1, 2],
        {"prompt": "", "output_tokens": 5},
        {"prompt": "no length"},
        {"prompt": "x", "output_tokens": 0},
        {"prompt": "x", "output_tokens": 2.5},
        {"output_tokens": 5},
        {"conversations": [{"from": "human", "value": "alone"}]},
        {"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "b"}]},
        {"prompt": "x", "output_tokens": 3, "temperature": "hot"},
        {"prompt": "x", "output_tokens": 3, "timestamp": "yesterday"},
        {"prompt_token_ids": [1, -2], "output_tokens": 3},
        {"messages": [{"role": "user"}], "output_tokens": 3},
        {"prompt": "x", "output_tokens": 3, "json_schema": "object"},
    )
    read = parse_workload(text, tokenizer)
    assert len(read.workload.recorded) == 1
    assert [line.number for line in read.broken] == [2, *range(4, 17)]
    reasons = {line.number: line.reason for line in read.broken}
    assert reasons[2].startswith("not JSON")
    assert reasons[4] == "an entry is an object, this is list"
    assert "output_tokens" in reasons[6]
    assert reasons[8] == "output_tokens = 2.5 is not a whole number of at least 1"
    assert "gpt" in reasons[11]
    assert reasons[12] == "temperature = 'hot' is not a number"
    assert any("14 of 15 entries" in note for note in read.notes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt_tokens": NaN, "output_tokens": 1}', "prompt_tokens = nan"),
        ('{"prompt_tokens": 1e999, "output_tokens": 1}', "prompt_tokens = inf"),
        ('{"prompt": "x", "output_tokens": 1, "temperature": NaN}', "temperature = nan"),
        ('{"prompt": "x", "output_tokens": 1, "temperature": -0.5}', "temperature = -0.5: vLLM takes from 0 to 2"),
        ('{"prompt": "x", "output_tokens": 1, "temperature": 2.5}', "temperature = 2.5"),
        ('{"prompt": "x", "output_tokens": 1, "top_p": 0}', "top_p = 0: vLLM takes above 0 to 1"),
        ('{"prompt": "x", "output_tokens": 1, "sampling": {"top_p": 1.5}}', "top_p = 1.5"),
        ('{"prompt": "x", "output_tokens": 1, "min_p": 2}', "min_p = 2"),
        ('{"prompt": "x", "output_tokens": 1, "top_k": -2}', "top_k = -2"),
        ('{"prompt": "x", "output_tokens": 1, "top_k": 1.5}', "top_k = 1.5 is not a whole number"),
        ('{"prompt": "x", "output_tokens": 1, "repetition_penalty": 0}', "repetition_penalty = 0"),
        ('{"prompt": "x", "output_tokens": 1, "presence_penalty": 3}', "presence_penalty = 3"),
        ('{"prompt": "x", "output_tokens": 1, "seed": 1e40}', "seed = 1e+40"),
        ('{"prompt": "x", "output_tokens": 1, "timestamp": -1}', "timestamp = -1"),
        ('{"prompt": "x", "output_tokens": 1, "stop": 5}', "stop = 5"),
        ('{"prompt": "\\ud800", "output_tokens": 1}', "not valid Unicode"),
    ],
)
def test_values_that_json_allows_and_a_request_does_not(line: str, words: str) -> None:
    read = parse_workload(line + '\n{"prompt_tokens": 9, "output_tokens": 1}', None)
    assert len(read.workload.recorded) == 1
    assert words in read.broken[0].reason


def test_a_line_ends_only_at_a_line_feed() -> None:
    text = '{"prompt": "one\u2028two\x85three", "output_tokens": 1}\r\n{"prompt_tokens": 9, "output_tokens": 1}\r\n'
    read = parse_workload(text, None)
    assert read.broken == ()
    assert read.workload.recorded[0].text == "one\u2028two\x85three"


def test_a_file_with_nothing_usable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no usable entry: line 1: not JSON") as refused:
        parse_workload("hello\nworld", None)
    assert "output_tokens" in refused.value.hint
    with pytest.raises(UsageError, match="it is empty"):
        parse_workload("\n\n", None)
    with pytest.raises(UsageError, match="No such file"):
        read_workload(tmp_path / "none.jsonl", None)


def test_a_length_for_entries_that_state_none(tokenizer: TextTokenizer) -> None:
    read = parse_workload(lines({"prompt": "one"}, {"prompt": "two", "output_tokens": 7}), tokenizer, output_tokens=50)
    assert [entry.output_tokens for entry in read.workload.recorded] == [50, 7]


def test_a_production_log(tokenizer: TextTokenizer) -> None:
    schema = {"type": "object", "properties": {"port": {"type": "string"}}}
    text = lines(
        {"timestamp": "2026-03-01T10:00:05Z", "prompt": "b", "output_tokens": 4, "temperature": 0.2, "session_id": 7},
        {"timestamp": "2026-03-01T10:00:00+00:00", "prompt_tokens": 120, "output_tokens": 6, "sampling": {"top_p": 0.9}},
        {
            "timestamp": "2026-03-01T10:00:02",
            "prompt_token_ids": [300, 301, 302],
            "completion_tokens": 2,
            "json_schema": schema,
        },
    )
    first, second, third = parse_workload(text, tokenizer).workload.recorded
    assert [first.at_s, second.at_s, third.at_s] == [5, 0, 2]
    assert first.sampling == {"temperature": 0.2}
    assert first.session == "7"
    assert (second.prompt_tokens, second.sampling) == (120, {"top_p": 0.9})
    assert third.token_ids == (300, 301, 302)
    assert third.sampling == {"structured_outputs": {"json": schema}}


@pytest.mark.parametrize(("stamps", "seconds"), [((1.5, 4.0), 2.5), ((1_760_000_000_000, 1_760_000_002_500), 2.5)])
def test_numeric_timestamps_are_seconds_or_milliseconds(stamps: tuple[float, float], seconds: float) -> None:
    text = lines(*({"timestamp": stamp, "prompt_tokens": 9, "output_tokens": 1} for stamp in stamps))
    assert [entry.at_s for entry in parse_workload(text, None).workload.recorded] == [0, seconds]


def test_a_half_timed_log_says_that_it_cannot_be_replayed() -> None:
    text = lines({"timestamp": 1, "prompt_tokens": 9, "output_tokens": 1}, {"prompt_tokens": 9, "output_tokens": 1})
    read = parse_workload(text, None)
    assert not read.workload.has_times
    assert any("cannot be replayed" in note for note in read.notes)


def test_without_a_tokenizer_tokens_are_estimated_and_said_so() -> None:
    read = parse_workload(lines({"prompt": "x" * 400, "output_tokens": 5}, {"prompt_tokens": 7, "output_tokens": 5}), None)
    assert [entry.prompt_tokens for entry in read.workload.recorded] == [100, 7]
    assert any("1 prompts are counted as one token per 4 characters" in note for note in read.notes)


def test_messages_become_one_text_with_the_system_message_apart(tokenizer: TextTokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    talk = [*messages, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Bye"}]
    text = lines({"messages": messages, "output_tokens": 3}, {"messages": talk, "output_tokens": 3})
    one, more = parse_workload(text, tokenizer).workload.recorded
    assert (one.system, one.text) == ("Be brief.", "Hello")
    assert more.text == "user: Hello\nassistant: Hi\nuser: Bye"
    assert tokenizer.decode(one.token_ids) == "Be brief.\n\nHello"


def test_prefix_repetition_with_our_names_or_those_of_vllm_bench() -> None:
    ours = {"prefix_tokens": 256, "suffix_tokens": 64, "prefixes": 5, "output_tokens": 100}
    theirs = {"prefix_len": 256, "suffix_len": 64, "num_prefixes": 5, "output_len": 100}
    assert parse_workload(json.dumps(ours), None) == parse_workload(json.dumps(theirs), None)
    assert parse_workload(json.dumps(ours), None).workload.facts()["reuse_share"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prefix_len": 1600, "suffix_len": 100, "output_len": 50}', "needs prefixes (or num_prefixes)"),
        ('{"prefix_tokens": 1600, "suffix_tokens": "100", "prefixes": 2, "output_tokens": 50}', "'100'"),
        ('{"prefix_tokens": 1600, "suffix_tokens": 2, "prefixes": 2, "output_tokens": 50}', "suffix of at least 8"),
        ('{"prefix_tokens": 0, "suffix_tokens": 20, "prefixes": 2, "output_tokens": 50}', "not 0, 2, 50 and 20"),
    ],
)
def test_a_prefix_repetition_that_is_none_says_what_it_lacks(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_workload(text, None)
    assert words in refused.value.message
    assert '"prefix_tokens": 1024' in refused.value.hint


def test_our_own_format_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "chat.workload"
    path.write_text(json.dumps(CHAT.to_json(), indent=1))
    assert read_workload(path, None).workload == CHAT
    with pytest.raises(UsageError, match="version"):
        parse_workload(json.dumps({**CHAT.to_json(), "format_version": 99}), None)
    with pytest.raises(UsageError, match="cannot be meant"):
        parse_workload(json.dumps({**CHAT.to_json(), "lengths": {}}), None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["prompt", "messages", "prompt_token_ids", "prompt_tokens", "output_tokens", "timestamp", "sampling", "conversations",
     "temperature", "json_schema", "session", "stop"]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(KEYS, JSON | st.integers(1, 50), max_size=6) | JSON, min_size=1, max_size=4))
def test_whatever_a_line_holds_it_is_used_or_named(entries: list[Any]) -> None:
    text = lines({"prompt_tokens": 9, "output_tokens": 1}, *(json.dumps(entry) for entry in entries))
    read = parse_workload(text, None)
    assert len(read.workload.recorded) + len(read.broken) == len(entries) + 1
    assert all(isinstance(line, BrokenLine) and line.reason for line in read.broken)
