"""Brings a search up from its options and runs it: the wiring between preflight, study, evaluation and loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from vopt.objectives.goals import Goal
from vopt.objectives.metrics import Direction
from vopt.optimizer.command import split_environment
from vopt.optimizer.environment import fetch_weights, first_difference
from vopt.optimizer.errors import UsageError
from vopt.optimizer.evaluate import Bench, Evaluator
from vopt.optimizer.events import Listener, Note
from vopt.optimizer.history import SAMPLED_STAGES, Stage, StudyRecord, TrialRecord, TrialRequest
from vopt.optimizer.interruption import Interruption
from vopt.optimizer.judge import judge
from vopt.optimizer.lessons import LessonBook, lessons_file
from vopt.optimizer.measurement import Measurement, natural_ends
from vopt.optimizer.opening import switched_off
from vopt.optimizer.options import ResumeOptions, SearchOptions
from vopt.optimizer.preflight import Preflight
from vopt.optimizer.prepare import conditions_of, find_asked, find_goals, find_load, setup_of, with_typed
from vopt.optimizer.report.raw import read_records
from vopt.optimizer.samplers import KINDS
from vopt.optimizer.schedule import plan, plan_text
from vopt.optimizer.search import search
from vopt.optimizer.sessions import opener
from vopt.optimizer.setup import Pinned, SearchSetup
from vopt.optimizer.space_of import find_space, search_setup, space_subject
from vopt.optimizer.study import Study, read_study, searching
from vopt.optimizer.subject import Subject, find_subject
from vopt.optimizer.trial import Deadlines, EngineConfig, TrialSpec


@dataclass(frozen=True, slots=True)
class Prepared:
    """A search that could start: everything checked, nothing stored, no engine started."""

    options: SearchOptions
    subject: Subject
    goals: tuple[Goal, ...]
    setup: SearchSetup
    stored: dict[str, Any]
    bench: Callable[[Study, Listener, Callable[[EngineConfig], str | None]], Bench]


def prepare(options: SearchOptions, listener: Listener) -> Prepared:
    """Preflight. Raises ``UsageError`` or ``EnvironmentLacks`` before anything is stored."""

    def say(text: str) -> None:
        listener(Note(text))

    goals = find_goals(options)
    subject = find_subject(options, say)
    load = find_load(options, subject, say)
    asked = find_asked(options, goals[0])
    space = find_space(options, subject, load.workload, goals[0].name, asked.concurrency)
    if space.learned.lessons:
        known = len(space.learned.lessons)
        say(f"{known} limits are known from earlier engine starts of this model, GPU and vLLM: {lessons_file(subject)}")
    for change in switched_off(space, space.learned):
        say(change.text)
    sampler = options.sampler
    if sampler not in KINDS:
        raise UsageError(f"--sampler {sampler}: there are {', '.join(KINDS)}")
    setup = search_setup(options, subject, goals, space, sampler, asked)
    if options.seed_from is not None:
        earlier = read_study(options.storage, options.seed_from, data_dir=options.data_dir)
        setup = replace(setup, pinned=(*setup.pinned, *best_of(earlier, setup, subject)))
    open_session = opener(options.engine, subject)

    def bench(study: Study, heard: Listener, refusal: Callable[[EngineConfig], str | None]) -> Bench:
        def spec_for(request: TrialRequest) -> TrialSpec:
            attempt = f"-{request.attempt}" if request.attempt > 1 else ""
            arguments, variables = split_environment(subject.fixed | request.config)
            return TrialSpec(
                label=request.label,
                model=str(subject.model.directory or subject.model.name),
                arguments=arguments,
                directory=study.directory / f"{request.label}{attempt}",
                python=subject.python,
                served_model_name=subject.model.name,
                front_end=subject.front_end,
                revision=subject.model.revision,
                environment={**subject.environment, **variables},
                gpus=subject.machine.uuids,
                deadlines=Deadlines(load_s=asked.deadline_s + options.soak),
                seed=options.seed,
            )

        return Bench(
            spec_for=spec_for,
            argv_for=lambda request: subject.argv(request.config),
            open_session=open_session,
            source=load.requests.source,
            soak_source=load.soak.source,
            asked=asked,
            slos=goals[0].slos,
            listener=heard,
            served_confirmation=not (options.no_serve or subject.machine.simulated),
            soak_s=options.soak,
            simulated=subject.machine.simulated,
            dummy_weights=subject.dummy_weights,
            conditions=conditions_of(subject),
            refusal=lambda request: refusal(request.config),
        )

    stored = setup_of(
        options, subject, goals, load, {"space": space.to_json(), "space_digest": space.digest, "mode": space.mode}
    )
    return Prepared(options, subject, goals, setup, stored, bench)


def dry_run(options: SearchOptions, listener: Listener) -> str:
    """The plan of a search that is not started, as text."""
    return plan_text(plan(prepare(options, listener).setup))


def best_of(earlier: StudyRecord, setup: SearchSetup, subject: Subject) -> tuple[Pinned, ...]:
    """The best few configurations of an earlier study, to be measured again.

    Raises:
        UsageError: it was about another model, GPU, vLLM or goal, so its best say nothing here.
    """
    here = {"model": subject.model.name, "gpus": list(subject.machine.names), "vllm_version": subject.schema.version}
    there = {name: earlier.setup.get(name) for name in here}
    here["goal"], there["goal"] = setup.goal.name, (earlier.setup.get("goal") or {}).get("name")
    for name, value in here.items():
        if there[name] != value:
            raise UsageError(
                f"--seed-from {earlier.name}: it was measured with {name} = {there[name]!r}, this search has {value!r}",
                hint="leave --seed-from out",
            )
    baseline = next((trial.metrics for trial in earlier.trials if trial.stage is Stage.SEARCH), None)
    judged = [judge(trial, setup.goal, baseline) for trial in earlier.trials if trial.stage in SAMPLED_STAGES]
    ranked = sorted((one for one in judged if one.may_win and one.merit is not None), key=lambda one: -(one.merit or 0.0))
    configs = dict.fromkeys(one.record.config for one in ranked if one.record.config != setup.baseline)
    return tuple(Pinned(config, f"among the best of {earlier.name}, measured again") for config in list(configs)[:SEEDED])


SEEDED = 3
"""How many configurations of an earlier study are measured again."""


def launch(options: SearchOptions, listener: Listener) -> StudyRecord:
    """The whole loop of a new study."""
    prepared = prepare(options, listener)
    fetch_weights(prepared.subject.model, lambda text: listener(Note(text)))
    study = Study.create(
        options.storage,
        prepared.stored,
        prepared.setup.space,
        name=options.study,
        maximize=[goal.direction is Direction.MAXIMIZE for goal in prepared.goals],
        data_dir=options.data_dir,
    )
    return _run(prepared, study, listener)


def relaunch(options: ResumeOptions, listener: Listener) -> StudyRecord:
    """Go on with a stored study.

    Raises:
        UsageError: results of the old and the new run would not compare; names the field that differs.
    """
    record = read_study(options.storage, options.study, data_dir=options.data_dir)
    before = stored_options(record.setup["options"])
    typed = with_typed(
        before,
        trials=options.trials,
        rounds=options.rounds,
        time_budget=options.time_budget,
        soak=options.soak,
        storage=options.storage,
        data_dir=options.data_dir,
    )
    prepared = prepare(replace(typed, study=record.name, dry_run=False), listener)
    difference = first_difference(record.setup, prepared.stored)
    if difference is not None:
        name, was, now = difference
        raise UsageError(
            f"{record.name} was measured with {name} = {was!r}, here it is {now!r}: results would not compare",
            hint=f"vopt search … --seed-from {record.name}   # or go on where {name} is as it was",
        )
    study = Study.reopen(options.storage, record.name, prepared.setup.space, data_dir=options.data_dir)
    return _run(prepared, study, listener)


def stored_options(typed: dict[str, Any]) -> SearchOptions:
    """The options of a study as they were typed; unknown ones (of a later version) are left out."""
    known = {spec.name for spec in fields(SearchOptions)}
    paths = ("from_file", "python", "space", "data_dir")
    values: dict[str, Any] = {name: value for name, value in typed.items() if name in known}
    return SearchOptions(**values | {name: Path(values[name]) for name in paths if values.get(name) is not None})


def _run(prepared: Prepared, study: Study, listener: Listener) -> StudyRecord:
    options = prepared.options
    subject = prepared.subject
    book = LessonBook(subject, space_subject(subject), prepared.setup.space, prepared.setup.fixed)
    with (
        searching(study),
        Interruption(study.name) as interruption,
        closing(Preflight(subject, lambda text: listener(Note(text, important=True)))) as preflight,
    ):
        evaluator = Evaluator(prepared.bench(study, listener, preflight.refusal), measurement_of(study.records()))

        def evaluate(request: TrialRequest) -> TrialRecord:
            with interruption.allowed():
                record = evaluator(request)
            book.add(record)
            return record

        search(prepared.setup, study, evaluate, listener)
    return read_study(options.storage, study.name, data_dir=options.data_dir)


def measurement_of(records: tuple[TrialRecord, ...]) -> Measurement | None:
    """The measurement that the study's baseline froze, from what is stored; ``None`` before there was one."""
    for record in records:
        frozen = record.environment.get("load_plan")
        if frozen is not None:
            first = next(other for other in records if other.failure is None and other.config == record.config)
            return Measurement.from_json(frozen, natural_ends(read_records(Path(first.directory))))
    return None


def configuration_of(record: StudyRecord, label: str) -> EngineConfig:
    """The configuration of one trial of a stored study; ``UsageError`` when there is no such trial."""
    for trial in record.trials:
        if trial.label == label:
            return trial.config
    raise UsageError(f"{record.name} has no trial {label!r}; it has {', '.join(t.label for t in record.trials)}")
