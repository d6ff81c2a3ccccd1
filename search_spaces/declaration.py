"""What a search-space file says, as values: declarations, narrowings, seeds, forbidden combinations; and its words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GOALS = ("throughput", "latency", "goodput")
GROUPS = (
    "scheduling",
    "memory",
    "compile",
    "speculation",
    "quantization",
    "parallelism",
    "kernels",
    "multimodal",
    "hybrid",
    "environment",
    "other",
)
APPLIES = ("dense", "moe", "hybrid", "not_hybrid", "mla", "not_mla", "multimodal", "gpus", "mtp", "unquantized")
NEEDS = (
    "queue",
    "kv_pressure",
    "token_budget",
    "prefix_caching",
    "reuse_beyond_gpu",
    "speculation",
    "long_prompts",
    "priorities",
    "batch_beyond_graphs",
    "small_batches",
)


class SpaceFileError(ValueError):
    """A search-space file or option that cannot be meant: where, which key, which value, which rule."""

    def __init__(self, file: str, key: str, value: object, rule: str) -> None:
        super().__init__(f"{file}: {key} = {value!r}: {rule}")
        self.file, self.key, self.value, self.rule = file, key, value, rule


@dataclass(frozen=True, slots=True)
class Declaration:
    """One tunable argument as declared; ``since`` is the first release that has it, ``until`` the first without it.

    ``searched`` are the goals for which it is varied unasked. ``default`` is only for what vLLM cannot tell (variables of
    the environment); ``never`` is the reason why it is not varied at all. ``asked`` says that the user wants it.
    """

    name: str
    group: str
    values: tuple[Any, ...]
    ordered: bool
    why: str
    searched: tuple[str, ...] = ()
    needs: str | None = None
    applies: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None
    default: Any = None
    changes_outputs: bool = False
    changes_contract: bool = False
    in_compile_key: bool = True
    never: str | None = None
    asked: bool = False
    source: str = "base.toml"


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What remains of a domain: values between two bounds, or among ``values``; and why."""

    name: str
    why: str
    source: str
    at_least: float | None = None
    at_most: float | None = None
    values: tuple[Any, ...] | None = None

    def keeps(self, value: Any) -> bool:
        if self.values is not None and value not in self.values:
            return False
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return self.values is not None
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


@dataclass(frozen=True, slots=True)
class PriorSeed:
    """A configuration worth trying early, by parameter name, and why."""

    values: Mapping[str, Any]
    why: str
    source: str


@dataclass(frozen=True, slots=True)
class Forbidden:
    """A combination that is not to be tried: every condition holds. A condition is a value or ``{at_least, at_most}``."""

    conditions: Mapping[str, Any]
    why: str
    source: str


@dataclass(frozen=True, slots=True)
class SpaceFile:
    """One file. ``bare`` is the engine config of the mode's own flag alone."""

    source: str
    declarations: tuple[Declaration, ...] = ()
    keeps: tuple[Narrowing, ...] = ()
    seeds: tuple[PriorSeed, ...] = ()
    rules: tuple[Forbidden, ...] = ()
    mode: str | None = None
    bare: Mapping[str, Any] | None = None
