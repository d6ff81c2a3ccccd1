"""What one engine start is worth under the goal: its value, which limits it breaks, and what the study is told. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vopt.objectives.goals import Goal, Objective
from vopt.objectives.metrics import Direction, Metrics
from vopt.objectives.records import LoadStatus
from vopt.objectives.score import STATUS_KEY, score, violation_keys
from vopt.optimizer.history import Stage, TrialRecord
from vopt.optimizer.trial import Blame

ARTEFACT = "artefact_acceptance"
"""Record flag: speculation on dummy weights accepted more of its drafts than real text allows."""

STOPPED_EARLY = "stopped_early"


@dataclass(frozen=True, slots=True)
class Judged:
    """One engine start under the goal.

    ``value`` is the goal's metric (``None``: there is none that may be compared), ``merit`` its logarithm turned so that
    larger is better; a start that was ended early carries its optimistic bound in both. ``violations`` hold every
    constraint of the study, in the same order for every start: above 0 is broken. ``kind`` and ``reason`` say why it
    cannot win; both are empty when it can.
    """

    record: TrialRecord
    value: float | None
    merit: float | None
    violations: Mapping[str, float]
    kind: str = ""
    reason: str = ""

    @property
    def feasible(self) -> bool:
        """It ran, was measured, and broke no limit (it may still have been ended early, or be an artefact)."""
        return self.merit is not None and all(value <= 0 for value in self.violations.values())

    @property
    def may_win(self) -> bool:
        """Feasible, measured to the end, and no artefact."""
        return self.feasible and not self.kind

    @property
    def charged(self) -> bool:
        """Whether it says something about the configuration: infrastructure failures do not."""
        failure = self.record.failure
        return failure is None or failure.kind.blame is not Blame.INFRASTRUCTURE


def merit_of(value: float | None, direction: Direction) -> float | None:
    """Log of a positive value, negated where smaller is better; ``None`` for what has no logarithm."""
    if value is None or not value > 0 or not math.isfinite(value):
        return None
    return math.log(value) if direction is Direction.MAXIMIZE else -math.log(value)


def change_text(lead: float, goal: Goal) -> str:
    """A difference of merits as the change of the goal's own metric: ``mean_e2e_s -10.8%`` is better."""
    return f"{goal.metric} {math.exp(lead if goal.direction is Direction.MAXIMIZE else -lead) - 1:+.1%}"


def judge(record: TrialRecord, goal: Goal, baseline: Metrics | None, early_bound: float | None = None) -> Judged:
    """Judge one start. ``baseline`` are the metrics that relative limits refer to (``None``: this is the baseline);
    ``early_bound`` is the optimistic value of a start that was ended early, in the goal's unit."""
    if record.stage is Stage.SOAK:
        return _soaked(record, goal)
    if record.failure is not None or record.metrics is None:
        return _failed(record, goal, baseline)
    scored = score(record.metrics, goal, baseline, status=record.status)
    value, kind = scored.value, ""
    reason = "; ".join(scored.reasons)
    if not scored.feasible:
        kind = _broken_kind(scored.violations, goal, record.status)
        if record.status is LoadStatus.STOPPED_EARLY and record.metrics.get("success_rate") is None:
            reason = "; ".join(("ended early", *record.metrics.notes))  # no window opened: there is no figure to name
    elif record.status is LoadStatus.STOPPED_EARLY:
        value, kind = early_bound, STOPPED_EARLY
        reason = "ended early: it could not have come within 15 % of the best"
    elif ARTEFACT in record.flags:
        kind, reason = ARTEFACT, "more than 0.95 of the drafts were accepted on dummy weights: an artefact that cannot win"
    merit = merit_of(value, goal.direction)
    violations = dict(scored.violations)
    if merit is None and not kind:
        violations[STATUS_KEY] = 1.0
        kind, reason = f"limit:{STATUS_KEY}", f"{goal.metric} = {value!r} cannot be compared"
    return Judged(record, value, merit, violations, kind, reason)


SOAK_ENDINGS = (LoadStatus.ENGINE_DIED, LoadStatus.REPEATED_ERRORS)
"""Ends of a soak's load that refuse its configuration: the engine answers no more, or with nothing but errors."""


