"""Preflight: from what was typed to everything that a search needs, before any engine starts and before anything is stored."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vopt.objectives.goals import Goal, GoalError, Limit, built_in_goal, joint_goal, parse_limit, too_few_for_p99
from vopt.objectives.metrics import FEW_FOR_P99, Direction
from vopt.optimizer import gpus
from vopt.optimizer.environment import host_facts
from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.materialise import Materialised, materialise
from vopt.optimizer.load.plan import Arrivals
from vopt.optimizer.load.text import load_tokenizer, serving_sampling
from vopt.optimizer.load.workload import Workload, named
from vopt.optimizer.load.workload_files import read_workload
from vopt.optimizer.measurement import Asked
from vopt.optimizer.model_files import contents
from vopt.optimizer.options import BenchOptions, SearchOptions
from vopt.optimizer.report.redaction import clean
from vopt.optimizer.subject import Subject
from vopt.optimizer.variables import SHELL_PREFIX

SIMULATED_VOCAB = 32_000
MOST_IN_FLIGHT = 65_536
"""An address has so many ports. Engines are full long before: vLLM's own default is 1,024 sequences at most."""
MOST_RATE = 100_000.0
"""Requests per second; a client that reads their streams manages some thousands."""


@dataclass(frozen=True, slots=True)
class Load:
    """The workload and its requests. ``soak`` are the workload's longest requests."""

    workload: Workload
    requests: Materialised
    soak: Materialised


def find_goal(options: SearchOptions) -> Goal:
    """The goal that was typed, limits included; two of them are one goal with two objectives.

    Raises:
        UsageError: no goal, a goal or limit that cannot be meant, or more goals than can be weighed against each other.
    """
    if not options.goal:
        raise UsageError("no goal is given", hint="vopt search --goal throughput --model MODEL")
    try:
        limits: list[Limit] = [parse_limit(text) for text in options.limit]
        if len(options.goal) > 1:
            if options.metric is not None:
                raise UsageError(
                    f"--metric {options.metric}: with several goals it does not say which of them is meant",
                    hint=f"leave --metric out, or --goal {options.goal[0]} alone",
                )
            return joint_goal(options.goal, limits=limits, min_success=options.min_success)
        return built_in_goal(
            options.goal[0], metric=options.metric, limits=limits, min_success=options.min_success, guard=not options.no_guard
        )
    except GoalError as error:
        raise UsageError(str(error), hint=error.hint) from None


def find_load(
    options: SearchOptions | BenchOptions, subject: Subject, say: Callable[[str], None], *, replay: bool = False
) -> Load:
    """The workload, checked against ``max_model_len``, with the sampling parameters that ``vllm serve`` would apply.
    ``replay`` keeps a recording's order and times."""
    directory = subject.model.directory
    vocab = subject.shape.vocab if subject.shape is not None else SIMULATED_VOCAB
    tokenizer = None
    if directory is not None and not subject.machine.simulated:
        tokenizer, note = load_tokenizer(_tokenizer_directory(subject, directory), vocab=vocab)
        if note:
            say(note)
    workload = find_workload(options.workload, tokenizer, say)
    sampling = serving_sampling(directory) if directory is not None else {}
    workload = workload.with_sampling(sampling)
    max_model_len = longest_context(subject)

    def made(of: Workload) -> Materialised:
        return materialise(
            of,
            tokenizer,
            seed=options.seed,
            vocab=vocab,
            max_model_len=max_model_len,
            sampling=sampling,
            natural_ends=not (subject.dummy_weights or subject.machine.simulated) and of.natural_text and tokenizer is not None,
            prompts=not subject.machine.simulated,
            replay=replay and bool(of.recorded),
        )

    requests = made(workload)
    for note in requests.notes:
        say(note)
    return Load(workload, requests, made(workload.longest()))


def find_workload(name: str, tokenizer: Any, say: Callable[[str], None]) -> Workload:
    """A named workload, or one read from a file; what had to be left out of the file is said, line by line."""
    path = Path(name)
    if not path.suffix and not path.exists():
        return named(name)
    read = read_workload(path, tokenizer)
    for note in read.notes:
        say(f"{path}: {note}")
    for line in read.broken:
        say(f"{path}, entry {line.number}: {line.reason}")
    return read.workload


def longest_context(subject: Subject) -> int:
    """``max_model_len`` as the baseline will have it: stated, else the model's own."""
    stated = (subject.fixed | subject.baseline).get("max_model_len")
    if isinstance(stated, int) and stated > 0:
        return stated
    return subject.shape.max_position if subject.shape is not None else 2**31


def _tokenizer_directory(subject: Subject, directory: Path) -> Path:
    stated = (subject.fixed | subject.baseline).get("tokenizer")
    return Path(stated) if isinstance(stated, str) and Path(stated).is_dir() else directory


