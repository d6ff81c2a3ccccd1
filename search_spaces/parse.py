"""Search-space files: TOML -> declarations, narrowings, seeds and forbidden combinations.

The package's own files and a user's have one format::

    [parameters.NAME]            # a new dimension, or other values, reasons, ... for one of base.toml
    values = [1, 2, 4]           # or range = { from = 1, to = 4096, step = "double" }  (or a number)
    [keep.NAME]                  # a narrowing: at_least, at_most, values, why
    [[seeds]]                    # set = { NAME = VALUE }, why
    [[rules]]                    # forbid = { NAME = VALUE, OTHER = { at_least = 4 } }, why
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from vopt.search_spaces.arguments import release_of
from vopt.search_spaces.declaration import (
    APPLIES,
    GOALS,
    GROUPS,
    NEEDS,
    Declaration,
    Forbidden,
    Narrowing,
    PriorSeed,
    SpaceFile,
    SpaceFileError,
)

__all__ = [
    "APPLIES",
    "GOALS",
    "GROUPS",
    "MODES",
    "NEEDS",
    "Declaration",
    "Forbidden",
    "Narrowing",
    "PriorSeed",
    "SpaceFile",
    "SpaceFileError",
    "bare_mode_config",
    "base_declarations",
    "canonical",
    "mode_file",
    "mode_for",
    "parse_space",
]

_TOP = frozenset({"parameters", "keep", "seeds", "rules", "mode", "bare"})
_PARAMETER = frozenset(
    {
        "group",
        "values",
        "range",
        "ordered",
        "why",
        "searched",
        "needs",
        "applies",
        "since",
        "until",
        "default",
        "changes_outputs",
        "changes_contract",
        "in_compile_key",
        "never",
    }
)


def parse_space(text: str, file: str, known: Iterable[Declaration] = ()) -> SpaceFile:
    """The file's content; ``SpaceFileError`` names file, key, value and rule. ``known`` are declarations that it builds on:
    a parameter of the same name replaces only what the file says."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpaceFileError(file, "file", "", f"not valid TOML: {error}") from error
    _only(data, _TOP, file, "")
    base = {declaration.name: declaration for declaration in known}
    declared: dict[str, Declaration] = {}
    for written, entry in _table(data.get("parameters", {}), file, "parameters").items():
        name = canonical(written)
        if name in declared:
            raise SpaceFileError(file, f"parameters.{written}", name, "declared twice")
        declared[name] = _declaration(name, _table(entry, file, f"parameters.{written}"), file, base.get(name))
    names = {**base, **declared}
    keeps = []
    for written, entry in _table(data.get("keep", {}), file, "keep").items():
        keeps.append(_narrowing(canonical(written), _table(entry, file, f"keep.{written}"), file, names))
    return SpaceFile(
        file,
        tuple(declared.values()),
        tuple(keeps),
        tuple(_seed(entry, file, i, names) for i, entry in enumerate(data.get("seeds", []))),
        tuple(_rule(entry, file, i, names) for i, entry in enumerate(data.get("rules", []))),
        data.get("mode"),
        data.get("bare"),
    )


def canonical(name: str) -> str:
    """``--max-num-seqs`` and ``max-num-seqs`` are ``max_num_seqs``; variables of the environment keep their spelling."""
    return name if name.startswith("env:") else name.removeprefix("--").replace("-", "_")


