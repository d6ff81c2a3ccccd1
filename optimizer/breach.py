"""Which limits a configuration breaks: for certain, or as far as chance allows. Pure.

A finalist is refused by the mean of its starts, and by failed requests that it cannot rule out. The baseline is what runs
today: it gives way to something slower only where its breach is beyond chance, by the same confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vopt.objectives.confidence import failure_share_lower, surely_beyond
from vopt.objectives.goals import Goal, Limit
from vopt.objectives.metrics import Metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer.history import TrialRecord
from vopt.optimizer.judge import ARTEFACT, Judged, broken_limits

MEASURED_STATUSES = (LoadStatus.COMPLETE, LoadStatus.UNSTEADY)
LOST_FOR_CERTAIN = 2
"""Starts of a baseline that must fail or be overloaded: a single one may have been an accident, unless it failed at all of
them. An overload is called at 95 % confidence: of five starts at their limit two are called so in 2 % of studies."""


def absolute(goal: Goal) -> Goal:
    """The goal without limits relative to the baseline: they bound what is compared with it, and say nothing of itself."""
    return replace(goal, limits=tuple(limit for limit in goal.limits if not limit.relative_to_baseline))


def broken(metrics: Metrics, goal: Goal, reference: Metrics | None) -> str:
    """Which limits mean figures break, in words; those relative to the baseline only where its figures are known."""
    return broken_limits(metrics, goal if reference is not None else absolute(goal), reference)


def ended_well(record: TrialRecord) -> bool:
    """Whether a start came up and its load came to its end: what it measured counts."""
    return record.failure is None and record.metrics is not None and record.status in MEASURED_STATUSES


def success_limit(goal: Goal) -> Limit | None:
    return next((x for x in goal.limits if x.metric == "success_rate" and x.op == ">=" and not x.relative_to_baseline), None)


def certain(
    goal: Goal, starts: Sequence[Judged], others: Sequence[Sequence[Judged]], mean: Metrics | None, failed: int, n: int
) -> str:
    """What the starts of a baseline break beyond chance, in words; empty when chance may have done it.

    ``others`` are the starts of the arms beside it, which tell how much starts scatter; ``mean`` its mean figures;
    ``failed`` of ``n`` its requests over all starts.
    """
    if not starts:
        return ""
    lost = [start.reason for start in starts if not ended_well(start.record)]
    if len(lost) >= LOST_FOR_CERTAIN or all(start.record.failure is not None for start in starts):
        return (
            f"{len(lost)} of its {len(starts)} starts failed: {lost[0]}" if len(starts) > 1 else f"its start failed: {lost[0]}"
        )
    if any(ARTEFACT in start.record.flags for start in starts):
        return "its acceptance of drafts is an artefact of dummy weights"
    found = [
        broken_limits(mean, replace(goal, limits=(limit,)), mean)
        for limit in absolute(goal).limits
        if mean is not None and limit != success_limit(goal) and _surely_broken(limit, starts, others)
    ]
    limit = success_limit(goal)
    if limit is not None and n and (least := failure_share_lower(failed, n)) > 1 - limit.value:
        found.append(
            f"{failed} of {n} requests failed: with 95 % confidence at least {least:.2%}, more than the {1 - limit.value:.2%} "
            f"that success_rate >= {limit.value:g} allows"
        )
    return "; ".join(words for words in found if words)


def _surely_broken(limit: Limit, starts: Sequence[Judged], others: Sequence[Sequence[Judged]]) -> bool:
    mine = _figures(limit, starts)
    arms = [mine, *(_figures(limit, arm) for arm in others)]
    return surely_beyond(mine, limit.value, [arm for arm in arms if arm], above=limit.op == "<=")


def _figures(limit: Limit, starts: Sequence[Judged]) -> list[float]:
    records = [start.record for start in starts if ended_well(start.record)]
    return [value for record in records if record.metrics and (value := record.metrics.get(limit.metric)) is not None]


def kind_of(goal: Goal, starts: Sequence[Judged], mean: Metrics | None, reference: Metrics | None) -> str:
    """What refuses a finalist, as a failure kind, a load's end or ``limit:<metric>``."""
    ended = next((start.kind for start in starts if start.kind and not ended_well(start.record)), "")
    if ended:
        return ended
    if any(ARTEFACT in start.record.flags for start in starts):
        return ARTEFACT
    over = (x.metric for x in goal.limits if mean is not None and broken(mean, replace(goal, limits=(x,)), reference))
    return f"limit:{next(over, 'success_rate')}"


def possible(goal: Goal, starts: Sequence[Judged], mean: Metrics | None) -> str:
    """What the starts of a baseline break as far as their mean goes, where chance may have done it; empty when nothing."""
    lost = [start.reason for start in starts if not ended_well(start.record)]
    words = [f"{len(lost)} of its {len(starts)} starts failed: {lost[0]}"] if lost else []
    if mean is not None and (over := broken_limits(mean, absolute(goal), mean)):
        words.append(over)
    return "; ".join(words)
