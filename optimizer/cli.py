"""The command line. The only place that prints and exits; stdout carries the answer alone, stderr everything else."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vopt.optimizer import streams
from vopt.optimizer.errors import GateFailed, Interrupted, NothingFeasible, VoptError
from vopt.optimizer.faults import ending
from vopt.optimizer.interruption import close_ears, listen
from vopt.optimizer.one_thread import one_thread
from vopt.optimizer.options import (
    BenchOptions,
    CheckedSpaceOptions,
    CleanOptions,
    DashboardOptions,
    DoctorOptions,
    ExportOptions,
    ReportOptions,
    ResumeOptions,
    SearchOptions,
    ShowOptions,
    StoredOptions,
    WorkloadOptions,
    command,
)
from vopt.optimizer.secrecy import clean_text, known_secrets
from vopt.optimizer.way_on import USUAL, with_storage

if TYPE_CHECKING:  # the command line imports nothing heavy before it knows what to do
    from vopt.optimizer.history import StudyRecord
    from vopt.optimizer.recommend import Importance
    from vopt.optimizer.report.view import StudyView

_AS_COMMAND: ContextVar[bool] = ContextVar("as_command", default=False)
"""Whether this process is the command: then no signal has anything to say once the exit code is decided."""

app = typer.Typer(name="vopt", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """The ``vopt`` command."""
    os.umask(0o077)  # logs and records are the user's alone
    streams.secure()
    listen()
    _AS_COMMAND.set(True)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of libraries, to their callers: nothing that a user can do anything about
    try:
        try:
            app(prog_name="vopt")
        finally:
            sys.stdout.flush()
    except streams.ReaderGone as gone:
        sys.exit(gone.exit_code)
    except VoptError as error:
        close_ears()
        _say(error)
        sys.exit(error.exit_code)
    finally:
        close_ears()


def verbs() -> tuple[str, ...]:
    """Every verb, in the order of ``vopt --help``."""
    return tuple(str(info.name) for info in app.registered_commands)


def _show_version(asked: bool) -> None:
    if asked:
        try:
            print(version("vopt"))
        except PackageNotFoundError:
            print("source tree")
        raise typer.Exit


@app.callback()
def vopt(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Finds the vLLM launch command that is best for your model, machine and workload, and says how much better it is."""


