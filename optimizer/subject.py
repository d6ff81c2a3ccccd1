"""What a search is about: the model, the command in use, the arguments that its vLLM takes, and the machine that it runs on."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vopt.optimizer import gpus
from vopt.optimizer.caches import cache_root
from vopt.optimizer.command import LaunchCommand, argument_words, bound_argv, shell_line, split_environment, to_argv
from vopt.optimizer.command_in_use import command_in_use, refuse_typed
from vopt.optimizer.engine.arguments import VllmProbe
from vopt.optimizer.engine.hardware import Hardware, hardware
from vopt.optimizer.engine.process import asking_environment
from vopt.optimizer.environment import ModelFiles, find_model, vllm_version
from vopt.optimizer.errors import EnvironmentLacks, SearchSpaceError, UsageError
from vopt.optimizer.locks import held_gpu_locks
from vopt.optimizer.options import BenchOptions, SpaceOptions
from vopt.optimizer.secrecy import refuse_secret
from vopt.optimizer.trial import Deadlines, EngineConfig, TrialSpec
from vopt.search_spaces.arguments import Arguments, stored_arguments, stored_versions
from vopt.search_spaces.choices import parse_setting, split_settings
from vopt.search_spaces.circumstances import Circumstances
from vopt.search_spaces.defaults import Gpu
from vopt.search_spaces.model import ShapeError, shape_from_config
from vopt.search_spaces.parse import SpaceFileError, canonical
from vopt.search_spaces.rules import rule_violations
from vopt.search_spaces.shape import ModelShape
from vopt.search_spaces.subject import Subject as SpaceSubject

NEWEST = "0.33.0"
ASKING = "asking the vLLM of"
"""Begins the one thing said by ``find_subject`` that is about its progress, not about the command in use."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where engines run. ``uuids`` are the GPUs given to each trial; ``hardware`` is set for a simulation.

    ``gpu`` is what vLLM's defaults depend on (``None``: the CPU build).
    """

    gpu: Gpu | None
    uuids: tuple[str, ...] = ()
    hardware: Hardware | None = None
    count: int = 1

    @property
    def simulated(self) -> bool:
        return self.hardware is not None

    @property
    def names(self) -> tuple[str, ...]:
        name = self.gpu.name if self.gpu else "cpu"
        return (f"{name} (simulated)" if self.simulated else name,) * self.count


@dataclass(frozen=True, slots=True)
class Subject:
    """``fixed`` (``--set``) is in every trial; ``baseline`` is the user's own command (empty: the untouched defaults).

    ``resolved`` is what the installed vLLM itself makes of ``fixed`` on this machine (empty for a simulation). ``left_out``
    says what of the command in use as it was given no engine has, and no exported command.
    """

    model: ModelFiles
    shape: ModelShape | None
    schema: Arguments
    machine: Machine
    python: str
    fixed: EngineConfig
    baseline: EngineConfig
    front_end: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    own_command: bool = False
    resolved: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def dummy_weights(self) -> bool:
        return (self.fixed | self.baseline).get("load_format") == "dummy"

    def argv(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The launch command of one configuration, ``--set`` arguments included: the words that are exported, and those that
        a served start runs (it only moves to a free port of the loopback)."""
        return bound_argv(to_argv(self.model.name, self.fixed | config, self.front_end, self.schema))

    def trial_spec(
        self, label: str, config: Mapping[str, Any], directory: Path, deadlines: Deadlines, *, seed: int, **more: Any
    ) -> TrialSpec:
        """One engine start of a configuration, ``--set`` arguments included; variables among them go into its environment.
        ``more`` are further fields of the specification."""
        arguments, variables = split_environment(self.fixed | config)
        return TrialSpec(
            label=label,
            model=str(self.model.directory or self.model.name),
            arguments=arguments,
            directory=directory,
            python=self.python,
            served_model_name=self.served_name(config),
            front_end=self.front_end,
            revision=self.model.revision,
            environment={**self.environment, **variables},
            gpus=self.machine.uuids,
            deadlines=deadlines,
            seed=seed,
            **more,
        )

    def served_name(self, config: Mapping[str, Any]) -> str:
        """What ``/v1/models`` lists for one configuration: the first ``served_model_name``, else the model as it is named."""
        stated = (self.fixed | config).get("served_model_name")
        names = stated if isinstance(stated, (list, tuple)) else [stated]
        return str(names[0]) if names and names[0] else self.model.name


def interpreter_of(options: SpaceOptions | BenchOptions) -> str:
    """The interpreter that has vLLM: ``--python``, else this one."""
    return str(options.python) if options.python else sys.executable


