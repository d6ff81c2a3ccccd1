"""Going on with a stored study: its options and budgets, what has to be as it was, and what is taken over from its starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from vopt.objectives.goals import Goal, guarded_as
from vopt.optimizer import schedule
from vopt.optimizer.arms import MOST_ROUNDS, round_of
from vopt.optimizer.differences import refusal
from vopt.optimizer.environment import first_difference
from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.history import Stage, StudyRecord, TrialRecord
from vopt.optimizer.hopeless import beyond_reach, nothing_to_gain
from vopt.optimizer.judge import judge
from vopt.optimizer.measurement import Measurement, natural_ends
from vopt.optimizer.options import ResumeOptions, SearchOptions
from vopt.optimizer.prepare import find_goal, with_typed
from vopt.optimizer.recommend import Verdict
from vopt.optimizer.report.raw import RECORDS, read_records
from vopt.optimizer.secrecy import REMOVED
from vopt.optimizer.setup import EarlierBudget, SearchSetup
from vopt.optimizer.variables import computing

BUDGET = ("trials", "rounds", "time_budget", "soak")
EARLIER = "earlier_budgets"


@dataclass(frozen=True, slots=True)
class Resumption:
    """How a study goes on: with which options, and what its budgets were before."""

    record: StudyRecord
    options: SearchOptions
    earlier: tuple[EarlierBudget, ...]

    def setup_of(self) -> dict[str, Any]:
        """The study's attributes with the budget that it has from now on: an interruption must not take it back."""
        options = {**self.record.setup["options"], **{name: getattr(self.options, name) for name in BUDGET}}
        earlier = [{**asdict(budget), "starts": sorted(budget.starts)} for budget in self.earlier]
        return {**self.record.setup, "options": options, EARLIER: earlier}


def resumption(record: StudyRecord, typed: ResumeOptions) -> Resumption:
    """A stored study with what was typed. What was not is as it was when the study last went on.

    Raises:
        UsageError: fewer rounds than were begun, which would leave out what was measured; the model's directory is gone.
    """
    model = str(record.setup.get("model"))
    local = record.setup.get("model_files") is not None or model.startswith(("/", ".", "~"))
    if local and not Path(model).expanduser().is_dir():
        words = f"the model of {record.name} is gone: there is no directory {model}"
        raise UsageError(words, hint=f"put it back, then: vopt resume {record.name}")
    before, begun = stored_options(record.setup["options"]), rounds_begun(record.trials)
    before = replace(before, rounds=max(before.rounds, begun))  # earlier versions forgot the rounds that a resume was given
    if typed.rounds is not None and typed.rounds < begun:
        raise UsageError(
            f"--rounds {typed.rounds}: round {begun} of {record.name} has begun, and an answer rests on all that was measured",
            hint=f"vopt resume {record.name} --rounds {begun}",
        )
    time_budget = None if typed.time_budget is None else schedule.spent_s(record.trials) + typed.time_budget
    kept = before.data_dir if before.data_dir is not None and before.data_dir.is_dir() else None
    options = replace(
        with_typed(before, trials=typed.trials, rounds=typed.rounds, time_budget=time_budget, soak=typed.soak),
        storage=typed.storage,
        data_dir=typed.data_dir or kept,
        study=record.name,
        dry_run=False,
    )
    earlier = earlier_budgets(record.setup)
    reopened = options.trials > before.trials or (time_budget is not None and time_budget > before.time_budget)
    if record.trials and (reopened or options.rounds != before.rounds):
        starts = frozenset(trial.label for trial in record.trials)
        earlier = (*earlier, EarlierBudget(before.trials, before.rounds, starts, reopened))
    return Resumption(record, options, earlier)


def earlier_budgets(setup: Mapping[str, Any]) -> tuple[EarlierBudget, ...]:
    """What a study was given before its present budget, as it is stored."""
    return tuple(
        EarlierBudget(row["trials"], row["rounds"], frozenset(row["starts"]), row["reopened"]) for row in setup.get(EARLIER, ())
    )


