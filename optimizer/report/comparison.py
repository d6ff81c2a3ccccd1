"""Metrics of two arms side by side: mean and spread over engine starts, and which is better."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vopt.optimizer.history import TrialRecord
from vopt.optimizer.report import wording

WITHIN_STARTS = 0.01
"""Starts of one configuration differ by about as much: one start each cannot tell a smaller change from chance."""
BEYOND = 10
"""Requests above a percentile: 1,000 have as many above their p99 (``objectives.metrics.FEW_FOR_P99``), 200 above their p95."""
METRIC_ORDER = (
    "tokens_per_s",
    "output_tokens_per_s",
    "requests_per_s",
    "goodput_per_s",
    "success_rate",
    *(f"{part}_{metric}_s" for metric in ("ttft", "tpot", "e2e") for part in ("mean", "p50", "p90", "p95", "p99")),
    "kv_peak",
    "preemptions",
    "acceptance_length",
    "acceptance_rate",
    "prefix_hit_rate",
    "peak_running",
    "queued_share",
    "full_budget_share",
    "front_end_share",
)
SENT = frozenset({"tokens_per_s", "output_tokens_per_s", "requests_per_s"})
"""At a fixed rate these are what was sent, not what an engine could do."""
AS_SENT = 0.02
"""Up to this much of them, requests that begin or end beside the window explain; a larger loss is an engine falling behind."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over the engine starts of one arm: mean, least and greatest. One start: no spread."""

    mean: float
    low: float
    high: float
    starts: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of baseline and winner. ``change`` is winner / baseline; ``better`` is ``None`` when they do not differ, or
    when neither direction is better (gauges, and what a fixed rate sent: ``as_sent``) or nobody can say (a percentile of
    ``few`` requests)."""

    metric: str
    baseline: Spread | None
    winner: Spread | None
    change: float | None
    better: bool | None
    as_sent: bool = False
    few: bool = False

    @property
    def too_little(self) -> bool:
        """Whether a single start of an arm differs from the other by less than starts of one configuration do anyway."""
        alone = any(spread is None or spread.starts < 2 for spread in (self.baseline, self.winner))
        return alone and self.change is not None and abs(self.change - 1) < WITHIN_STARTS

    @property
    def overlaps(self) -> bool:
        """Whether the starts of both arms cover common ground, so that no direction can be claimed."""
        one, other = self.baseline, self.winner
        if one is None or other is None or one.starts < 2 or other.starts < 2:
            return False
        return one.low <= other.high and other.low <= one.high


def names_of(trials: Iterable[TrialRecord]) -> set[str]:
    return {name for trial in trials if trial.metrics for name in trial.metrics.values}


def in_order(names: Iterable[str]) -> list[str]:
    rank = {name: place for place, name in enumerate(METRIC_ORDER)}
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), name))


def spread_of(name: str, trials: Sequence[TrialRecord], stated: Mapping[str, float]) -> Spread | None:
    values = [value for trial in trials if trial.metrics and (value := trial.metrics.get(name)) is not None]
    if not values:
        return Spread(stated[name], stated[name], stated[name], 1) if name in stated else None
    return Spread(statistics.fmean(values), min(values), max(values), len(values))


def few_for(name: str, *arms: Sequence[TrialRecord]) -> bool:
    """Whether a percentile has fewer than ``BEYOND`` requests of an arm above it, all its starts together: a change of it is
    then mostly chance."""
    found = re.match(r"p(\d+)_", name)
    counted = [sum(trial.metrics.succeeded for trial in arm if trial.metrics) for arm in arms if arm]
    return found is not None and any(requests * (100 - int(found[1])) < 100 * BEYOND for requests in counted)


def compare(
    name: str, baseline: Spread | None, winner: Spread | None, *, fixed_rate: bool = False, few: bool = False
) -> Comparison:
    change = winner.mean / baseline.mean if baseline and winner and baseline.mean else None
    better = None
    if fixed_rate and name in SENT and change is not None and abs(change - 1) <= AS_SENT:
        return Comparison(name, baseline, winner, change, None, as_sent=True)
    if few:
        return Comparison(name, baseline, winner, change, None, few=True)
    if change is not None and wording.is_cost(name) and abs(change - 1) >= 0.0005:
        better = (change < 1) is wording.lower_is_better(name)
    return Comparison(name, baseline, winner, change, better)
