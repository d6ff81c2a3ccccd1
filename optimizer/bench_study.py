"""``vopt bench --study``: a study's recommendation against its alternative, measured again under the study's own load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vopt.objectives.confidence import Comparison
from vopt.objectives.goals import Goal, balance, built_in_goal
from vopt.objectives.metrics import Direction
from vopt.optimizer.bench import BenchOutcome
from vopt.optimizer.bench_duel import Duel, find_duel, judge_duel, order
from vopt.optimizer.bench_run import Told
from vopt.optimizer.bench_study_text import start_entry, study_text
from vopt.optimizer.check import FlagFinding, FlagStatus, modernised
from vopt.optimizer.command import shell_line
from vopt.optimizer.engine.arguments import VllmProbe
from vopt.optimizer.environment import fetch_weights
from vopt.optimizer.errors import EnvironmentLacks, GateFailed, UsageError, VoptError
from vopt.optimizer.evaluate import Bench, Evaluator
from vopt.optimizer.events import Listener, StageBegan, TrialBegan, TrialEnded
from vopt.optimizer.history import Arm, Stage, StudyRecord, TrialRecord, TrialRequest
from vopt.optimizer.host import conditions_of, reserved
from vopt.optimizer.load.plan import LoadPlan
from vopt.optimizer.measurement import Asked, Measurement
from vopt.optimizer.model_files import changed
from vopt.optimizer.not_simulated import say_left_out
from vopt.optimizer.options import BenchOptions, SearchOptions
from vopt.optimizer.prepare import find_load, find_second
from vopt.optimizer.report.redaction import clean, clean_text, known_secrets
from vopt.optimizer.resumption import measurement_of, stored_options, stored_variables
from vopt.optimizer.second_load import stored_plan
from vopt.optimizer.secrecy import refuse_words
from vopt.optimizer.sessions import opener
from vopt.optimizer.streams import columns
from vopt.optimizer.study import read_study
from vopt.optimizer.subject import Subject, find_arguments, find_machine, find_subject, front_end_note, interpreter_of
from vopt.optimizer.trial import Blame, Deadlines, TrialSpec

FORMAT_VERSION = 1
INFRASTRUCTURE_TRIES = 2
COMPARED = ("vllm_version", "gpus", "model_revision")
_FIXED = {
    "model": "--model",
    "url": "--url",
    "command": "arguments after --",
    "set": "--set",
    "arrivals": "--arrivals",
    "concurrency": "--concurrency",
    "rate": "--rate",
    "window": "--window",
    "requests": "--requests",
    "slo": "--slo",
    "simulate": "--simulate",
    "tokenizer": "--tokenizer",
    "api_key_file": "--api-key-file",
    "records": "--records",
}


def metric_of(options: BenchOptions) -> tuple[str, bool]:
    """The metric that progress shows, and whether more of it is better: a study's own. What is wrong with a study is left to
    ``measure_again`` to say."""
    try:
        stored = read_study(options.storage, options.study, data_dir=options.data_dir) if options.study else None
    except VoptError:
        stored = None
    goal = Goal.from_json(stored.setup["goal"]) if stored is not None else built_in_goal("throughput")
    return goal.metric, goal.direction is Direction.MAXIMIZE


def measure_again(options: BenchOptions, listener: Listener) -> BenchOutcome:
    """Measure both arms in fresh starts, ABBA, and say whether the recommendation still holds.

    Raises:
        UsageError: the study has no answer, or its workload or arguments are not what they were.
        EnvironmentLacks: an arm could not be measured for no fault of its own, or the client was the limit.
        GateFailed: with a gate, the recommended command has arguments that this vLLM lacks and that have no modern form.
    """
    if name := next((words for name, words in _FIXED.items() if getattr(options, name)), None):
        raise UsageError(f"{name} with --study: the study fixes it", hint=f"vopt bench --study {options.study}")
    record = read_study(options.storage, options.study, data_dir=options.data_dir)
    duel, measurement, second = find_duel(record), measurement_of(record.trials), stored_plan(record.trials)
    goal = Goal.from_json(record.setup["goal"])
    if measurement is None or (second is None and find_second(goal, Asked(measurement.plan.arrivals)) is not None):
        raise UsageError(
            f"{record.name} stores no load plan: its baseline was never measured", hint=f"vopt resume {record.name}"
        )
    stored = _with_options(options, stored_options(record.setup["options"]), record)
    told = Told(listener)
    with VllmProbe(interpreter_of(stored)) as probe:
        subject, duel, findings = _as_of_today(probe, options, stored, record, duel, told.say)
    for text in record.setup.get("left_out") or ():  # of the study's command then, and so of what is measured now
        told.say(str(text), important=True)
    say_left_out(subject, told.say)
    if other := changed(record.setup.get("model_files"), Path(subject.model.name).expanduser()):
        told.say(f"{', '.join(other)} of {subject.model.name}: not as {record.name} measured the model", important=True)
    bench = _bench(subject, stored, record, measurement, second, told)
    if not subject.machine.simulated:
        fetch_weights(subject.model, told.say)
    with reserved(subject, f"vopt bench of {record.name}"):
        starts = _measure(Evaluator(bench, measurement, second, earlier=record.trials), duel, options.repeat, told, goal)
    return _outcome(options, record, subject, duel, starts, findings, told.notes)


def _with_options(options: BenchOptions, stored: SearchOptions, record: StudyRecord) -> SearchOptions:
    """The study's options with what was typed now in their place."""
    python = options.python or stored.python
    return replace(
        stored,
        python=python,
        gpus=options.gpus or stored.gpus,
        vllm_version=options.vllm_version
        or stored.vllm_version
        or (record.setup["vllm_version"] if record.setup.get("simulated") and not python else None),
    )


