"""From the confirmed starts to the answer: which arm wins, by how much, within which interval. Pure.

Only data that did not choose the finalist decide: the confirmation's starts (and the soak, for failures).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from vopt.objectives.confidence import (
    ALPHA_FURTHER,
    Comparison,
    compare,
    failure_share_lower,
    failure_share_upper,
    like_starts,
    lite_suffices,
    smallest_visible_gain,
)
from vopt.objectives.metrics import Metrics
from vopt.optimizer import breach
from vopt.optimizer.arms import Arms
from vopt.optimizer.history import Arm, Stage, TrialRecord
from vopt.optimizer.judge import ARTEFACT, Judged, of_stage
from vopt.optimizer.progress import Progress, finalists
from vopt.optimizer.recommend import Gain, SuccessBound
from vopt.optimizer.trial import EngineConfig


@dataclass(frozen=True, slots=True)
class ArmResult:
    """What an arm's starts showed together. ``values`` are the goal's metric, one for each start that came to its end."""

    arm: Arm
    config: EngineConfig
    starts: tuple[Judged, ...]
    values: tuple[float, ...]
    metrics: Metrics | None
    failure: str = ""

    @property
    def last(self) -> TrialRecord | None:
        return self.starts[-1].record if self.starts else None


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The confirmation up to one round. ``lite`` is ``None`` without a lite arm; ``comparison`` is finalist against baseline
    (``None``: one of them has no start that counts), its bound at the one-sided ``level`` of this look."""

    arms: Arms
    rounds: int
    baseline: ArmResult
    finalist: ArmResult
    lite: ArmResult | None
    comparison: Comparison | None
    level: float

    @property
    def all_values(self) -> list[tuple[float, ...]]:
        return [arm.values for arm in (self.baseline, self.finalist, self.lite) if arm is not None and arm.values]


def mean_metrics(records: Sequence[TrialRecord]) -> Metrics | None:
    """Means of each metric that every record has; counts are summed. ``None`` without records."""
    measured = [record.metrics for record in records if record.metrics is not None]
    if not measured:
        return None
    names = [name for name in measured[0].values if all(name in metrics.values for metrics in measured)]
    return Metrics(
        values={name: fmean(metrics[name] for metrics in measured) for name in names},
        succeeded=sum(metrics.succeeded for metrics in measured),
        failed=sum(metrics.failed for metrics in measured),
        censored=sum(metrics.censored for metrics in measured),
    )


def confirmation(progress: Progress, up_to: int | None = None) -> Confirmation | None:
    """The confirmation in course up to a round (default: all rounds begun); ``None`` before its first start. Where every
    finalist failed, the last of their confirmations.

    In a study that was given more trials after a confirmation: without ``up_to`` the confirmation that the answer rests on.
    That is one that shows a better finalist, of several the one with the highest bound, else the last.
    """
    tried = progress.arms
    seen = _seen(progress, tried, up_to) if tried is not None else None
    if up_to is not None:
        return seen
    others = [arms for arms in progress.earlier_arms if tried is None or arms.finalist != tried.finalist]
    found = [one for one in (*(_seen(progress, arms, None) for arms in others), seen) if one is not None]
    won = [one for one in found if _provisional(progress, one, winner) is not None] if others else []
    if won:
        return max(won, key=lambda one: (one.comparison.bound if one.comparison else None) or 0.0)
    if not found and progress.fallen_arms is not None:
        return _seen(progress, progress.fallen_arms, None)
    return found[-1] if found else None


