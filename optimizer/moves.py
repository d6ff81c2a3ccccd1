"""Which configuration to measure next, from a model of what was measured: expected gain times the chance that it runs within
the limits. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr, stdtr

from vopt.optimizer.memory_edge import MemoryEdge
from vopt.optimizer.surrogate import FEASIBILITY, LIMIT, VALUE, Floats, Ints, Surrogate, correlation, families, fit, leaning
from vopt.search_spaces.learned import HUNGRY
from vopt.search_spaces.space import Parameter, Point, SearchSpace

Bools = NDArray[np.bool_]

_HOPE, _COST = 1.3, 0.4  # prior mean of feasibility, coded +1 / -1: of the defaults, and what each changed argument takes off
RADIUS = 3  # arguments that a proposal changes at once
_STARTS = 3  # of the best known points, from which proposals depart
_BEAM = 12
_RANDOM = 2000
_LIKELY, _LAST = 0.95, 1e6  # chance to run that a careful proposal has, and how far others are put behind it
_WHOLE = 20_000  # spaces up to this size are looked at whole
_FREEDOM = 3.0
"""Degrees of freedom of the chance to keep a limit: how uncertain a margin is, is itself known from a few starts only."""
_MUCH = 2.0
"""Standard deviations of a start's noise that a proposal has to gain once a limit was broken. What may keep that limit is a
gamble then; what hardly differs from the best known configuration surely keeps it, always promises a little, and would take
every start. Where no limit is near, asking for so much lost more than it gained."""

HUNGER, LEANING = 1.2, 4.0
"""What the whole range of an argument that takes memory is expected to take off the feasibility, and how sure that is not: the
variance of its own slope, over that of an argument's effect. Memory is a sum, so less of one makes room for another."""
DECAY = 0.15
"""What a numeric argument is expected to lose at the far end of its range, log units: defaults were chosen with care, and the
loss grows with the square of the distance from them."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured point: ``merit`` is the log value, larger is better (``None``: not known), ``feasibility`` in [-1, 1]
    is above 0 where it ran and answered its requests. ``doubt`` multiplies the variance of its noise. ``starved`` says whether
    memory ran out (``None``: it failed in a way that does not tell). ``margins`` say how far inside each limit it was: a
    logarithm, below 0 where it is broken (``None``: not measured), of the same limits for every point."""

    point: Point
    merit: float | None
    feasibility: float
    doubt: float = 1.0
    starved: bool | None = None
    margins: tuple[float | None, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether it ran within every limit."""
        return self.merit is not None and self.feasibility > 0 and all(m is None or m >= 0 for m in self.margins)


class Model:
    """Value, margins and whether it runs, over one space, fitted to the observations so far."""

    def __init__(self, space: SearchSpace, observations: Sequence[Observation]) -> None:
        self.space, self.observations = space, observations
        self.sizes = np.array([len(parameter.values) for parameter in space.parameters])
        self.tables = tuple(relation(parameter) for parameter in space.parameters)
        self.home = positions(space, space.default_point())
        self.numeric = np.array([parameter.ordered and len(parameter.values) > 2 for parameter in space.parameters])
        self.hungry = self.numeric & np.array([parameter.name in HUNGRY for parameter in space.parameters])
        self.points = np.array([positions(space, seen.point) for seen in observations])
        self.merits = np.array([np.nan if seen.merit is None else seen.merit for seen in observations])
        self.feasible = np.array([seen.feasible for seen in observations])
        self.worked = self.points[np.array([seen.starved is False for seen in observations])]
        self.starved = np.array([bool(seen.starved) for seen in observations])

    @cached_property
    def value(self) -> Surrogate | None:
        """What a start is worth, against what is usual; ``None`` where nothing was measured."""
        valued = ~np.isnan(self.merits)
        if not valued.any():
            return None
        noise = np.array([seen.doubt for seen in self.observations])
        merits = self.merits - self.usual(self.points)
        centre = float(np.median(merits[valued & self.feasible])) if (valued & self.feasible).any() else None
        return fit(self.tables, self.points[valued], merits[valued], VALUE, mean=centre, weights=noise[valued])

    @cached_property
    def limits(self) -> list[Surrogate]:
        """How far inside each limit a start is, of those that a start broke. What nothing is known of is expected where the
        first start is, which is that of the defaults."""
        found = []
        for margins in zip(*(seen.margins for seen in self.observations), strict=True):
            known = np.array([margin is not None for margin in margins])
            values = np.array([margin for margin in margins if margin is not None])
            if (values < 0).any():
                found.append(fit(self.tables, self.points[known], values, LIMIT, mean=float(values[0])))
        return found

    @cached_property
    def edge(self) -> MemoryEdge | None:
        """Where memory ends; ``None`` while nothing ran out of it."""
        told = np.array([seen.starved is not None for seen in self.observations])
        return MemoryEdge(self.space, self.points[told], list(~self.starved[told])) if self.starved.any() else None

    @cached_property
    def runs(self) -> Surrogate:
        """Whether a start runs, +1 or -1, against what is hoped."""
        codes = np.array([seen.feasibility for seen in self.observations])
        # What memory ended says nothing of other causes, and these would take an upper end of a domain for a bad value.
        rest = ~self.starved if not self.starved.all() else self.starved
        leans = [
            table + leaning(self._shifts(np.arange(len(table)), j), LEANING) if self.hungry[j] else table
            for j, table in enumerate(self.tables)
        ]
        return fit(leans, self.points[rest], codes[rest] - self.hope(self.points[rest]), FEASIBILITY, mean=0.0)

    def _shifts(self, places: Ints, j: int) -> Floats:
        """How far positions of argument *j* lie from its default, in units of its whole range."""
        return np.asarray((places - self.home[j]) / max(1, self.sizes[j] - 1), dtype=np.float64)

    def hope(self, points: Ints) -> Floats:
        """Prior mean of feasibility: the defaults run, and each argument that is changed may be the one too many. More of
        what takes memory is less likely to run, less of it more likely."""
        changed = (points != self.home) & ~(self.hungry & (points < self.home))
        hope: Floats = _HOPE - _COST * changed.sum(axis=1).astype(np.float64)
        for j in np.flatnonzero(self.hungry):
            hope = hope - HUNGER * self._shifts(points[:, j], int(j))
        return hope

    def usual(self, points: Ints) -> Floats:
        """Prior mean of the value against that of the defaults, log units, shape (n,)."""
        usual: Floats = np.zeros(len(points))
        for j in np.flatnonzero(self.numeric):
            usual = usual - DECAY * self._shifts(points[:, j], int(j)) ** 2
        return usual

    def expected(self, points: Ints) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the value at each point, shapes (n,). There must be a value."""
        assert self.value is not None
        mean, deviation = self.value.predict(points)
        return mean + self.usual(points), deviation

    def difference(self, first: Ints, second: Ints) -> tuple[float, float]:
        """Mean and standard deviation of value(first) - value(second), both shape (dimensions,). There must be a value."""
        assert self.value is not None
        mean, deviation = self.value.difference(first, second)
        usual = self.usual(np.stack([first, second]))
        return mean + float(usual[0] - usual[1]), deviation

    def chance(self, points: Ints) -> Floats:
        """Chance that each point runs, shape (n,)."""
        mean, deviation = self.runs.predict(points)
        chance = np.asarray(ndtr((mean + self.hope(points)) / np.sqrt(deviation**2 + self.runs.noise + 0.05)))
        return chance if self.edge is None else np.asarray(chance * self.edge.chance(points))

    def kept(self, points: Ints) -> Floats:
        """Chance that each point keeps every limit if it runs, shape (n,)."""
        kept = np.ones(len(points))
        for limit in self.limits:
            mean, deviation = limit.predict(points)
            kept *= stdtr(_FREEDOM, mean / np.sqrt(deviation**2 + limit.noise))
        return kept

    def proven(self, points: Ints) -> Bools:
        """Whether each choice among alternatives (backends, drafts, …) is one that an engine ran with, shape (n,)."""
        proven = np.ones(len(points), dtype=bool)
        for j, parameter in enumerate(self.space.parameters):
            if not parameter.ordered:
                proven &= np.isin(points[:, j], np.append(self.worked[:, j], self.home[j]))
        return proven

    @cached_property
    def level(self) -> float | None:
        """The best expected merit among feasible measured points."""
        if self.value is None or not self.feasible.any():
            return None
        mean, _ = self.expected(self.points[self.feasible])
        return float(mean.max())

    def worth(self, points: Ints) -> Floats:
        """Log of expected gain over the incumbent times the chances to run and to keep the limits, shape (n,)."""
        chance: Floats = np.log(np.maximum(self.chance(points) * self.kept(points), 1e-9))
        if self.value is None or self.level is None:
            return chance
        mean, deviation = self.expected(points)
        least = _MUCH * np.sqrt(self.value.noise) if self.limits else 0.0
        return np.asarray(_log_expected_gain(mean - self.level - least, deviation) + chance)


def _log_expected_gain(gain: Floats, deviation: Floats) -> Floats:
    """Logarithm of E[max(0, N(gain, deviation))], stable far below zero (Ament et al., NeurIPS 2023, eq. 9)."""
    z = gain / deviation
    density = -(z**2) / 2 - 0.5 * np.log(2 * np.pi)
    with np.errstate(divide="ignore", invalid="ignore"):
        near = np.log(np.maximum(np.exp(density) + z * ndtr(z), 1e-300))
        ratio = np.exp(np.minimum(log_ndtr(z) - density, 0.0)) * np.abs(z)  # tends to 1 from below as z falls
        far = density + np.log(np.maximum(1 - ratio, 1e-12))
    return np.asarray(np.where(z > -5, near, far) + np.log(deviation))


def relation(parameter: Parameter) -> Floats:
    """How alike the values of a parameter are expected to be, shape (n, n): drafts by one method are, the more so the nearer
    their numbers."""
    if parameter.name != "speculation":
        return correlation(len(parameter.values), ordered=parameter.ordered)
    split = [str(value).partition(":") for value in parameter.values]
    return families([method for method, _, _ in split], [int(count) if count.isdigit() else 0 for _, _, count in split])


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
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(sizes))


