"""The search space of what was typed, and what ``vopt space`` says of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vopt.objectives.goals import Goal, GoalError, built_in_goal
from vopt.optimizer.check import check_command as check
from vopt.optimizer.check import objection_of, render_check
from vopt.optimizer.command import SEE_SPACE, LaunchCommand
from vopt.optimizer.command_in_use import Written, file_command, with_config_file
from vopt.optimizer.command_reader import parse_command
from vopt.optimizer.engine.arguments import VllmProbe
from vopt.optimizer.engine.floor import Floor, floor
from vopt.optimizer.engine.process import asking_environment
from vopt.optimizer.engine.roofline import estimate
from vopt.optimizer.engine.simulated import MODELLED
from vopt.optimizer.environment import find_model
from vopt.optimizer.errors import SearchSpaceError, UsageError, VoptError
from vopt.optimizer.lessons import lessons_file, read_lessons, section_of
from vopt.optimizer.load.workload import Workload
from vopt.optimizer.measurement import Asked
from vopt.optimizer.memory_of import host_as_gpu, memory_checks, memory_fits, space_subject
from vopt.optimizer.not_simulated import assumed_by
from vopt.optimizer.options import CheckedSpaceOptions, SearchOptions, SpaceOptions
from vopt.optimizer.secrecy import refuse_secret
from vopt.optimizer.setup import Budget, Pinned, SearchSetup, Timing
from vopt.optimizer.space_report import SPACE_WIDTH, space_document, space_text
from vopt.optimizer.stated_acceptance import stated_notes
from vopt.optimizer.streams import columns
from vopt.optimizer.subject import ASKING, Machine, Subject, find_arguments, find_machine, find_subject, interpreter_of
from vopt.optimizer.trial import EngineConfig
from vopt.optimizer.typed_files import read_typed
from vopt.search_spaces.arguments import Arguments
from vopt.search_spaces.bare_mode import bare_mode
from vopt.search_spaces.build import Subject as SpaceSubject
from vopt.search_spaces.build import build_space
from vopt.search_spaces.choices import Choices, parse_choices
from vopt.search_spaces.evidence import WorkloadFacts
from vopt.search_spaces.known_names import check_names
from vopt.search_spaces.memory import Possible, can_start
from vopt.search_spaces.model import ShapeError, known_model, shape_from_config
from vopt.search_spaces.on_load import loaded
from vopt.search_spaces.parameter import Inactive
from vopt.search_spaces.parse import SpaceFile, SpaceFileError, base_declarations, mode_for, parse_space
from vopt.search_spaces.retired import valueless_flags
from vopt.search_spaces.space import SearchSpace
from vopt.search_spaces.speculation import SUFFIX_TOKENS, tokens

LONGEST_PATH = 4096

RANKED_CONCURRENCY = 256
"""Concurrency that seeds are ranked at while the real one is not known yet."""


@dataclass(frozen=True, slots=True)
class SpaceAnswer:
    """What ``vopt space`` prints."""

    text: str
    document: dict[str, Any]
    exit_code: int = 0


NOT_MODELLED = "the simulation does not model it"


def find_space(options: SpaceOptions, subject: Subject, workload: Workload, goal: str, concurrency: int | None) -> SearchSpace:
    """The space of one study. Raises ``SearchSpaceError`` for files and choices that cannot be meant, ``UsageError`` for
    ``--vary`` of what a simulation does not model."""
    user = user_space(options.space, subject.schema)

    def made(choices: Choices) -> SearchSpace:
        return build_space(
            space_subject(subject),
            goal=goal,
            mode=options.mode,
            workload=workload_facts(workload, subject, concurrency, options.acceptance_length),
            choices=choices,
            user=user,
            baseline=subject.baseline.to_json(),
            rank=ranking(subject, workload, concurrency),
        )

    try:
        choices = parse_choices(
            subject.schema,
            vary=options.vary,
            keep=[*options.keep, *_cpu_kernels(options, subject)],
            allow_lossy=options.allow_lossy,
            allow_contract=options.allow_contract,
            settings=[f"{name}={json.dumps(value)}" for name, value in subject.fixed.items()],
        )
        space = modelled_space(made, choices) if subject.machine.simulated else made(choices)
    except SpaceFileError as error:
        raise SearchSpaceError(error.file, error.key, error.value, error.rule, hint=SEE_SPACE) from None
    # Limits of earlier studies keep proposals out; the domain stays as it would be without them, so a study can be resumed.
    known = read_lessons(lessons_file(subject), section_of(subject))
    space = replace(space, learned=known.learned)
    if options.no_memory_check:
        return space.with_checks()
    return space.with_checks(*memory_checks(subject, known.calibration)([]))


def modelled_space(made: Callable[[Choices], SearchSpace], choices: Choices) -> SearchSpace:
    """The space that ``choices`` make, without what the simulation does not model: its values would differ by noise alone,
    and the answer would name one of them."""
    asked = sorted(name for name in choices.vary if not _modelled(name))
    if asked:
        raise UsageError(
            f"--vary {asked[0]}: {NOT_MODELLED}, so its values would differ by noise alone",
            hint=f"leave --vary {asked[0]} out, or search on the GPU itself, without --simulate",
        )
    whole = made(choices)
    dropped = {part.name for part in (*whole.parameters, *whole.dormant) if not _modelled(part.name)}
    if not dropped:
        return whole
    space = made(replace(choices, unmodelled=frozenset(dropped)))
    told = tuple(Inactive(part.name, NOT_MODELLED) if part.name in dropped else part for part in space.inactive)
    return replace(space, inactive=told)


def _modelled(name: str) -> bool:
    """Whether a parameter of a space moves a simulated engine."""
    return ("speculative_config" if name == "speculation" else name) in MODELLED


GPU_KERNELS = ("attention_backend", "moe_backend", "linear_backend", "gdn_prefill_backend")
"""Choices among CUDA kernels: the CPU build takes them and changes nothing."""


def _cpu_kernels(options: SpaceOptions, subject: Subject) -> list[str]:
    """Kernel choices that are left alone on the CPU, unless the user asks for one."""
    if subject.machine.gpu is not None:
        return []
    asked = {text.partition("=")[0].strip().replace("-", "_") for text in options.vary}
    return [name for name in GPU_KERNELS if name not in asked]


def user_space(path: Path | None, arguments: Arguments | None = None) -> SpaceFile | None:
    """The file of ``--space``, on top of the built-in space. Raises ``SearchSpaceError`` for what it cannot mean; with
    ``arguments`` also for a parameter that neither they nor another release have."""
    if path is None:
        return None
    try:
        text = read_typed(path, "--space", hint="docs/how-to/write-a-search-space.md shows one")
        read = parse_space(text, str(path), base_declarations())
        if read.mode is not None or read.bare is not None:
            key, value = ("mode", read.mode) if read.mode is not None else ("bare", read.bare)
            raise SpaceFileError(str(path), key, value, "a file of yours narrows any mode: choose it by --mode")
        refuse_secret(f"--space {path}", asdict(read))
        for declaration in read.declarations:
            for one in declaration.values or ():
                refuse_secret(declaration.name, one)
        if arguments is not None:
            check_names(read, arguments)
        return read
    except SpaceFileError as error:
        raise SearchSpaceError(error.file, error.key, error.value, error.rule, hint=SEE_SPACE) from None


def workload_facts(workload: Workload, subject: Subject, concurrency: int | None, acceptance: float | None) -> WorkloadFacts:
    """The workload as the evidence rules see it. Raises ``UsageError`` for an acceptance that cannot be."""
    if acceptance is not None and not 1 <= acceptance < math.inf:
        raise UsageError(
            f"--acceptance-length {acceptance:g}: it is the mean of tokens per step, its own one included, so at least 1",
            hint="--acceptance-length 2.5",
        )
    facts = workload.facts()
    return WorkloadFacts(
        prompt_tokens=round(facts["mean_prompt_tokens"]),
        longest_prompt=facts["max_prompt_tokens"],
        total_tokens=round(facts["mean_prompt_tokens"] + facts["mean_output_tokens"]),
        longest_total=facts["max_total_tokens"],
        concurrency=concurrency,
        shared_prefix_tokens=facts["shared_prefix_tokens"],
        states_reuse=facts["states_reuse"],
        natural_text=facts["natural_text"],
        dummy_weights=subject.dummy_weights,
        acceptance_length=acceptance,
    )


def ranking(subject: Subject, workload: Workload, concurrency: int | None) -> Callable[[Mapping[str, Any]], float] | None:
    """Predicted tokens per second of an engine config, where the device is known well enough to predict."""
    shape, hardware = subject.shape, subject.machine.hardware
    if shape is None or hardware is None:
        return None
    lengths = workload.request_lengths()

    def rank(config: Mapping[str, Any]) -> float:
        width = concurrency or RANKED_CONCURRENCY
        return estimate(shape, hardware, config, lengths, width, subject.schema.version).tokens_per_s

    return rank


def floor_of(subject: Subject, workload: Workload, space: SearchSpace, lossy: Sequence[str]) -> Floor | None:
    """The physical floor of this search; ``None`` where the device or the model's shape is not known, or weights may be
    quantized further than they are."""
    shape, hardware = subject.shape, subject.machine.hardware
    if shape is None or hardware is None or any("quantization" in name for name in lossy):
        return None
    drafted = max((tokens(value) for value in space["speculation"].values), default=0) if "speculation" in space else 0
    given = subject.fixed | subject.baseline
    shape, stated = loaded(shape, given, subject.schema.version), given.get("speculative_config")
    if isinstance(stated, Mapping):
        drafted = max(drafted, int(stated.get("num_speculative_tokens") or SUFFIX_TOKENS))
    return floor(shape, hardware, subject.machine.count, workload.request_lengths(), 1 + drafted)


def search_setup(
    options: SearchOptions, subject: Subject, goal: Goal, space: SearchSpace, sampler: str, asked: Asked
) -> SearchSetup:
    """What the loop is given. With the user's own command as the baseline, the bare defaults are measured next; then the
    bare mode. What the command says outside the space stays in every trial."""
    known = read_lessons(lessons_file(subject), section_of(subject))
    outside = EngineConfig({name: value for name, value in subject.baseline.items() if not _varied(name, space)})
    pinned = [Pinned(outside, "the defaults of vLLM")] if subject.own_command else []
    modes = dict.fromkeys([mode_for(objective.name) for objective in goal.objectives] or [space.mode])
    pinned += [Pinned(outside | bare.config, bare.words) for bare in (bare_mode(space, mode) for mode in modes) if bare.config]
    window_s = asked.window_s or 60.0
    load_s = (1.5 * window_s + 30.0) * (2 if goal.objectives and not asked.open_loop else 1)
    timing = Timing() if subject.machine.gpu is not None else Timing(60.0, 40.0, 30.0)
    return SearchSetup(
        goal=goal,
        space=space,
        budget=Budget(options.trials, options.rounds, options.time_budget, options.soak),
        baseline=subject.baseline,
        fixed=outside,
        pinned=tuple(pinned),
        sampler=sampler,
        seed=options.seed,
        timing=Timing(timing.first_start_s, timing.new_key_start_s, timing.known_key_start_s, load_s, timing.stop_s),
        command=subject.argv,
        # What loses in one of several objectives may still win in another.
        early_end=not asked.open_loop and not goal.objectives,
        explain=options.explain,
        deadline_s=asked.deadline_s,
        no_serve=options.no_serve,
        assumed=lambda config: (*stated_notes(subject.fixed | config), *assumed_by(subject)(config)),
        rate=options.rate,
        checks=None if options.no_memory_check else memory_checks(subject, known.calibration),
        fits=None if options.no_memory_check else memory_fits(subject, known.calibration),
        auto_load=not asked.open_loop and asked.concurrency is None,
    )


def _varied(name: str, space: SearchSpace) -> bool:
    return name in space or (name == "speculative_config" and "speculation" in space)


def describe_space(options: CheckedSpaceOptions) -> SpaceAnswer:
    """``vopt space``: every parameter with its range and reasons, and what was left out and why."""
    from vopt.optimizer.prepare import concurrency_of, find_workload

    said: list[str] = []
    try:
        built_in_goal(options.goal)
    except GoalError as error:
        raise UsageError(str(error), hint=error.hint) from None
    subject = find_subject(options, said.append)
    workload = find_workload(options.workload, None, lambda _: None)
    space = find_space(options, subject, workload, options.goal, concurrency_of(options.concurrency))
    text, document = space_text(space, min(columns() or SPACE_WIDTH, SPACE_WIDTH)), space_document(space)
    if subject.machine.simulated and subject.shape is not None and not document["default_violations"]:
        given = subject.fixed | subject.baseline  # of a simulated engine the estimate is exact, as --check has it
        verdict = can_start(subject.shape, space_subject(subject).gpu, given, subject.schema.version, exact=True)
        if verdict.possible is Possible.CANNOT:
            text += f"\nWithout a repair the baseline cannot start here: {verdict.reason}\n"
            document = {**document, "default_violations": [verdict.reason]}
    if notes := [note for note in said if not note.startswith(ASKING)]:
        text += "".join(f"\n{note}\n" for note in notes)
        document = {**document, "notes": notes}
    if subject.front_end:
        document = {**document, "front_end": list(subject.front_end)}
    return SpaceAnswer(text, document)


def check_command(options: CheckedSpaceOptions) -> SpaceAnswer:
    """``vopt space --check``: a launch command taken apart, flag by flag."""
    with VllmProbe(interpreter_of(options)) as probe:
        machine = find_machine(options.simulate, options.gpus, probe.python)
        if not machine.simulated:
            probe.see(asking_environment(probe.python, machine.uuids))
        schema = find_arguments(probe, machine, options.vllm_version, installed=options.python is not None)
        written = _command_text(options.check or "")
        parsed, notes = _whole_command(written, schema)
        subject = _checked_subject(parsed.model, schema, machine)
        ask = None if machine.simulated else objection_of(probe)
        simulated = machine.simulated
        report = check(written.command, subject, more=parsed.config, model=parsed.model, ask=ask, simulated=simulated)
    text = "\n".join([render_check(report).rstrip(), *([""] if notes else []), *notes])
    return SpaceAnswer(text, {**report.to_json(), "notes": list(notes)}, report.exit_code)


def _whole_command(written: Written, schema: Arguments) -> tuple[LaunchCommand, tuple[str, ...]]:
    """The command with its ``--config`` file, where that is here, and what is to be said about what was not read."""
    parsed = parse_command(written.command, schema, strict=False, valueless=valueless_flags())
    if parsed.config_file is not None and not Path(parsed.config_file).exists():
        return parsed, (*written.notes, f"--config {parsed.config_file}: no such file here, so its arguments are not checked")
    return with_config_file(parsed, schema, strict=False), written.notes


def _command_text(given: str) -> Written:
    """The command itself, or what stands in the file of that name."""
    path = Path(given)
    if len(given) > LONGEST_PATH or "\n" in given or not path.is_file():
        return Written(given)
    return file_command(path, "--check")


def _checked_subject(name: str | None, schema: Arguments, machine: Machine) -> SpaceSubject:
    """The subject of a command to check; a model that cannot be found leaves the memory arithmetic out."""
    gpu = machine.gpu or host_as_gpu()
    shape = None
    if name is not None:
        try:
            shape = known_model(name) or shape_from_config(find_model(name, simulated=True).config, name)
        except (VoptError, ShapeError):
            shape = None
    return SpaceSubject(schema, gpu, shape, machine.count)