def _table(value: Any, file: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpaceFileError(file, key, value, "a table is wanted here")
    return value


def _only(entry: Mapping[str, Any], allowed: frozenset[str], file: str, prefix: str) -> None:
    for key in entry:
        if key not in allowed:
            where = f"{prefix}.{key}" if prefix else key
            raise SpaceFileError(file, where, entry[key], f"unknown key; known are {', '.join(sorted(allowed))}")


def _declaration(name: str, entry: Mapping[str, Any], file: str, base: Declaration | None) -> Declaration:
    prefix = f"parameters.{name}"
    _only(entry, _PARAMETER, file, prefix)
    _check_words(entry, file, prefix)
    own = file if base is None else f"{base.source}, {file}"
    values = _values(entry, file, prefix) if "values" in entry or "range" in entry else (base.values if base else ())
    if not values:
        raise SpaceFileError(file, f"{prefix}.values", [], "an empty range: at least one value is needed")
    ordered = entry.get("ordered", base.ordered if base else _numeric(values))
    if base is None:
        start = Declaration(name, "environment" if name.startswith("env:") else "other", values, ordered, f"given in {file}")
    else:
        start = base
    fields = {key: value for key, value in entry.items() if key not in ("values", "range", "ordered")}
    for key in ("searched", "applies"):
        if key in fields:
            fields[key] = tuple(fields[key])
    made = replace(start, **fields, values=values, ordered=ordered, source=own)
    if made.default is not None and made.default not in made.values:
        raise SpaceFileError(file, f"{prefix}.default", made.default, f"the default is outside the range {list(made.values)}")
    return made


def _check_words(entry: Mapping[str, Any], file: str, prefix: str) -> None:
    lists: tuple[tuple[str, tuple[str, ...]], ...] = (("searched", GOALS), ("applies", APPLIES))
    for key, allowed in lists:
        for word in entry.get(key, ()):
            if word not in allowed:
                raise SpaceFileError(file, f"{prefix}.{key}", word, f"not one of {', '.join(allowed)}")
    for key, allowed in (("group", GROUPS), ("needs", NEEDS)):
        if key in entry and entry[key] not in allowed:
            raise SpaceFileError(file, f"{prefix}.{key}", entry[key], f"not one of {', '.join(allowed)}")
    for key in ("since", "until"):
        if key in entry:
            try:
                release_of(str(entry[key]))
            except ValueError as error:
                raise SpaceFileError(file, f"{prefix}.{key}", entry[key], str(error)) from error
    for key in ("ordered", "changes_outputs", "changes_contract", "in_compile_key"):
        if key in entry and not isinstance(entry[key], bool):
            raise SpaceFileError(file, f"{prefix}.{key}", entry[key], "true or false is wanted here")


def _values(entry: Mapping[str, Any], file: str, prefix: str) -> tuple[Any, ...]:
    if "values" in entry and "range" in entry:
        raise SpaceFileError(file, f"{prefix}.range", entry["range"], "values and range exclude each other")
    if "range" in entry:
        return _range(_table(entry["range"], file, f"{prefix}.range"), file, f"{prefix}.range")
    values = entry["values"]
    if not isinstance(values, list):
        raise SpaceFileError(file, f"{prefix}.values", values, "a list is wanted here")
    for i, value in enumerate(values):
        if any(value == other and type(value) is type(other) for other in values[:i]):
            raise SpaceFileError(file, f"{prefix}.values", value, "given twice")
    return tuple(values)


def _range(entry: Mapping[str, Any], file: str, key: str) -> tuple[float, ...]:
    _only(entry, frozenset({"from", "to", "step"}), file, key)
    low, high, step = entry.get("from"), entry.get("to"), entry.get("step", "double")
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, (int, float)):
            raise SpaceFileError(file, key, dict(entry), "from and to are numbers")
    assert low is not None
    assert high is not None
    doubling = step == "double"
    if low > high or (doubling and low <= 0):
        raise SpaceFileError(file, key, dict(entry), "an empty range: from is above to, or zero cannot be doubled")
    if not doubling and (isinstance(step, bool) or not isinstance(step, (int, float)) or step <= 0):
        raise SpaceFileError(file, f"{key}.step", step, 'a positive number or "double"')
    found: list[float] = []
    value = low
    while value <= high and len(found) < 10_000:
        found.append(value)
        value = value * 2 if doubling else round(low + step * len(found), 12)
    return tuple(found)


def _numeric(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _known(name: str, names: Mapping[str, Declaration], file: str, key: str) -> None:
    if name not in names:
        near = [known for known in names if known.startswith(name[:8])]
        hint = f"; near: {', '.join(sorted(near))}" if near else ""
        raise SpaceFileError(file, key, name, f"names a parameter that is declared nowhere{hint}")


def _narrowing(name: str, entry: Mapping[str, Any], file: str, names: Mapping[str, Declaration]) -> Narrowing:
    key = f"keep.{name}"
    _only(entry, frozenset({"at_least", "at_most", "values", "why"}), file, key)
    _known(name, names, file, key)
    values = tuple(entry["values"]) if "values" in entry else None
    made = Narrowing(name, entry.get("why", f"given in {file}"), file, entry.get("at_least"), entry.get("at_most"), values)
    if not any(made.keeps(value) for value in names[name].values):
        rule = f"an empty range: nothing of {list(names[name].values)} remains"
        raise SpaceFileError(file, key, dict(entry), rule)
    return made


def _seed(entry: Any, file: str, position: int, names: Mapping[str, Declaration]) -> PriorSeed:
    key = f"seeds[{position}]"
    table = _table(entry, file, key)
    _only(table, frozenset({"set", "why"}), file, key)
    values = {canonical(name): value for name, value in _table(table.get("set", {}), file, f"{key}.set").items()}
    for name in values:
        _known(name, names, file, f"{key}.set")
    return PriorSeed(values, table.get("why", f"given in {file}"), file)


def _rule(entry: Any, file: str, position: int, names: Mapping[str, Declaration]) -> Forbidden:
    key = f"rules[{position}]"
    table = _table(entry, file, key)
    _only(table, frozenset({"forbid", "why"}), file, key)
    conditions = {canonical(name): value for name, value in _table(table.get("forbid", {}), file, f"{key}.forbid").items()}
    if not conditions:
        raise SpaceFileError(file, f"{key}.forbid", {}, "a rule forbids at least one thing")
    for name in conditions:
        _known(name, names, file, f"{key}.forbid")
    return Forbidden(conditions, table.get("why", f"given in {file}"), file)


@cache
def base_declarations() -> tuple[Declaration, ...]:
    """What ``base.toml`` declares, in its order."""
    return parse_space(_own("base.toml"), "base.toml").declarations


@cache
def mode_file(mode: str) -> SpaceFile:
    """The prior of ``balanced``, ``interactivity`` or ``throughput``."""
    if mode not in MODES:
        raise SpaceFileError("--mode", "mode", mode, f"not one of auto, {', '.join(MODES)}")
    return parse_space(_own(f"{mode}.toml"), f"{mode}.toml", base_declarations())


MODES = ("balanced", "interactivity", "throughput")


def mode_for(goal: str) -> str:
    """The mode that a goal chooses: throughput's own, interactivity for latency, balanced for goodput."""
    return {"throughput": "throughput", "latency": "interactivity"}.get(goal, "balanced")


def bare_mode_config(mode: str) -> dict[str, Any]:
    """The engine config of the mode's own flag alone; ``{}`` for balanced, which is vLLM's default."""
    return dict(mode_file(mode).bare or {})


def _own(name: str) -> str:
    return resources.files("vopt.search_spaces").joinpath(name).read_text(encoding="utf-8")
