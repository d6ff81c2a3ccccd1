"""Intervals within one run, vectorised: bootstrap of percentiles, means and rates, and the exact interval of a share.

They describe the run they come from and support no comparison between engine starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]

CONFIDENCE = 0.95
RATE_BLOCKS = 20
"""Blocks of time that a rate is resampled in: long enough to hold a prefill burst and its pause."""

_CELLS_AT_ONCE = 2_000_000


def percentile_interval(ordered: Array, percent: float, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Percentile-bootstrap interval of a percentile, without resampling: the limit of infinitely many resamples.

    The k-th order statistic of a resample of n is at most the j-th of the sample with probability P(Binomial(n, j/n) >= k)
    = I(j/n; k, n - k + 1), so its quantiles are order statistics at n x betaincinv(k, n - k + 1, q) (Efron, *Annals of
    Statistics* 7, 1979, section 3, for the median). k = 1 + (n - 1) percent / 100 may lie between two order statistics, as
    numpy's linear percentile does. ``ordered`` ascends; ``None`` below two values.
    """
    n = len(ordered)
    if n < 2:
        return None
    k = 1 + (n - 1) * percent / 100
    tails = np.array([(1 - confidence) / 2, (1 + confidence) / 2])
    ranks = np.ceil(n * special.betaincinv(k, n - k + 1, tails)).astype(int)
    low, high = ordered[np.clip(ranks, 1, n) - 1]
    return float(low), float(high)


MANY = 500


def mean_interval(values: Array, rng: np.random.Generator, resamples: int) -> tuple[float, float] | None:
    """Percentile-bootstrap interval of the mean; ``None`` below two values.

    From ``MANY`` values on it is the normal interval that the bootstrap of a mean tends to (central limit theorem), since
    resampling is most of what figures cost. Their ends differ there by 2 % of the width in the mean and 8 % at most (40
    log-normal samples with a deviation of 0.9 of the logarithm, 4,000 resamples; exponential and gamma: half of that).
    """
    n = len(values)
    if n < 2:
        return None
    if n >= MANY:
        half = float(special.ndtri(0.975)) * float(values.std(ddof=1)) / math.sqrt(n)
        return float(values.mean()) - half, float(values.mean()) + half
    means = np.empty(resamples)
    at_once = max(1, _CELLS_AT_ONCE // n)
    for begin in range(0, resamples, at_once):
        rows = min(at_once, resamples - begin)
        means[begin : begin + rows] = values[rng.integers(0, n, (rows, n), dtype=np.int32)].mean(axis=1)
    return _middle(means)


def rate_interval(per_block: Array, block_s: float, rng: np.random.Generator, resamples: int) -> tuple[float, float] | None:
    """Bootstrap interval of a rate from its counts in equal blocks of time; ``None`` when nothing was counted.

    Blocks of time, not requests, because tokens come in bursts: neighbours within a block are not independent.
    """
    n = len(per_block)
    if n < 2 or block_s <= 0 or not per_block.any():
        return None
    return _middle(per_block[rng.integers(0, n, (resamples, n))].mean(axis=1) / block_s)


def share_interval(hits: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two-sided Clopper-Pearson interval of a share (*Biometrika* 26, 1934).

    Exact instead of a bootstrap, which would call 400 of 400 certain.
    """
    tail = (1 + confidence) / 2
    return 1 - failure_share_upper(n - hits, n, tail), failure_share_upper(hits, n, tail)


def failure_share_upper(failed: int, n: int, confidence: float = CONFIDENCE) -> float:
    """One-sided upper Clopper-Pearson bound of the failure share; 1.0 when nothing was counted."""
    if not 0 <= failed <= n:
        raise ValueError(f"{failed} failures of {n} requests")
    return 1.0 if failed == n else float(special.betaincinv(failed + 1, n - failed, confidence))


def failure_share_lower(failed: int, n: int, confidence: float = CONFIDENCE) -> float:
    """One-sided lower Clopper-Pearson bound of the failure share; 0.0 when nothing failed."""
    return 1 - failure_share_upper(n - failed, n, confidence) if failed else 0.0


def counts_per_part(at_s: Array, weights: Array | None, edges: Sequence[float]) -> Array:
    """Sum of ``weights`` (default: 1) of the events in each half-open part ``[edges[i], edges[i + 1])``."""
    part = np.searchsorted(np.asarray(edges), at_s, side="right")
    return np.bincount(part, weights=weights, minlength=len(edges) + 1)[1 : len(edges)].astype(np.float64)


def _middle(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
