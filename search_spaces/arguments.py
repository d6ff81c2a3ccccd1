"""What a vLLM takes as arguments: names, kinds, choices, defaults and command-line forms, as data.

The data come from vLLM itself (``EngineArgs`` and the parser of ``vllm serve``): of the installed one, or of the releases
whose answers are stored beside this module for work without vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any


class Kind(StrEnum):
    """The command-line form of an argument."""

    BOOL = "bool"  # --x / --no-x
    FLAG = "flag"  # --x, only to switch on
    INT = "int"
    FLOAT = "float"
    STR = "str"
    JSON = "json"
    JSON_OR_STR = "json_or_str"
    LIST = "list"  # --x a b c
    APPEND = "append"  # --x a --x b
    COMMA = "comma"  # --x a,b,c
    OPTIONAL = "optional"  # --x, or --x VALUE


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. ``default`` is the dataclass default: ``None`` for "resolved by vLLM" and for configuration objects.

    ``human`` numbers may be written ``64k``. ``front_end`` arguments belong to ``vllm serve`` and never reach the engine.
    ``suggested`` are known values of an argument that takes others too.
    """

    name: str
    flags: tuple[str, ...]
    kind: Kind
    element: str = "str"
    choices: tuple[Any, ...] | None = None
    suggested: tuple[Any, ...] | None = None
    default: Any = None
    nullable: bool = False
    human: bool = False
    front_end: bool = False

    @property
    def flag(self) -> str:
        """The long flag, ``--like-this``."""
        long = [flag for flag in self.flags if flag.startswith("--") and not flag.startswith("--no-")]
        exact = "--" + self.name.replace("_", "-")
        return exact if exact in long else (long or ["--" + self.name.replace("_", "-")])[0]

    @property
    def negative(self) -> str | None:
        """The flag that switches a ``BOOL`` off. A flag whose own name begins with ``no`` keeps it (``--no-no-x``).
        ``--no-x`` comes first: all releases take it, ``--disable-x`` for ``--enable-x`` only those from 0.33 on."""
        wanted = "--no-" + self.flag[2:]
        return wanted if wanted in self.flags else next(iter(self.negatives), None)

    @property
    def negatives(self) -> tuple[str, ...]:
        """Every flag that switches a ``BOOL`` off."""
        if self.kind is not Kind.BOOL:
            return ()
        off = {inverse for flag in self.flags for inverse in _inverses(flag)}
        return tuple(flag for flag in self.flags if flag in off and flag != self.flag)


def _inverses(flag: str) -> tuple[str, ...]:
    """What vLLM's parser makes of a switch to turn it off."""
    found = ["--no-" + flag[2:]]
    for prefix, inverse in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if flag.startswith(prefix):
            found.append(inverse + flag.removeprefix(prefix))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Arguments:
    """All arguments of one vLLM version. ``hidden`` are engine arguments without a flag; ``device`` is where it would run."""

    version: str
    arguments: Mapping[str, Argument]
    hidden: frozenset[str] = frozenset()
    device: str = ""
    source: str = ""
    by_flag: Mapping[str, Argument] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        flags = {flag: argument for argument in self.arguments.values() for flag in argument.flags}
        object.__setattr__(self, "by_flag", MappingProxyType(flags))

    def __contains__(self, name: object) -> bool:
        return name in self.arguments

    def __getitem__(self, name: str) -> Argument:
        return self.arguments[name]

    def get(self, name: str) -> Argument | None:
        return self.arguments.get(name)

    @property
    def release(self) -> tuple[int, int, int]:
        return release_of(self.version)

    @property
    def engine_names(self) -> frozenset[str]:
        return frozenset(name for name, argument in self.arguments.items() if not argument.front_end) | self.hidden

    @classmethod
    def from_json(cls, document: Mapping[str, Any], source: str = "") -> Arguments:
        """From the document that ``arguments_probe.py schema`` prints."""
        rows = [_argument(row) for row in document["arguments"]]
        return cls(
            document["version"],
            MappingProxyType({row.name: row for row in rows}),
            frozenset(document.get("hidden", ())),
            document.get("device", ""),
            source,
        )

    def unlike(self, name: str, value: Any) -> str | None:
        """Why ``value`` is not one that this argument takes, ``None`` when it is (or when the argument is unknown)."""
        argument = self.arguments.get(name)
        if argument is None or value is None:
            return None
        if argument.choices is not None and argument.kind is not Kind.LIST and value not in argument.choices:
            return f"vLLM {self.version} takes {', '.join(map(str, argument.choices))}"
        match argument.kind:
            case Kind.BOOL | Kind.FLAG:
                fits, what = isinstance(value, bool), "true or false"
            case Kind.INT:
                fits, what = isinstance(value, int) and not isinstance(value, bool), "an integer"
            case Kind.FLOAT:
                fits, what = isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
            case Kind.LIST | Kind.APPEND | Kind.COMMA:
                fits, what = isinstance(value, (list, tuple)), "a list"
            case Kind.JSON:
                fits, what = isinstance(value, (dict, list)), "a JSON object"
            case _:
                return None
        return None if fits else f"{name} takes {what}"


def _argument(row: Mapping[str, Any]) -> Argument:
    # A choice "None" of an optional argument means "no value": it cannot be given.
    unset = ("None",) if row.get("nullable") else ()
    return Argument(
        name=row["name"],
        flags=tuple(row["flags"]),
        kind=Kind(row["kind"]),
        element=row.get("element", "str"),
        choices=tuple(choice for choice in row["choices"] if choice not in unset) if "choices" in row else None,
        suggested=tuple(row["suggested"]) if "suggested" in row else None,
        default=row.get("default"),
        nullable=row.get("nullable", False),
        human=row.get("human", False),
        front_end=row.get("front_end", False),
    )


def release_of(version: str) -> tuple[int, int, int]:
    """``0.22.1rc1+cpu`` -> ``(0, 22, 1)``; ``ValueError`` for what is no version."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise ValueError(f"{version!r} is not a vLLM version")
    return int(match[1]), int(match[2]), int(match[3] or 0)


@cache
def stored_versions() -> tuple[str, ...]:
    """The releases whose arguments come with this package, oldest first."""
    names = (entry.name for entry in resources.files("vopt.search_spaces").iterdir())
    found = [
        name.removeprefix("arguments_").removesuffix(".json") for name in names if re.fullmatch(r"arguments_.+\.json", name)
    ]
    return tuple(sorted(found, key=release_of))


@cache
def stored_arguments(version: str) -> Arguments:
    """The arguments of a release from this package: the same release, else the newest stored one before it.

    ``ValueError`` when ``version`` is older than everything stored or no version at all.
    """
    wanted = release_of(version)
    older = [stored for stored in stored_versions() if release_of(stored) <= wanted]
    if not older:
        raise ValueError(f"no arguments of vLLM {version} are stored; stored are {', '.join(stored_versions())}")
    name = f"arguments_{older[-1]}.json"
    text = resources.files("vopt.search_spaces").joinpath(name).read_text(encoding="utf-8")
    return Arguments.from_json(json.loads(text), source=f"stored arguments of vLLM {older[-1]}")
