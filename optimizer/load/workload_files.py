"""Workload files: ShareGPT, ``vllm bench serve`` custom, production logs, prefix repetition, and our own format.

What a file holds decides how it is read, not its name. A line that cannot be used is named with its number and the reason;
nothing is dropped in silence.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.lengths import Lengths
from vopt.optimizer.load.source import HEADER_DIGITS
from vopt.optimizer.load.text import CHARACTERS_PER_TOKEN, SAMPLING_NAMES, TextTokenizer
from vopt.optimizer.load.workload import FORMAT, Recorded, Workload, prefix_repetition

MILLISECONDS_FROM = 1e11
"""Numeric timestamps from this on are milliseconds since 1970: as seconds they would lie in the year 5138."""


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """An entry that cannot be used. ``number`` counts lines, or entries of a JSON array, from 1."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReadWorkload:
    """What a file gave: the workload, the entries that are not in it, and what was assumed."""

    workload: Workload
    broken: tuple[BrokenLine, ...] = ()
    notes: tuple[str, ...] = ()


class _Unusable(Exception):
    """Why one entry cannot be used."""


@dataclass(frozen=True, slots=True)
class _Draft:
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


def read_workload(path: Path, tokenizer: TextTokenizer | None, *, output_tokens: int | None = None) -> ReadWorkload:
    """The workload in ``path``. ``output_tokens`` stands in where an entry does not say how long its answer was.

    Without a tokenizer prompts are counted as a quarter of their characters, said in a note. ``UsageError`` when the file
    cannot be read, or when no entry can be used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the workload file {path} cannot be read: {error}") from error
    return parse_workload(text, tokenizer, name=path.name, output_tokens=output_tokens)


def parse_workload(
    text: str, tokenizer: TextTokenizer | None, *, name: str = "file", output_tokens: int | None = None
) -> ReadWorkload:
    """As ``read_workload``, from the file's text."""
    if (declared := _declared(text)) is not None:
        return ReadWorkload(declared)
    broken: list[BrokenLine] = []
    drafts: list[tuple[int, _Draft]] = []
    for number, entry in _entries(text, broken):
        try:
            drafts.append((number, _draft(entry, output_tokens)))
        except _Unusable as unusable:
            broken.append(BrokenLine(number, str(unusable)))
    notes: list[str] = []
    recorded = _count(drafts, tokenizer, broken, notes)
    broken.sort(key=lambda line: line.number)
    if not recorded:
        reasons = "; ".join(f"line {line.number}: {line.reason}" for line in broken[:3]) or "it is empty"
        raise UsageError(
            f"the workload file {name} has no usable entry: {reasons}",
            hint='a line looks like {"prompt": "...", "output_tokens": 128}',
        )
    if broken:
        notes.append(f"{len(broken)} of {len(broken) + len(recorded)} entries cannot be used")
    recorded = _from_zero(recorded, notes)
    pairs = tuple((entry.prompt_tokens, entry.output_tokens) for entry in recorded)
    workload = Workload(name, Lengths(pairs=pairs), recorded=recorded)
    return ReadWorkload(workload, tuple(broken), tuple(notes))


