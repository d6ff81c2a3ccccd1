"""What the programs of this folder share: measured engine starts, a journal that survives a break, and a time budget.

A start goes through the product's own sessions, loads and metrics; nothing here measures by itself. A journal is a file of
JSON lines: a header that fixes what is measured, then one line for each start that came to an end, failures of the
configuration included. What failed for the machine's sake is not written, so that the next run tries it again.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

from vopt.objectives.metrics import compute_metrics
from vopt.objectives.records import LoadResult
from vopt.optimizer import host
from vopt.optimizer.bench_run import spec_of
from vopt.optimizer.engine.base import OnPhase, Session
from vopt.optimizer.engine.process import ProcessSession
from vopt.optimizer.environment import host_facts
from vopt.optimizer.errors import VoptError
from vopt.optimizer.evaluate import OpenSession
from vopt.optimizer.first_load import NumberedLoads
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.measurement import Asked
from vopt.optimizer.options import BenchOptions
from vopt.optimizer.prepare import driver_of, find_load
from vopt.optimizer.sessions import opener
from vopt.optimizer.subject import Subject, find_subject
from vopt.optimizer.trial import Blame, EngineConfig, EngineFailure, Failed, Phase, Started, TrialSpec

WORK_REMAINS = 10
"""Exit code of a program that ended because its time budget did: run the same command again."""

DUMMY = {"load_format": "dummy", "max_model_len": 8192}
GDN = {"language_model_only": True, "gdn_prefill_backend": "triton"}
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": DUMMY,
    "qwen3-8b": DUMMY,
    "qwen3.5-9b": DUMMY | GDN,
    "qwen3.5-35b-a3b-fp8": DUMMY | GDN,
}
"""What each model is always started with, by the name of its folder. The GDN models need a prefill backend that does not
come from FlashInfer, which the hosts these programs were written for do not have."""

KEPT = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enable_prefix_caching",
    "max_cudagraph_capture_size",
    "kv_cache_dtype",
    "async_scheduling",
    "block_size",
    "gpu_memory_utilization",
    "performance_mode",
)
"""Resolved arguments that are kept with each start."""


@dataclass(slots=True)
class Patience:
    """Seconds that are left of a run; a step that would outlast them is not begun."""

    budget_s: float
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.began_s)

    def covers(self, step_s: float) -> bool:
        return self.left_s >= step_s


class Journal:
    """The file that a program writes and goes on from. A last line that a break has torn is dropped."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` when the file was begun for something else; names the field."""
        self.path, self.entries = path, []  # type: Path, list[dict[str, Any]]
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(dict(header))
            return
        lines = path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
            path.write_bytes(b"".join(lines))
        found, *self.entries = [json.loads(line) for line in lines]
        for name, value in header.items():
            if name not in PASSING and found.get(name) != json.loads(json.dumps(value)):
                raise ValueError(f"{path} was begun with {name} = {found.get(name)!r}, now it is {value!r}: use another file")

    def add(self, entry: dict[str, Any]) -> None:
        self._write(entry)
        self.entries.append(json.loads(json.dumps(entry)))

    def _write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())


PASSING = ("environment", "command")
"""Fields of a header that may differ from run to run: another host of the same kind goes on with the file."""


@dataclass(frozen=True, slots=True)
class Stand:
    """One model on one machine, ready to be started again and again."""

    options: BenchOptions
    subject: Subject
    source: RequestSource
    workload: Mapping[str, Any]
    digest: str
    open_session: OpenSession
    directory: Path
    start_limit_s: float = 420.0

    def header(self, purpose: str, **facts: Any) -> dict[str, Any]:
        """The first line of a journal: what was measured, and with what."""
        subject = self.subject
        return {
            "format": f"vopt-{purpose}",
            "format_version": 1,
            "model": Path(subject.model.name).name,
            "gpus": list(subject.machine.names),
            "vllm_version": subject.schema.version,
            "simulated": subject.machine.simulated,
            "fixed": subject.fixed.to_json(),
            "workload": dict(self.workload),
            "workload_digest": self.digest,
            "seed": self.options.seed,
            **facts,
            "environment": {**host_facts(), **driver_of(subject)},
        }