def find_subject(
    options: SpaceOptions | BenchOptions,
    say: Callable[[str], None] = lambda _: None,
    probe: VllmProbe | None = None,
    warn: Callable[[str], None] | None = None,
) -> Subject:
    """Everything above from what was typed, before any engine starts.

    ``warn`` hears what is left out of the command in use, which has to be known later too (by default ``say`` does), ``say``
    the rest. ``probe`` is a child of ``interpreter_of(options)`` for whoever has further questions; without one its own ends
    here.

    Raises:
        UsageError: a model, command or argument that cannot be meant.
        EnvironmentLacks: no vLLM, no GPU, no network where one is needed.
    """
    refuse_typed(options)
    if probe is None:
        with VllmProbe(interpreter_of(options)) as probe:
            return find_subject(options, say, probe, warn)
    python = probe.python
    if shutil.which(python) is None:
        raise UsageError(
            f"--python {python}: no program that can be run", hint="--python PATH/bin/python of an environment with vLLM"
        )
    machine = find_machine(options.simulate, options.gpus, python)
    if not machine.simulated:
        probe.see(asking_environment(python, machine.uuids))
        probe.wake()
        say(f"{ASKING} {python} for its arguments and for its view of the model")
    schema = find_arguments(probe, machine, options.vllm_version, installed=options.python is not None)
    command = command_in_use(options, schema, say, warn or say)
    name = _model_name(options.model, command)
    fixed, front_end = _set_arguments(options.set, schema)
    model = find_model(name, revision=(fixed | command.config).get("revision"), simulated=machine.simulated)
    try:
        shape: ModelShape | None = shape_from_config(model.config, name)
    except ShapeError as error:
        if machine.simulated:
            beside = "; --no-memory-check leaves out the filter, not the simulation" if _unchecked(options) else ""
            raise UsageError(
                f"{name} cannot be simulated: an engine's times and memory are computed from the model's shape, and from its "
                f"config.json vopt {error}{beside}",
                hint="leave --simulate out and add --no-memory-check   # a real engine needs no shape; "
                "or simulate a model like Qwen/Qwen3-8B",
            ) from None
        if isinstance(options, SpaceOptions) and not _unchecked(options):
            raise UsageError(
                f"what the memory of {name} would hold is not known: {error}",
                hint="--no-memory-check   # goes on without the memory filter: configurations that cannot fit are tried too",
            ) from None
        shape = None
    if machine.simulated:
        refuse_out_of_range(fixed | command.config, SpaceSubject(schema, machine.gpu or Gpu("", 0), shape, machine.count))
    resolved = {} if machine.simulated else ask_engine(probe, model, fixed | command.config, fixed)
    front = (*command.front_end, *front_end)
    if front:
        say(front_end_note(front))
    return Subject(
        resolved=resolved,
        model=model,
        shape=shape,
        schema=schema,
        machine=machine,
        python=python,
        fixed=fixed,
        baseline=command.config,
        front_end=front,
        environment=command.environment,
        own_command=bool(command.config),
        left_out=command.left_out,
    )


def front_end_note(words: Sequence[str]) -> str:
    """What becomes of arguments that are not the engine's."""
    return f"{shell_line(words)}: for the server in front of the engine: in served and exported commands, not in-process"


OUT_OF_RANGE = ("size_below_one", "utilization_out_of_range")


def refuse_out_of_range(config: EngineConfig, subject: SpaceSubject) -> None:
    """What no vLLM takes, where none is asked. What only does not fit together is a baseline that a search repairs.

    Raises:
        UsageError: a value that lies outside what its argument can be.
    """
    for violation in rule_violations(config, Circumstances(subject).facts()):
        if violation.rule in OUT_OF_RANGE:
            raise UsageError(f"vLLM refuses this: {violation.detail}", hint="vopt space --check 'vllm serve …'")


def _unchecked(options: SpaceOptions | BenchOptions) -> bool:
    """Whether ``--no-memory-check`` was typed; ``bench`` has no filter that it could leave out."""
    return isinstance(options, SpaceOptions) and options.no_memory_check


def ask_engine(probe: VllmProbe, model: ModelFiles, config: EngineConfig, fixed: EngineConfig) -> Mapping[str, Any]:
    """What the installed vLLM makes of ``fixed``.

    Raises:
        UsageError: vLLM refuses ``config``, the baseline of every trial, in its own words.
    """
    name = str(model.directory or model.name)
    verdict = probe.ask(name, config)
    if not verdict.accepted:
        raise UsageError(
            f"vLLM refuses this model or these arguments: {verdict.reason}",
            hint="vopt space --check 'vllm serve …' takes a command apart",
        )
    return verdict.resolved if config == fixed else probe.ask(name, fixed).resolved


