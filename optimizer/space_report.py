"""What ``vopt space`` prints: each parameter with its range, default and reasons, and what is left out and why."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any

from vopt.search_spaces.bare_mode import BareMode, bare_mode
from vopt.search_spaces.parameter import Inactive, Parameter, same
from vopt.search_spaces.space import SearchSpace

GIB = 1024**3
FORMAT_VERSION = 1


def space_document(space: SearchSpace) -> dict[str, Any]:
    """The space as one JSON document; ``format_version`` is an integer."""
    return {
        "format_version": FORMAT_VERSION,
        "digest": space.digest,
        "points": space.size,
        "default_violations": [violation.detail for violation in space.violations(space.default_point())],
        "bare_mode": asdict(bare_mode(space, space.mode)),
        **space.to_json(),
    }


def space_text(space: SearchSpace, width: int = 100) -> str:
    """The space for a terminal, without colours. The default stands in brackets."""
    return "\n".join(line.rstrip() for line in _lines(space, width)) + "\n"


def _lines(space: SearchSpace, width: int) -> Iterator[str]:
    yield _title(space)
    yield f"{len(space.parameters)} parameters, {space.size:,} combinations before the rules; [default]"
    for violation in space.violations(space.default_point()):
        yield from _wrapped(f"vLLM's defaults cannot start here: {violation.detail}", "", width)
    for group, members in groupby(space.parameters, key=lambda parameter: parameter.group):
        yield ""
        yield group
        for parameter in members:
            yield from _parameter_lines(parameter, width)
    bare = bare_mode(space, space.mode)
    if space.seeds or bare.config:
        yield ""
        yield "tried early"
        if bare.config:
            words = ", ".join(f"{name}={_word(value)}" for name, value in bare.config.items())
            yield from _wrapped(f"{words}: {bare.words}{_resolved(bare)}", "  ", width)
        for seed in space.seeds:
            words = ", ".join(f"{n}={_word(v)}" for n, v in seed.point.items() if not same(v, space[n].default))
            yield from _wrapped(f"{words}: {seed.reason}", "  ", width)
    if space.facts.get("set"):
        yield ""
        yield "in every trial"
        for name, value in space.facts["set"].items():
            yield f"  {name}={_word(value)}"
    inactive = [*space.inactive, *([Inactive("performance_mode", bare.reason)] if bare.reason else ())]
    if inactive:
        yield ""
        yield "left at vLLM's default"
        longest = max(len(entry.name) for entry in inactive)
        for entry in sorted(inactive, key=lambda entry: entry.reopens_on is None):
            later = f" (reopens on {entry.reopens_on.replace('_', ' ')})" if entry.reopens_on else ""
            yield from _wrapped(f"{entry.name:<{longest}}  {entry.reason}{later}", "  ", width, longest + 4)


def _resolved(bare: BareMode) -> str:
    """What a mode's flag sets, where the flag itself is measured."""
    if bare.reason or not bare.resolved:
        return ""
    return "; it sets " + ", ".join(f"{name} to {_word(value)}" for name, value in bare.resolved.items())


def _title(space: SearchSpace) -> str:
    facts = space.facts
    parts = [f"Search space, mode {space.mode}"]
    if facts.get("version"):
        parts.append(f"vLLM {facts['version']}")
    model = facts.get("model", {})
    if model:
        kinds = [word for word in ("hybrid", "moe", "mla", "multimodal") if model.get(word)]
        parts.append(f"{model['name']} ({', '.join(kinds) or 'dense'})")
    else:
        parts.append("a model of unknown shape: no memory arithmetic")
    if gpu := facts.get("gpu"):
        parts.append(f"{facts.get('gpus', 1)} x {gpu['name']} ({gpu['memory_bytes'] / GIB:.1f} GiB)")
    return " | ".join(parts)


def _parameter_lines(parameter: Parameter, width: int) -> Iterator[str]:
    shown = [f"[{_word(v)}]" if same(v, parameter.default) else _word(v) for v in parameter.values]
    marks = [
        word
        for word, on in (("changes outputs", parameter.changes_outputs), ("changes the service", parameter.changes_contract))
        if on
    ]
    tail = f"  ({', '.join(marks)})" if marks else ""
    yield from _wrapped(f"{parameter.name:<27} {'  '.join(shown)}{tail}", "  ", width, 30)
    yield from _wrapped(parameter.why, "      ", width)
    for bound in parameter.bounds:
        yield from _wrapped(f"- {bound.text} [{bound.source}]", "      ", width, 8)


def _word(value: Any) -> str:
    if isinstance(value, list) and len(value) > 6:
        return f"[{value[0]}..{value[-1]}, {len(value)} sizes]"
    return value if isinstance(value, str) else json.dumps(value)


def _wrapped(text: str, indent: str, width: int, hang: int | None = None) -> list[str]:
    after = " " * (len(indent) + 2 if hang is None else hang)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=after, break_long_words=False)
