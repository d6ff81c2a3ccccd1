"""Metrics: one definition of each, with its unit, its better direction and its name in ``vllm bench serve``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Direction(StrEnum):
    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """What a metric is. ``bench_serve`` is the field of ``vllm bench serve``'s JSON (milliseconds there), if it has one."""

    name: str
    unit: str
    direction: Direction
    label: str
    bench_serve: str | None = None


@dataclass(frozen=True, slots=True)
class FailureCount:
    """How many requests failed in one way, and the first message of that kind."""

    n: int
    first_message: str


@dataclass(frozen=True, slots=True)
class Metrics:
    """The figures of one load. A metric that is undefined for it is absent from ``values``: never 0, never NaN.

    ``intervals`` are 95 % bootstrap intervals within this run; they describe it and support no comparison between engine
    starts. ``whole_run`` holds the figures that ``vllm bench serve`` would print, under its names; they decide nothing.
    """

    values: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    succeeded: int = 0
    failed: int = 0
    censored: int = 0
    not_sent: int = 0
    failures: Mapping[str, FailureCount] = field(default_factory=dict)
    whole_run: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def get(self, name: str) -> float | None:
        return self.values.get(name)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Metrics:
        return cls(
            **{
                **data,
                "intervals": {name: (low, high) for name, (low, high) in data.get("intervals", {}).items()},
                "failures": {kind: FailureCount(**count) for kind, count in data.get("failures", {}).items()},
                "notes": tuple(data.get("notes", ())),
            }
        )