def _seen(progress: Progress, tried: Arms, up_to: int | None) -> Confirmation | None:
    planned = progress.rounds_of(tried)
    rounds = up_to or planned
    begun = max((n for n in range(1, rounds + 1) if any(map(progress.labelled, tried.labels(n)))), default=0)
    if not begun:
        return None
    configs = {Arm.BASELINE: progress.baseline_config, Arm.FINALIST: tried.finalist, Arm.LITE: tried.lite}
    results = {arm: _arm(progress, tried, arm, config, rounds) for arm, config in configs.items() if config is not None}
    everything = [result.values for result in results.values() if result.values]
    baseline, finalist = results[Arm.BASELINE], results[Arm.FINALIST]
    levels = progress.levels_of(tried)
    level = levels.get(up_to or begun, levels.get(planned, ALPHA_FURTHER))
    comparison = None
    if baseline.values and finalist.values:
        comparison = compare(finalist.values, baseline.values, everything, progress.setup.goal.direction, alpha=level)
    return Confirmation(tried, begun, baseline, finalist, results.get(Arm.LITE), comparison, level)


def _arm(progress: Progress, tried: Arms, arm: Arm, config: EngineConfig, rounds: int) -> ArmResult:
    """One arm, of the starts of its own configuration: a label says where a start stands, not what was started."""
    labelled = (progress.made(tried.label(n, arm), config) for n in range(1, rounds + 1))
    starts = tuple(start for start in labelled if start is not None)
    failure = next((start.reason for start in starts if not breach.ended_well(start.record)), "")
    ended = [start for start in starts if start.value is not None and breach.ended_well(start.record)]
    if not failure and not like_starts([start.record.kv_cache_tokens for start in ended]):
        # Starts whose KV caches differ are different machines to the scheduler: only the most common size is pooled.
        ended = _most_alike(ended)
    values = tuple(start.value for start in ended if start.value is not None and start.value > 0)
    return ArmResult(arm, config, starts, values, mean_metrics([start.record for start in ended]), failure)


def _most_alike(starts: Sequence[Judged]) -> list[Judged]:
    groups = [
        [other for other in starts if like_starts([start.record.kv_cache_tokens, other.record.kv_cache_tokens])]
        for start in starts
    ]
    return max(groups, key=len)


def settled(progress: Progress, round_: int) -> bool:
    """At a permitted look: whether the finalist is better beyond doubt, so that no further round is needed."""
    seen = confirmation(progress, round_)
    return seen is not None and seen.comparison is not None and seen.comparison.better


def refusal(progress: Progress, result: ArmResult, baseline: ArmResult, *, soak_to_come: bool = False) -> str:
    """Why a finalist or lite may not be recommended whatever its gain: a start of it failed, its means break a limit, or as
    many of its requests failed as leave the success rate open. ``soak_to_come``: more requests will settle that, so it refuses
    only what no soak can mend."""
    if result.failure:
        return result.failure
    if result.metrics is None:
        return "none of its confirmation starts was measured"
    if ARTEFACT in {flag for start in result.starts for flag in start.record.flags}:
        return "its acceptance of drafts is an artefact of dummy weights"
    broken = breach.broken(result.metrics, progress.setup.goal, baseline.metrics)
    if broken:
        return broken
    bound, allowed = success_bound(progress, result.config), failure_allowance(progress)
    if bound is None or allowed is None or not bound.failed or bound.upper_failure_share <= allowed:
        return ""
    if soak_to_come and failure_share_lower(bound.failed, bound.n) <= allowed:
        return ""
    return (
        f"{bound.failed} of {bound.n} requests failed in confirmation and soak: with 95 % confidence up to "
        f"{bound.upper_failure_share:.2%}, more than the {allowed:.2%} that success_rate >= {1 - allowed:g} allows"
    )


def failure_allowance(progress: Progress) -> float | None:
    limit = breach.success_limit(progress.setup.goal)
    return None if limit is None else 1 - limit.value


def soak_of(progress: Progress, *configs: EngineConfig | None) -> Judged | None:
    """The soak of one of these configurations, the last of several; ``None`` before there was one."""
    soaks = of_stage(progress.charged, Stage.SOAK)
    return next((soak for soak in reversed(list(soaks)) if soak.record.config in configs), None)


def deciding_soak(progress: Progress, seen: Confirmation, config: EngineConfig) -> Judged | None:
    """The soak of a configuration, else of what won the same confirmation before it."""
    return soak_of(progress, config) or soak_of(progress, seen.arms.finalist, seen.arms.lite)


