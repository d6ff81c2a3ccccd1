"""The recommendation as a value: verdict, command, gain, costs, what was rejected and why. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from vopt.objectives.confidence import compare, requests_needed
from vopt.objectives.records import LoadStatus
from vopt.optimizer.answer_baseline import left_out, left_out_notes, repair_notes, repair_of
from vopt.optimizer.answer_limits import beyond_the_limits, doubted_breach, next_choice, none_above, unjudged
from vopt.optimizer.answer_text import (
    by_limits,
    caveats,
    drift_notes,
    general_notes,
    meaning_notes,
    soak_text,
    vanished_gain,
    why,
)
from vopt.optimizer.breach import kind_of
from vopt.optimizer.command import flags_text
from vopt.optimizer.explain import explained
from vopt.optimizer.history import Stage
from vopt.optimizer.hopeless import overloaded_at
from vopt.optimizer.judge import Judged
from vopt.optimizer.progress import Progress, finalists
from vopt.optimizer.propose import Finish
from vopt.optimizer.recommend import Gain, Override, Recommendation, Rejected, SuccessBound, Verdict
from vopt.optimizer.trial import EngineConfig
from vopt.optimizer.verdict import (
    ArmResult,
    Confirmation,
    baseline_breach,
    beats_baseline_unconfirmed,
    confirmation,
    deciding_soak,
    failure_allowance,
    gain_of,
    held_back,
    mean_metrics,
    refusal,
    refused_by_soak,
    soak_of,
    success_bound,
    unproven,
    winner,
)


def recommend(progress: Progress, finish: Finish) -> Recommendation:
    """The answer to a finished search."""
    answer = _answer(progress, finish)
    if progress.baseline is None:
        return answer
    winner = answer.winner_config
    notes = [*repair_notes(progress, winner), *(left_out_notes(progress, winner) if winner is not None else ())]
    return replace(answer, repair=repair_of(progress), notes=(*answer.notes, *notes))


def _answer(progress: Progress, finish: Finish) -> Recommendation:
    if finish.infeasible or progress.baseline is None:
        return _nothing_feasible(progress, finish.reason)
    seen = confirmation(progress)
    if seen is not None:
        return replace(_confirmed(progress, seen), finalist_config=seen.finalist.config)
    if any(judged.may_win for judged in progress.searched):
        return _unconfirmed(progress)
    return _nothing_feasible(progress, "no configuration met the limits")


def _confirmed(progress: Progress, seen: Confirmation) -> Recommendation:
    breaks = baseline_breach(progress, seen)
    arm = winner(progress, seen)
    best = (arm or unproven(progress, seen) or seen.finalist).config
    soak, soak_failed = deciding_soak(progress, seen, best), refused_by_soak(progress, seen, best)
    if arm is not None and not soak_failed:
        return _winner(progress, seen, arm, breaks)
    if not soak_failed and not breaks and (lead := unproven(progress, seen)) is not None:
        reason = f"unconfirmed: {why(progress, seen, lead)}; vopt resume with --rounds 3 gives one"
        return replace(_winner(progress, seen, lead, ""), verdict=Verdict.UNCONFIRMED, reason=reason)
    refused = refusal(progress, seen.finalist, seen.baseline)
    if breaks:
        reason = f"the baseline breaks its limits ({breaks}), and the finalist cannot take its place: {soak_failed or refused}"
        nothing = _nothing_feasible(progress, reason)
        return replace(nothing, baseline_breaks=breaks, notes=(*next_choice(progress), *nothing.notes))
    gain = gain_of(progress, seen, seen.finalist)
    fallen = seen.finalist.config in progress.failed_finalists
    if soak_failed:
        reason = f"the best configuration failed in its soak: {soak_failed}"
    elif fallen:
        died = "; ".join(f"{start.record.label}: {start.reason}" for start in progress.falls.values())
        gain, reason = None, f"no finalist came through its confirmation ({died}), so the baseline stays"
    elif refused:
        reason = f"the best configuration cannot be recommended: {refused}"
    else:
        reason = f"no measurable gain: {why(progress, seen, seen.finalist)}"
    said = [] if refused or soak_failed else vanished_gain(progress, seen)
    said += [*doubted_breach(progress, seen), *beyond_the_limits(progress)]
    said += next_choice(progress) if refused or soak_failed else []
    extra = []
    if refused and not soak_failed and not fallen:
        one = seen.finalist
        kind = kind_of(progress.setup.goal, one.starts, one.metrics, seen.baseline.metrics)
        extra = [Rejected("confirmation", one.config, kind, reason)]
    if soak is not None and soak_failed and not soak.kind:
        extra = [Rejected(soak.record.label, soak.record.config, "limit:success_rate", reason)]
    metrics = seen.baseline.metrics.values if seen.baseline.metrics else {}
    return _no_gain(progress, reason, gain, metrics, extra, said)


def _with_as_many(bound: SuccessBound, allowed: float) -> str:
    """With how many requests in all these failures would be few enough."""
    needed = requests_needed(1 - allowed, bound.failed)
    return f" ({needed:,} requests in all, if no further one fails)" if needed is not None else ""


def _winner(progress: Progress, seen: Confirmation, arm: ArmResult, breaks: str) -> Recommendation:
    gain = gain_of(progress, seen, arm)
    moved, notes = drift_notes(progress, gain)
    reason = by_limits(progress, seen, arm, breaks) if breaks else f"better: {why(progress, seen, arm)}"
    if gain is not None and moved is not None and (gain.low or 0) > 1 >= (moved.low or 0):
        reason += "; only for the machine's drift, which met all arms in turn, is the interval wider"
    bound, allowed = success_bound(progress, arm.config), failure_allowance(progress)
    if bound is not None and allowed is not None and bound.upper_failure_share > allowed:
        notes.append(
            f"{bound.n} requests without a failure bound the failure share by {bound.upper_failure_share:.2%} only: "
            f"longer windows or a soak are needed to show the limit itself{_with_as_many(bound, allowed)}"
        )
    notes += unjudged(progress, seen)
    if any(start.record.status is LoadStatus.UNSTEADY for start in (*arm.starts, *seen.baseline.starts)):
        notes.append("the load was unsteady in some starts: their two halves disagreed")
    return Recommendation(
        verdict=Verdict.BETTER,
        reason=reason,
        argv=_argv(progress, arm),
        baseline_argv=_baseline_argv(progress, seen.baseline),
        winner_label=_label_of(progress, arm.config),
        winner_config=arm.config,
        gain=moved,
        baseline_metrics=seen.baseline.metrics.values if seen.baseline.metrics else {},
        winner_metrics=arm.metrics.values if arm.metrics else {},
        overrides=_overrides(progress, seen, arm),
        rejected=_rejections(progress),
        trials=_counts(progress),
        success=bound,
        soak=soak_text(progress, soak_of(progress, arm.config)),
        notes=(*meaning_notes(progress, arm.config), *caveats(progress, arm.config), *notes, *general_notes(progress)),
        baseline_breaks=breaks,
    )


def _unconfirmed(progress: Progress) -> Recommendation:
    """Without confirmation rounds, or when no candidate was worth confirming."""
    ranked = finalists(progress)
    baseline = progress.baseline
    assert baseline is not None
    base_metrics = baseline.record.metrics.values if baseline.record.metrics else {}
    if not ranked or not beats_baseline_unconfirmed(progress, ranked[0]):
        if not baseline.feasible:
            return _nothing_feasible(progress, f"the baseline breaks a limit ({baseline.reason}) and nothing else met them all")
        return _no_gain(progress, none_above(progress), None, base_metrics, [])
    best = ranked[0]
    starts = progress.starts_of(best, Stage.SEARCH, Stage.SCREENING)
    soak = soak_of(progress, best)
    if soak is not None and (failed := _soak_failure(soak)):
        return _no_gain(progress, f"the best configuration failed in its soak: {failed}", None, base_metrics, [])
    merits = [start.merit for start in starts if start.merit is not None]
    gain = None
    if baseline.feasible and baseline.merit is not None:
        gain = Gain(math.exp(fmean(merits) - baseline.merit))
    moved, notes = drift_notes(progress, gain)
    if not baseline.feasible:
        notes.append(f"the baseline broke a limit in its start of the search ({baseline.reason}), so no gain is told")
    metrics = mean_metrics([start.record for start in starts])
    values = [start.value for start in starts if start.value]

    def worth(name: str) -> Gain | None:
        without = [start.value for start in explained(progress, best, name, 1) if start.value]
        return _worth_of(progress, values, without, [values])

    return Recommendation(
        verdict=Verdict.UNCONFIRMED,
        reason="unconfirmed: the best of the search, not measured against the baseline in fresh starts (--rounds 0)"
        if not progress.setup.budget.rounds
        else "unconfirmed: the confirmation could not be finished",
        argv=starts[-1].record.argv or progress.setup.command(best),
        baseline_argv=baseline.record.argv or progress.setup.command(progress.baseline_config),
        winner_label=starts[0].record.label,
        winner_config=best,
        gain=moved,
        baseline_metrics=base_metrics,
        winner_metrics=metrics.values if metrics else {},
        overrides=(
            *(
                Override(name, value, True, "part of the best configuration", worth(name))
                for name, value in _own(progress, best)
            ),
            *left_out(progress, best, worth),
        ),
        rejected=_rejections(progress),
        trials=_counts(progress),
        success=success_bound(progress, best),
        soak=soak_text(progress, soak),
        notes=(*meaning_notes(progress, best), *caveats(progress, best), *notes, *general_notes(progress)),
    )


def _no_gain(
    progress: Progress,
    reason: str,
    gain: Gain | None,
    base_metrics: object,
    extra: Sequence[Rejected],
    said: Sequence[str] = (),
) -> Recommendation:
    baseline = progress.baseline
    assert baseline is not None
    moved, notes = drift_notes(progress, gain)
    return Recommendation(
        verdict=Verdict.NO_GAIN,
        reason=reason,
        argv=baseline.record.argv or progress.setup.command(progress.baseline_config),
        baseline_argv=baseline.record.argv or progress.setup.command(progress.baseline_config),
        gain=moved,
        baseline_metrics=dict(base_metrics)
        if isinstance(base_metrics, dict)
        else dict(baseline.record.metrics.values if baseline.record.metrics else {}),
        rejected=(*_rejections(progress), *extra),
        trials=_counts(progress),
        success=success_bound(progress, progress.baseline_config),
        notes=(*said, *caveats(progress, progress.baseline_config), *notes, *general_notes(progress)),
    )


def _nothing_feasible(progress: Progress, reason: str) -> Recommendation:
    """The least violating configuration, which limit failed by how much, and the lowest value seen."""
    measured = [
        judged
        for judged in progress.charged
        if judged.record.metrics is not None and judged.record.failure is None and judged.record.stage is not Stage.SOAK
    ]
    notes = []
    tried = progress.first(progress.baseline_config)
    said = overloaded_at(tried, progress.setup.rate, progress.setup.request_tokens) if tried is not None else None
    if said is not None and said not in reason:
        notes.append(said)
    if measured:
        least = min(measured, key=lambda judged: sum(max(0.0, value) for value in judged.violations.values()))
        if least.reason:
            named = "the baseline" if least.record.config == progress.baseline_config else flags_text(least.record.config)
            notes.append(f"least violating: trial {least.record.label} ({named}): {least.reason}")
        notes += _closest_values(progress, measured)
    baseline = progress.baseline
    return Recommendation(
        verdict=Verdict.NOTHING_FEASIBLE,
        reason=reason,
        argv=None,
        baseline_argv=(baseline.record.argv if baseline else ()) or progress.setup.command(progress.baseline_config),
        baseline_metrics=dict(baseline.record.metrics.values) if baseline and baseline.record.metrics else {},
        rejected=_rejections(progress),
        trials=_counts(progress),
        notes=(*notes, *progress.setup.notes),
    )


def _closest_values(progress: Progress, measured: Sequence[Judged]) -> list[str]:
    notes = []
    for limit in progress.setup.goal.limits:
        values = [
            v for judged in measured if judged.record.metrics and (v := judged.record.metrics.get(limit.metric)) is not None
        ]
        if values:
            closest = min(values) if limit.op == "<=" else max(values)
            which = "lowest" if limit.op == "<=" else "highest"
            notes.append(f"{which} {limit.metric} seen: {closest:.4g}; the limit is {limit.text}")
    return notes


def _overrides(progress: Progress, seen: Confirmation, arm: ArmResult) -> tuple[Override, ...]:
    rows, lite = [], held_back(progress, seen, arm)
    for name, value in _own(progress, seen.finalist.config):
        kept = arm.config.get(name) == value
        reason = "part of the winner" if kept else "dropped: it resolves to the default or earns less than the noise"
        if lite is not None and lite.get(name) != value:
            reason = "part of the winner: it earns less than the noise, but without it no gain is beyond the noise"
        rows.append(Override(name, value, kept, reason, _worth(progress, name, arm, seen) if kept else None))
    return (*rows, *left_out(progress, arm.config, lambda name: _worth(progress, name, arm, seen)))


def _worth(progress: Progress, name: str, arm: ArmResult, seen: Confirmation) -> Gain | None:
    without = [start.value for start in explained(progress, arm.config, name, seen.arms.series) if start.value]
    return _worth_of(progress, arm.values, without, seen.all_values)


def _worth_of(
    progress: Progress, values: Sequence[float], without: Sequence[float], others: Sequence[Sequence[float]]
) -> Gain | None:
    if not values or not without:
        return None
    found = compare(values, without, [*others, without], progress.setup.goal.direction)
    return Gain(found.ratio, found.low, found.high)


def _own(progress: Progress, config: EngineConfig) -> list[tuple[str, object]]:
    return [(name, value) for name, value in config.items() if progress.baseline_config.get(name) != value]


def _argv(progress: Progress, arm: ArmResult) -> tuple[str, ...]:
    return (arm.last.argv if arm.last else ()) or progress.setup.command(arm.config)


def _baseline_argv(progress: Progress, arm: ArmResult) -> tuple[str, ...]:
    return (arm.last.argv if arm.last else ()) or progress.setup.command(progress.baseline_config)


def _label_of(progress: Progress, config: EngineConfig) -> str | None:
    return next((judged.record.label for judged in progress.charged if judged.record.config == config), None)


def _rejections(progress: Progress) -> tuple[Rejected, ...]:
    rows: dict[EngineConfig, Rejected] = {}
    for judged in progress.charged:
        if judged.kind and judged.kind != "stopped_early" and judged.record.stage is not Stage.EXPLAIN:
            rows.setdefault(
                judged.record.config, Rejected(judged.record.label, judged.record.config, judged.kind, judged.reason)
            )
    return tuple(rows.values())


def _counts(progress: Progress) -> dict[str, int]:
    stages = Counter(judged.record.stage for judged in progress.history)
    return {
        "search": stages[Stage.SEARCH],
        "screening": stages[Stage.SCREENING],
        "confirmation": stages[Stage.CONFIRMATION],
        "measured": sum(judged.record.failure is None and judged.record.metrics is not None for judged in progress.history),
        "failed": sum(judged.record.failure is not None for judged in progress.history),
        "stopped_early": sum(judged.record.status is LoadStatus.STOPPED_EARLY for judged in progress.history),
    }


def _soak_failure(soak: Judged) -> str:
    """Why a soak refuses its configuration: a dead or hung engine, or too many failed requests; empty when it does not."""
    return soak.reason if soak.kind else ""
