"""What a search will take: the plan by phase, before the start and as it learns. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from vopt.optimizer.errors import UsageError
from vopt.optimizer.history import Stage, TrialRecord
from vopt.optimizer.setup import SearchSetup, Timing
from vopt.optimizer.trial import Phase, StartClass


@dataclass(frozen=True, slots=True)
class PlannedPhase:
    """One line of the plan: how many engine starts and how many seconds in all."""

    stage: str
    starts: int
    expected_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole search as it is expected. ``notes`` say what was reduced to fit the budget."""

    phases: tuple[PlannedPhase, ...]
    notes: tuple[str, ...] = ()

    @property
    def expected_s(self) -> float:
        return sum(phase.expected_s for phase in self.phases)

    @property
    def starts(self) -> int:
        return sum(phase.starts for phase in self.phases)


def learned(timing: Timing, records: Sequence[TrialRecord]) -> Timing:
    """``timing`` with the medians of what this study has seen, by start class."""

    def seen(start_class: StartClass, otherwise: float) -> float:
        times = [
            r.phase_s[Phase.START]
            for r in records
            if r.start_class is start_class and r.failure is None and Phase.START in r.phase_s
        ]
        return median(times) if times else otherwise

    loads = [
        r.phase_s.get(Phase.LOAD, 0.0) + r.phase_s.get(Phase.WARMUP, 0.0)
        for r in records
        if r.failure is None and r.stage in (Stage.SEARCH, Stage.SCREENING, Stage.CONFIRMATION) and Phase.LOAD in r.phase_s
    ]
    # The first load also finds the concurrency or the rate: alone it is no more than a bound, or a search would end at once for
    # want of time.
    loads = loads[1:] if len(loads) > 1 else [min(timing.load_s, seconds) for seconds in loads]
    stops = [r.phase_s[Phase.STOP] for r in records if Phase.STOP in r.phase_s]
    return Timing(
        first_start_s=seen(StartClass.FIRST, timing.first_start_s),
        new_key_start_s=seen(StartClass.NEW_KEY, timing.new_key_start_s),
        known_key_start_s=seen(StartClass.KNOWN_KEY, timing.known_key_start_s),
        load_s=median(loads) if loads else timing.load_s,
        stop_s=median(stops) if stops else timing.stop_s,
    )


def spent_s(records: Sequence[TrialRecord]) -> float:
    """Seconds that the study's engine starts took so far, over all its sessions; virtual seconds where simulated."""
    return sum(sum(record.phase_s.values()) for record in records)


def trial_s(timing: Timing, *, known_key: bool) -> float:
    """Expected seconds of one more engine start and load."""
    return (timing.known_key_start_s if known_key else timing.new_key_start_s) + timing.load_s + timing.stop_s


def reserve_s(setup: SearchSetup, timing: Timing, *, screening: bool = True) -> float:
    """Seconds kept back from proposals: screening, confirmation and soak."""
    repeat = trial_s(timing, known_key=True)
    soak = timing.known_key_start_s + setup.budget.soak_s + timing.stop_s if setup.budget.soak_s else 0.0
    return repeat * (setup.drift_starts + 3 * setup.budget.rounds + (setup.budget.screening if screening else 0)) + soak


def plan(setup: SearchSetup, records: Sequence[TrialRecord] = ()) -> Plan:
    """The plan of the whole search; proposals shrink to the time budget, confirmation and soak never do."""
    timing, budget = learned(setup.timing, records), setup.budget
    first = timing.first_start_s + timing.load_s + timing.stop_s
    each = trial_s(timing, known_key=False)
    kept = reserve_s(setup, timing)
    proposals, notes = budget.searched - 1, []
    if budget.time_s is not None:
        affordable = max(0, int((budget.time_s - first - kept) / each))
        if affordable < proposals:
            notes.append(
                f"the time budget of {budget.time_s / 60:.0f} min leaves room for {affordable} of {proposals} configurations "
                f"beside the baseline: confirmation and soak ({kept / 60:.0f} min) are kept"
            )
            proposals = affordable
        if first + kept > budget.time_s:
            notes.append(
                f"baseline, confirmation and soak alone are expected to take {(first + kept) / 60:.0f} min, more than the "
                f"budget of {budget.time_s / 60:.0f} min: raise --time-budget, or lower --rounds or --soak"
            )
    repeat = trial_s(timing, known_key=True)
    phases = [
        PlannedPhase("baseline", 1, first),
        PlannedPhase("search", proposals, proposals * each),
        PlannedPhase("drift", setup.drift_starts, setup.drift_starts * repeat),
        PlannedPhase("screening", budget.screening, budget.screening * repeat),
        PlannedPhase("confirmation", 3 * budget.rounds, 3 * budget.rounds * repeat, f"{budget.rounds} rounds of three arms"),
    ]
    if budget.soak_s:
        phases.append(PlannedPhase("soak", 1, timing.known_key_start_s + budget.soak_s + timing.stop_s))
    if setup.explain:
        notes.append(f"--explain adds two starts for each flag that is kept, {2 * repeat / 60:.1f} min a flag")
    return Plan(tuple(phase for phase in phases if phase.starts), tuple(notes))


def check_budget(setup: SearchSetup) -> None:
    """``UsageError`` for a budget in which nothing beside the baseline could be measured and confirmed."""
    budget, timing = setup.budget, setup.timing
    if budget.searched < 2:
        raise UsageError(
            f"--trials {budget.trials} leaves the baseline alone: there would be nothing to compare it with",
            hint="--trials 2 or more; 8 to 16 find most of what is there",
        )
    if budget.time_s is None:
        return
    first = timing.first_start_s + timing.load_s + timing.stop_s
    kept, one = reserve_s(setup, timing, screening=False), trial_s(timing, known_key=False)
    if first + one + kept > budget.time_s:
        raise UsageError(
            f"--time-budget of {budget.time_s / 60:.0f} min: the baseline ({first / 60:.0f} min), one other configuration "
            f"({one / 60:.0f} min), and confirmation and soak ({kept / 60:.0f} min) are expected to take longer",
            hint=f"--time-budget {math.ceil((first + one + kept) / 60)}m or more, or lower --rounds or --soak",
        )


def plan_notes(plan: Plan, *, simulated: bool) -> tuple[str, ...]:
    """The plan as sentences, for a log: one for the phases, then what was reduced."""
    phases = ", ".join(f"{p.stage} {p.starts} ({p.expected_s / 60:.0f} min)" for p in plan.phases)
    minutes = f"about {plan.expected_s / 60:.0f} min"
    time = f"{minutes} of simulated time, which passes much faster" if simulated else minutes
    return (f"plan: {plan.starts} engine starts, {time}: {phases}", *plan.notes)


def plan_text(plan: Plan) -> str:
    """The plan as people read it: a line for each phase, the sum, and what was reduced."""
    lines = [f"{'phase':<14}{'starts':>7}{'minutes':>9}"]
    lines += [f"{p.stage:<14}{p.starts:>7}{p.expected_s / 60:>9.1f}  {p.detail}".rstrip() for p in plan.phases]
    lines.append(f"{'together':<14}{plan.starts:>7}{plan.expected_s / 60:>9.1f}")
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])
