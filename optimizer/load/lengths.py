"""Length distributions as blocks of 64 quantiles, so that every stretch of a load holds the same mix. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from math import exp, log
from statistics import NormalDist
from typing import Any

BLOCK = 64
"""Requests per block. A power of two, because the pairing below reverses bits."""

SHIFT = 0b100011
"""Added to the reversed bits without carry: makes the rank correlation of prompt and output lengths exactly 0, and that of
long-tailed lengths less than 0.01, where unshifted bits would pair the longest with the longest."""

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Marginal:
    """How long prompts or outputs are, in tokens: log-normal with this mean, cut to ``least``..``most``.

    ``sigma`` is the standard deviation of the logarithm; 0 means that every one is ``mean`` long. ``quantiles`` (any number,
    ascending) replace the log-normal by what was measured.
    """

    mean: float
    sigma: float = 0.0
    least: int = 1
    most: int = 1 << 20
    quantiles: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"lengths must be at least 1 and at most what they are cut to, got {self.least}..{self.most}")
        if not (self.least <= self.mean <= self.most) or self.sigma < 0:
            raise ValueError(
                f"the mean length {self.mean:g} must lie within {self.least}..{self.most}, and sigma {self.sigma:g} >= 0"
            )

    def block(self) -> tuple[int, ...]:
        """The 64 mid-quantiles, ascending; their mean is ``mean`` to within rounding, whatever the cut takes away."""
        if self.quantiles:
            ordered = sorted(self.quantiles)
            return tuple(ordered[int((i + 0.5) / BLOCK * len(ordered))] for i in range(BLOCK))
        if self.sigma == 0:
            return (round(self.mean),) * BLOCK
        low, high = log(self.least) - 8 * self.sigma, log(self.most) + 8 * self.sigma
        for _ in range(60):  # the mean of the cut quantiles rises with mu, so halving the interval finds it
            mu = (low + high) / 2
            low, high = (mu, high) if sum(self._cut(mu)) < self.mean * BLOCK else (low, mu)
        return tuple(round(value) for value in self._cut(high))

    def _cut(self, mu: float) -> list[float]:
        spread = (exp(mu + self.sigma * _NORMAL.inv_cdf((i + 0.5) / BLOCK)) for i in range(BLOCK))
        return [min(max(value, self.least), self.most) for value in spread]


@dataclass(frozen=True, slots=True)
class Lengths:
    """The joint distribution of prompt and output lengths: independent marginals, or ``pairs`` as they were recorded."""

    prompt: Marginal = field(default_factory=lambda: Marginal(1.0))
    output: Marginal = field(default_factory=lambda: Marginal(1.0))
    pairs: tuple[tuple[int, int], ...] = ()

    def block(self) -> tuple[tuple[int, int], ...]:
        """64 (prompt, output) quantiles of the joint distribution.

        Independent marginals are paired by reversed bits (a Hammersley set, digitally shifted): each marginal shows all of
        its 64 quantiles and each of the 8 x 8 coarser cells exactly one pair, so short prompts meet short and long outputs
        alike. Recorded pairs are taken at the 64 quantiles of their total length.
        """
        if self.pairs:
            ordered = sorted(self.pairs, key=lambda pair: (pair[0] + pair[1], pair))
            return tuple(ordered[int((i + 0.5) / BLOCK * len(ordered))] for i in range(BLOCK))
        prompts, outputs = self.prompt.block(), self.output.block()
        return tuple((prompts[i], outputs[_reversed(i) ^ SHIFT]) for i in range(BLOCK))

    @property
    def longest(self) -> tuple[int, int]:
        """The pair with the most tokens in all."""
        return max(self.pairs or self.block(), key=lambda pair: (pair[0] + pair[1], pair))

    @property
    def mean(self) -> tuple[float, float]:
        pairs = self.pairs or self.block()
        return sum(pair[0] for pair in pairs) / len(pairs), sum(pair[1] for pair in pairs) / len(pairs)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Lengths:
        prompt, output = (
            Marginal(**{**data[side], "quantiles": tuple(data[side].get("quantiles", ()))}) for side in ("prompt", "output")
        )
        return cls(prompt, output, tuple((pair[0], pair[1]) for pair in data.get("pairs", ())))


def _reversed(number: int) -> int:
    """The six bits of 0..63 in reverse order."""
    return int(f"{number:06b}"[::-1], 2)


def shuffled_blocks(block: Sequence[tuple[int, int]], blocks: int, seed: int) -> tuple[tuple[int, int], ...]:
    """``blocks`` copies of one block, each in an order of its own. The same seed gives the same order."""
    draw = random.Random(f"lengths-{seed}")
    return tuple(pair for _ in range(blocks) for pair in draw.sample(list(block), len(block)))


def stratified_order(sizes: Sequence[int], seed: int) -> tuple[int, ...]:
    """An order of recorded requests in which every 64 in a row span the whole range of sizes; each appears exactly once.

    The requests, sorted by size, are cut into 64 strata; each block takes one from each stratum in a shuffled order. When
    their number is no multiple of 64, the last block lacks some.
    """
    draw = random.Random(f"order-{seed}")
    ordered = sorted(range(len(sizes)), key=lambda i: (sizes[i], i))
    cuts = [len(ordered) * stratum // BLOCK for stratum in range(BLOCK + 1)]
    strata = [draw.sample(ordered[a:b], b - a) for a, b in pairwise(cuts)]
    order: list[int] = []
    for row in range(max(map(len, strata), default=0)):
        block = [stratum[row] for stratum in strata if row < len(stratum)]
        order.extend(draw.sample(block, len(block)))
    return tuple(order)


def from_histogram(buckets: Sequence[tuple[float, float]], total: float, parts: int = 4 * BLOCK) -> tuple[int, ...]:
    """Quantiles of a Prometheus histogram: ``buckets`` are (upper bound, count up to it), ascending, the last infinite.

    Within a bucket lengths are spread evenly on a log scale, then scaled within their buckets so that their mean is
    ``total`` / count as closely as the buckets' bounds allow. ``ValueError`` when nothing was counted.
    """
    count = buckets[-1][1] if buckets else 0.0
    if count <= 0:
        raise ValueError("the histogram counted nothing between the two scrapes")
    bounds = [bound for bound, _ in buckets]
    shares = [b - a for a, b in zip([0.0, *(c for _, c in buckets)], (c for _, c in buckets), strict=False)]
    lows = [bound + 1 for bound in (0.0, *bounds[:-1])]  # a bucket holds whole numbers above the bound before it
    edges = [(low, max(low, high) if high < float("inf") else 2 * low) for low, high in zip(lows, bounds, strict=True)]
    cumulative = list(accumulate(shares))
    places = []
    for i in range(parts):
        rank = (i + 0.5) / parts * count
        bucket = next((k for k, upto in enumerate(cumulative) if upto >= rank), len(cumulative) - 1)
        within = (rank - (cumulative[bucket] - shares[bucket])) / shares[bucket]
        places.append((edges[bucket], within))

    def lengths(power: float) -> list[float]:
        return [low * (high / low) ** (within**power) for (low, high), within in places]

    low, high = log(0.05), log(20.0)
    for _ in range(50):  # a larger power moves lengths down within their buckets
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lengths(exp(middle))) / parts > total / count else (low, middle)
    return tuple(max(1, round(value)) for value in lengths(exp(low)))
