"""Where a device's memory ends, from starts that ran out of it and starts that did not. Pure: numpy and this package's spaces.

What a configuration takes grows with each of its sizes, by how much is not known, nor is the limit. So many guesses are
drawn: a weight and a curvature for each size, a share for drafts and for other settings that move memory, and a limit above
what the defaults take. A guess counts by how many of the starts it explains (one that it gets wrong costs a factor of
``WRONG``, since an engine may also run out for another cause), and a point's chance to fit is the share of the guesses under
whose limit it stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vopt.optimizer.surrogate import Floats, Ints
from vopt.search_spaces.learned import HUNGRY, RELATED
from vopt.search_spaces.space import Parameter, SearchSpace

DRAWS, KEPT = 20_000, 400
WRONG = 0.03
CURVES = (1, 2, 4)
"""Powers of a size's position in its domain: domains double from value to value, what they cost may or may not."""

OTHERS = 0.3
"""Spread of what a setting beside the sizes takes or saves, where a size's weight has mean 1."""

SPREADS_OVER_GPUS = ("tensor_parallel_size", "pipeline_parallel_size")


class MemoryEdge:
    """Fitted to points (positions in the domains, shape (n, dimensions)) and whether each stayed within memory, shape (n,)."""

    def __init__(self, space: SearchSpace, points: Ints, fits: Sequence[bool]) -> None:
        self._sizes = [j for j, p in enumerate(space.parameters) if p.name in HUNGRY and p.ordered and len(p.values) > 1]
        self._others = [j for j, p in enumerate(space.parameters) if p.name in RELATED and j not in self._sizes]
        self._parameters = space.parameters
        rng = np.random.default_rng(len(points))
        weights = self._draw(rng)
        home = self._features(np.array([[p.index(p.default) for p in space.parameters]]))[0]
        at_home = weights @ home
        most = weights[:, : len(CURVES) * len(self._sizes)].sum(axis=1)
        limits = at_home + rng.uniform(0, 1.1, DRAWS) * np.maximum(most - at_home, 1e-9)
        loads = weights @ self._features(points).T
        wrong = ((loads <= limits[:, None]) != np.asarray(fits)[None, :]).sum(axis=1)
        counts = WRONG ** (wrong - wrong.min()).astype(np.float64)
        kept = rng.choice(DRAWS, KEPT, p=counts / counts.sum())
        self._weights, self._limits = weights[kept], limits[kept]

    def chance(self, points: Ints) -> Floats:
        """Chance that each point stays within memory, shape (n,)."""
        within = self._features(points) @ self._weights.T <= self._limits[None, :]
        return np.asarray(within.mean(axis=1))

    def _draw(self, rng: np.random.Generator) -> Floats:
        """Guesses of what each feature takes, shape (draws, features): a size has one curve in each guess."""
        sizes = np.zeros((DRAWS, len(self._sizes), len(CURVES)))
        curve = rng.integers(0, len(CURVES), sizes.shape[:2])
        np.put_along_axis(sizes, curve[..., None], rng.exponential(1.0, curve.shape)[..., None], axis=2)
        others = rng.normal(0.0, OTHERS, (DRAWS, len(self._others)))
        for column, j in enumerate(self._others):
            name = self._parameters[j].name
            if name == "speculation":  # a draft only adds
                others[:, column] = np.abs(others[:, column])
            elif name in SPREADS_OVER_GPUS:
                others[:, column] = -np.abs(others[:, column]) / OTHERS
        return np.concatenate([sizes.reshape(DRAWS, -1), others], axis=1)

    def _features(self, points: Ints) -> Floats:
        """Shape (n, features): powers of each size's place in its domain, then whether each other setting was changed."""
        columns = [_place(self._parameters[j], points[:, j]) ** power for j in self._sizes for power in CURVES]
        for j in self._others:
            parameter = self._parameters[j]
            if parameter.name in SPREADS_OVER_GPUS:
                columns.append(_place(parameter, points[:, j]))
            else:
                columns.append((points[:, j] != parameter.index(parameter.default)).astype(np.float64))
        return np.stack(columns, axis=1) if columns else np.zeros((len(points), 0))


def _place(parameter: Parameter, positions: Ints) -> Floats:
    """Positions as shares of the domain, 0 at its first value and 1 at its last."""
    return np.asarray(positions / max(1, len(parameter.values) - 1))
