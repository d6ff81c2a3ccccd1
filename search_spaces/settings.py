"""A complete engine config as rules see it, and how rules are collected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vopt.search_spaces.arguments import release_of
from vopt.search_spaces.parameter import Violation


@dataclass(frozen=True, slots=True)
class Settings:
    """A complete engine config (by ``EngineArgs`` name, nested ones as objects) beside what is known of its surroundings."""

    config: Mapping[str, Any]
    facts: Mapping[str, Any]

    def given(self, name: str) -> Any:
        return self.config.get(name)

    def value(self, name: str, otherwise: Any = None) -> Any:
        """What vLLM will use: the given value, else what it resolves to as far as that is known."""
        given = self.config.get(name)
        if given is not None:
            return given
        resolved = self.facts.get("resolved", {}).get(name)
        return otherwise if resolved is None else resolved

    def nested(self, name: str, key: str) -> Any:
        part = self.config.get(name)
        return part.get(key) if isinstance(part, Mapping) else None

    @property
    def release(self) -> tuple[int, int, int]:
        return release_of(self.facts.get("version", "0.33.0"))

    @property
    def model(self) -> Mapping[str, Any]:
        """Facts of the model, empty when its shape is not known: rules that need one then stay silent."""
        found: Mapping[str, Any] = self.facts.get("model", {})
        return found

    @property
    def speculation(self) -> Mapping[str, Any]:
        spec = self.config.get("speculative_config")
        return spec if isinstance(spec, Mapping) else {}

    @property
    def method(self) -> str:
        method = str(self.speculation.get("method") or "")
        return "mtp" if method.endswith("_mtp") else method

    @property
    def draft_tokens(self) -> int:
        return int(self.speculation.get("num_speculative_tokens") or 0)


Rule = Callable[[Settings], Violation | None]


def collector(table: list[Rule]) -> Callable[[Rule], Rule]:
    """A decorator that puts a rule into ``table``."""

    def collect(function: Rule) -> Rule:
        table.append(function)
        return function

    return collect