def refused_by_soak(progress: Progress, seen: Confirmation, config: EngineConfig) -> str:
    """Why a configuration may not be recommended for its soak, or for that of the other arm: none takes the place of a refused
    one without a soak of its own. Empty when it may be."""
    soak = deciding_soak(progress, seen, config)
    if soak is None or soak.kind or soak.record.config == config:
        return soak.reason if soak is not None and soak.kind else ""
    soaked = next((one for one in (seen.lite, seen.finalist) if one is not None and one.config == soak.record.config), None)
    return refusal(progress, soaked, seen.baseline) if soaked is not None else ""  # its failures, pooled over both stages


def success_bound(progress: Progress, config: EngineConfig) -> SuccessBound | None:
    """Failed requests of a configuration pooled over confirmation and soak, with the upper 95 % bound of their share."""
    starts = progress.starts_of(config, Stage.CONFIRMATION, Stage.SOAK)
    counted = [start.record.metrics for start in starts if start.record.metrics is not None]
    failed, n = sum(metrics.failed for metrics in counted), sum(metrics.failed + metrics.succeeded for metrics in counted)
    return SuccessBound(failed, n, failure_share_upper(failed, n)) if n else None


def baseline_breach(progress: Progress, seen: Confirmation) -> str:
    """Which limits the baseline breaks beyond chance, in words; empty when it keeps them, or chance may have done it."""
    bound = success_bound(progress, progress.baseline_config)
    failed, n = (bound.failed, bound.n) if bound is not None else (0, 0)
    others = [arm.starts for arm in (seen.finalist, seen.lite) if arm is not None]
    return breach.certain(progress.setup.goal, seen.baseline.starts, others, seen.baseline.metrics, failed, n)


def held_back(progress: Progress, seen: Confirmation, arm: ArmResult) -> EngineConfig | None:
    """Lite, where it keeps up with the recommended finalist and the limits and was left for want of a gain of its own."""
    lite = seen.lite
    if lite is None or arm is lite or not lite_keeps_up(progress, seen) or refusal(progress, lite, seen.baseline):
        return None
    return lite.config


def winner(progress: Progress, seen: Confirmation, *, soak_to_come: bool = False) -> ArmResult | None:
    """The arm to be recommended over the baseline, ``None`` when there is none: lite where it keeps up with the finalist, else
    the finalist.

    Either must keep the limits, and no start of the finalist may have failed. By its gain an arm wins where the finalist's
    gain and its own are real; slower than the baseline it may be only where that breaks a limit beyond chance.
    """
    if seen.finalist.failure:
        return None
    gained = seen.comparison is not None and seen.comparison.better
    broken = bool(baseline_breach(progress, seen))
    for arm in (seen.lite if lite_keeps_up(progress, seen) else None, seen.finalist):
        if arm is None or refusal(progress, arm, seen.baseline, soak_to_come=soak_to_come):
            continue
        own = against_baseline(progress, seen, arm)
        if broken or (gained and own is not None and own.better):
            return arm
    return None


def unproven(progress: Progress, seen: Confirmation, *, soak_to_come: bool = False) -> ArmResult | None:
    """The finalist where fresh starts are too few for an interval (one round) and it lies above the baseline: neither a gain
    nor the lack of one is shown."""
    found = against_baseline(progress, seen, seen.finalist)
    if found is None or found.low is not None or found.ratio <= 1:
        return None
    return None if refusal(progress, seen.finalist, seen.baseline, soak_to_come=soak_to_come) else seen.finalist


def lite_keeps_up(progress: Progress, seen: Confirmation) -> bool:
    """Whether lite surely loses no more against the finalist than it may."""
    lite, direction = seen.lite, progress.setup.goal.direction
    if lite is None or not lite.values or seen.comparison is None:
        return False
    return lite_suffices(lite.values, seen.finalist.values, seen.all_values, direction, gain_ratio=seen.comparison.ratio)


