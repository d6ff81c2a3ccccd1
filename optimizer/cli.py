"""The command line. The only place that prints and exits; stdout carries the answer alone, stderr everything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from vopt.optimizer.errors import GateFailed, Interrupted, NothingFeasible, VoptError
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

app = typer.Typer(name="vopt", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """The ``vopt`` command."""
    app(prog_name="vopt")


def verbs() -> tuple[str, ...]:
    """Every verb, in the order of ``vopt --help``."""
    return tuple(str(info.name) for info in app.registered_commands)


@app.callback()
def vopt(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Finds the vLLM launch command that is best for your model, machine and workload, and says how much better it is."""
    if show_version:
        try:
            print(version("vopt"))
        except PackageNotFoundError:
            print("source tree")
        raise typer.Exit


def _verb(name: str, options: type[Any]) -> Callable[[Callable[[Any], int | None]], Callable[[Any], int | None]]:
    """Registers a function of one options object as a verb; what it returns is the exit code."""

    def register(body: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
        def run(typed: Any) -> None:
            with _reported():
                code = body(typed)
            raise typer.Exit(code or 0)

        run.__name__, run.__doc__ = body.__name__, body.__doc__
        app.command(name)(command(options, run))
        return body

    return register


@contextmanager
def _reported() -> Iterator[None]:
    """Turns an expected error into one paragraph on stderr and its exit code."""
    try:
        yield
    except VoptError as error:
        print(f"vopt: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  try: {error.hint}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        print("vopt: interrupted", file=sys.stderr)
        raise typer.Exit(Interrupted.exit_code) from None


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


@_verb("search", SearchOptions)
def search(options: SearchOptions) -> int | None:
    """Find the best launch command: the whole loop, from the defaults to a confirmed answer."""
    from vopt.optimizer.launch import launch

    return _answer(options.json, options.quiet, lambda listener: launch(options, listener), dry_run=options.dry_run)


@_verb("resume", ResumeOptions)
def resume(options: ResumeOptions) -> int | None:
    """Go on with a study after an interruption, a crash, or with a larger budget."""
    from vopt.optimizer.launch import relaunch

    return _answer(options.json, options.quiet, lambda listener: relaunch(options, listener))


def _answer(as_json: bool, quiet: bool, run: Callable[[Any], Any], *, dry_run: bool = False) -> int | None:
    """Run a search with live progress on stderr and its answer on stdout."""
    from vopt.optimizer.recommend import Verdict
    from vopt.optimizer.report import console, document

    with console.progress(sys.stderr, quiet=quiet) as listener:
        study = run(listener)
    if dry_run:
        print(study)
        return None
    print(console.answer(study), file=sys.stderr)
    if as_json:
        _print_json(document.document(study))
    elif study.recommendation.argv is not None:
        print(document.command_line(study.recommendation.argv))
    if study.recommendation.verdict is Verdict.NOTHING_FEASIBLE:
        return NothingFeasible.exit_code
    return None


@_verb("bench", BenchOptions)
def bench(options: BenchOptions) -> int | None:
    """Measure one configuration, a running server, or a study's recommendation again."""
    from vopt.optimizer.bench_run import bench as run_bench
    from vopt.optimizer.report import console

    with console.progress(sys.stderr, quiet=options.json) as listener:
        outcome = run_bench(options, listener)
    if options.json:
        _print_json(outcome.document)
    else:
        print(outcome.text)
    return GateFailed.exit_code if outcome.gate_failed else None


@_verb("space", CheckedSpaceOptions)
def space(options: CheckedSpaceOptions) -> int | None:
    """Print what can be varied here, each bound with its reason; or check a launch command."""
    from vopt.optimizer.prepare import check_command, describe_space

    report = check_command(options) if options.check is not None else describe_space(options)
    _print_json(report.document) if options.json else print(report.text)
    return report.exit_code


@_verb("show", ShowOptions)
def show(options: ShowOptions) -> int | None:
    """Studies; or one study: baseline, winner, rejected with reasons, importance."""
    from vopt.optimizer.report import console, document, show
    from vopt.optimizer.stored import importance, studies, study

    if options.all:
        records = studies(options)
        _print_json(show.list_document(records)) if options.json else console.show(show.list_text(records), sys.stdout)
        return None
    record = study(options)
    if options.json:
        _print_json(document.document(record))
    else:
        console.show(show.study_text(record, importance(options, record)), sys.stdout)
    return None


@_verb("export", ExportOptions)
def export(options: ExportOptions) -> int | None:
    """The answer as a shell script, YAML for vllm serve, JSON, a compose file, or Kubernetes objects."""
    from vopt.optimizer.report.deploy import export as render
    from vopt.optimizer.stored import study

    _write(render(study(options), options.format, options.trial), options.output)
    return None


@_verb("report", ReportOptions)
def report(options: ReportOptions) -> int | None:
    """One self-contained HTML page."""
    from vopt.optimizer.report.page import page
    from vopt.optimizer.stored import importance, study

    record = study(options)
    output = options.output or Path(f"{record.name.replace('/', '_')}.html")
    _write(page(record, importance(options, record)), output)
    print(output)
    return None


@_verb("dashboard", DashboardOptions)
def dashboard(options: DashboardOptions) -> int | None:
    """optuna-dashboard on a read-only copy of the storage, bound to 127.0.0.1."""
    from vopt.optimizer.dashboard import serve

    def ready(url: str) -> None:
        print(f"optuna-dashboard on {url} (read-only; Ctrl-C ends it)", file=sys.stderr)

    serve(options.storage, options.study, options.port, ready)
    return None


@_verb("workload", WorkloadOptions)
def workload(options: WorkloadOptions) -> int | None:
    """Write a workload file from the histograms of a running vLLM."""
    from vopt.optimizer.bench_run import workload_from_metrics

    print(workload_from_metrics(options))
    return None


@_verb("doctor", DoctorOptions)
def doctor(options: DoctorOptions) -> int | None:
    """What is installed, which GPUs, free memory, leftovers of a dead search, and what to do about each."""
    from vopt.optimizer.doctor import examine

    report = examine(options)
    _print_json(report.document) if options.json else print(report.text)
    return None


@_verb("clean", CleanOptions)
def clean(options: CleanOptions) -> int | None:
    """Remove leftovers of dead searches, and caches beyond the disk budget."""
    from vopt.optimizer.clean import clean as sweep

    for line in sweep(options.disk_budget, dry_run=options.dry_run):
        print(line)
    return None


def _write(text: str, output: Path | None) -> None:
    """To stdout, or to a file that only its owner may read."""
    if output is None:
        sys.stdout.write(text)
        return
    output.write_text(text, encoding="utf-8")
    output.chmod(0o700 if text.startswith("#!") else 0o600)


def stored_of(options: ShowOptions | ExportOptions | ReportOptions | DashboardOptions) -> StoredOptions:
    """The part of a verb's options that says which study."""
    return StoredOptions(**{spec.name: getattr(options, spec.name) for spec in fields(StoredOptions)})