def reported(main: Callable[[Sequence[str] | None], int]) -> Callable[[Sequence[str] | None], int]:
    """``main`` with its failures said and as exit codes: 3 the machine, 2 what was typed cannot be meant."""

    @wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except EngineFailure as failure:
            print(f"the machine failed: {failure}", file=sys.stderr)
            return 3
        except (VoptError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2

    return run


def add_options(parser: argparse.ArgumentParser, *, out: str) -> None:
    """The options that all programs of this folder have. ``out`` is where results go by default.

    What they print goes out line by line from here on: most runs are detached, and only their log tells how far they are.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of the model directories")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="in every start, beside what is known")
    parser.add_argument("--python", type=Path, help="the interpreter that has vLLM (this one)")
    parser.add_argument("--gpus", help="like vopt's --gpus")
    parser.add_argument("--simulate", help="like vopt's --simulate: tries the program, measures nothing")
    parser.add_argument("--out", type=Path, default=Path(out), help=f"where results are kept and gone on from ({out})")
    parser.add_argument("--budget", type=float, default=540.0, metavar="S", help="begin nothing that would end later (540)")
    parser.add_argument("--window", type=float, default=10.0, metavar="S", help="seconds of each measured window (10)")
    parser.add_argument("--start-limit", type=float, default=420.0, metavar="S", help="a start that takes longer hangs (420)")
    parser.add_argument("--workload", default="chat", help="like vopt's --workload")
    parser.add_argument("--seed", type=int, default=0)


def settings_of(typed: argparse.Namespace, model: str) -> list[str]:
    """``NAME=JSON`` of a model's starts: what is known of it, then what was typed."""
    return [*(f"{name}={json.dumps(value)}" for name, value in KNOWN.get(Path(model).name, {}).items()), *typed.set]


def model_path(typed: argparse.Namespace, model: str) -> str:
    """A model's folder below ``--models``, or what was typed where there is none."""
    inside = typed.models / model
    return str(inside) if inside.is_dir() else model


def stand_of(typed: argparse.Namespace, model: str) -> Stand:
    """Find model, machine and requests, as ``vopt bench`` does. Raises ``VoptError``."""
    options = BenchOptions(
        model=model_path(typed, model),
        set=settings_of(typed, model),
        python=typed.python,
        gpus=typed.gpus,
        simulate=typed.simulate,
        workload=typed.workload,
        seed=typed.seed,
    )
    subject = find_subject(options, say)
    load = find_load(options, subject, say)
    kind = "simulated" if subject.machine.simulated else "vllm"
    logs = typed.out.absolute().parent / f"{typed.out.stem}-logs" / Path(model).name
    return Stand(
        options,
        subject,
        load.requests.source,
        load.workload.to_json(),
        load.workload.digest,
        opener(kind, subject),
        logs,
        typed.start_limit,
    )


def reserved(stand: Stand, purpose: str) -> AbstractContextManager[None]:
    """The stand's GPUs for this program alone, also between two of its starts. Raises ``Locked``."""
    return host.reserved(stand.subject, f"{purpose} of {Path(stand.subject.model.name).name}")


def on_one_gpu(stand: Stand, place: int, *, ahead: bool = False) -> Stand:
    """The same stand on one of its GPUs alone, with logs of its own. ``ahead``: while an engine of it starts, a process imports
    vLLM for its next start, as in a search; without it nothing works on this host but what is meant to."""
    machine = replace(stand.subject.machine, uuids=stand.subject.machine.uuids[place : place + 1], count=1)
    subject = replace(stand.subject, machine=machine)
    open_session = opener("simulated" if machine.simulated else "vllm", subject)

    def alone(spec: TrialSpec, served: bool) -> Session:
        """The same without what comes ahead."""
        return ProcessSession(spec)

    open_session = open_session if ahead or machine.simulated else alone
    return replace(stand, subject=subject, open_session=open_session, directory=stand.directory / f"gpu-{place}")


def told(label: str) -> OnPhase:
    """Says where a start is: a first one takes minutes."""
    return lambda phase, words: say(f"{label}: {words}")


def say(text: str) -> None:
    print(f"[{datetime.now(UTC):%H:%M:%S}] {text}", file=sys.stderr, flush=True)


def closed(concurrency: int, window_s: float, seed: int = 0) -> LoadPlan:
    """A load that never doubles its window: the time on a GPU is planned."""
    return LoadPlan(
        arrivals=Arrivals.CLOSED,
        concurrency=concurrency,
        window_s=window_s,
        max_doublings=0,
        min_requests=0,
        deadline_s=max(120.0, 10 * window_s),
        seed=seed,
    )


def session_of(stand: Stand, config: Mapping[str, Any], *, label: str, served: bool = False) -> Session:
    """A session in a directory of its own, whatever other program writes its logs beside it."""
    number = 0
    while True:
        try:
            (stand.directory / str(number + 1)).mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
    spec = spec_of(stand.subject, stand.options, Asked(Arrivals.CLOSED), stand.directory, number)
    limits = replace(spec.deadlines, start_s=stand.start_limit_s)  # time on a GPU is short: nothing waits 15 minutes
    spec = replace(spec, label=label, arguments=stand.subject.fixed | config, deadlines=limits)
    return stand.open_session(spec, served)


def measured_start(
    stand: Stand, config: Mapping[str, Any], plans: Sequence[LoadPlan], *, label: str, served: bool = False, must: bool = False
) -> dict[str, Any]:
    """One fresh start with one load for each plan: a journal's line.

    Raises ``EngineFailure`` when it failed for the machine's sake, or at all where it ``must`` not; else a failure of the
    configuration is in the line, beside the loads that came before it.
    """
    session = session_of(stand, config, label=label, served=served)
    began_at, failure = datetime.now(UTC).isoformat(timespec="seconds"), None
    started: Started | None = None
    loads: list[dict[str, Any]] = []
    marks = [time.monotonic()]
    try:
        started = session.start(told(label))
        marks.append(time.monotonic())
        once = NumberedLoads(stand.source, lambda tick: True).on(session.load)
        for plan in plans:
            loads += [load_row(once(plan))]  # one by one: what was measured before a failure is kept
    except EngineFailure as failed:
        if must or failed.failed.kind.blame is Blame.INFRASTRUCTURE:
            raise
        failure, started = failed.failed, started or failed.failed.started
    finally:
        marks.append(time.monotonic())
        left = session.close()
    clock = {Phase.START: marks[1] - marks[0], Phase.LOAD: marks[-1] - marks[1], Phase.STOP: time.monotonic() - marks[-1]}
    return {
        "label": label,
        "config": dict(config),
        "served": served,
        "began_at": began_at,
        "outcome": "measured" if failure is None else "failed",
        "failure": failure and failure_row(failure),
        "started": started and started_row(started),
        "phase_s": {str(phase): rounded(s) for phase, s in {**clock, **getattr(session, "phase_s", {})}.items()},
        "wall_s": rounded(time.monotonic() - marks[0]),
        "loads": loads,
        "left_behind": list(left),
    }


def started_row(started: Started) -> dict[str, Any]:
    return {
        "resolved": {name: started.resolved[name] for name in KEPT if name in started.resolved},
        "kv_cache_tokens": started.kv_cache_tokens,
        "kv_cache_bytes": started.kv_cache_bytes,
        "num_gpu_blocks": started.num_gpu_blocks,
        "start_class": started.start_class and started.start_class.value,
        "start_parts_s": {name: rounded(seconds) for name, seconds in started.start_parts_s.items()},
    }


def failure_row(failed: Failed) -> dict[str, Any]:
    return {"phase": failed.phase.value, "kind": failed.kind.value, "detail": failed.detail[:300]}


def load_row(load: LoadResult) -> dict[str, Any]:
    metrics = compute_metrics(load)
    return {
        "concurrency": load.concurrency,
        "status": load.status.value,
        "window_s": None if load.window is None else rounded(load.window.length_s),
        "succeeded": metrics.succeeded,
        "failed": metrics.failed,
        "censored": metrics.censored,
        "client_limited": load.client.limited,
        "metrics": {name: rounded(value) for name, value in metrics.values.items()},
    }


def rounded(value: float) -> float:
    """Six significant digits: more than any of these figures has."""
    return float(f"{value:.6g}")


def config_words(config: Mapping[str, Any]) -> str:
    """A configuration on one line."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in EngineConfig(config).items()) or "defaults"


def row_words(entry: Mapping[str, Any]) -> str:
    """A journal's line for people."""
    rates = " ".join(f"{load['concurrency']}: {load['metrics'].get('tokens_per_s', 0):,.0f} tok/s" for load in entry["loads"])
    end = rates if entry["failure"] is None else f"{entry['failure']['kind']}: {entry['failure']['detail'][:80]}"
    return f"{entry['label']}: {config_words(entry['config'])}: start {entry['phase_s'].get('start', 0):.1f} s; {end}"
