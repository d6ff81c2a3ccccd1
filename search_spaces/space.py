"""What may vary: parameters over finite ordered domains, the rules between them, and points in their product.

A *point* maps every parameter's name to one of its values. A value that equals the parameter's ``default`` is what vLLM
resolves by itself, so it never enters the engine config: the default point is the config ``{}``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    ``EngineArgs`` fields, ``env:NAME`` for an environment variable, or ``speculation`` (values like ``off``, ``ngram:3``,
    ``mtp:1``, ``draft:MODEL:4``).
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
            if member == value and type(member) is type(value):
                return position
        raise ValueError(f"{self.name} = {value!r} is not one of {list(self.values)!r}")


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
    """A rule that a point breaks, with the values that break it."""

    rule: str
    detail: str
    repair: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The domain of one study. Immutable; equal spaces have equal digests."""

    parameters: tuple[Parameter, ...]
    seeds: tuple[Seed, ...] = ()
    inactive: tuple[Inactive, ...] = ()
    mode: str = "balanced"
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Parameter:
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise KeyError(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def size(self) -> int:
        """Number of points before the rules."""
        size = 1
        for parameter in self.parameters:
            size *= len(parameter.values)
        return size

    @property
    def digest(self) -> str:
        """Twelve hex digits over the domain (names, values, defaults): what must agree for a study to be resumed."""
        body = [(p.name, list(p.values), p.default, p.ordered) for p in self.parameters]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]

    def default_point(self) -> dict[str, Any]:
        return {parameter.name: parameter.default for parameter in self.parameters}
