"""Which load to measure at, when the user leaves it open. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEVELS = (64, 128, 256, 512)
WITHIN = 0.05
RATE_SHARE = 0.6
"""Latency is measured at this share of the request rate that the baseline sustains: busy, but far from saturation."""


@dataclass(frozen=True, slots=True)
class MeasureNext:
    """A concurrency that has to be measured before there is an answer."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """The concurrency to use, and why."""

    concurrency: int
    reason: str


def auto_concurrency(tokens_per_s: Mapping[int, float], levels: tuple[int, ...] = LEVELS) -> MeasureNext | Chosen:
    """The smallest of ``levels`` whose throughput is within 5 % of that at twice the concurrency; else the highest level.

    ``tokens_per_s`` holds what was measured so far, by concurrency. The level after the last is twice it, so that the last
    one is judged by the same rule. ``ValueError`` for a throughput that is not above 0.
    """
    for concurrency, throughput in tokens_per_s.items():
        if not throughput > 0:
            raise ValueError(f"the throughput at concurrency {concurrency} must be above 0 tokens/s, got {throughput}")
    for level in levels:
        for needed in (level, 2 * level):
            if needed not in tokens_per_s:
                return MeasureNext(needed)
        gain = tokens_per_s[2 * level] / tokens_per_s[level] - 1
        if gain <= WITHIN:
            return Chosen(level, f"twice as many {_brings(gain)}")
    last = levels[-1]
    gain = tokens_per_s[2 * last] / tokens_per_s[last] - 1
    return Chosen(last, f"{2 * last} still brought {gain:+.1%} throughput, but auto goes no higher; --concurrency does")


def _brings(gain: float) -> str:
    """What twice the concurrency did to throughput; too little of a gain, or a loss."""
    if gain < 0:
        return f"lose {-gain:.1%} throughput"
    return f"bring {gain:+.1%} throughput, no more than {WITHIN:.0%}"


def rate_for_latency(requests_per_s: float) -> float:
    """The open-loop rate for a latency goal, from the requests per second of a closed loop at saturation."""
    if not 0 < requests_per_s < float("inf"):
        raise ValueError(f"the baseline's request rate must be above 0 per second, got {requests_per_s}")
    return RATE_SHARE * requests_per_s
