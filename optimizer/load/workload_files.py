"""Workload files: ShareGPT, ``vllm bench serve`` custom, production logs, prefix repetition, and our own format.

What a file holds decides how it is read, not its name. A line that cannot be used is named with its number and the reason;
nothing is dropped in silence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.lengths import Lengths
from vopt.optimizer.load.source import HEADER_DIGITS
from vopt.optimizer.load.text import CHARACTERS_PER_TOKEN, TextTokenizer
from vopt.optimizer.load.workload import FORMAT, PREFIX_EXAMPLE, Recorded, Workload, prefix_repetition
from vopt.optimizer.load.workload_entries import Draft, Unusable, read_entry
from vopt.optimizer.typed_files import read_typed


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


def read_workload(path: Path, tokenizer: TextTokenizer | None, *, output_tokens: int | None = None) -> ReadWorkload:
    """The workload in ``path``. ``output_tokens`` stands in where an entry does not say how long its answer was.

    Without a tokenizer prompts are counted as a quarter of their characters, said in a note. ``UsageError`` when the file
    cannot be read, or when no entry can be used.
    """
    text = read_typed(path, "the workload file", most_bytes=None, hint="--workload chat, or a file of JSON lines")
    return parse_workload(text, tokenizer, name=path.name, output_tokens=output_tokens)


def parse_workload(
    text: str, tokenizer: TextTokenizer | None, *, name: str = "file", output_tokens: int | None = None
) -> ReadWorkload:
    """As ``read_workload``, from the file's text."""
    if (declared := _declared(text)) is not None:
        return ReadWorkload(declared)
    broken: list[BrokenLine] = []
    drafts: list[tuple[int, Draft]] = []
    for number, entry in _entries(text, broken):
        try:
            drafts.append((number, read_entry(entry, output_tokens)))
        except Unusable as unusable:
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
    if {"prompt", "prompt_tokens", "messages", "conversations"} & data.keys() or values["prefix_tokens"] is None:
        return None
    for ours, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(
                f"a prefix repetition needs {ours} (or {names[ours]}) as a whole number, not {value!r}", hint=PREFIX_EXAMPLE
            )
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


def _count(
    drafts: list[tuple[int, Draft]], tokenizer: TextTokenizer | None, broken: list[BrokenLine], notes: list[str]
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
