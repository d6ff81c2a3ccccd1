"""Points and engine configs: one into the other, over the parameters of a space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vopt.search_spaces.parameter import Parameter, Point, same
from vopt.search_spaces.speculation import collapse, expand


def config_of(parameters: Sequence[Parameter], point: Point, acceptance_length: float | None = None) -> dict[str, Any]:
    """Overrides only: ``speculation`` expanded, dotted names nested, variables of the environment left out."""
    config: dict[str, Any] = {}
    for parameter in parameters:
        value = point[parameter.name]
        if same(value, parameter.default) or parameter.name.startswith("env:"):
            continue
        if parameter.name == "speculation":
            expanded = expand(value, acceptance_length)
            if expanded is not None:
                config["speculative_config"] = expanded
        elif "." in parameter.name:
            _nest(config, parameter.name, value)
        else:
            config[parameter.name] = value
    return config


def environment_of(parameters: Sequence[Parameter], point: Point) -> dict[str, str]:
    """The variables that differ from their default, as the strings that an environment holds."""
    found = {}
    for parameter in parameters:
        value = point[parameter.name]
        if parameter.name.startswith("env:") and not same(value, parameter.default):
            found[parameter.name.removeprefix("env:")] = _as_variable(value)
    return found


def point_of(parameters: Sequence[Parameter], config: Mapping[str, Any]) -> dict[str, Any]:
    """The point of a config, ``env:NAME`` entries included; ``ValueError`` names what lies outside the parameters."""
    rest = dict(config)
    point = {parameter.name: parameter.default for parameter in parameters}
    for parameter in parameters:
        name = parameter.name
        if name == "speculation":
            if "speculative_config" in rest:
                point[name] = parameter.values[parameter.index(collapse(rest.pop("speculative_config")))]
        elif name.startswith("env:"):
            if name in rest:
                text = str(rest.pop(name))
                matching = [value for value in parameter.values if _as_variable(value) == text]
                if not matching:
                    raise ValueError(f"{name} = {text!r} is not one of {list(parameter.values)!r}")
                point[name] = matching[0]
        elif "." in name:
            found, value = _pick(rest, name)
            if found:
                point[name] = parameter.values[parameter.index(value)]
        elif name in rest:
            value = rest.pop(name)
            point[name] = parameter.default if value is None else parameter.values[parameter.index(value)]
    if rest:
        name, value = next(iter(rest.items()))
        raise ValueError(f"{name} = {value!r} is no dimension of this space")
    return point


def _as_variable(value: Any) -> str:
    return str(int(value) if isinstance(value, bool) else value)


def _nest(config: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[last] = value


def _pick(config: dict[str, Any], name: str) -> tuple[bool, Any]:
    """Takes a nested value out of ``config`` and the tables that it leaves empty."""
    head, _, tail = name.partition(".")
    nested = config.get(head)
    if not tail:
        return (True, config.pop(head)) if head in config else (False, None)
    if not isinstance(nested, Mapping):
        return False, None
    inner = dict(nested)
    found, value = _pick(inner, tail)
    if found:
        if inner:
            config[head] = inner
        else:
            del config[head]
    return found, value