def rounds_begun(trials: Sequence[TrialRecord]) -> int:
    """The last confirmation round that a study has a start of; 0 before its confirmation."""
    return max((round_of(trial.label) for trial in trials if trial.stage is Stage.CONFIRMATION), default=0)


def stored_options(typed: dict[str, Any]) -> SearchOptions:
    """The options of a study as they were typed; unknown ones (of a later version) are left out."""
    known = {spec.name for spec in fields(SearchOptions)}
    paths = ("from_file", "python", "space", "data_dir")
    values: dict[str, Any] = {name: value for name, value in typed.items() if name in known}
    return SearchOptions(**values | {name: Path(values[name]) for name in paths if values.get(name) is not None})


def goal_gone_on(options: SearchOptions, stored: Mapping[str, Any]) -> Goal:
    """The goal that was typed, with the guards that its starts were judged by so far."""
    goal = find_goal(options)
    try:
        return guarded_as(goal, Goal.from_json(stored["goal"]))
    except (KeyError, TypeError, ValueError):  # as no version stored it; what differs is said with all that may
        return goal


def refuse_difference(record: StudyRecord, options: SearchOptions, now: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` where results of the old and the new run would not compare; says what differs first. ``options``
    are those with which the study would go on."""
    stored = dict(record.setup)
    if "baseline" not in stored and record.trials:  # of an earlier version; its first start is the baseline as it was given
        stored["baseline"] = record.trials[0].config.to_json()
    difference = first_difference(stored, now)
    if difference is not None:
        raise refusal(record.name, record.created_at, options, stored, now, difference)


def measurement_of(records: tuple[TrialRecord, ...]) -> Measurement | None:
    """The measurement that the study's baseline froze, from what is stored; ``None`` before there was one."""
    measured = _measured_baseline(records)
    if measured is None:
        return None
    frozen, start = measured
    return Measurement.from_json(frozen, natural_ends(read_records(Path(start.directory))))


def _measured_baseline(records: tuple[TrialRecord, ...]) -> tuple[Mapping[str, Any], TrialRecord] | None:
    for record in records:
        frozen = record.environment.get("load_plan")
        if frozen is not None:
            same = (other for other in records if other.failure is None and other.config == record.config)
            return frozen, next(same, record)
    return None


def refuse_lost_lengths(study: str, records: tuple[TrialRecord, ...]) -> None:
    """For a workload whose outputs end where the model ends them: later starts replay the lengths that the baseline saw.

    Raises:
        EnvironmentLacks: the baseline's request records are gone or cut off, so further starts would have other requests.
    """
    measured = _measured_baseline(records)
    if measured is None:
        return
    frozen, start = measured
    path = Path(start.directory) / RECORDS
    ended = sum(not record.censored for record in read_records(path.parent))
    if ended and ended >= (frozen.get("expected_requests") or 0):
        return
    state = f"hold {ended} of its {frozen['expected_requests']} requests" if ended else "are gone"
    raise EnvironmentLacks(
        f"the output lengths that {study} replays are in the request records of trial {start.label}, and these {state}: {path}",
        hint=f"put {path.parent.parent} back beside the database (a study moves with its folder), then: vopt resume {study}; "
        f"or --data-dir with the folder that holds studies/{study}; or vopt search … --seed-from {study}   # a new study",
    )


def unspent(setup: SearchSetup, typed: ResumeOptions, before: StudyRecord, after: StudyRecord) -> tuple[str, ...]:
    """What a resume was asked for and could not spend, each with why and what to type; empty when all of it came to starts."""
    known = {trial.label for trial in before.trials}
    fresh = {trial.stage for trial in after.trials if trial.label not in known}
    budget, name, said = setup.budget, before.name, []
    at_baseline = _ended_at_its_baseline(setup, after)
    if typed.trials is not None and Stage.SEARCH not in fresh:
        said.append(f"--trials {typed.trials}: {at_baseline or _why_no_search(setup, before, after)}")
    if typed.rounds and Stage.CONFIRMATION not in fresh:
        said.append(f"--rounds {typed.rounds}: {_why_no_round(setup, typed.rounds, after)}")
    if typed.soak and Stage.SOAK not in fresh:
        done = any(trial.stage is Stage.SOAK for trial in before.trials)
        said.append(f"--soak: {'the winner was soaked already' if done else 'there is no winner to soak'}")
    if not fresh and not said and at_baseline is not None:
        said.append(f"{name} is finished, nothing was measured: {at_baseline}")
    elif not fresh and not said:
        more = f" or --rounds {MOST_ROUNDS if budget.rounds else 3}" if budget.rounds < MOST_ROUNDS else ""
        said.append(f"{name} is finished, nothing was measured; vopt resume {name} --trials {budget.trials + 8}{more} goes on")
    return tuple(said)


def _ended_at_its_baseline(setup: SearchSetup, after: StudyRecord) -> str | None:
    """Why no other configuration is worth a start, whatever budget there is; ``None`` where one may be."""
    first = next((trial for trial in after.trials if trial.failure is None and trial.metrics is not None), None)
    if first is None:
        return None
    baseline = judge(first, setup.goal, None)
    return beyond_reach(baseline, setup.rate, setup.request_tokens) or nothing_to_gain(baseline, setup.goal)


def _why_no_search(setup: SearchSetup, before: StudyRecord, after: StudyRecord) -> str:
    budget, name = setup.budget, before.name
    if budget.trials <= stored_options(before.setup["options"]).trials:
        return f"{name} had as many, and they were made; vopt resume {name} --trials {budget.trials + 8} goes on"
    timing = schedule.learned(setup.timing, after.trials)
    needed = schedule.trial_s(timing, known_key=False) + schedule.reserve_s(setup, timing)
    spent = schedule.spent_s(after.trials)
    if budget.time_s is not None and spent + needed > budget.time_s:
        minutes = -(-int(needed + 60) // 60) + 30
        return (
            f"no time is left for one more configuration: {spent / 60:.0f} of {budget.time_s / 60:.0f} min are used, "
            f"one more with confirmation and soak takes {needed / 60:.0f}; vopt resume {name} --trials {budget.trials} "
            f"--time-budget {minutes}m goes on, its time counted from now"
        )
    return "nothing new is left to measure in this space; vopt search … --vary NAME searches further arguments"


def _why_no_round(setup: SearchSetup, asked: int, after: StudyRecord) -> str:
    begun, answer = rounds_begun(after.trials), after.recommendation
    if not begun:
        return "no configuration came out of the search that could be confirmed"
    if asked <= begun:
        return f"{after.name} has {begun} rounds" + ("" if begun >= MOST_ROUNDS else f"; --rounds {begun + 1} goes on")
    if answer is not None and answer.verdict is Verdict.BETTER:
        return f"the finalist was better after round {begun} beyond doubt, further rounds would decide nothing"
    return f"its confirmation ended in round {begun}: an arm cannot be started any more"


def stored_variables(record: StudyRecord) -> dict[str, str]:
    """The variables that the study's engines had, its command's and its shell's, as far as they say how an engine computes:
    places, ports and switches are this search's own. A secret is not stored, only its name: engines inherit it from this
    shell, so it has to be there."""
    wanted = computing(record.setup)
    secret = [name for name, value in wanted.items() if REMOVED in value]
    if missing := [name for name in secret if name not in os.environ]:
        raise UsageError(
            f"the engines of {record.name} had {missing[0]}, a secret that is not stored and not set here",
            hint=f"export {missing[0]}=…; vopt bench --study {record.name}",
        )
    return {name: value for name, value in wanted.items() if name not in secret}
