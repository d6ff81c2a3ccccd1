"""The family of random landscapes: effects, memory, concurrency and pairs that do not add up are redrawn for each seed.

648,648 points, about a third of which crash (memory and illegal pairs); many of the rest break the success limit, the raw
optimum among them. Invented, not measured on an engine. A point is a row of positions in the domains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from landscapes import Landscape, Truth, parameter, space
from numpy.typing import NDArray

from vopt.optimizer.trial import FailureKind
from vopt.search_spaces.space import Parameter, Point

NOISE = 0.02
"""Standard deviation of a start's log value."""
PAIRS = 4
PAIR_EFFECT = 0.02

_SPECULATION = ("off", *(f"ngram:{k}" for k in range(1, 6)), *(f"mtp:{k}" for k in range(1, 6)))


def engine_parameters() -> tuple[Parameter, ...]:
    return (
        parameter("performance_mode", ("balanced", "interactivity", "throughput"), "balanced", ordered=False),
        parameter("max_num_seqs", [2**k for k in range(4, 11)], 256),
        parameter("max_num_batched_tokens", [2**k for k in range(10, 16)], 8192),
        parameter("gpu_memory_utilization", [round(0.85 + 0.01 * k, 2) for k in range(13)], 0.92),
        parameter("enable_prefix_caching", (False, True), True, ordered=False),
        parameter("speculation", _SPECULATION, "off", ordered=False),
        parameter("kv_cache_dtype", ("auto", "fp8"), "auto", ordered=False),
        parameter("moe_backend", ("auto", "triton", "cutlass"), "auto", ordered=False),
        parameter("cudagraph_mode", ("full_and_piecewise", "piecewise", "full"), "full_and_piecewise", ordered=False),
    )


_PRIORS: tuple[Mapping[str, Any], ...] = (
    {"performance_mode": "throughput", "max_num_batched_tokens": 16384},
    {"performance_mode": "throughput", "max_num_seqs": 512},
    {"speculation": "mtp:1"},
    {"kv_cache_dtype": "fp8"},
)


@dataclass(frozen=True)
class Tables:
    """The truth at every point, shape (points,): ``level`` is the log value against the defaults, ``crash`` whether it dies,
    ``success`` its success rate, ``grid`` its positions (points, dimensions); ``home`` is the defaults' row, ``pairs`` which
    arguments do not add up."""

    grid: NDArray[Any]
    level: NDArray[Any]
    crash: NDArray[Any]
    success: NDArray[Any]
    home: int
    pairs: tuple[tuple[int, int], ...]

    @property
    def feasible(self) -> NDArray[Any]:
        return ~self.crash & (self.success >= 0.99)


def random_tables(seed: int) -> Tables:
    """The first draw of a seed whose defaults are feasible and whose raw optimum is not."""
    for attempt in itertools.count():
        found = _tables(np.random.default_rng([seed, attempt]))
        if found is not None:
            return found
    raise AssertionError


def random_landscape(seed: int) -> Landscape:
    tables, parameters = random_tables(seed), engine_parameters()
    strides = [math.prod(len(q.values) for q in parameters[j + 1 :]) for j in range(len(parameters))]

    def truth(point: Point) -> Truth:
        index = sum(stride * p.index(point[p.name]) for stride, p in zip(strides, parameters, strict=True))
        if tables.crash[index]:
            return Truth(0.0, 0.0, FailureKind.OOM_START)
        return Truth(10_000 * math.exp(tables.level[index]), float(tables.success[index]))

    made = space(*parameters, seeds=_PRIORS)
    landscape = Landscape(f"random-{seed}", made, truth, mode={"performance_mode": "throughput"}, noise=NOISE)
    landscape.__dict__["best"] = math.log(10_000) + float(tables.level[tables.feasible].max())
    return landscape


@cache
def _grid(sizes: tuple[int, ...]) -> Any:
    """Every point as positions, shape (points, dimensions)."""
    return np.asfortranarray(np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=1).astype(np.int8))


def main_effects(rng: np.random.Generator, sizes: tuple[int, ...]) -> list[NDArray[Any]]:
    """One draw of what each argument does alone, log units."""
    effects = [rng.normal(0, 0.04, size) for size in sizes]
    for j, width in ((1, 0.10), (2, 0.06)):  # one broad peak, anywhere in the upper part
        peak = rng.uniform(0.4, 1.0) * (sizes[j] - 1)
        effects[j] = -width * ((np.arange(sizes[j]) - peak) / (sizes[j] - 1) * 2) ** 2
    effects[3] = np.linspace(0, rng.uniform(0, 0.04), sizes[3])
    rise = rng.uniform(0.02, 0.12)
    tired = rng.uniform(0.1, 0.4)
    k = np.arange(1, 6)
    effects[5] = np.concatenate(
        [[0.0], rng.normal(0, 0.03) + 0.01 * k - 0.006 * k**2, rise * np.log1p(k) - tired * rise * (k - 1) / 2]
    )
    return effects


def _tables(rng: np.random.Generator) -> Tables | None:
    parameters = engine_parameters()
    sizes = tuple(len(p.values) for p in parameters)
    grid, effects = _grid(sizes), main_effects(rng, sizes)
    value = np.zeros(len(grid))
    for j in range(len(sizes)):
        value += effects[j][grid[:, j]]
    pairs = []
    for _ in range(PAIRS):
        one, two = rng.choice(len(sizes), 2, replace=False)
        pairs.append((int(one), int(two)))
        table = rng.normal(0, PAIR_EFFECT, (sizes[one], sizes[two]))
        value = value + table[grid[:, one], grid[:, two]]
    load = (
        rng.uniform(0.5, 1.0) * grid[:, 1] / 6
        + rng.uniform(0.3, 0.9) * grid[:, 2] / 5
        + rng.uniform(0.5, 1.0) * grid[:, 3] / 12
        + rng.uniform(0, 0.3) * (grid[:, 5] > 5)
        - rng.uniform(0, 0.3) * (grid[:, 6] == 1)
    )
    crash = load > np.quantile(load, 0.70)
    for _ in range(2):  # illegal pairs of two settings
        one, two = rng.choice([0, 5, 6, 7, 8], 2, replace=False)
        crash |= (grid[:, one] == rng.integers(1, sizes[one])) & (grid[:, two] == rng.integers(1, sizes[two]))
    strain = (
        rng.uniform(0.5, 1.5) * np.maximum(0, grid[:, 5] - 5) / 5
        + rng.uniform(0.2, 1.0) * grid[:, 1] / 6
        + rng.normal(0, 0.15, sizes[7])[grid[:, 7]]
    )
    success = np.where(strain > np.quantile(strain, 0.57), 0.985 - 0.5 * (strain - np.quantile(strain, 0.57)), 1.0)
    success = np.clip(success, 0.3, 1.0)
    home = int(np.ravel_multi_index([p.index(p.default) for p in parameters], sizes))
    found = Tables(grid, value - value[home], crash, success, home, tuple(pairs))
    runs = np.flatnonzero(~crash)
    fastest = runs[np.argmax(value[runs])]
    return found if found.feasible[home] and not found.feasible[fastest] else None
