"""What each flag of a launch command amounts to under one vLLM: known, redundant, retired, and what to write today."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vopt.optimizer.command import Flag, argument_words
from vopt.search_spaces.arguments import Arguments, Kind
from vopt.search_spaces.parse import canonical
from vopt.search_spaces.retired import Retired, retired

NO_EFFECT = {
    "kv_offloading_backend": ("kv_offloading_size", "without --kv-offloading-size nothing is offloaded"),
    "all2all_backend": ("enable_expert_parallel", "without --enable-expert-parallel nothing is exchanged"),
    "eplb_config": ("enable_eplb", "without --enable-eplb nothing is balanced"),
    "ubatch_size": ("enable_dbo", "without --enable-dbo there are no micro-batches"),
}


class FlagStatus(StrEnum):
    """What a flag amounts to. The last three keep the command from starting."""

    GOOD = "good"
    REDUNDANT = "redundant"
    NO_EFFECT = "no_effect"
    UNREAD = "unread"
    RETIRED = "retired"
    UNKNOWN = "unknown"
    INVALID = "invalid"

    @property
    def fatal(self) -> bool:
        return self in (FlagStatus.RETIRED, FlagStatus.UNKNOWN, FlagStatus.INVALID)


@dataclass(frozen=True, slots=True)
class FlagFinding:
    """One flag: as it was written, what it is, and what to write today (empty: nothing)."""

    written: str
    status: FlagStatus
    message: str
    instead: tuple[str, ...] = ()


def meant(flag: Flag, schema: Arguments) -> bool | None:
    """What ``--flag=true`` and its like meant: switches take no value, but people write one. ``None``: something else."""
    if flag.name is None or not flag.problem or schema[flag.name].kind not in (Kind.BOOL, Kind.FLAG) or not flag.words:
        return None
    said = {"true": True, "1": True, "false": False, "0": False}.get(flag.words[0].lower())
    negated = flag.written in schema[flag.name].negatives
    return None if said is None else said is not negated


def is_last(flag: Flag, later: Sequence[Flag], schema: Arguments) -> bool:
    """Whether no later flag takes this one's place, as the last of two equal ones does in argparse."""
    again = any(other.name == flag.name and not other.problem for other in later)
    return flag.name is None or schema[flag.name].kind is Kind.APPEND or not again


def finding(
    flag: Flag, given: Mapping[str, Any], schema: Arguments, resolved: Mapping[str, Any], *, last: bool = True
) -> FlagFinding:
    written = " ".join((flag.written, *flag.words))
    if flag.name is None:
        return unknown(flag, written, schema)
    if flag.problem:
        old = _old_value(flag)
        return FlagFinding(written, FlagStatus.INVALID, f"{old.why} ({flag.problem})" if old else flag.problem)
    if (old := retired_value(flag, schema)) is not None:
        return FlagFinding(written, FlagStatus.INVALID, f"gone since {old.gone}: {old.why}")
    if not last:
        return FlagFinding(written, FlagStatus.NO_EFFECT, "the same argument is given again later, and the last one wins")
    if flag.front_end:
        return FlagFinding(written, FlagStatus.GOOD, "front end: reaches the served command, not an engine in-process")
    need = NO_EFFECT.get(flag.name)
    if need is not None and not given.get(need[0]):
        return FlagFinding(written, FlagStatus.NO_EFFECT, need[1])
    if flag.name in resolved and resolved[flag.name] == flag.value and type(resolved[flag.name]) is type(flag.value):
        return FlagFinding(written, FlagStatus.REDUNDANT, f"{flag.value!r} is what vLLM resolves to by itself")
    default = resolved.get(flag.name)
    beside = f" (without it: {default!r})" if isinstance(default, (bool, int, float, str)) and default != "" else ""
    plainly = (
        isinstance(flag.value, (int, float)) and not isinstance(flag.value, bool) and [str(flag.value)] != list(flag.words)
    )
    said = f"known: {flag.value!r}" if plainly and flag.words else "known"
    return FlagFinding(written, FlagStatus.GOOD, f"{said}{beside}")


def unknown(flag: Flag, written: str, schema: Arguments) -> FlagFinding:
    old = retired().get(canonical(flag.written))
    if old is not None:
        since = f"gone since {old.gone}" if old.gone else "no vLLM since 0.17 has it"
        return FlagFinding(written, FlagStatus.RETIRED, f"{since}: {old.why}", instead=instead_of(old, flag, schema))
    if not flag.written.startswith("-"):
        return FlagFinding(written, FlagStatus.UNKNOWN, flag.problem or "")
    near = difflib.get_close_matches(flag.written, list(schema.by_flag), n=1)
    return FlagFinding(written, FlagStatus.UNKNOWN, (flag.problem or "") + (f"; did you mean {near[0]}?" if near else ""))


def instead_of(old: Retired, flag: Flag, schema: Arguments) -> tuple[str, ...]:
    if old.merge and old.key:
        part = merged({}, old, flag)
        return tuple(argument_words(old.merge, part[old.merge], schema))
    if old.rename and old.rename in schema:
        return (schema[old.rename].flag, *flag.words)
    return old.instead


def merged(config: dict[str, Any], old: Retired, flag: Flag) -> dict[str, Any]:
    """``config`` with a retired flag's value in the JSON argument that holds it now, in place of one that is no object."""
    assert old.merge is not None
    assert old.key is not None
    held = config.get(old.merge)
    part = dict(held) if isinstance(held, Mapping) else {}
    part[old.key] = _retired_word(flag.words[0] if flag.words else "")
    if old.merge == "speculative_config":
        part |= {"method": _method(part)} if _method(part) else {}
        if part.get("model") in NGRAM:
            del part["model"]  # it named no model, but the method
    return {**config, old.merge: part}


NGRAM = ("[ngram]", "ngram")
"""What --speculative-model took for drafting from the prompt itself."""


def _method(part: Mapping[str, Any]) -> str | None:
    """The method that the flags before --speculative-config stood for, as far as they were given."""
    if part.get("model") in NGRAM or part.get("method") == "ngram":
        return "ngram"
    if "model" in part:
        return part.get("method") or "draft_model"
    return "ngram" if "prompt_lookup_max" in part else None


def _retired_word(word: str) -> Any:
    """A retired flag's value as JSON holds it: finite numbers and objects as such, everything else as text."""
    try:
        value = json.loads(word)
        json.dumps(value, allow_nan=False)  # Python reads NaN and 1e999, which JSON has not
    except ValueError:
        return word
    return value if isinstance(value, (int, float, dict)) and not isinstance(value, bool) else word


def variables(environment: Mapping[str, str], schema: Arguments) -> list[FlagFinding]:
    found = []
    for name, value in environment.items():
        old = retired().get(f"env:{name}")
        gone = old is not None and (old.gone is None or schema.release >= _release(old.gone))
        status = FlagStatus.UNREAD if gone else FlagStatus.GOOD
        message = old.why if old is not None and gone else "environment"
        found.append(FlagFinding(f"{name}={value}", status, message))
    return found


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _old_value(flag: Flag) -> Retired | None:
    return next((old for word in flag.words if (old := retired().get(f"value:{flag.name}:{word}"))), None)


def retired_value(flag: Flag, schema: Arguments) -> Retired | None:
    """The value of a flag that this vLLM's parser lets pass and its engine refuses, as one that is gone."""
    old = _old_value(flag)
    return old if old is not None and old.gone and schema.release >= _release(old.gone) else None
