"""What the user chose: ``--vary``, ``--keep``, ``--set``, ``--allow-lossy``, ``--allow-contract`` and their own file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vopt.search_spaces.arguments import Argument, Arguments, Kind
from vopt.search_spaces.parse import Declaration, SpaceFile, SpaceFileError, base_declarations, canonical
from vopt.search_spaces.speculation import SpeculationError, expand


@dataclass(frozen=True, slots=True)
class Choices:
    """``vary``: name -> values (``None``: those of ``base.toml`` or of vLLM); ``set`` is in every trial, baseline included.
    ``unmodelled`` are left alone by a simulation, not by the user."""

    vary: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    keep: frozenset[str] = frozenset()
    allow_lossy: frozenset[str] = frozenset()
    allow_contract: frozenset[str] = frozenset()
    set: Mapping[str, Any] = field(default_factory=dict)
    unmodelled: frozenset[str] = frozenset()


def parse_choices(
    arguments: Arguments,
    *,
    vary: Iterable[str] = (),
    keep: Iterable[str] = (),
    allow_lossy: Iterable[str] = (),
    allow_contract: Iterable[str] = (),
    settings: Iterable[str] = (),
) -> Choices:
    """The options as they were typed; ``SpaceFileError`` (with the option as its file) for what cannot be meant.

    ``settings`` are engine arguments alone: ``split_settings`` takes the front end's out of ``--set`` first.
    """
    names = {declaration.name for declaration in base_declarations()} | arguments.engine_names
    ranges = dict(_vary(text, arguments) for text in vary)
    made = Choices(
        ranges,
        frozenset(_named(name, names, "--keep") for name in keep),
        frozenset(_marked(name, "--allow-lossy") for name in allow_lossy),
        frozenset(_marked(name, "--allow-contract") for name in allow_contract),
        dict(parse_setting(text, arguments) for text in settings),
    )
    for name in made.vary:
        if name in made.keep or name in made.set:
            option = "--keep" if name in made.keep else "--set"
            raise SpaceFileError("--vary", name, name, f"also given to {option}: it cannot be both")
    return made


def parse_value(text: str) -> Any:
    """JSON where it parses, else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def parse_setting(text: str, arguments: Arguments, option: str = "--set") -> tuple[str, Any]:
    """``NAME=VALUE`` -> (name, value); a known argument's value must be of its kind."""
    name, separator, value_text = text.partition("=")
    if not separator or not name:
        raise SpaceFileError(option, text, text, "write NAME=VALUE")
    name = canonical(name.strip())
    value = parse_value(value_text)
    argument = arguments.get(name)
    if argument is None and not name.startswith("env:") and name not in arguments.hidden:
        raise SpaceFileError(option, name, value_text, _unknown(name, arguments))
    if argument is not None and argument.kind is Kind.STR and not isinstance(value, str):
        value = value_text if not isinstance(argument.default, int) else value
    if (reason := arguments.unlike(name, value)) is not None:
        raise SpaceFileError(option, name, value_text, reason)
    return name, value


def split_settings(texts: Iterable[str], arguments: Arguments) -> tuple[tuple[str, ...], dict[str, Any]]:
    """(texts that concern the engine, front-end arguments by name): the latter reach the served command alone."""
    engine: list[str] = []
    front: dict[str, Any] = {}
    for text in texts:
        argument = arguments.get(canonical(text.partition("=")[0].strip()))
        if argument is not None and argument.front_end:
            name, value = parse_setting(text, arguments)
            front[name] = value
        else:
            engine.append(text)
    return tuple(engine), front


def merge_declarations(arguments: Arguments, choices: Choices, user: SpaceFile | None) -> tuple[Declaration, ...]:
    """``base.toml``, the user's file over it, and what ``--vary`` asks for over both."""
    found = {declaration.name: declaration for declaration in base_declarations()}
    for declaration in user.declarations if user else ():
        found[declaration.name] = replace(declaration, asked=True)
    for name, values in choices.vary.items():
        base = found.get(name) or _declared(name, values, arguments)
        found[name] = replace(base, asked=True, values=values or base.values)
    return tuple(found.values())


def _vary(text: str, arguments: Arguments) -> tuple[str, tuple[Any, ...] | None]:
    written, separator, rest = text.partition("=")
    name = canonical(written.strip())
    declared = any(declaration.name == name for declaration in base_declarations())
    head = name.partition(".")[0]
    if not declared and head not in arguments.engine_names and not name.startswith("env:"):
        raise SpaceFileError("--vary", name, text, _unknown(name, arguments))
    if not separator:
        if not declared:
            _declared(name, None, arguments)  # says which values are wanted where vLLM names none
        return name, None
    values = _list(name, rest)
    if not values:
        raise SpaceFileError("--vary", name, rest, "an empty range: give at least one value")
    if len({json.dumps(value, sort_keys=True) for value in values}) < len(values):
        raise SpaceFileError("--vary", name, rest, "a value is given twice")
    for value in values:
        if name == "speculation":
            try:
                expand(str(value))
            except SpeculationError as error:
                raise SpaceFileError("--vary", name, value, str(error)) from error
        elif (reason := arguments.unlike(name, value)) is not None:
            raise SpaceFileError("--vary", name, value, reason)
    return name, values


def _list(name: str, text: str) -> tuple[Any, ...]:
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except json.JSONDecodeError as error:
            raise SpaceFileError("--vary", name, text, f"not a JSON list: {error.msg}") from error
        return tuple(listed)
    return tuple(parse_value(part.strip()) for part in text.split(",") if part.strip())


def _declared(name: str, values: tuple[Any, ...] | None, arguments: Arguments) -> Declaration:
    """A declaration of an argument that ``base.toml`` does not know."""
    argument = arguments.get(name)
    found = values or (_all_values(argument) if argument is not None else ())
    if not found:
        raise SpaceFileError("--vary", name, name, f"say which values: --vary {name}=V1,V2")
    ordered = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in found)
    group = "environment" if name.startswith("env:") else "other"
    return Declaration(name, group, found, ordered, "asked for by you", source="--vary")


def _all_values(argument: Argument) -> tuple[Any, ...]:
    if argument.kind in (Kind.BOOL, Kind.FLAG):
        return (False, True)
    return argument.choices or ()


def _named(name: str, names: Iterable[str], option: str) -> str:
    if canonical(name) not in names:
        near = difflib.get_close_matches(canonical(name), list(names), n=1)
        raise SpaceFileError(option, "name", name, "no such parameter" + (f"; did you mean {near[0]}?" if near else ""))
    return canonical(name)


def _marked(name: str, option: str) -> str:
    mark = "changes_outputs" if option == "--allow-lossy" else "changes_contract"
    marked = [declaration.name for declaration in base_declarations() if getattr(declaration, mark)]
    if canonical(name) not in marked:
        raise SpaceFileError(option, "name", name, f"it takes {', '.join(marked)}")
    return canonical(name)


def _unknown(name: str, arguments: Arguments) -> str:
    if name in arguments.arguments:
        return "it is an argument of the API server, not of the engine: fix it with --set"
    near = difflib.get_close_matches(name, [*arguments.arguments], n=1)
    return f"vLLM {arguments.version} has no such argument" + (f"; did you mean {near[0]}?" if near else "")
