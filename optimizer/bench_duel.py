"""A study's recommendation against its alternative: which two configurations, and whether the first still leads. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vopt.objectives.confidence import Comparison, compare
from vopt.objectives.goals import Goal
from vopt.objectives.score import score
from vopt.optimizer.breach import broken, ended_well
from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.history import Arm, StudyRecord, TrialRecord
from vopt.optimizer.measurement import CLIENT_LIMITED
from vopt.optimizer.recommend import Verdict
from vopt.optimizer.trial import EngineConfig
from vopt.optimizer.verdict import mean_metrics

TOLERANCE = 0.03
"""Without ``--gate``: a recommendation holds while it has lost no more than this. Two starts differ by up to 1 % each."""


@dataclass(frozen=True, slots=True)
class Duel:
    """The recommended configuration and what it is compared with. ``then`` is the study's own ratio, above 1 where the
    recommended one was better."""

    recommended: str
    arms: Mapping[str, EngineConfig]
    then: float | None

    @property
    def alternative(self) -> str:
        return next(name for name in self.arms if name != self.recommended)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came out. ``lost`` is the share of the study's ratio that is gone (negative: it grew)."""

    holds: bool
    reason: str
    now: Comparison | None = None
    lost: float | None = None


def find_duel(record: StudyRecord) -> Duel:
    """Which two configurations a study's answer is about. ``UsageError`` when there are no two."""
    answer = record.recommendation
    if answer is None:
        raise UsageError(f"{record.name} has no answer yet", hint=f"vopt resume {record.name}")
    baseline = _baseline(record)
    if answer.winner_config is not None and answer.verdict in (Verdict.BETTER, Verdict.UNCONFIRMED):
        ratio = answer.gain.ratio if answer.gain else None
        return Duel("winner", {"baseline": baseline, "winner": answer.winner_config}, ratio)
    # Answers of older versions do not say which one: the last, since a study may have confirmed one after another.
    last = next((trial.config for trial in reversed(record.trials) if trial.arm is Arm.FINALIST), None)
    finalist = answer.finalist_config if answer.finalist_config is not None else last
    if answer.verdict is Verdict.NOTHING_FEASIBLE or finalist is None:
        raise UsageError(
            f"{record.name} recommends nothing beside its baseline ({answer.verdict}), so there is nothing to compare",
            hint="vopt bench -- vllm serve …   # measures one command",
        )
    ratio = 1 / answer.gain.ratio if answer.gain else None
    return Duel("baseline", {"baseline": baseline, "finalist": finalist}, ratio)


def _baseline(record: StudyRecord) -> EngineConfig:
    """The baseline as it was measured: a repaired one is not what was typed."""
    confirmed = [trial for trial in record.trials if trial.arm is Arm.BASELINE]
    measured = [trial for trial in record.trials if trial.failure is None and "load_plan" in trial.environment]
    return (confirmed or measured or list(record.trials))[0].config


def order(duel: Duel, repeat: int) -> Iterator[tuple[int, str]]:
    """(round, arm) of every start: AB, BA, AB, ... so that a drift of the machine meets both arms alike."""
    for number in range(1, repeat + 1):
        names = list(duel.arms)
        for name in names if number % 2 else reversed(names):
            yield number, name


def judge_duel(duel: Duel, starts: Mapping[str, Sequence[TrialRecord]], goal: Goal, gate: float | None) -> Answer:
    """Whether the recommendation holds: it starts, keeps its limits, and has lost no more than the gate of its lead.

    Raises:
        EnvironmentLacks: the client was the limit, so nothing can be said.
    """
    limited = [start.label for arm in starts.values() for start in arm if CLIENT_LIMITED in start.flags]
    if limited:
        raise EnvironmentLacks(
            f"the load client, not the engine, was the limit in {', '.join(limited)}: nothing can be said",
            hint="free more cores for the client",
        )
    mine, others = starts[duel.recommended], starts[duel.alternative]
    if failed := next((start.failure for start in mine if start.failure), None):
        return Answer(False, f"the recommended command failed: {failed.kind} during {failed.phase}: {failed.detail}")
    if breaks := _broken(duel, mine, others, goal):
        return Answer(False, f"the recommended command breaks a limit: {breaks}", _compared(duel, starts, goal))
    now = _compared(duel, starts, goal)
    if now is None:
        return Answer(True, f"the {duel.alternative} does not run here, the recommended command does")
    allowed = TOLERANCE if gate is None else gate
    lost = 1 - now.ratio / (duel.then if duel.then is not None else 1.0)
    words = f"lost {lost:.1%}" if lost > 0 else f"gained {-lost:.1%}"
    against = f"against the {duel.alternative} it has {words} since the study"
    return Answer(lost <= allowed, f"{against}; a loss of {allowed:.1%} is allowed", now, lost)


def _broken(duel: Duel, mine: Sequence[TrialRecord], others: Sequence[TrialRecord], goal: Goal) -> str:
    """Which limit the recommended arm breaks, by the rule of the study: a start that does not come to its end, else its means,
    with the means of the baseline as reference."""
    if unended := next((start for start in mine if not ended_well(start)), None):
        return next(iter(score(unended.metrics, goal, None, status=unended.status).reasons), "its load was not ended")
    reference = None if duel.recommended == "baseline" else mean_metrics([start for start in others if ended_well(start)])
    mean = mean_metrics(mine)
    return broken(mean, goal, reference) if mean is not None else "nothing was measured"


def _compared(duel: Duel, starts: Mapping[str, Sequence[TrialRecord]], goal: Goal) -> Comparison | None:
    values = {
        name: [
            value
            for start in arm
            if start.failure is None and start.metrics and (value := start.metrics.get(goal.metric)) is not None and value > 0
        ]
        for name, arm in starts.items()
    }
    if not all(values.values()):
        return None
    return compare(values[duel.recommended], values[duel.alternative], tuple(values.values()), goal.direction)