def find_machine(simulate: str | None, wanted_gpus: str | None, python: str) -> Machine:
    """The simulated GPU, the free GPUs of this host, or the CPU where the CPU build of vLLM is installed."""
    if simulate is not None:
        device = hardware(simulate)
        return Machine(device.gpu, hardware=device, count=simulated_count(wanted_gpus))
    version = vllm_version(python)
    if version is None:
        raise EnvironmentLacks(
            f"{python} has no vLLM",
            hint="pip install 'vopt[vllm]' (GPU) or 'vopt[cpu]'; --python PATH; or --simulate h200, which needs none",
        )
    if "cpu" in version:
        return Machine(None)
    seen = gpus.visible(gpus.inventory())
    if not seen:
        raise EnvironmentLacks(
            f"no NVIDIA GPU is visible here, and vLLM {version} is built for one",
            hint="--simulate h200 needs none; or install the CPU build: pip install 'vopt[cpu]'",
        )
    chosen = _chosen(seen, wanted_gpus)
    return Machine(Gpu(chosen[0].name, chosen[0].total_bytes), tuple(gpu.uuid for gpu in chosen), count=len(chosen))


def simulated_count(wanted: str | None) -> int:
    """How many GPUs are simulated: ``4``, or as many as are listed (``0,1,2,3``)."""
    words = [word.strip() for word in (wanted or "1").split(",")]
    if not all(word.isdigit() for word in words) or words == ["0"] or len(set(words)) < len(words):
        raise UsageError(f"--gpus {wanted}: a simulation wants the number of GPUs", hint="--gpus 4")
    return len(words) if len(words) > 1 else int(words[0])


def _chosen(seen: Sequence[gpus.Gpu], wanted: str | None) -> list[gpus.Gpu]:
    if wanted is None:
        searched = {uuid: f"in use by {owner.words()}" for uuid, owner in held_gpu_locks()}  # idle between two of its trials
        free = [gpu for gpu in seen if gpu.free and gpu.uuid not in searched]
        if not free:
            used = {gpu.uuid: searched.get(gpu.uuid, f"{gpu.used_bytes / 2**30:.1f} GiB used") for gpu in seen}
            held = "; ".join(f"GPU {gpu.index}: {used[gpu.uuid]}" for gpu in seen)
            raise EnvironmentLacks(f"no GPU is free ({held})", hint="vopt doctor   # says who holds them")
        return free[:1]
    by_name = {str(gpu.index): gpu for gpu in seen} | {gpu.uuid: gpu for gpu in seen}
    names = [word.strip() for word in wanted.split(",") if word.strip()]
    if unknown := [name for name in names if name not in by_name] or ([] if names else [wanted]):
        raise UsageError(
            f"--gpus {wanted}: there is no GPU {unknown[0]!r}; there are {', '.join(str(g.index) for g in seen)}",
            hint=f"--gpus {seen[0].index}",
        )
    chosen = [by_name[name] for name in names]
    for gpu in chosen:  # memory alone may be a screen's; somebody's work would be slowed down, or killed for its memory
        if gpu.holders:
            holders = ", ".join(f"{holder.name or 'process'} {holder.pid}" for holder in gpu.holders)
            raise EnvironmentLacks(
                f"--gpus {wanted}: {holders} computes on GPU {gpu.index}", hint="wait for it, or choose another; vopt doctor"
            )
    return chosen


def find_arguments(probe: VllmProbe, machine: Machine, version: str | None, *, installed: bool = False) -> Arguments:
    """The arguments of the installed vLLM; for a simulation those of a stored release, or with ``installed`` those of the vLLM
    of ``probe``."""
    if machine.simulated and not installed:
        try:
            return stored_arguments(version or NEWEST)
        except ValueError as error:
            raise UsageError(f"--vllm-version {version}: {error}", hint=f"--vllm-version {stored_versions()[-1]}") from None
    if version is not None:
        why = (
            "--python names a vLLM that is asked itself"
            if installed
            else "without --simulate the installed vLLM is asked itself"
        )
        raise UsageError(f"--vllm-version {version}: {why}", hint="leave --vllm-version out")
    return probe.arguments(cache_root() / "arguments")


def _model_name(given: str | None, command: LaunchCommand) -> str:
    if given and command.model and given != command.model:
        raise UsageError(f"two models are named: --model {given}, and {command.model} in the command", hint="leave --model out")
    name = given or command.model
    if not name:
        raise UsageError("no model is named", hint="vopt search --goal throughput --model Qwen/Qwen3-8B")
    return name


def _set_arguments(texts: Sequence[str], schema: Arguments) -> tuple[EngineConfig, tuple[str, ...]]:
    """``--set`` as engine arguments and as front-end words; a name that this vLLM lacks is an error."""
    given: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        refuse_secret(canonical(name.strip()), value)
        before = given.setdefault(canonical(name.strip()), value)
        if before != value:
            raise UsageError(f"--set {name.strip()} is given twice, as {before} and as {value}", hint=f"--set {text}")
    try:
        engine_texts, front = split_settings(texts, schema)
        engine = dict(parse_setting(text, schema) for text in engine_texts)
    except SpaceFileError as error:
        raise SearchSpaceError(
            error.file, error.key, error.value, error.rule, hint="vopt space --check 'vllm serve …'"
        ) from None
    return EngineConfig(engine), tuple(word for name, value in front.items() for word in argument_words(name, value, schema))
