"""Which configuration to measure next, from a model of what was measured: expected gain times the chance that it runs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtr

from vopt.optimizer.surrogate import FEASIBILITY, VALUE, Floats, Ints, Surrogate, correlation, fit
from vopt.search_spaces.space import Point, SearchSpace

_HOPE = 0.6  # prior mean of feasibility, coded +1 / -1: an untried configuration near the default mostly runs
_STARTS = 6  # local searches start from this many of the best known points
_RANDOM = 400  # random points in the candidate pool


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured point: ``merit`` is the log value, larger is better (``None``: not known), ``feasibility`` in [-1, 1]
    is above 0 where it ran within every limit. ``optimistic``: the merit is only an upper bound."""

    point: Point
    merit: float | None
    feasibility: float
    optimistic: bool = False


class Model:
    """Value and feasibility over one space, fitted to the observations so far."""

    def __init__(self, space: SearchSpace, observations: Sequence[Observation]) -> None:
        self.space = space
        self.sizes = np.array([len(parameter.values) for parameter in space.parameters])
        tables = tuple(correlation(len(p.values), ordered=p.ordered) for p in space.parameters)
        self.points = np.array([positions(space, seen.point) for seen in observations])
        self.merits = np.array([np.nan if seen.merit is None else seen.merit for seen in observations])
        self.feasible = np.array([seen.feasibility > 0 and seen.merit is not None for seen in observations])
        valued = ~np.isnan(self.merits)
        self.value: Surrogate | None = None
        if valued.any():
            noise = np.array([25.0 if seen.optimistic else 1.0 for seen in observations])
            centre = float(np.median(self.merits[valued & self.feasible])) if (valued & self.feasible).any() else None
            self.value = fit(tables, self.points[valued], self.merits[valued], VALUE, mean=centre, weights=noise[valued])
        codes = np.array([seen.feasibility for seen in observations])
        self.runs = fit(tables, self.points, codes, FEASIBILITY, mean=_HOPE)

    def chance(self, points: Ints) -> Floats:
        """Chance that each point runs within the limits, shape (n,)."""
        mean, deviation = self.runs.predict(points)
        return np.asarray(ndtr(mean / np.sqrt(deviation**2 + self.runs.noise + 0.05)))

    def level(self) -> float | None:
        """The best expected merit among feasible measured points."""
        if self.value is None or not self.feasible.any():
            return None
        mean, _ = self.value.predict(self.points[self.feasible])
        return float(mean.max())

    def worth(self, points: Ints) -> Floats:
        """Log of expected gain over the incumbent times the chance to run, shape (n,)."""
        chance: Floats = np.log(np.maximum(self.chance(points), 1e-9))
        level = self.level()
        if self.value is None or level is None:
            return chance
        mean, deviation = self.value.predict(points)
        return np.asarray(_log_expected_gain(mean - level, deviation) + chance)


def _log_expected_gain(gain: Floats, deviation: Floats) -> Floats:
    """Logarithm of E[max(0, N(gain, deviation))], stable far below zero (Ament et al., NeurIPS 2023, eq. 9)."""
    z = gain / deviation
    density = -(z**2) / 2 - 0.5 * np.log(2 * np.pi)
    with np.errstate(divide="ignore", invalid="ignore"):
        near = np.log(np.maximum(np.exp(density) + z * ndtr(z), 1e-300))
        ratio = np.exp(np.minimum(log_ndtr(z) - density, 0.0)) * np.abs(z)  # tends to 1 from below as z falls
        far = density + np.log(np.maximum(1 - ratio, 1e-12))
    return np.asarray(np.where(z > -5, near, far) + np.log(deviation))


def positions(space: SearchSpace, point: Point) -> Ints:
    """The point as positions in its domains, shape (dimensions,)."""
    return np.array([parameter.index(point[parameter.name]) for parameter in space.parameters], dtype=np.int64)


def point_at(space: SearchSpace, where: Iterable[int]) -> dict[str, object]:
    """The point at these positions."""
    return {parameter.name: parameter.values[int(i)] for parameter, i in zip(space.parameters, where, strict=True)}


def neighbours(where: Ints, sizes: Ints) -> Ints:
    """All points that differ in one argument, shape (n, dimensions)."""
    rows = []
    for j, size in enumerate(sizes):
        for value in range(int(size)):
            if value != where[j]:
                row = where.copy()
                row[j] = value
                rows.append(row)
    return np.array(rows, dtype=np.int64).reshape(-1, len(sizes))


def propose(
    space: SearchSpace,
    observations: Sequence[Observation],
    allowed: Callable[[Point], bool],
    *,
    seed: int,
) -> dict[str, object] | None:
    """The most promising point that ``allowed`` lets pass (unseen, breaking no rule); ``None`` when there is none.

    Small spaces are searched whole; in large ones local searches start from the best known points and from random ones.
    """
    model = Model(space, observations)
    rng = np.random.default_rng(seed)
    if space.size <= 6000:
        grid = np.stack(np.unravel_index(np.arange(space.size), tuple(model.sizes)), axis=1).astype(np.int64)
        return _first_allowed(space, model, grid, allowed)
    randoms = np.stack([rng.integers(0, size, _RANDOM) for size in model.sizes], axis=1).astype(np.int64)
    pool = [randoms, *(neighbours(where, model.sizes) for where in _best_known(model))]
    candidates = np.unique(np.concatenate(pool), axis=0)
    order = np.argsort(-model.worth(candidates), kind="stable")
    peaks = [_climb(model, candidates[i]) for i in order[:_STARTS]]
    around = [neighbours(peak, model.sizes) for peak in peaks]
    return _first_allowed(space, model, np.unique(np.concatenate([candidates, np.array(peaks), *around]), axis=0), allowed)


def _best_known(model: Model) -> list[Ints]:
    ranked = np.where(model.feasible, model.merits, -np.inf)
    return [model.points[i] for i in np.argsort(-ranked, kind="stable")[:_STARTS]]


def _climb(model: Model, where: Ints) -> Ints:
    """Steepest ascent of the worth, one argument at a time."""
    here, height = where, float(model.worth(where[None])[0])
    for _ in range(3 * len(model.sizes)):
        around = neighbours(here, model.sizes)
        worth = model.worth(around)
        best = int(np.argmax(worth))
        if worth[best] <= height:
            return here
        here, height = around[best], float(worth[best])
    return here


def _first_allowed(
    space: SearchSpace, model: Model, candidates: Ints, allowed: Callable[[Point], bool]
) -> dict[str, object] | None:
    for i in np.argsort(-model.worth(candidates), kind="stable"):
        point = point_at(space, candidates[i])
        if allowed(point):
            return point
    return None