def _declared(text: str) -> Workload | None:
    """Our own format, or the parameters of a prefix repetition, when the whole text is such an object."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if data.get("format") == FORMAT:
        return Workload.from_json(data)
    names = {
        "prefix_tokens": "prefix_len",
        "suffix_tokens": "suffix_len",
        "prefixes": "num_prefixes",
        "output_tokens": "output_len",
    }
    values = {ours: data.get(ours, data.get(theirs)) for ours, theirs in names.items()}
    if "prompt" in data or any(not isinstance(value, int) or isinstance(value, bool) for value in values.values()):
        return None
    return prefix_repetition(**values)


def _entries(text: str, broken: list[BrokenLine]) -> Iterator[tuple[int, Any]]:
    """(number, entry) of a JSON array or of JSON lines, whichever the text is."""
    if text.lstrip().startswith("["):
        try:
            array = json.loads(text)
        except ValueError:
            array = None  # perhaps lines that are arrays, or a broken array: each line then says what is wrong with it
        if isinstance(array, list):
            yield from enumerate(array, start=1)
            return
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() would also cut at U+2028 inside a prompt
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            broken.append(BrokenLine(number, f"not JSON: {error}"))


def _draft(entry: Any, output_tokens: int | None) -> _Draft:
    if not isinstance(entry, Mapping):
        raise _Unusable(f"an entry is an object, this is {type(entry).__name__}")
    turns = entry.get("conversations", entry.get("conversation"))
    draft = _share_gpt(turns) if turns is not None else _logged(entry)
    try:
        "".join((draft.text, draft.system, draft.answer or "")).encode()
    except UnicodeEncodeError:
        raise _Unusable("its text is not valid Unicode (half of a surrogate pair)") from None
    if draft.output_tokens is None and draft.answer is None:
        if output_tokens is None:
            raise _Unusable("it does not say how many tokens to generate (output_tokens)")
        draft = replace(draft, output_tokens=output_tokens)
    return draft


def _share_gpt(turns: Any) -> _Draft:
    """The first question and its answer, as ``vllm bench serve`` takes them."""
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise _Unusable("conversations is not a list")
    spoken = [
        (turn.get("from", turn.get("role")), turn.get("value", turn.get("content")))
        for turn in turns
        if isinstance(turn, Mapping)
    ]
    system = spoken[0][1] if spoken and spoken[0][0] == "system" and isinstance(spoken[0][1], str) else ""
    spoken = [turn for turn in spoken if turn[0] != "system"]
    if len(spoken) < 2:
        raise _Unusable("a conversation needs a question and an answer")
    if spoken[0][0] not in ("human", "user"):
        raise _Unusable(f"the conversation begins with {spoken[0][0]!r} instead of a question")
    question, answer = spoken[0][1], spoken[1][1]
    if not isinstance(question, str) or not isinstance(answer, str) or not question or not answer:
        raise _Unusable("the question or the answer is empty")
    return _Draft(text=question, system=system, answer=answer)


def _logged(entry: Mapping[str, Any]) -> _Draft:
    """``vllm bench serve`` custom lines and production logs: a prompt, messages, token ids, or only counts."""
    text, system = _prompt(entry)
    ids = entry.get("prompt_token_ids", ())
    if not isinstance(ids, (list, tuple)) or any(
        not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in ids
    ):
        raise _Unusable("prompt_token_ids is not a list of token ids")
    counted = _whole(entry, "prompt_tokens", "input_tokens", "input_length")
    if not text and not ids and counted is None:
        raise _Unusable("it has neither prompt, messages, prompt_token_ids nor prompt_tokens")
    session = entry.get("session", entry.get("session_id"))
    return _Draft(
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
            raise _Unusable("prompt is not a text, or empty")
        return prompt, ""
    if messages is None:
        return "", ""
    if not isinstance(messages, list) or not all(
        isinstance(message, Mapping) and isinstance(message.get("content"), str) for message in messages
    ):
        raise _Unusable("messages is not a list of objects with a content of text")
    system = "\n".join(message["content"] for message in messages if message.get("role") == "system")
    rest = [message for message in messages if message.get("role") != "system"]
    if not rest:
        raise _Unusable("messages hold no word of a user")
    if len(rest) == 1:
        return str(rest[0]["content"]), system
    return "\n".join(f"{message.get('role', 'user')}: {message['content']}" for message in rest), system


def _sampling(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters beside the prompt or under ``sampling``; a JSON schema as vLLM's ``structured_outputs``."""
    nested = entry.get("sampling", {})
    if not isinstance(nested, Mapping):
        raise _Unusable("sampling is not an object")
    found: dict[str, Any] = {}
    for name in (*SAMPLING_NAMES, "seed", "stop"):
        value = nested.get(name, entry.get(name))
        if value is None:
            continue
        if name == "stop":
            _stop_words(value)
        elif not _finite(value):
            raise _Unusable(f"{name} = {value!r} is not a number")
        found[name] = value
    schema = entry.get("json_schema", entry.get("schema"))
    if schema is not None:
        if not isinstance(schema, Mapping):
            raise _Unusable("json_schema is not an object")
        found["structured_outputs"] = {"json": dict(schema)}
    return found


