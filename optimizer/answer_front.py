"""Of several goals: the front of what was measured, and what the confirmation says of each goal on its own. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from vopt.objectives.confidence import compare
from vopt.objectives.goals import Objective
from vopt.objectives.metrics import Direction
from vopt.optimizer.history import Stage
from vopt.optimizer.judge import Judged
from vopt.optimizer.progress import Progress, front_of
from vopt.optimizer.recommend import FrontMember, Gain, GoalVerdict, Recommendation, Verdict
from vopt.optimizer.trial import EngineConfig
from vopt.optimizer.verdict import ArmResult, Confirmation, confirmation, winner

BETTER, WORSE, LIKE, OPEN = "better", "worse", "no measurable difference", "unconfirmed"


def with_front(progress: Progress, answer: Recommendation) -> Recommendation:
    """The answer with its front and a verdict for each goal; as it is for one goal, or when nothing is feasible."""
    goal = progress.setup.goal
    if not goal.objectives or answer.verdict is Verdict.NOTHING_FEASIBLE:
        return answer
    seen = confirmation(progress)
    arm = ((winner(progress, seen) if answer.winner_config else None) or seen.finalist) if seen is not None else None
    knee = seen.finalist.config if seen is not None else answer.winner_config
    goals = tuple(_goal_verdict(progress, objective, seen, arm, answer.winner_config) for objective in goal.objectives)
    return replace(answer, front=_members(progress, knee), goals=tuple(one for one in goals if one is not None))


def _members(progress: Progress, knee: EngineConfig | None) -> tuple[FrontMember, ...]:
    members = front_of(progress)
    # One that was screened once more may have fallen behind another's single start by more than the noise: it is still the
    # one that was confirmed.
    if knee is not None and all(judged.record.config != knee for judged in members):
        first = progress.first(knee)
        members += [first] if first is not None else []
    rows = []
    for judged in members:
        config = judged.record.config
        starts = progress.starts_of(config, Stage.SEARCH, Stage.SCREENING)
        figures = {
            objective.metric: fmean(values)
            for objective in progress.setup.goal.objectives
            if (values := _values(starts, objective))
        }
        rows.append(FrontMember(judged.record.label, config, figures, config == knee, config == progress.baseline_config))
    return tuple(rows)


def _goal_verdict(
    progress: Progress, objective: Objective, seen: Confirmation | None, arm: ArmResult | None, winner: EngineConfig | None
) -> GoalVerdict | None:
    """One goal on its own; ``None`` when neither a confirmation nor a winner of the search shows it."""
    if seen is None or arm is None:
        return _unconfirmed(progress, objective, winner)
    arms = [one for one in (seen.baseline, seen.finalist, seen.lite) if one is not None]
    everything = [values for one in arms if (values := _values(one.starts, objective))]
    mine, theirs = _values(arm.starts, objective), _values(seen.baseline.starts, objective)
    if not mine or not theirs:
        return None
    found = compare(mine, theirs, everything, objective.direction, alpha=seen.level)
    other = Direction.MINIMIZE if objective.direction is Direction.MAXIMIZE else Direction.MAXIMIZE
    worse = compare(mine, theirs, everything, other, alpha=seen.level).better
    word = OPEN if found.low is None else BETTER if found.better else WORSE if worse else LIKE
    return GoalVerdict(objective.name, objective.metric, word, Gain(found.ratio, found.low, found.high))


def _unconfirmed(progress: Progress, objective: Objective, winner: EngineConfig | None) -> GoalVerdict | None:
    if winner is None or progress.baseline is None:
        return None
    mine = _values(progress.starts_of(winner, Stage.SEARCH, Stage.SCREENING), objective)
    theirs = _values([progress.baseline], objective)
    if not mine or not theirs:
        return None
    ratio = fmean(mine) / fmean(theirs)
    gain = Gain(ratio if objective.direction is Direction.MAXIMIZE else 1 / ratio)
    return GoalVerdict(objective.name, objective.metric, OPEN, gain)


def _values(starts: Sequence[Judged], objective: Objective) -> list[float]:
    """One goal's figure of each start that came to its end."""
    return [
        value
        for start in starts
        if start.record.failure is None
        and start.record.metrics is not None
        and (value := start.record.metrics.get(objective.metric)) is not None
        and value > 0
    ]
