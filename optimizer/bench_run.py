"""``vopt bench``: from what was typed to figures. Nothing here prints."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from vopt.optimizer.bench import BenchLabels, BenchOutcome, BenchResult, run_bench, write_records
from vopt.optimizer.bench_load import checked_load, checked_output, find_slos, load_words, replayed
from vopt.optimizer.bench_server import server_load
from vopt.optimizer.bench_text import bench_text, full_document
from vopt.optimizer.engine.base import Session
from vopt.optimizer.environment import fetch_weights, host_facts
from vopt.optimizer.errors import EnvironmentLacks, NothingFeasible, UsageError, VoptError
from vopt.optimizer.evaluate import LOG
from vopt.optimizer.events import Event, Listener, LoadTicked, Note, PhaseBegan, TrialBegan
from vopt.optimizer.history import Stage, TrialRequest
from vopt.optimizer.host import reserved
from vopt.optimizer.load.plan import Arrivals, Tick
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.target import Dialect
from vopt.optimizer.measurement import Asked
from vopt.optimizer.not_simulated import say_left_out
from vopt.optimizer.options import BenchOptions
from vopt.optimizer.prepare import find_load
from vopt.optimizer.report.redaction import clean, clean_text, known_secrets
from vopt.optimizer.sessions import KINDS, opener
from vopt.optimizer.streams import columns
from vopt.optimizer.subject import ASKING, Subject, find_subject
from vopt.optimizer.traffic import workload_from_metrics
from vopt.optimizer.trial import Blame, Deadlines, EngineFailure, Failed, Phase, TrialSpec

__all__ = ["BenchOutcome", "bench", "workload_from_metrics"]

LOG_LINES = 12
URL_ONLY = {"api_key_file": "--api-key-file", "tokenizer": "--tokenizer"}
ENGINE_ONLY = {
    "command": "arguments after --",
    "set": "--set",
    "python": "--python",
    "simulate": "--simulate",
    "vllm_version": "--vllm-version",
    "gpus": "--gpus",
}


@dataclass(frozen=True, slots=True)
class Measurand:
    """What is measured: how its sessions are opened, its requests, and how it is called."""

    open_session: Callable[[int], Session]
    source: RequestSource
    labels: BenchLabels
    fresh_starts: bool
    simulated: bool = False
    replay_ends: bool = True
    command: Sequence[str] = ()
    begin: Callable[[int], None] = lambda start: None


@dataclass(frozen=True, slots=True)
class Told:
    """A listener that remembers the notes: they belong to the result as much as to the progress."""

    listener: Listener
    notes: list[str] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note) and not event.text.startswith(ASKING):
            self.notes.append(event.text)
        self.listener(event)

    def say(self, text: str, important: bool = False) -> None:
        self(Note(text, important))


def bench(options: BenchOptions, listener: Listener) -> BenchOutcome:
    """Measure one configuration, a running server, or a study's recommendation again.

    Raises:
        UsageError: what was typed cannot be meant; nothing was started.
        EnvironmentLacks: no vLLM, no GPU, no such server, the GPU is another search's, or the machine failed.
        NothingFeasible: the engine did not start, died, or answered no request; with the last lines of its log.
    """
    checked_combination(options)
    checked_output("--records", options.records)
    if options.study is not None:
        from vopt.optimizer.bench_study import measure_again

        return measure_again(options, listener)

    told = Told(listener)
    asked, slos = checked_load(options, told.say), find_slos(options.slo)
    if is_url(options):
        return _bench_server(options, asked, slos, told)
    with work_directory(options.data_dir) as directory:
        return _bench_engine(options, asked, slos, directory, told)


def is_url(options: BenchOptions) -> bool:
    """Whether a running server is to be measured."""
    return options.url is not None or options.engine.startswith(("http://", "https://"))


def checked_combination(options: BenchOptions) -> None:
    """``UsageError`` for options that say two different things."""
    if options.gate is not None and options.study is None:
        raise UsageError("--gate compares with what a study found", hint="--study STUDY --gate 3%")
    if options.gate is not None and not 0 <= options.gate < 1:
        raise UsageError(f"--gate {options.gate * 100:g}%: a gate is from 0 % to below 100 %", hint="--gate 3%")
    if is_url(options):
        if options.study is not None:
            raise UsageError("--study starts the study's own commands, so it has no --url", hint="leave one of them out")
        if options.url is not None and options.engine.startswith(("http://", "https://")):
            raise UsageError("two servers are named, by --url and by --engine", hint="leave --engine out")
        if typed := _typed(options, ENGINE_ONLY):
            raise UsageError(
                f"{typed} belongs to an engine that we start; {options.url or options.engine} runs already",
                hint="leave it out, or leave the URL out",
            )
        return
    if options.engine not in KINDS:
        raise UsageError(
            f"--engine {options.engine}: there are {', '.join(KINDS)}, or the URL of a running server", hint="--engine vllm"
        )
    if typed := _typed(options, URL_ONLY):
        raise UsageError(f"{typed} belongs to a running server", hint="--url http://127.0.0.1:8000")
    if options.client_processes is not None and (options.engine != "server" or options.study is not None):
        raise UsageError(
            "--client-processes is about a server that is loaded over HTTP"
            + ("; a study has fixed its number" if options.study is not None else ""),
            hint="leave it out" if options.study is not None else "--engine server, or --url http://127.0.0.1:8000",
        )
    if options.endpoint != "completions":
        raise UsageError(
            f"--endpoint {options.endpoint} belongs to a running server: engines that we start get token ids",
            hint="--url http://127.0.0.1:8000 --endpoint chat",
        )


def _typed(options: BenchOptions, names: Mapping[str, str]) -> str | None:
    return next((words for name, words in names.items() if getattr(options, name)), None)


@contextmanager
def work_directory(data_dir: Path | None) -> Iterator[Path]:
    """Where engines write their logs: below ``--data-dir``, else a temporary directory that only a failure leaves behind."""
    if data_dir is not None:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Absolute, which mkdtemp makes it only from Python 3.12 on: an engine's processes work in other directories.
    directory = Path(tempfile.mkdtemp(prefix="vopt-bench-" if data_dir is None else "bench-", dir=data_dir)).absolute()
    try:
        yield directory
    except BaseException:
        if not any(directory.rglob("engine.log")):
            shutil.rmtree(directory, ignore_errors=True)
        raise
    if data_dir is None:
        shutil.rmtree(directory, ignore_errors=True)


def _bench_engine(options: BenchOptions, asked: Asked, slos: Mapping[str, float], directory: Path, told: Told) -> BenchOutcome:
    subject = find_subject(options, told.say, warn=lambda text: told.say(text, important=True))
    load = find_load(options, subject, told.say, replay=asked.arrivals is Arrivals.REPLAY)
    asked = replayed(asked, load.workload)
    say_left_out(subject, told.say)
    kind = "simulated" if subject.machine.simulated else options.engine
    open_session = opener(kind, subject)
    if not subject.machine.simulated:
        fetch_weights(subject.model, told.say)
    config = subject.fixed | subject.baseline

    def begin(start: int) -> None:
        request = TrialRequest(str(start + 1), config, Stage.SEARCH)
        told(TrialBegan(request, "" if start == 0 else "a fresh start"))

    labels = BenchLabels(
        model=subject.model.name,
        backend="vllm",
        tokenizer=str(subject.model.directory) if subject.model.directory and not subject.machine.simulated else None,
        workload=load.workload.name,
        workload_hash=load.workload.digest,
        environment={**host_facts(), "gpus": list(subject.machine.names), "engine": kind},
    )
    measurand = Measurand(
        open_session=lambda start: open_session(spec_of(subject, options, asked, directory, start), False),
        source=load.requests.source,
        labels=labels,
        fresh_starts=True,
        simulated=subject.machine.simulated,
        command=subject.argv(subject.baseline),
        begin=begin,
    )
    with reserved(subject, f"vopt bench of {subject.model.name}"):
        return _measured(options, measurand, asked, slos, told, directory)


def spec_of(subject: Subject, options: BenchOptions, asked: Asked, directory: Path, start: int) -> TrialSpec:
    """The specification of start number ``start`` of the configuration that was typed."""
    own = directory / str(start + 1)
    own.mkdir(parents=True, exist_ok=True, mode=0o700)
    return subject.trial_spec(
        f"bench-{start + 1}",
        subject.baseline,
        own,
        Deadlines(load_s=asked.deadline_s),
        seed=options.seed,
        client_processes=options.client_processes,
    )


def _bench_server(options: BenchOptions, asked: Asked, slos: Mapping[str, float], told: Told) -> BenchOutcome:
    from vopt.optimizer.engine.server import UrlSession

    found = server_load(options, asked, told.say)
    asked = replayed(asked, found.workload)
    target = found.server.target
    labels = BenchLabels(
        model=target.model,
        backend=target.dialect.value,
        endpoint=target.endpoint.value,
        tokenizer=found.tokenizer,
        workload=found.workload.name,
        workload_hash=found.workload.digest,
        environment={**host_facts(), "url": target.base_url, "engine": "url"},
    )
    measurand = Measurand(
        open_session=lambda start: UrlSession(target, clients=options.client_processes),
        source=found.requests.source,
        labels=labels,
        fresh_starts=False,
        replay_ends=target.dialect is Dialect.VLLM,
    )
    return _measured(options, measurand, asked, slos, told, None, target.api_key)


def _measured(
    options: BenchOptions,
    measurand: Measurand,
    asked: Asked,
    slos: Mapping[str, float],
    told: Told,
    directory: Path | None,
    api_key: str | None = None,
) -> BenchOutcome:
    """Run it, keep the records, and say what came out."""
    label = "1"
    secrets = (*known_secrets(os.environ), *([api_key] if api_key else []))

    def open_session(start: int) -> Session:
        nonlocal label
        label = str(start + 1)
        measurand.begin(start)
        return measurand.open_session(start)

    def on_tick(tick: Tick) -> bool:
        told(LoadTicked(label, tick))
        return True

    def on_phase(phase: Phase, words: str) -> None:
        told(PhaseBegan(label, phase, words))

    try:
        result = run_bench(
            open_session,
            measurand.source,
            asked,
            repeat=options.repeat,
            fresh_starts=measurand.fresh_starts,
            replay_ends=measurand.replay_ends,
            slos=slos or None,
            on_tick=on_tick,
            on_phase=on_phase,
            say=told.say,
            log_of=lambda start: None if directory is None else directory / str(start + 1) / LOG,
        )
    except EngineFailure as failure:
        if failure.failed.load is not None and options.records is not None:
            write_records(failure.failed.load.records, options.records)
        refuse(failure.failed, directory, secrets)
    for left in result.leftovers:
        told(Note(f"left behind: {left}", important=True))
    records = _write_all(result, options.records)
    _check_any_succeeded(result, secrets)
    words = load_words(asked, result.first.load.concurrency, result.first.load.rate)
    document = full_document(result, measurand.labels, measurand.source, words, measurand.simulated)
    document["vopt"] |= {"command": list(measurand.command), "records": [str(path) for path in records]}
    document["vopt"]["notes"] = [*told.notes, *document["vopt"]["notes"]]
    document["vopt"]["plan"] = None if result.plan is None else asdict(result.plan)
    document = clean(document, secrets)
    return BenchOutcome(document, clean_text(bench_text(document, result, columns()), secrets))


def _write_all(result: BenchResult, path: Path | None) -> list[Path]:
    """One file for each load: ``records.jsonl.gz``, ``records-2.jsonl.gz``, ..."""
    if path is None:
        return []
    written = []
    for number, measured in enumerate(load for loads in result.starts for load in loads):
        stem, dot, rest = path.name.partition(".")
        own = path if number == 0 else path.with_name(f"{stem}-{number + 1}{dot}{rest}")
        write_records(measured.load.records, own)
        written.append(own)
    return written


def _check_any_succeeded(result: BenchResult, secrets: Sequence[str]) -> None:
    load, metrics = result.first.load, result.first.metrics
    if any(record.succeeded for record in load.records):
        return
    kinds = "; ".join(f"{count.n} x {kind}: {count.first_message}" for kind, count in metrics.failures.items())
    raise NothingFeasible(
        clean_text(f"no request succeeded ({load.status.value}): {kinds or load.detail or 'none was finished'}", secrets),
        hint="a longer --window, if requests were under way; else see the server's or engine's log",
    )


def refuse(failed: Failed, directory: Path | None, secrets: Sequence[str] = ()) -> NoReturn:
    """Raise the error of a failed engine by whose fault it was, with the last lines of its log."""
    error: type[VoptError]
    match failed.kind.blame:
        case Blame.CONFIGURATION:
            error = NothingFeasible
        case Blame.WORKLOAD:
            error = UsageError
        case Blame.INFRASTRUCTURE:
            error = EnvironmentLacks
    words = [f"{failed.kind} during {failed.phase}: {failed.detail}"]
    if failed.load is not None:
        done = sum(record.succeeded for record in failed.load.records)
        words.append(f"  {done} of {len(failed.load.records)} requests had succeeded")
    words += [f"  | {line}" for line in failed.log_tail[-LOG_LINES:]]
    hint = "; ".join(f"{name}: {json.dumps(dict(bound))}" for name, bound in failed.hint.items())
    if directory is not None and any(directory.rglob("engine.log")):
        hint = "; ".join(part for part in (hint, f"the whole log is below {directory}") if part)
    raise error(clean_text("\n".join(words), secrets), hint=hint) from None