def _stop_words(value: Any) -> None:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise _Unusable(f"stop = {value!r} is not a text or a list of texts")


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(entry: Mapping[str, Any], *names: str) -> int | None:
    """The first of ``names`` that is there, as a whole number of at least 1."""
    for name in names:
        value = entry.get(name)
        if value is None:
            continue
        if not _finite(value) or value != int(value) or value < 1:
            raise _Unusable(f"{name} = {value!r} is not a whole number of at least 1")
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
            raise _Unusable(f"timestamp = {stamp!r} is no ISO 8601 time") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    raise _Unusable(f"timestamp = {stamp!r} is neither a number nor a text")


def _count(
    drafts: list[tuple[int, _Draft]], tokenizer: TextTokenizer | None, broken: list[BrokenLine], notes: list[str]
) -> tuple[Recorded, ...]:
    """Token counts from given ids, else the tokenizer, else the file's own counts, else a quarter of the characters."""
    count: Callable[[Sequence[str]], list[tuple[int, ...]]] = (
        tokenizer.encode_all if tokenizer else lambda texts: [()] * len(texts)
    )
    whole = [f"{draft.system}\n\n{draft.text}" if draft.system else draft.text for _, draft in drafts]
    prompts, answers = count(whole), count([draft.answer or "" for _, draft in drafts])
    recorded: list[Recorded] = []
    estimated = 0
    for (number, draft), text, ids, answer_ids in zip(drafts, whole, prompts, answers, strict=True):
        known = draft.token_ids or ids
        prompt_tokens = len(known) or draft.prompt_tokens or -(-len(text) // CHARACTERS_PER_TOKEN)
        answer = draft.answer or ""
        output = draft.output_tokens or len(answer_ids) or -(-len(answer) // CHARACTERS_PER_TOKEN)
        estimated += not known and draft.prompt_tokens is None
        if prompt_tokens < 1 or output < 1:
            broken.append(BrokenLine(number, "no token is left of the prompt or the answer"))
            continue
        hashed = hashlib.sha256((text or repr(draft.token_ids)).encode()).hexdigest() if text or draft.token_ids else ""
        sampling = draft.sampling or {}
        entry = Recorded(prompt_tokens, output, known, draft.text, draft.system, draft.at_s, sampling, draft.session, hashed)
        recorded.append(entry)
    if estimated:
        notes.append(f"no tokenizer: {estimated} prompts are counted as one token per {CHARACTERS_PER_TOKEN} characters")
    if short := sum(not entry.token_ids and entry.prompt_tokens < HEADER_DIGITS for entry in recorded):
        notes.append(f"{short} prompts are shorter than {HEADER_DIGITS} tokens and are lengthened to that many")
    return tuple(recorded)


def _from_zero(recorded: tuple[Recorded, ...], notes: list[str]) -> tuple[Recorded, ...]:
    """Times counted from the first request. When only some entries have one, none can be replayed."""
    times = [entry.at_s for entry in recorded if entry.at_s is not None]
    if not times:
        return recorded
    if len(times) < len(recorded):
        notes.append(f"{len(recorded) - len(times)} entries have no timestamp, so the file cannot be replayed in time")
    first = min(times)
    return tuple(entry if entry.at_s is None else replace(entry, at_s=entry.at_s - first) for entry in recorded)