def _soaked(record: TrialRecord, goal: Goal) -> Judged:
    """A soak is judged by whether the engine lives and answers, and by nothing else.

    Its requests are the workload's longest: its figures compare with no other start's, so it has no value, and limits on
    latency or relative to the baseline say nothing of it. Nor does an overload or a deadline: that is the requests' doing.
    """
    violations = dict.fromkeys(violation_keys(goal), 0.0)
    if record.failure is not None or record.metrics is None:
        return replace(_failed(record, goal, None), violations={**violations, STATUS_KEY: 1.0})
    status = record.status if record.status in SOAK_ENDINGS else None
    told = record.metrics.get("success_rate") is not None
    limits = tuple(limit for limit in goal.limits if told and limit.metric == "success_rate" and not limit.relative_to_baseline)
    scored = score(record.metrics, replace(goal, metric="success_rate", limits=limits), None, status=status)
    violations |= {limit.text: scored.violations[limit.text] for limit in limits}
    if status is not None:
        return Judged(record, None, None, {**violations, STATUS_KEY: 1.0}, str(status), "; ".join(scored.reasons))
    broken = any(violation > 0 for violation in violations.values())
    kind, reason = ("limit:success_rate", "; ".join(scored.reasons)) if broken else ("", "")
    return Judged(record, None, None, violations, kind, reason)


def _failed(record: TrialRecord, goal: Goal, baseline: Metrics | None) -> Judged:
    """A start without figures that count. What it showed before it died is kept as how far it broke each limit."""
    failure = record.failure
    kind = str(failure.kind) if failure else "hang"
    reason = f"{failure.kind} during {failure.phase}: {failure.detail}" if failure else "nothing was measured"
    violations = dict.fromkeys(violation_keys(goal), 0.0)
    if record.metrics is not None:
        violations |= {key: max(0.0, value) for key, value in score(record.metrics, goal, baseline).violations.items()}
    return Judged(record, None, None, {**violations, STATUS_KEY: 1.0}, kind, reason)


def _broken_kind(violations: Mapping[str, float], goal: Goal, status: LoadStatus | None) -> str:
    for limit in goal.limits:
        if violations[limit.text] > 0:
            return f"limit:{limit.metric}"
    return str(status) if status is not None and status is not LoadStatus.COMPLETE else f"limit:{goal.metric}"


FAR = math.log(2.0)
"""Beyond half and twice its bound a figure says no more of its limit: a queue that grows has no level of its own."""


def margins(judged: Judged, goal: Goal) -> dict[str, float | None]:
    """By limit, how far inside it a start was: the logarithm of bound over figure (figure over bound, for a least one), within
    ``FAR``; ``None`` where that was not measured. Without the success rate, which is 1 almost everywhere and has no level that
    an argument moves."""
    known = judged.merit is not None and judged.record.failure is None
    return {
        limit.text: _margin(judged.violations[limit.text], limit.op) if known else None
        for limit in goal.limits
        if limit.metric != "success_rate"
    }


def _margin(violation: float, op: str) -> float:
    """From a violation: (figure - bound) / bound, negated for a least one, within 1."""
    return max(-FAR, min(FAR, -math.log(max(1 + violation, 0.1)) if op == "<=" else math.log(max(1 - violation, 0.1))))


def broken_limits(metrics: Metrics, goal: Goal, baseline: Metrics | None) -> str:
    """Which limits the metrics break, in words; empty when none."""
    return "; ".join(score(metrics, goal, baseline).reasons)


def told_value(judged: Judged, earlier: Sequence[Judged], direction: Direction, deadline_s: float) -> float:
    """What Optuna is told: the value, or for a start that cannot win by its limits the worst feasible value so far in the
    goal's direction (none yet: 0 to maximise, the load's deadline to minimise), so that a success at a high rate that broke
    a limit looks best nowhere."""
    if judged.value is not None and judged.feasible and judged.kind != ARTEFACT:
        return judged.value
    values = [other.value for other in earlier if other.value is not None and other.feasible and other.kind != ARTEFACT]
    if direction is Direction.MAXIMIZE:
        return min(values, default=0.0)
    return max(values, default=deadline_s)


def told_objective(judged: Judged, earlier: Sequence[Judged], objective: Objective, deadline_s: float) -> float:
    """The same for one of several objectives."""

    def figure(of: Judged) -> float | None:
        metrics = of.record.metrics
        return metrics.get(objective.metric) if of.may_win and metrics is not None else None

    own = figure(judged)
    if own is not None:
        return own
    values = [value for other in earlier if (value := figure(other)) is not None]
    if objective.direction is Direction.MAXIMIZE:
        return min(values, default=0.0)
    return max(values, default=deadline_s)


def of_stage(history: Sequence[Judged], *stages: Stage) -> list[Judged]:
    return [judged for judged in history if judged.record.stage in stages]