def _as_of_today(
    probe: VllmProbe,
    options: BenchOptions,
    stored: SearchOptions,
    record: StudyRecord,
    duel: Duel,
    say: Callable[[str], None],
) -> tuple[Subject, Duel, tuple[FlagFinding, ...]]:
    """The study's subject under the vLLM that is installed now, and the arms in that vLLM's words."""
    machine = find_machine(stored.simulate, stored.gpus, probe.python)
    schema = find_arguments(probe, machine, stored.vllm_version, installed=stored.python is not None)
    fixed, findings = modernised(record.setup.get("fixed", {}), schema)
    arms = {}
    for name, config in duel.arms.items():
        arms[name], more = modernised(config, schema)
        findings += tuple(finding for finding in more if finding not in findings)
    _refuse_unknown(findings, options, record)
    settings = [f"{name}={json.dumps(value)}" for name, value in fixed.items()]
    bare = replace(stored, command=None, from_file=None, set=settings, model=record.setup["model"])
    subject = find_subject(bare, say, probe)
    front_end = tuple(record.setup.get("front_end", ()))
    refuse_words(front_end)
    if front_end:
        say(front_end_note(front_end))
    subject = replace(subject, front_end=front_end, environment=stored_variables(record), baseline=arms["baseline"])
    return subject, replace(duel, arms=arms), findings


def _refuse_unknown(findings: Sequence[FlagFinding], options: BenchOptions, record: StudyRecord) -> None:
    unknown = [finding for finding in findings if finding.status is FlagStatus.UNKNOWN]
    if not unknown:
        return
    words = "; ".join(f"{finding.written}: {finding.message}" for finding in unknown)
    error = UsageError if options.gate is None else GateFailed
    raise error(
        f"the recommendation of {record.name} cannot be started any more: {words}", hint="vopt search …   # on this vLLM"
    )


def _bench(
    subject: Subject,
    stored: SearchOptions,
    record: StudyRecord,
    measurement: Measurement,
    second: LoadPlan | None,
    told: Told,
) -> Bench:
    """As the study's own trials were measured, in both loads where they had two; confirmation starts are served where the
    study's were."""
    goal = Goal.from_json(record.setup["goal"])
    asked = Asked(measurement.plan.arrivals, seed=stored.seed)
    loads_s = measurement.plan.deadline_s + (second.deadline_s if second is not None else 0.0)
    load = find_load(stored, subject, told.say)
    if load.workload.digest != record.setup.get("workload_digest"):
        raise UsageError(
            f"the workload {load.workload.name} is not the one that {record.name} was measured with "
            f"({load.workload.digest} instead of {record.setup.get('workload_digest')}): results would not compare",
            hint="bring the file, and the model's generation_config.json, back as they were",
        )
    served = not (stored.no_serve or subject.machine.simulated)
    directory = Path(record.directory) / f"bench-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"

    def spec_for(request: TrialRequest) -> TrialSpec:
        return subject.trial_spec(
            request.label, request.config, directory / request.label, Deadlines(load_s=loads_s), seed=stored.seed
        )

    return Bench(
        spec_for=spec_for,
        argv_for=lambda request: subject.argv(request.config),
        open_session=opener("simulated" if subject.machine.simulated else stored.engine, subject),
        source=load.requests.source,
        soak_source=load.soak.source,
        asked=asked,
        slos=goal.slos,
        listener=told,
        served_confirmation=served,
        served_trials=False,
        soak_s=0.0,
        simulated=subject.machine.simulated,
        dummy_weights=subject.dummy_weights,
        conditions=conditions_of(subject),
        second=find_second(goal, asked),
        balance=lambda values: balance(goal, values),
    )