def _verb(name: str, options: type[Any]) -> Callable[[Callable[[Any], int | None]], Callable[[Any], int | None]]:
    """Registers a function of one options object as a verb; what it returns is the exit code."""

    def register(body: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
        def run(typed: Any) -> None:
            with _reported(getattr(typed, "storage", USUAL)):
                code = body(typed)
            _decided()
            raise typer.Exit(code or 0)

        run.__name__, run.__doc__ = body.__name__, body.__doc__
        app.command(name)(command(options, run))
        return body

    return register


@contextmanager
def _reported(storage: str) -> Iterator[None]:
    """Turns an error into one paragraph on stderr and its exit code; one that nobody expected too."""
    try:
        yield
    except (typer.Exit, streams.ReaderGone):
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # a traceback tells a user nothing; it is kept in a file
        _decided()
        _say(end := ending(error), storage)
        raise typer.Exit(end.exit_code) from None


def _decided() -> None:
    """A second Ctrl-C now would cut off what is said of the first, and replace the exit code."""
    if _AS_COMMAND.get():
        close_ears()


def _say(error: VoptError, storage: str = USUAL) -> None:
    """No secret in it: stderr ends in logs. Imports nothing, for an interruption may have cut off any import."""
    secrets = known_secrets(os.environ)
    print(f"vopt: {clean_text(with_storage(error.message, storage), secrets)}", file=sys.stderr)
    if error.hint:
        print(f"  try: {clean_text(with_storage(error.hint, storage), secrets)}", file=sys.stderr)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


@_verb("search", SearchOptions)
def search(options: SearchOptions) -> int | None:
    """Find the best launch command: the whole loop, from the defaults to a confirmed answer."""
    with one_thread():
        from vopt.optimizer.launch import dry_run, launch
        from vopt.optimizer.notify import notified
        from vopt.optimizer.prepare import find_goal
        from vopt.optimizer.report.shown_progress import shown_progress

    goal = find_goal(options)
    objectives = [one.metric for one in goal.objectives]
    simulated = options.simulate is not None
    progress = shown_progress(goal.metric, goal.direction == "maximize", simulated, options.quiet, objectives)
    if options.dry_run:
        with progress as listener:
            text = dry_run(options, listener)
        streams.say(text)
        return None
    with notified(options.notify, _told) as begun, progress as listener:
        study = launch(options, listener, begun.name)
        begun.study = study
    return _answer(study, options)


@_verb("resume", ResumeOptions)
def resume(options: ResumeOptions) -> int | None:
    """Go on with a study after an interruption, a crash, or with a larger budget."""
    with one_thread():
        from vopt.optimizer.launch import relaunch
    from vopt.optimizer.notify import notified
    from vopt.optimizer.report.shown_progress import shown_progress
    from vopt.optimizer.study import read_study

    view = _view(read_study(options.storage, options.study, data_dir=options.data_dir))
    objectives = [str(one["metric"]) for one in view.goal.get("objectives", ())]
    progress = shown_progress(view.metric, view.maximize, view.simulated, options.quiet, objectives)
    with notified(options.notify, _told) as begun, progress as listener:
        begun.name(view.name)
        study = relaunch(options, listener)
        begun.study = study
    return _answer(study, options)


def _told(text: str) -> None:
    print(f"vopt: {text}", file=sys.stderr)


def _answer(study: StudyRecord, options: SearchOptions | ResumeOptions) -> int | None:
    """The verdict on stderr, the command (or the document) on stdout; the exit code."""
    from vopt.optimizer.recommend import Verdict
    from vopt.optimizer.report import console, document, shell, show, wording

    view = _view(study)
    try:
        console.write_blocks(show.answer_blocks(view, clean_text(options.storage, known_secrets(os.environ))), sys.stderr)
        if options.json:
            _print_json(document.answer_document(view))
        elif view.answer is not None and view.answer.argv is not None:
            print(wording.command_text(view.answer.argv, shell.exported_variables(view)))
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; the study {study.name} has its answer", hint=f"vopt show {study.name}") from None
    return NothingFeasible.exit_code if view.verdict is Verdict.NOTHING_FEASIBLE else None


def _view(study: StudyRecord) -> StudyView:
    from vopt.optimizer.report.view import StudyView

    return StudyView.of(study, known_secrets(os.environ))


@_verb("bench", BenchOptions)
def bench(options: BenchOptions) -> int | None:
    """Measure one configuration, a running server, or a study's recommendation again."""
    from vopt.optimizer.bench_run import bench as run_bench
    from vopt.optimizer.bench_study import metric_of
    from vopt.optimizer.report.shown_progress import shown_progress

    with shown_progress(*metric_of(options), options.simulate is not None, options.json) as listener:
        outcome = run_bench(options, listener)
    if options.json:
        _print_json(outcome.document)
    else:
        streams.say(outcome.text)
    return GateFailed.exit_code if outcome.gate_failed else None


@_verb("space", CheckedSpaceOptions)
def space(options: CheckedSpaceOptions) -> int | None:
    """Print what can be varied here, each bound with its reason; or check a launch command."""
    from vopt.optimizer.space_of import check_command, describe_space

    report = check_command(options) if options.check is not None else describe_space(options)
    if options.json:
        _print_json(report.document)
    else:
        streams.say(report.text)
    return report.exit_code


@_verb("show", ShowOptions)
def show(options: ShowOptions) -> int | None:
    """Studies; or one study: baseline, winner, rejected with reasons, importance."""
    from vopt.optimizer.report import console, document, show
    from vopt.optimizer.study import list_studies

    if options.all:
        views = [_view(record) for record in list_studies(options.storage, data_dir=options.data_dir)]
        if options.json:
            _print_json(document.list_document(views))
        else:
            console.write_blocks(show.list_blocks(views), sys.stdout)
        return None
    record = _stored(options)
    if options.json:
        _print_json(document.study_document(_view(record)))
    else:
        console.write_blocks(show.study_blocks(_view(record), _importance(record)), sys.stdout)
    return None


def _stored(options: StoredOptions) -> StudyRecord:
    from vopt.optimizer.study import read_study

    return read_study(options.storage, options.study, data_dir=options.data_dir)


def _importance(record: StudyRecord) -> Importance:
    from vopt.optimizer.importance import importance

    return importance(record)


@_verb("export", ExportOptions)
def export(options: ExportOptions) -> int | None:
    """The answer as a shell script, YAML for vllm serve, JSON, a compose file, or Kubernetes objects."""
    from vopt.optimizer.report.deploy import export as render

    streams.write_text(
        render(_stored(options), options.format, options.trial, secrets=known_secrets(os.environ)), options.output
    )
    return None


@_verb("report", ReportOptions)
def report(options: ReportOptions) -> int | None:
    """One self-contained HTML page."""
    from vopt.optimizer.report.page import page

    record = _stored(options)
    output = options.output or Path(f"{record.name.replace('/', '_')}.html")
    secrets = known_secrets(os.environ)
    streams.write_text(page(record, _importance(record), secrets=secrets, storage=options.storage), output)
    print(output)
    return None


@_verb("dashboard", DashboardOptions)
def dashboard(options: DashboardOptions) -> int | None:
    """optuna-dashboard on a read-only copy of the storage, bound to 127.0.0.1."""
    from vopt.optimizer.dashboard import serve

    def ready(url: str) -> None:
        print(f"optuna-dashboard on {url} (read-only; Ctrl-C ends it)", file=sys.stderr)

    serve(
        options.storage,
        options.study,
        port=options.port,
        data_dir=options.data_dir,
        ready=ready,
        secrets=known_secrets(os.environ),
    )
    return None


@_verb("workload", WorkloadOptions)
def workload(options: WorkloadOptions) -> int | None:
    """Write a workload file from the histograms of a running vLLM."""
    from vopt.optimizer.bench_run import workload_from_metrics

    print(workload_from_metrics(options))
    return None


@_verb("doctor", DoctorOptions)
def doctor(options: DoctorOptions) -> int | None:
    """What is installed, which GPUs, free memory, leftovers of a dead search, and what to do about each. Exit 3: a fault."""
    from vopt.optimizer.doctor import examine

    report = examine(options)
    if options.json:
        _print_json(report.document)
    else:
        streams.say(report.text)
    return report.exit_code


@_verb("clean", CleanOptions)
def clean(options: CleanOptions) -> int | None:
    """Remove leftovers of dead searches, and caches beyond the disk budget."""
    from vopt.optimizer.clean import clean as sweep

    for line in sweep(options.disk_budget, dry_run=options.dry_run):
        print(line)
    return None