def propose(
    space: SearchSpace,
    observations: Sequence[Observation],
    allowed: Callable[[Point], bool],
    *,
    seed: int,
    careful: bool = False,
) -> dict[str, object] | None:
    """The most promising point that ``allowed`` lets pass (unseen, breaking no rule); ``None`` when there is none.

    Proposals stay within ``RADIUS`` changed arguments of a configuration that ran: a start that changes everything at once
    mostly crashes, and says little about which change did it. When nothing near is left, the whole space is looked at.
    ``careful`` puts points last that are not likely to run, or hold a choice that no engine ran with yet: near the end a
    crash teaches nothing that is still used. Where nothing crashed so far it changes nothing.
    """
    if not space.parameters:
        return None  # the defaults are all there is
    model = Model(space, observations)
    near = _around(model, _best_known(model))
    found = _first_allowed(space, model, near, allowed, careful)
    if found is not None:
        return found
    if space.size <= _WHOLE:
        grid = np.stack(np.unravel_index(np.arange(space.size), tuple(model.sizes)), axis=1).astype(np.int64)
        return _first_allowed(space, model, grid, allowed, careful)
    rng = np.random.default_rng(seed)
    randoms = np.stack([rng.integers(0, size, _RANDOM) for size in model.sizes], axis=1).astype(np.int64)
    return _first_allowed(space, model, randoms, allowed, careful)


