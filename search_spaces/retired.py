"""What guides still recommend and this vLLM lacks: the table of ``retired.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, slots=True)
class Retired:
    """One retired flag (``num_scheduler_steps``), value (``value:NAME:VALUE``) or variable (``env:NAME``).

    ``instead`` are words to write today, ``rename`` an argument that takes the same value, ``merge``/``key`` the JSON argument
    and the key that hold the value now. All empty: nothing is needed. ``gone`` is the first release without it (``None``:
    no release from 0.17 on has it).
    """

    name: str
    why: str
    instead: tuple[str, ...] = ()
    rename: str | None = None
    merge: str | None = None
    key: str | None = None
    takes_value: bool = True
    takes_several: bool = False
    gone: str | None = None


@cache
def retired() -> Mapping[str, Retired]:
    """By name."""
    text = resources.files("vopt.search_spaces").joinpath("retired.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)
    return {name: Retired(name, **{**row, "instead": tuple(row.get("instead", ()))}) for name, row in rows.items()}


@cache
def valueless_flags() -> frozenset[str]:
    """Retired flags that stood alone, as they were written."""
    return frozenset(_flag(entry.name) for entry in retired().values() if not entry.takes_value)


@cache
def flags_of_several() -> frozenset[str]:
    """Retired flags that took a list of values, as they were written."""
    return frozenset(_flag(entry.name) for entry in retired().values() if entry.takes_several)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