def provisional_winner(progress: Progress) -> EngineConfig | None:
    """The configuration that will be recommended unless its soak fails; ``None`` when that is the baseline or nothing."""
    if progress.setup.budget.rounds == 0:
        ranked = finalists(progress)
        if not ranked or not beats_baseline_unconfirmed(progress, ranked[0]):
            return None
        soak = soak_of(progress, ranked[0])
        return None if soak is not None and soak.kind else ranked[0]
    seen = confirmation(progress)
    if seen is None:
        return None
    arm = _provisional(progress, seen, winner) or _provisional(progress, seen, unproven)
    return arm.config if arm is not None else None


def _provisional(progress: Progress, seen: Confirmation, rule: Callable[..., ArmResult | None]) -> ArmResult | None:
    """What a rule recommends of a confirmation, where its soak is still to come or did not refuse it."""
    to_come = bool(progress.setup.budget.soak_s) and soak_of(progress, seen.arms.finalist, seen.arms.lite) is None
    arm = rule(progress, seen, soak_to_come=to_come)
    return None if arm is None or refused_by_soak(progress, seen, arm.config) else arm


def beats_baseline_unconfirmed(progress: Progress, config: EngineConfig) -> bool:
    """Without confirmation: whether a configuration's mean over its starts lies above the baseline's."""
    baseline = progress.baseline
    if baseline is None or not baseline.feasible or baseline.merit is None:
        return True
    merits = [start.merit for start in progress.starts_of(config, Stage.SEARCH, Stage.SCREENING) if start.merit is not None]
    return bool(merits) and fmean(merits) > baseline.merit


def against_baseline(progress: Progress, seen: Confirmation, arm: ArmResult) -> Comparison | None:
    """An arm against the baseline, with the spread of all arms; ``None``: one of them has no start that counts."""
    if not arm.values or not seen.baseline.values:
        return None
    return compare(arm.values, seen.baseline.values, seen.all_values, progress.setup.goal.direction, alpha=seen.level)


def gain_of(progress: Progress, seen: Confirmation, arm: ArmResult) -> Gain | None:
    """The gain of an arm over the baseline, with the interval that decides for it and what the study could have seen."""
    comparison = against_baseline(progress, seen, arm)
    if comparison is None:
        return None
    rounds = min(len(arm.values), len(seen.baseline.values))
    visible = (
        smallest_visible_gain(comparison.spread.sd, rounds, arms=len(seen.all_values)) if comparison.spread.freedom else None
    )
    return Gain(comparison.ratio, comparison.low, comparison.high, visible)


def _changed(before: object, after: object) -> bool:
    """Whether a recorded condition is another one now; figures that always move a little have to move by more than 5 %, and
    those that are no counts by more than 1 as well (MHz, degrees, watts, load average)."""
    if isinstance(before, int | float) and isinstance(after, int | float) and not isinstance(before, bool):
        apart = abs(before - after)
        counts = isinstance(before, int) and isinstance(after, int)
        return apart > 0.05 * max(abs(before), abs(after)) and (counts or apart > 1)
    return before != after


def drift(progress: Progress) -> tuple[float, Mapping[str, tuple[object, object]]] | None:
    """How far the baseline moved between trial 0 and its last start under like conditions (a ratio), and which recorded
    conditions differ; ``None`` when it was not measured again."""
    first = progress.baseline
    if first is None or first.merit is None:
        return None
    again = [
        start
        for start in progress.starts_of(progress.baseline_config, Stage.DRIFT, Stage.CONFIRMATION, Stage.SCREENING)
        if start.value is not None and start.record.served == first.record.served
    ]
    if not again or first.value is None:
        return None
    before, after = first.record.environment, again[-1].record.environment
    changed = {
        name: (before[name], after[name])
        for name in before
        if name != "load_plan" and name in after and _changed(before[name], after[name])
    }
    return fmean(start.value for start in again if start.value is not None) / first.value, changed
