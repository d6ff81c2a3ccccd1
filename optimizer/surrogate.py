"""A Gaussian-process model of few, costly and noisy measurements over finite domains. Pure: numpy and scipy only.

The prior says what engine arguments look like: effects on the logarithm of a metric mostly add up, few arguments matter,
neighbours in an ordered domain are alike, and pairs may interact. With ``a[j]`` the variance of argument *j* and ``k[j]``
its correlation over its domain (Matern 3/2 over positions where ordered, equal-or-not where not):

    K = c + sum_j a[j] k[j] + rho / (s (d - 1)) * sum_{j<l} a[j] a[l] k[j] k[l]

an additive kernel of order two (Duvenaud, Nickisch, Rasmussen: Additive Gaussian Processes, NIPS 2011). With *s* the
prior's variance of one argument, *rho* is how much of an argument's effect depends on the others. The variances are
set by maximum a posteriori under log-normal priors, so that with few measurements the prior decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_JITTER = 1e-9


@dataclass(frozen=True, slots=True)
class Prior:
    """Prior of one model, in the squared unit of what is modelled. ``constant`` is the variance of the overall level,
    ``interaction`` the variance of all pairs of an argument over its own."""

    constant: float
    effect: float
    noise: float
    interaction: float
    effect_spread: float = 1.2  # of the natural logarithm of an argument's variance
    noise_spread: float = 0.5

    def pair(self, dimensions: int) -> float:
        """Factor of the product of two arguments' covariances."""
        return self.interaction / self.effect / max(1, dimensions - 1)


# Logarithm of a throughput or latency: arguments move it by about 5 %, restarts by 0.5 to 2.5 %.
VALUE = Prior(constant=0.25, effect=0.05**2, noise=0.015**2, interaction=0.3)
# Logarithm of how far inside a limit a figure is: a queue that begins to grow moves it by much, and several arguments together
# more than each alone (a draft that fits without prefix caching does not fit with it).
LIMIT = Prior(constant=0.01, effect=0.3**2, noise=0.05**2, interaction=6.0, effect_spread=0.7)
# Feasibility coded +1 / -1 around a hopeful mean.
FEASIBILITY = Prior(constant=0.1, effect=0.5**2, noise=0.15**2, interaction=0.3, effect_spread=0.7)


def correlation(size: int, *, ordered: bool, length: float = 0.6) -> Floats:
    """Correlation over one finite domain, shape (size, size). ``length`` is in units of the whole ordered range."""
    if not ordered or size < 3:
        return np.eye(size)
    distance = np.abs(np.subtract.outer(np.arange(size), np.arange(size))) / (size - 1) / length
    scaled = np.sqrt(3.0) * distance
    return np.asarray((1 + scaled) * np.exp(-scaled))


def leaning(shifts: Floats, strength: float) -> Floats:
    """Covariance of an effect that grows in a straight line with ``shifts``, the distances from the default, shape (n, n)."""
    return np.asarray(strength * np.outer(shifts, shifts))


def families(groups: Sequence[str], ranks: Sequence[int], *, shared: float = 0.5) -> Floats:
    """Correlation over a domain of alternatives with a strength each (drafts by a method, so many at a time), shape (n, n).

    Values of one group share an effect, ``shared`` of their variance, and are the more alike the nearer their ranks are; values
    of different groups say nothing of each other.
    """
    names, positions = np.array(groups), np.array(ranks)
    widest = max(1, int(positions.max(initial=0)) - int(positions.min(initial=0)))
    scaled = np.sqrt(3.0) * np.abs(np.subtract.outer(positions, positions)) / widest
    alike = shared + (1 - shared) * (1 + scaled) * np.exp(-scaled)
    return np.asarray(np.where(names[:, None] == names[None, :], alike, 0.0))


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A fitted model. Points are rows of positions in the domains, shape (n, dimensions)."""

    tables: tuple[Floats, ...]
    points: Ints
    variances: Floats
    noise: float
    prior: Prior
    mean: float
    alpha: Floats
    factor: tuple[Floats, bool]

    def predict(self, points: Ints) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the noise-free value at each point, shapes (n,)."""
        cross = _covariance(self._parts(points), self.variances, self.prior)
        parts = [np.diag(table)[points[:, j]] for j, table in enumerate(self.tables)]
        total = _covariance(parts, self.variances, self.prior)
        mean = self.mean + cross @ self.alpha
        solved = _solved(self.factor, cross.T)
        variance = np.maximum(total - np.einsum("ij,ji->i", cross, solved), 1e-12)
        return mean, np.sqrt(variance)

    def difference(self, first: Ints, second: Ints) -> tuple[float, float]:
        """Mean and standard deviation of value(first) - value(second), both shape (dimensions,)."""
        both = np.stack([first, second])
        cross = _covariance(self._parts(both), self.variances, self.prior)
        own = _covariance(
            [table[np.ix_(both[:, j], both[:, j])] for j, table in enumerate(self.tables)], self.variances, self.prior
        )
        posterior = own - cross @ cho_solve(self.factor, cross.T)
        mean = float((cross[0] - cross[1]) @ self.alpha)
        return mean, float(np.sqrt(max(0.0, posterior[0, 0] + posterior[1, 1] - 2 * posterior[0, 1])))

    def _parts(self, points: Ints) -> list[Floats]:
        return [table[np.ix_(points[:, j], self.points[:, j])] for j, table in enumerate(self.tables)]