def _best_known(model: Model) -> list[Ints]:
    """The best measured feasible points, and the default where nothing was feasible."""
    ranked = [i for i in np.argsort(-np.where(model.feasible, model.merits, -np.inf), kind="stable") if model.feasible[i]]
    return [model.points[i] for i in ranked[:_STARTS]] or [model.points[0]]


def _around(model: Model, centres: Sequence[Ints]) -> Ints:
    """Points up to ``RADIUS`` changes from any centre: at each distance only the ``_BEAM`` most promising are extended."""
    found = []
    for centre in centres:
        frontier = centre[None]
        for _ in range(RADIUS):
            ring = np.unique(np.concatenate([neighbours(where, model.sizes) for where in frontier]), axis=0)
            found.append(ring)
            frontier = ring[np.argsort(-model.worth(ring), kind="stable")[:_BEAM]]
    return np.unique(np.concatenate(found), axis=0)


def _first_allowed(
    space: SearchSpace, model: Model, candidates: Ints, allowed: Callable[[Point], bool], careful: bool
) -> dict[str, object] | None:
    worth = model.worth(candidates)
    if careful and len(model.worked) < len(model.points):
        worth = np.where((model.chance(candidates) < _LIKELY) | ~model.proven(candidates), worth - _LAST, worth)
    for i in np.argsort(-worth, kind="stable"):
        point = point_at(space, candidates[i])
        if allowed(point):
            return point
    return None
