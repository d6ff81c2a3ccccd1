"""Brings a search up from its options and runs it: the wiring between preflight, study, evaluation and loop."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from vopt.objectives.goals import Goal, balance
from vopt.optimizer.bench_load import check_descriptors
from vopt.optimizer.deadlines import deadlines
from vopt.optimizer.engine.arguments import VllmProbe
from vopt.optimizer.engine.floor import check_limits
from vopt.optimizer.environment import fetch_weights
from vopt.optimizer.errors import EnvironmentLacks, Interrupted, UsageError
from vopt.optimizer.evaluate import SERVED_STAGES, Bench, Evaluator
from vopt.optimizer.events import Listener, Note
from vopt.optimizer.history import SAMPLED_STAGES, Stage, StudyRecord, TrialRecord, TrialRequest
from vopt.optimizer.host import (
    Watch,
    check_room,
    conditions_of,
    reserved,
    results_place,
    shared_note,
    shared_with,
    shrink,
)
from vopt.optimizer.interruption import Interruption
from vopt.optimizer.judge import change_text, judge
from vopt.optimizer.lessons import LessonBook, lessons_file
from vopt.optimizer.memory_of import space_subject
from vopt.optimizer.not_simulated import notes_of
from vopt.optimizer.opening import switched_off
from vopt.optimizer.options import ResumeOptions, SearchOptions
from vopt.optimizer.preflight import Preflight
from vopt.optimizer.prepare import find_asked, find_goal, find_load, find_second, setup_of
from vopt.optimizer.propose import compile_key
from vopt.optimizer.resumption import (
    goal_gone_on,
    measurement_of,
    refuse_difference,
    refuse_lost_lengths,
    resumption,
    unspent,
)
from vopt.optimizer.samplers import KINDS
from vopt.optimizer.schedule import check_budget, plan, plan_notes, plan_text
from vopt.optimizer.search import search
from vopt.optimizer.second_load import stored_plan
from vopt.optimizer.sessions import opener
from vopt.optimizer.setup import Pinned, SearchSetup
from vopt.optimizer.space_of import find_space, floor_of, search_setup
from vopt.optimizer.space_report import left_out
from vopt.optimizer.study import Study, read_study
from vopt.optimizer.study_name import checked_name
from vopt.optimizer.subject import Subject, find_subject, interpreter_of
from vopt.optimizer.trial import EngineConfig, TrialSpec
from vopt.optimizer.way_on import with_storage
from vopt.search_spaces.bare_mode import within_limits


@dataclass(frozen=True, slots=True)
class Prepared:
    """A search that could start: everything checked, nothing stored, no engine started. ``replays``: its outputs end where the
    model ends them, so that every start replays the lengths that the baseline saw."""

    options: SearchOptions
    subject: Subject
    goal: Goal
    setup: SearchSetup
    stored: dict[str, Any]
    bench: Callable[[Study, Listener, Callable[[EngineConfig], str | None]], Bench]
    replays: bool = False


def prepare(
    options: SearchOptions, listener: Listener, probe: VllmProbe | None = None, resumed: Mapping[str, Any] | None = None
) -> Prepared:
    """Preflight. ``probe`` may be asked further by the caller; ``resumed`` is the setup of a study that goes on.

    Raises ``UsageError`` or ``EnvironmentLacks`` before anything is stored."""

    def say(text: str) -> None:
        listener(Note(text))

    goal = find_goal(options) if resumed is None else goal_gone_on(options, resumed)
    subject = find_subject(options, say, probe, lambda text: listener(Note(text, important=True)))
    load = find_load(options, subject, say)
    asked = find_asked(options, goal)
    if not (subject.machine.simulated or options.no_serve):
        check_descriptors(asked.concurrency)  # confirmation starts are loaded over sockets; better said now than then
    space = find_space(options, subject, load.workload, goal.name, asked.concurrency)
    least = floor_of(subject, load.workload, space, options.allow_lossy)
    if least is not None:
        check_limits(goal, least)
    if space.learned.lessons:
        known = len(space.learned.lessons)
        say(f"{known} limits are known from earlier engine starts of this model, GPU and vLLM: {lessons_file(subject)}")
    for change in switched_off(space, space.learned):
        say(change.text)
    sampler = options.sampler
    if sampler not in KINDS:
        raise UsageError(f"--sampler {sampler}: there are {', '.join(KINDS)}", hint="leave --sampler out: auto is our own")
    setup = search_setup(options, subject, goal, space, sampler, asked)
    if options.seed_from is not None:
        earlier = read_study(options.storage, options.seed_from, data_dir=options.data_dir)
        setup = replace(setup, pinned=(*setup.pinned, *best_of(earlier, setup, subject)))
    check_budget(setup)
    shared = shared_with(subject)
    served = not (options.no_serve or subject.machine.simulated)
    # The confirmation measures the baseline again, but not under the trials' conditions where it is served.
    setup = replace(
        setup,
        notes=(*shared_note(shared), *notes_of(subject)),
        request_tokens=load.requests.source.mean_tokens,
        drift_check=not subject.machine.simulated and (served or options.rounds == 0),
    )
    if not subject.machine.simulated:
        check_room(subject, space, setup.budget, results_place(options.storage, options.data_dir))
    for note in setup.notes:
        say(note)
    open_session = opener(options.engine, subject)

    def bench(study: Study, heard: Listener, refusal: Callable[[EngineConfig], str | None]) -> Bench:
        def spec_for(request: TrialRequest) -> TrialSpec:
            attempt = f"-{request.attempt}" if request.attempt > 1 else ""
            records = study.records()
            key = compile_key(setup, request.config)
            known = any(record.failure is None and compile_key(setup, record.config) == key for record in records)
            return subject.trial_spec(
                request.label,
                request.config,
                study.directory / f"{request.label}{attempt}",
                deadlines(
                    setup.timing,
                    records,
                    known_key=known,
                    served=served and request.stage in SERVED_STAGES,
                    load_s=asked.deadline_s + options.soak,
                ),
                seed=options.seed,
            )

        return Bench(
            spec_for=spec_for,
            argv_for=lambda request: subject.argv(request.config),
            open_session=open_session,
            source=load.requests.source,
            soak_source=load.soak.source,
            asked=asked,
            slos=goal.slos,
            listener=heard,
            served_confirmation=served,
            served_trials=options.engine == "server" and not subject.machine.simulated,
            soak_s=options.soak,
            simulated=subject.machine.simulated,
            dummy_weights=subject.dummy_weights,
            conditions=conditions_of(subject),
            refusal=lambda request: refusal(request.config),
            second=find_second(goal, asked),
            balance=lambda values: balance(goal, values),
        )

    stored = setup_of(
        options, subject, goal, load, {"space": space.to_json(), "space_digest": space.digest, "mode": space.mode}, shared
    )
    return Prepared(options, subject, goal, setup, stored, bench, not load.requests.source.ignore_eos)


def dry_run(options: SearchOptions, listener: Listener) -> str:
    """The plan of a search that is not started, as text."""
    if options.study is not None:
        checked_name(options.study)
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
    baseline = next((trial.metrics for trial in earlier.trials if trial.stage is Stage.SEARCH and trial.metrics), None)
    judged = [judge(trial, setup.goal, baseline) for trial in earlier.trials if trial.stage in SAMPLED_STAGES]
    ranked = sorted((one for one in judged if one.may_win and one.merit is not None), key=lambda one: -(one.merit or 0.0))
    kept = (one.record.config for one in ranked if within_limits(setup.space, one.record.config, setup.fixed))
    configs = dict.fromkeys(config for config in kept if config != setup.baseline)
    return tuple(Pinned(config, f"among the best of {earlier.name}, measured again") for config in list(configs)[:SEEDED])


SEEDED = 3
"""How many configurations of an earlier study are measured again."""


def launch(options: SearchOptions, listener: Listener, named: Callable[[str], None] = lambda _: None) -> StudyRecord:
    """The whole loop of a new study. ``named`` hears its name as soon as it exists."""
    if options.study is not None:
        checked_name(options.study)
    with VllmProbe(interpreter_of(options)) as probe:
        prepared = prepare(options, listener, probe)
        notes = plan_notes(plan(prepared.setup), simulated=prepared.subject.machine.simulated)
        for note in (*left_out(prepared.setup.space), *notes):
            listener(Note(note))
        fetch_weights(prepared.subject.model, lambda text: listener(Note(text)))
        with Interruption() as interruption:
            study = Study.create(
                options.storage,
                prepared.stored,
                prepared.setup.space,
                name=options.study,
                directions=[one.direction for one in prepared.goal.objectives or (prepared.goal,)],
                data_dir=options.data_dir,
            )
            named(study.name)
            return _search(prepared, study, listener, probe, interruption)


def relaunch(options: ResumeOptions, listener: Listener) -> StudyRecord:
    """Go on with a stored study.

    Raises:
        UsageError: results of the old and the new run would not compare; names the field that differs.
    """
    record = read_study(options.storage, options.study, data_dir=options.data_dir)
    try:
        found, unspent_words = _gone_on(record, options, listener)
    except KeyboardInterrupt:  # before its search began, or after it ended
        raise Interrupted(f"interrupted; the study {record.name} is kept", hint=f"vopt resume {record.name}") from None
    for text in unspent_words:
        listener(Note(with_storage(text, options.storage), important=True))
    return found


def _gone_on(record: StudyRecord, options: ResumeOptions, listener: Listener) -> tuple[StudyRecord, tuple[str, ...]]:
    """The study at its end, and what of its new budget could not be spent."""
    resumed = resumption(record, options)
    with VllmProbe(interpreter_of(resumed.options)) as probe:
        prepared = prepare(resumed.options, listener, probe, record.setup)
        refuse_difference(record, resumed.options, prepared.stored)
        prepared = replace(prepared, setup=replace(prepared.setup, earlier=resumed.earlier))
        if prepared.replays:
            refuse_lost_lengths(record.name, record.trials)
        with Interruption() as interruption:
            data_dir = resumed.options.data_dir
            study = Study.reopen(options.storage, record.name, prepared.setup.space, data_dir=data_dir)
            study.keep_setup(resumed.setup_of())
            found = _search(prepared, study, listener, probe, interruption)
    return found, unspent(prepared.setup, options, record, found)


def _search(prepared: Prepared, study: Study, listener: Listener, probe: VllmProbe, interruption: Interruption) -> StudyRecord:
    options = prepared.options
    subject = prepared.subject
    shrink(subject, study.directory, options.disk_budget, lambda text: listener(Note(text)))
    book = LessonBook(subject, space_subject(subject), prepared.setup.space, prepared.setup.fixed)
    with (
        study,
        reserved(subject, f"a search of {study.name}"),
        closing(Preflight(subject, lambda text: listener(Note(text, important=True)), probe)) as preflight,
    ):
        evaluator = Evaluator(
            prepared.bench(study, listener, preflight.refusal),
            measurement_of(study.records()),
            stored_plan(study.records()),
            interruption,
            study.records(),
        )
        watch = Watch(subject.machine.uuids)

        def evaluate(request: TrialRequest) -> TrialRecord:
            record = watch.checked(evaluator(request))
            book.add(record)
            return record

        try:
            search(prepared.setup, study, evaluate, listener, interruption.checkpoint)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted; the study {study.name} is kept; {so_far(study.records(), prepared.setup)}",
                hint=f"vopt resume {study.name}",
            ) from None
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            raise EnvironmentLacks(
                f"the disk refused a write: {error}", hint=f"make room (vopt clean), then: vopt resume {study.name}"
            ) from error
        finally:
            watch.close()
    return read_study(options.storage, study.name, data_dir=options.data_dir)


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def so_far(records: Sequence[TrialRecord], setup: SearchSetup) -> str:
    """What an interrupted search knows: how many starts are kept, and the best configuration of the search yet."""
    kept = f"{len(records)} engine {'start is' if len(records) == 1 else 'starts are'} kept"
    start = next((record for record in records if record.stage is Stage.SEARCH and record.metrics), None)
    baseline = start.metrics if start is not None else None
    judged = [judge(record, setup.goal, baseline) for record in records if record.stage in SAMPLED_STAGES]
    ranked = [one for one in judged if one.may_win and one.merit is not None]
    if not ranked:
        return f"{kept}, none with a result yet"
    best = max(ranked, key=lambda one: one.merit or 0.0)
    first = next(one for one in judged if one.record is start)
    against = ""
    if best is not first and first.merit is not None and best.merit is not None:
        against = f", {change_text(best.merit - first.merit, setup.goal)} against the baseline, unconfirmed"
    arguments = " ".join(f"{name}={value}" for name, value in best.record.config.items()) or "the defaults"
    return f"{kept}; best so far: trial {best.record.label} ({arguments}{against})"