_COLUMNS = 32
"""Columns solved at once. From about 50 on BLAS spreads a solve over all cores, and threads that wait for each other on a
busy machine took 20 to 30 ms for what takes 0.1 ms."""


def _solved(factor: tuple[Floats, bool], right: Floats) -> Floats:
    """``cho_solve`` in pieces: the same values."""
    pieces = [cho_solve(factor, right[:, at : at + _COLUMNS]) for at in range(0, right.shape[1], _COLUMNS)]
    return np.concatenate(pieces, axis=1)


def _covariance(parts: Sequence[Floats], variances: Floats, prior: Prior) -> Floats:
    weighted = [variance * part for variance, part in zip(variances, parts, strict=True)]
    first = np.sum(weighted, axis=0)
    squares = np.sum([part**2 for part in weighted], axis=0)
    return np.asarray(prior.constant + first + prior.pair(len(parts)) * (first**2 - squares) / 2)


def fit(
    tables: Sequence[Floats],
    points: Ints,
    values: Floats,
    prior: Prior,
    *,
    mean: float | None = None,
    weights: Floats | None = None,
    rounds: int = 25,
) -> Surrogate:
    """Fit to ``values`` (n,) at ``points`` (n, d). ``mean`` fixes the prior mean (default: the values' mean);
    ``weights`` multiply the noise variance of single values."""
    centre = float(values.mean()) if mean is None else mean
    residual = values - centre
    scale = np.ones(len(values)) if weights is None else weights
    parts = [table[np.ix_(points[:, j], points[:, j])] for j, table in enumerate(tables)]
    start = np.concatenate([np.full(len(tables), np.log(prior.effect)), [np.log(prior.noise)]])
    spread = np.concatenate([np.full(len(tables), prior.effect_spread), [prior.noise_spread]])

    def loss(theta: Floats) -> tuple[float, Floats]:
        variances, noise = np.exp(theta[:-1]), float(np.exp(theta[-1]))
        weighted = [variance * part for variance, part in zip(variances, parts, strict=True)]
        first = np.sum(weighted, axis=0)
        ratio = prior.pair(len(parts))
        squares = np.sum([part**2 for part in weighted], axis=0)
        covariance = prior.constant + first + ratio * (first**2 - squares) / 2 + np.diag(noise * scale + _JITTER)
        factor = cho_factor(covariance, lower=True)
        alpha = cho_solve(factor, residual)
        inverse = _solved(factor, np.eye(len(residual)))
        slope = (np.outer(alpha, alpha) - inverse) / 2
        gradient = np.array(
            [np.sum(slope * (part * (1 + ratio * (first - part)))) for part in weighted]
            + [np.sum(np.diag(slope) * noise * scale)]
        )
        away = (theta - start) / spread
        objective = residual @ alpha / 2 + np.log(np.diag(factor[0])).sum() + (away**2).sum() / 2
        return float(objective), away / spread - gradient

    bounds = [(middle - 4 * width, middle + 4 * width) for middle, width in zip(start, spread, strict=True)]
    best = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": rounds})
    variances, noise = np.exp(best.x[:-1]), float(np.exp(best.x[-1]))
    covariance = _covariance(parts, variances, prior) + np.diag(noise * scale + _JITTER)
    factor = cho_factor(covariance, lower=True)
    return Surrogate(tuple(tables), points, variances, noise, prior, centre, cho_solve(factor, residual), factor)
