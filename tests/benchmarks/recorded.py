"""Recorded engine starts: tables that `tests/gpu/record_table.py` wrote, read back, and as landscapes for the regret replay.

A table is a file of JSON lines (`tests/gpu/README.md` describes them): a header, then one line for each start, with one load
for each concurrency. `recorded_landscape` takes the geometric mean of a configuration's starts for its truth and the pooled
spread of starts of equal configurations for the noise; only recorded configurations can be measured.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from landscapes import LATENCY, THROUGHPUT, Landscape, Truth, parameter, space

from vopt.objectives.goals import Goal
from vopt.optimizer.trial import EngineConfig, FailureKind
from vopt.search_spaces.space import Point

FORMAT = "vopt-recorded-table"
FORMAT_VERSION = 1
ASSETS = Path(__file__).resolve().parent.parent / "assets" / "h200"
UNKNOWN_NOISE = 0.005
"""From start to start where no configuration has two: 0.2 to 1 % were measured (`docs/explanation/h200.md`)."""


@dataclass(frozen=True, slots=True)
class Start:
    """One engine start. ``levels`` are the metrics by requests in flight; ``failure`` says why it is not complete."""

    config: EngineConfig
    levels: Mapping[int, Mapping[str, float]]
    started: Mapping[str, Any]
    phase_s: Mapping[str, float]
    failure: FailureKind | None


@dataclass(frozen=True)
class Table:
    """A file's header and starts."""

    header: Mapping[str, Any]
    starts: tuple[Start, ...]

    @cached_property
    def configs(self) -> tuple[EngineConfig, ...]:
        return tuple(dict.fromkeys(start.config for start in self.starts))

    def of(self, config: EngineConfig) -> tuple[Start, ...]:
        return tuple(start for start in self.starts if start.config == config)

    def values(self, config: EngineConfig, level: int, metric: str) -> list[float]:
        """The metric of each complete start at a level."""
        found = [start.levels[level] for start in self.of(config) if start.failure is None and level in start.levels]
        return [metrics[metric] for metrics in found if metrics.get(metric)]

    def noise(self, level: int, metric: str) -> float | None:
        """Pooled standard deviation of the logarithm over starts of equal configurations; ``None`` without a pair."""
        squares, freedom = 0.0, 0
        for config in self.configs:
            logs = [math.log(value) for value in self.values(config, level, metric)]
            squares += sum((value - fmean(logs)) ** 2 for value in logs)
            freedom += max(0, len(logs) - 1)
        return math.sqrt(squares / freedom) if freedom else None


def read_table(path: Path) -> Table:
    """Raises ``ValueError`` for a file of another format or version."""
    header, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if (header.get("format"), header.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise ValueError(f"{path}: format {header.get('format')!r} version {header.get('format_version')!r}")
    return Table(header, tuple(_start(row) for row in rows))


def _start(row: Mapping[str, Any]) -> Start:
    failure = row["failure"]
    return Start(
        EngineConfig(row["config"]),
        {load["concurrency"]: load["metrics"] for load in row["loads"]},
        row["started"] or {},
        row["phase_s"],
        FailureKind(failure["kind"]) if failure else None,
    )


def recorded_landscape(path: Path, level: int | None = None, goal: Goal = THROUGHPUT, mode: str | None = None) -> Landscape:
    """A table as a landscape at one load level (default: its highest), for ``regret.py``.

    ``goal``: the metric whose truth is replayed, ``THROUGHPUT`` (tokens/s) or ``LATENCY`` (mean E2E at that concurrency).
    ``mode``: the performance mode that a search of this goal pins, if the table has it.
    """
    table = read_table(path)
    at = max(table.header["levels"]) if level is None else level
    names = list(dict.fromkeys(name for config in table.configs for name in config))
    resolved = next((start.started.get("resolved", {}) for start in table.of(EngineConfig()) if start.started), {})
    defaults = {name: _word(resolved.get(name, "default")) for name in names}
    truths = {_key(names, defaults, config): _truth(table, config, at, goal) for config in table.configs}
    truths = {key: truth for key, truth in truths.items() if truth is not None}

    def key(point: Point) -> tuple[Any, ...]:
        return tuple(point[name] for name in names)

    parameters = []
    for place, name in enumerate(names):
        values = list(dict.fromkeys([defaults[name], *(entry[place] for entry in truths)]))
        numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
        parameters.append(parameter(name, sorted(values) if numbers else values, defaults[name], ordered=numbers))
    wanted = {"performance_mode": mode or ("interactivity" if goal is LATENCY else "throughput")}
    landscape = Landscape(
        f"{table.header['model']}-{goal.name}-{at}",
        space(*parameters, rule=lambda point: key(point) in truths),
        lambda point: _known(truths[key(point)]),
        goal,
        wanted if _key(names, defaults, EngineConfig(wanted)) in truths else {},
        table.noise(at, goal.metric) or UNKNOWN_NOISE,
    )
    sign = 1 if goal.direction is THROUGHPUT.direction else -1
    good = [truth for truth in truths.values() if truth is not None and truth.crash is None and truth.success >= 0.99]
    landscape.__dict__["best"] = max(sign * math.log(truth.value) for truth in good)
    return landscape


def _known(truth: Truth | None) -> Truth:
    assert truth is not None  # what has none is outside the space
    return truth


def _word(value: Any) -> Any:
    """A value that a domain can hold: compound ones as their JSON text."""
    return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else value


def _key(names: Sequence[str], defaults: Mapping[str, Any], config: EngineConfig) -> tuple[Any, ...]:
    return tuple(_word(config.get(name, defaults[name])) for name in names)


def _truth(table: Table, config: EngineConfig, level: int, goal: Goal) -> Truth | None:
    """``None`` for a configuration that has neither a figure at this level nor a failure."""
    values = table.values(config, level, goal.metric)
    failures = [start.failure for start in table.of(config) if start.failure is not None]
    if failures and len(failures) >= len(values):
        return Truth(0.0, 0.0, failures[0])
    if not values:
        return None
    success = min(table.values(config, level, "success_rate"), default=0.0)
    return Truth(math.exp(fmean(math.log(value) for value in values)), success)
