"""The values that a search space is made of: parameters over finite ordered domains, bounds, seeds, violations."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Point = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bound:
    """One narrowing of a domain and where it came from (a mode file, memory arithmetic, an engine's message, the user)."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """One dimension. ``values`` is the whole domain, in order; ``ordered`` says that neighbours are alike.

    ``default`` is a member of ``values``: what the engine resolves by itself. Values are JSON values; the names are
    ``EngineArgs`` fields, ``field.key`` inside a nested one, ``env:NAME`` for an environment variable, or ``speculation``
    (values like ``off``, ``ngram:3``, ``mtp:1``, ``draft:MODEL:4``).
    """

    name: str
    values: tuple[Any, ...]
    default: Any
    ordered: bool
    group: str
    why: str
    bounds: tuple[Bound, ...] = ()
    changes_outputs: bool = False
    changes_contract: bool = False
    in_compile_key: bool = True

    def index(self, value: Any) -> int:
        """Position of ``value``; ``ValueError`` naming the domain when it is not a member."""
        for position, member in enumerate(self.values):
            if same(member, value):
                return position
        raise ValueError(f"{self.name} = {value!r} is not one of {list(self.values)!r}")

    def nearest(self, value: Any) -> Any:
        """The member that stands for ``value``: itself, else (numbers) the largest below it, else the smallest."""
        if any(same(member, value) for member in self.values):
            return value
        numbers = sorted(v for v in self.values if isinstance(v, (int, float)) and not isinstance(v, bool))
        if not numbers or isinstance(value, bool) or not isinstance(value, (int, float)):
            return self.default
        return numbers[max(0, bisect.bisect_right(numbers, value) - 1)]


@dataclass(frozen=True, slots=True)
class Inactive:
    """A knob that is not searched, and why."""

    name: str
    reason: str
    reopens_on: str | None = None


@dataclass(frozen=True, slots=True)
class Seed:
    """A point worth trying early, and why."""

    point: Point
    reason: str


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a point breaks, with the values that break it. ``repair`` are values, by argument, that would keep it."""

    rule: str
    detail: str
    repair: Mapping[str, Any] | None = None


def same(left: Any, right: Any) -> bool:
    """Equal as JSON values: ``True`` is not ``1``, ``1`` is not ``1.0``."""
    return bool(left == right) and type(left) is type(right)