def find_asked(options: SearchOptions, goal: Goal) -> Asked:
    """What the user fixed of the load. A throughput goal is a closed loop; latency and goodput are measured at a rate."""
    if options.rate is not None and not (options.rate > 0 and options.rate < float("inf")):
        raise UsageError(f"--rate {options.rate}: a rate is requests per second, above 0 and finite", hint="--rate 8")
    if options.rate is not None and options.rate > MOST_RATE:
        raise UsageError(
            f"--rate {options.rate:g}: more requests per second than a client can send; at most {MOST_RATE:,.0f}",
            hint="leave --rate out: 0.6 of what the baseline sustains is found on its engine",
        )
    if options.window is not None and not options.window > 0:
        raise UsageError(f"--window {options.window}: a window is longer than 0 seconds", hint="--window 60s")
    if options.rate is not None and not any(_open_loop(*kind) for kind in _kinds(goal)):
        raise UsageError(
            "a throughput goal is measured in a closed loop: below saturation every configuration has the rate's throughput",
            hint="--goal latency --rate …, or leave --rate out",
        )
    open_loop = all(_open_loop(*kind) for kind in _kinds(goal))
    insists = options.window is not None  # a window that was typed is taken as it is
    if options.requests is not None and not insists and too_few_for_p99(goal.metric, options.requests):
        raise UsageError(
            f"--requests {options.requests}: a p99 of fewer than {FEW_FOR_P99:,} requests is mostly chance and no objective",
            hint=f"--metric {goal.metric.replace('p99', 'p95')}, or --window with a length to insist",
        )
    return Asked(
        arrivals=Arrivals.POISSON if open_loop else Arrivals.CLOSED,
        concurrency=concurrency_of(options.concurrency),
        rate=options.rate,
        window_s=options.window,
        max_requests=options.requests,
        min_success=next((limit.value for limit in goal.limits if limit.metric == "success_rate"), 0.99),
        seed=options.seed,
        least_successes=FEW_FOR_P99 if too_few_for_p99(goal.metric, 0) and not insists else 0,
        slos=goal.slos if any(name == "goodput" for name, _ in _kinds(goal)) else {},
    )


def find_second(goal: Goal, asked: Asked) -> Asked | None:
    """The open loop that follows the closed one on the same engine, where one goal needs either; ``None`` where one load shows
    all.

    A closed loop of C requests cannot show both: its mean end-to-end time is C / (requests per second) (Little's law), so
    throughput and latency would rise and fall together, and a front over it would be one point and its noise.
    """
    if asked.open_loop or not any(_open_loop(*kind) for kind in _kinds(goal)):
        return None
    return replace(asked, arrivals=Arrivals.POISSON)


def _kinds(goal: Goal) -> list[tuple[str, Direction]]:
    return [(one.name, one.direction) for one in goal.objectives] or [(goal.name, goal.direction)]


def _open_loop(name: str, direction: Direction) -> bool:
    """Whether a goal is measured at a rate: in a closed loop an engine that answers sooner is only sent more."""
    return direction is Direction.MINIMIZE or name == "goodput"


def concurrency_of(text: str | None) -> int | None:
    """``auto`` (or nothing) is ``None``; anything else is a whole number above 0."""
    if text is None or text == "auto":
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise UsageError(
            f"--concurrency {text}: requests in flight are a whole number above 0, or auto", hint="--concurrency 128"
        )
    if value > MOST_IN_FLIGHT:
        raise UsageError(
            f"--concurrency {text}: more requests at once than one host can send; at most {MOST_IN_FLIGHT:,}",
            hint="--concurrency auto finds how many fill this engine",
        )
    return value


def setup_of(
    options: SearchOptions,
    subject: Subject,
    goal: Goal,
    load: Load,
    space: Mapping[str, Any],
    shared: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The study attributes: what fixed this study, and what a resume has to find unchanged."""
    # A notification belongs to one run, and its command may hold the key of a web hook.
    typed = {name: _plain(value) for name, value in asdict(options).items() if name != "notify"}
    return {
        "model": subject.model.name,
        "model_revision": subject.model.revision,
        "model_files": contents(local) if (local := Path(subject.model.name).expanduser()).is_dir() else None,
        "model_shape": subject.shape.summary() if subject.shape is not None else None,
        "gpus": list(subject.machine.names),
        "vllm_version": subject.schema.version,
        "engine": options.engine if not subject.machine.simulated else "simulated",
        "simulated": subject.machine.simulated,
        "dummy_weights": subject.dummy_weights,
        "goal": goal.to_json(),
        "workload": load.workload.to_json() if not load.workload.recorded else {"name": load.workload.name},
        "workload_digest": load.workload.digest,
        "fixed": subject.fixed.to_json(),
        "baseline": subject.baseline.to_json(),
        "front_end": list(subject.front_end),
        "left_out": clean(list(subject.left_out)),
        "options": clean(typed),
        "seed": options.seed,
        "environment": {
            **host_facts(),
            **driver_of(subject),
            "shared_with": list(shared),
            "variables": clean({**engine_variables(), **subject.environment}),
            "variables_of_command": sorted(subject.environment),
        },
        "baseline_argv": list(subject.argv(subject.baseline)),
        **space,
    }


def driver_of(subject: Subject) -> dict[str, str]:
    """The NVIDIA driver of the GPUs of a search; nothing for a simulation and for the CPU."""
    found = gpus.select(subject.machine.uuids)
    return {"driver": found[0].driver} if found and found[0].driver else {}


def engine_variables() -> dict[str, str]:
    """vLLM's own variables that this process passes on to every engine it starts."""
    return {name: value for name, value in os.environ.items() if name.startswith(SHELL_PREFIX)}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def with_typed(options: SearchOptions, **changed: Any) -> SearchOptions:
    """The same options with what a resume may change, where it was given."""
    return replace(options, **{name: value for name, value in changed.items() if value is not None})
