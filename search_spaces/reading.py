"""Fields of a ``config.json``: nobody checks those files, so each value's kind is checked where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vopt.search_spaces.shape import ShapeError

Config = Mapping[str, Any]

LARGEST = 2**31
"""Above every dimension, length and count of a model: what is larger is a slip, and would be computed with for hours."""


def integer(config: Config, key: str, default: int | None = None) -> int:
    """A whole number from 1 on; ``default`` where it is absent or null."""
    value = config.get(key)
    if value is None:
        if default is not None:
            return default
        raise ShapeError(key, f"config.json of model_type {config.get('model_type')!r} has no {key!r}")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < LARGEST:
        raise ShapeError(key, f"{key} = {value!r} is not a positive integer")
    return value


def count(config: Config, *keys: str) -> int:
    """The first of these that is stated and not 0; 0 where none is: absent, null, false and 0 are the same here."""
    key = next((key for key in keys if config.get(key)), None)
    return 0 if key is None else integer(config, key)


def entries(config: Config, key: str) -> tuple[Any, ...]:
    """A list; empty where it is absent or null."""
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ShapeError(key, f"{key} = {value!r} is not a list")
    return tuple(value)


def section(config: Config, key: str) -> Config:
    """An object; empty where it is absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ShapeError(key, f"{key} = {value!r} is not an object")
    return value
