"""What could be reached on the random family: an optimiser that knows more than any user does.

    python tests/benchmarks/ideal.py [--seeds N] [--first-seed N] [--starts 16]

It is told which of the 648,648 points run within the limits, so no start of it is lost, and it looks at all of them before each
start: expected improvement of a Gaussian process over the whole grid, from the defaults. Three states of knowledge:

    drawn       mean and covariance of the very generator that draws the landscapes, except which arguments form pairs
    covariance  the same covariance around zero: how effects look, not which way they go
    generic     the prior of our own model: 5 % an argument, alike where neighbours

Regret is that of the measured point with the highest expected value. Real searches also have to find out what crashes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

sys.path.insert(0, str(Path(__file__).resolve().parent))

from random_family import NOISE, PAIR_EFFECT, PAIRS, Tables, engine_parameters, main_effects, random_tables

from vopt.optimizer.surrogate import correlation

Floats = NDArray[np.float64]
DRAWS = 4000
SHOWN = (6, 8, 12, 13, 16)


@dataclass(frozen=True)
class Knowledge:
    """Prior mean and covariance of each argument's effect, by its positions."""

    means: tuple[Floats, ...]
    covariances: tuple[Floats, ...]


def knowledge() -> dict[str, Knowledge]:
    """The three states, from draws of the generator and from our own model."""
    parameters = engine_parameters()
    sizes = tuple(len(p.values) for p in parameters)
    rng = np.random.default_rng(5)
    draws = [main_effects(rng, sizes) for _ in range(DRAWS)]
    effects = [np.stack([draw[j] for draw in draws]) for j in range(len(sizes))]
    means = tuple(part.mean(axis=0) for part in effects)
    covariances = tuple(np.atleast_2d(np.cov(part.T)) for part in effects)
    none = tuple(np.zeros(size) for size in sizes)
    around_zero = tuple(c + np.outer(m, m) for c, m in zip(covariances, means, strict=True))
    generic = tuple(0.05**2 * correlation(len(p.values), ordered=p.ordered) for p in parameters)
    return {
        "drawn": Knowledge(means, covariances),
        "covariance": Knowledge(none, around_zero),
        "generic": Knowledge(none, generic),
    }


def covariance(known: Knowledge, rows: NDArray[Any], columns: NDArray[Any]) -> Floats:
    """Prior covariance between two sets of points, shapes (n, d) and (m, d): effects, pairs of unknown arguments, the level."""
    total: Floats = np.ones((len(rows), len(columns)))
    same = [rows[:, j][:, None] == columns[:, j] for j in range(rows.shape[1])]
    for j, table in enumerate(known.covariances):
        total += table[np.ix_(rows[:, j], columns[:, j])]
    every = list(itertools.combinations(range(rows.shape[1]), 2))
    share = PAIRS / len(every) * PAIR_EFFECT**2
    for one, two in every:
        total += share * (same[one] & same[two])
    return total


def regrets(known: Knowledge, tables: Tables, seed: int, starts: int) -> list[float]:
    """Regret after each start."""
    rng = np.random.default_rng(seed)
    allowed = np.flatnonzero(tables.feasible)
    grid, level = tables.grid[allowed].astype(np.int64), tables.level[allowed]
    mean = np.sum([known.means[j][grid[:, j]] for j in range(grid.shape[1])], axis=0)
    chosen = [int(np.flatnonzero(allowed == tables.home)[0])]
    mean -= mean[chosen[0]]
    own = covariance(known, grid[:1], grid[:1])[0, 0] + np.sum(
        [np.diag(c)[grid[:, j]] - c[grid[0, j], grid[0, j]] for j, c in enumerate(known.covariances)], axis=0
    )
    measured = [rng.normal(0, NOISE)]
    columns: list[Floats] = []
    found = []
    while True:
        columns.append(covariance(known, grid, grid[chosen[-1:]])[:, 0])
        cross = np.stack(columns, axis=1)
        inverse = np.linalg.inv(cross[chosen] + np.eye(len(chosen)) * NOISE**2)
        expected = mean + cross @ (inverse @ (np.array(measured) - mean[chosen]))
        deviation = np.sqrt(np.maximum(own - np.einsum("ij,jk,ik->i", cross, inverse, cross), 1e-9))
        best = chosen[int(np.argmax(expected[chosen]))]
        found.append(1 - math.exp(level[best] - level.max()))
        if len(chosen) == starts:
            return found
        z = (expected - expected[chosen].max()) / deviation
        gain = deviation * (z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
        gain[chosen] = 0.0
        chosen.append(int(np.argmax(gain)))
        measured.append(level[chosen[-1]] + rng.normal(0, NOISE))


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=16)
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    shown = [starts for starts in SHOWN if starts <= options.starts]
    print(f"{'knows':<12}" + "".join(f"{f'@{starts}':>22}" for starts in shown))
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    states = knowledge()
    runs: dict[str, list[list[float]]] = {name: [] for name in states}
    for seed in seeds:
        tables = random_tables(seed)
        for name, known in states.items():
            runs[name].append(regrets(known, tables, seed, options.starts))
    for name, rows in runs.items():
        cells = []
        for starts in shown:
            at = [row[starts - 1] for row in rows]
            cells.append(f"{median(at):.1%}/{max(at):.1%}, mean {fmean(at):.1%}")
        print(f"{name:<12}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
