"""One entry of a workload file: what it asks for, or why it cannot be used. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from vopt.optimizer.load.text import SAMPLING_NAMES

MILLISECONDS_FROM = 1e11
"""Numeric timestamps from this on are milliseconds since 1970: as seconds they would lie in the year 5138."""


SAMPLING_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1.0, 2.0**31),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 2.0**31),
    "seed": (-(2.0**63), 2.0**63),
}
"""Least and most that ``SamplingParams._verify_args`` of vLLM 0.32 takes; it refuses a request beyond them."""
ABOVE_LEAST = ("top_p", "repetition_penalty")
WHOLE_SAMPLING = ("top_k", "seed")


class Unusable(Exception):
    """Why one entry cannot be used."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An entry before its tokens are counted. Counts that the file gives are kept."""

    text: str = ""
    system: str = ""
    answer: str | None = None
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    at_s: float | None = None
    sampling: Mapping[str, Any] | None = None
    session: str | None = None


def read_entry(entry: Any, output_tokens: int | None) -> Draft:
    """The request of one line. ``output_tokens`` stands in for a missing length; ``Unusable`` says what is wrong."""
    if not isinstance(entry, Mapping):
        raise Unusable(f"an entry is an object, this is {type(entry).__name__}")
    turns = entry.get("conversations", entry.get("conversation"))
    draft = _share_gpt(turns) if turns is not None else _logged(entry)
    try:
        "".join((draft.text, draft.system, draft.answer or "")).encode()
    except UnicodeEncodeError:
        raise Unusable("its text is not valid Unicode (half of a surrogate pair)") from None
    if draft.output_tokens is None and draft.answer is None:
        if output_tokens is None:
            raise Unusable("it does not say how many tokens to generate (output_tokens)")
        draft = replace(draft, output_tokens=output_tokens)
    return draft


def _share_gpt(turns: Any) -> Draft:
    """The first question and its answer, as ``vllm bench serve`` takes them."""
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise Unusable("conversations is not a list")
    spoken = [
        (turn.get("from", turn.get("role")), turn.get("value", turn.get("content")))
        for turn in turns
        if isinstance(turn, Mapping)
    ]
    system = spoken[0][1] if spoken and spoken[0][0] == "system" and isinstance(spoken[0][1], str) else ""
    spoken = [turn for turn in spoken if turn[0] != "system"]
    if len(spoken) < 2:
        raise Unusable("a conversation needs a question and an answer")
    if spoken[0][0] not in ("human", "user"):
        raise Unusable(f"the conversation begins with {spoken[0][0]!r} instead of a question")
    question, answer = spoken[0][1], spoken[1][1]
    if not isinstance(question, str) or not isinstance(answer, str) or not question or not answer:
        raise Unusable("the question or the answer is empty")
    return Draft(text=question, system=system, answer=answer)


def _logged(entry: Mapping[str, Any]) -> Draft:
    """``vllm bench serve`` custom lines and production logs: a prompt, messages, token ids, or only counts."""
    text, system = _prompt(entry)
    ids = entry.get("prompt_token_ids", ())
    if not isinstance(ids, (list, tuple)) or any(
        not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in ids
    ):
        raise Unusable("prompt_token_ids is not a list of token ids")
    counted = _whole(entry, "prompt_tokens", "input_tokens", "input_length")
    if not text and not ids and counted is None:
        raise Unusable("it has neither prompt, messages, prompt_token_ids nor prompt_tokens")
    session = entry.get("session", entry.get("session_id"))
    return Draft(
        text=text,
        system=system,
        token_ids=tuple(ids),
        prompt_tokens=counted,
        output_tokens=_whole(entry, "output_tokens", "completion_tokens", "output_length", "max_tokens"),
        at_s=_seconds(entry["timestamp"]) if entry.get("timestamp") is not None else None,
        sampling=_sampling(entry),
        session=None if session is None else str(session),
    )


def _prompt(entry: Mapping[str, Any]) -> tuple[str, str]:
    """(the user's text, the system message); several messages become one text with their roles."""
    prompt, messages = entry.get("prompt"), entry.get("messages")
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt:
            raise Unusable("prompt is not a text, or empty")
        return prompt, ""
    if messages is None:
        return "", ""
    if not isinstance(messages, list) or not all(
        isinstance(message, Mapping) and isinstance(message.get("content"), str) for message in messages
    ):
        raise Unusable("messages is not a list of objects with a content of text")
    system = "\n".join(message["content"] for message in messages if message.get("role") == "system")
    rest = [message for message in messages if message.get("role") != "system"]
    if not rest:
        raise Unusable("messages hold no word of a user")
    if len(rest) == 1:
        return str(rest[0]["content"]), system
    return "\n".join(f"{message.get('role', 'user')}: {message['content']}" for message in rest), system


def _sampling(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters beside the prompt or under ``sampling``; a JSON schema as vLLM's ``structured_outputs``."""
    nested = entry.get("sampling", {})
    if not isinstance(nested, Mapping):
        raise Unusable("sampling is not an object")
    found: dict[str, Any] = {}
    for name in (*SAMPLING_NAMES, "seed", "stop"):
        value = nested.get(name, entry.get(name))
        if value is None:
            continue
        if name == "stop":
            _stop_words(value)
        else:
            _in_range(name, value)
        found[name] = int(value) if name in WHOLE_SAMPLING else value
    schema = entry.get("json_schema", entry.get("schema"))
    if schema is not None:
        if not isinstance(schema, Mapping):
            raise Unusable("json_schema is not an object")
        found["structured_outputs"] = {"json": dict(schema)}
    return found


def _in_range(name: str, value: Any) -> None:
    if not _finite(value):
        raise Unusable(f"{name} = {value!r} is not a number")
    if name in WHOLE_SAMPLING and value != int(value):
        raise Unusable(f"{name} = {value!r} is not a whole number")
    least, most = SAMPLING_RANGES[name]
    if not least <= value <= most or (name in ABOVE_LEAST and value == least):
        above = "above" if name in ABOVE_LEAST else "from"
        raise Unusable(f"{name} = {value!r}: vLLM takes {above} {least:g} to {most:g}")


def _stop_words(value: Any) -> None:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise Unusable(f"stop = {value!r} is not a text or a list of texts")


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(entry: Mapping[str, Any], *names: str) -> int | None:
    """The first of ``names`` that is there, as a whole number of at least 1."""
    for name in names:
        value = entry.get(name)
        if value is None:
            continue
        if not _finite(value) or value != int(value) or value < 1:
            raise Unusable(f"{name} = {value!r} is not a whole number of at least 1")
        return int(value)
    return None


def _seconds(stamp: Any) -> float:
    """Seconds of a number (seconds, or milliseconds since 1970) or an ISO 8601 text; without a zone it is UTC."""
    if _finite(stamp) and stamp >= 0:
        return float(stamp / 1000 if stamp >= MILLISECONDS_FROM else stamp)
    if isinstance(stamp, str):
        try:
            moment = datetime.fromisoformat(stamp)
        except ValueError:
            raise Unusable(f"timestamp = {stamp!r} is no ISO 8601 time") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    raise Unusable(f"timestamp = {stamp!r} is neither a number nor a text")