def _measure(
    evaluate: Callable[[TrialRequest], TrialRecord], duel: Duel, repeat: int, listener: Listener, goal: Goal
) -> dict[str, list[TrialRecord]]:
    """Every start of both arms. An arm that fails for its own fault is not started again."""
    listener(StageBegan("bench", repeat * len(duel.arms)))
    starts: dict[str, list[TrialRecord]] = {name: [] for name in duel.arms}
    for number, name in order(duel, repeat):
        if any(start.failure is not None for start in starts[name]):
            continue
        record = _one(evaluate, duel, number, name, listener)
        starts[name].append(record)
        value = record.metrics.get(goal.metric) if record.metrics and record.failure is None else None
        reason = f"{record.failure.kind}: {record.failure.detail}" if record.failure else ""
        listener(TrialEnded(record, value, None, None, reason))
    return starts


def _one(
    evaluate: Callable[[TrialRequest], TrialRecord], duel: Duel, number: int, name: str, listener: Listener
) -> TrialRecord:
    """One start; tried again when the machine, not the configuration, failed."""
    record = None
    for attempt in range(1, INFRASTRUCTURE_TRIES + 1):
        again = f"-{attempt}" if attempt > 1 else ""
        request = TrialRequest(f"bench-{number}-{name}{again}", duel.arms[name], Stage.CONFIRMATION, attempt=attempt)
        listener(TrialBegan(request, f"round {number}: {name}"))
        record = evaluate(request)
        if record.failure is None or record.failure.kind.blame is Blame.CONFIGURATION:
            return record
        if record.failure.kind.blame is Blame.WORKLOAD:
            raise UsageError(
                f"the workload cannot be served: {record.failure.detail}",
                hint="vopt search …   # the study's workload no longer fits its model here",
            )
    assert record is not None
    assert record.failure is not None
    raise EnvironmentLacks(
        f"{name} could not be measured: {record.failure.kind} during {record.failure.phase}: {record.failure.detail}",
        hint="vopt doctor",
    )


def _outcome(
    options: BenchOptions,
    record: StudyRecord,
    subject: Subject,
    duel: Duel,
    starts: Mapping[str, Sequence[TrialRecord]],
    findings: Sequence[FlagFinding],
    notes: Sequence[str],
) -> BenchOutcome:
    goal = Goal.from_json(record.setup["goal"])
    answer = judge_duel(duel, starts, goal, options.gate)
    document = {
        "format_version": FORMAT_VERSION,
        "study": record.name,
        "simulated": subject.machine.simulated,
        "metric": goal.metric,
        "direction": goal.direction.value,
        "recommended": duel.recommended,
        "holds": answer.holds,
        "reason": answer.reason,
        "gate": options.gate,
        "gate_failed": options.gate is not None and not answer.holds,
        "gain": None if answer.now is None else _gain(answer.now),
        "gain_then": None if duel.then is None else {"ratio": duel.then},
        "lost": answer.lost,
        "notes": list(notes),
        "changed": _changed(record, subject),
        "retired": [
            {"written": finding.written, "message": finding.message, "instead": list(finding.instead)} for finding in findings
        ],
        "arms": {name: _arm(record, name, duel, subject, arm) for name, arm in starts.items()},
    }
    secrets = known_secrets(os.environ)
    document = clean(document, secrets)
    return BenchOutcome(document, clean_text(study_text(document, columns()), secrets), bool(document["gate_failed"]))


def _gain(now: Comparison) -> dict[str, Any]:
    return {"ratio": now.ratio, "low": now.low, "high": now.high, "starts": list(now.starts)}


def _changed(record: StudyRecord, subject: Subject) -> dict[str, Any]:
    """What of the environment is not as it was."""
    now = {
        "vllm_version": subject.schema.version,
        "gpus": list(subject.machine.names),
        "model_revision": subject.model.revision,
    }
    then = {name: record.setup.get(name) for name in COMPARED}
    return {name: {"then": then[name], "now": now[name]} for name in COMPARED if then[name] != now[name]}


def _arm(record: StudyRecord, name: str, duel: Duel, subject: Subject, starts: Sequence[TrialRecord]) -> dict[str, Any]:
    return {
        "command": shell_line(subject.argv(duel.arms[name])),
        "engine_config": duel.arms[name].to_json(),
        "then": dict(_then(record, name)),
        "starts": [start_entry(start) for start in starts],
    }


def _then(record: StudyRecord, name: str) -> Mapping[str, float]:
    """The figures of one arm when the study was made."""
    answer = record.recommendation
    if answer is not None and name == "baseline":
        return answer.baseline_metrics
    if answer is not None and name == "winner":
        return answer.winner_metrics
    starts = [trial for trial in record.trials if trial.arm is Arm.FINALIST]
    found = [trial.metrics.values for trial in starts if trial.config == starts[-1].config and trial.metrics is not None]
    shared = [metric for metric in found[0] if all(metric in values for values in found)] if found else []
    return {metric: sum(values[metric] for values in found) / len(found) for metric in shared}
