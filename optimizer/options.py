"""What the user may type, declared once: each field is the option, its help, its default and its type.

``command`` turns a function of one options object into a Typer command, so help text, parsing and the typed value come from
the same declaration, and ``docs/reference/cli.md`` is generated from it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from vopt.optimizer.shared_options import (
    BUDGET,
    GOAL,
    LOAD,
    MACHINERY,
    OUTPUT,
    SUBJECT,
    Acceptance,
    AllowContract,
    AllowLossy,
    Concurrency,
    DataDir,
    EngineKind,
    From,
    Gpus,
    Json,
    Keep,
    Mode,
    Model,
    NoMemoryCheck,
    Notify,
    Python,
    Rate,
    Requests,
    Seed,
    Set,
    Simulate,
    SpaceFile,
    Storage,
    Vary,
    VllmVersion,
    Window,
    Words,
    WorkloadOption,
    duration_s,
    option,
    percent,
    size_bytes,
)


@dataclass(frozen=True, kw_only=True)
class SpaceOptions:
    """What ``vopt space`` and ``vopt search`` share: the subject and what may vary."""

    command: Words = None
    model: Model = None
    from_file: From = None
    set: Set = field(default_factory=list)
    python: Python = None
    workload: WorkloadOption = "chat"
    concurrency: Concurrency = None
    mode: Mode = "auto"
    vary: Vary = field(default_factory=list)
    keep: Keep = field(default_factory=list)
    space: SpaceFile = None
    allow_lossy: AllowLossy = field(default_factory=list)
    allow_contract: AllowContract = field(default_factory=list)
    acceptance_length: Acceptance = None
    no_memory_check: NoMemoryCheck = False
    simulate: Simulate = None
    vllm_version: VllmVersion = None
    gpus: Gpus = None
    seed: Seed = 0
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class SearchOptions(SpaceOptions):
    """The whole loop."""

    goal: Annotated[list[str], option("throughput, latency or goodput; two: a front.", GOAL, "--goal", metavar="GOAL")] = field(
        default_factory=list
    )
    metric: Annotated[str | None, option("Another metric of that goal, like p95_ttft_s.", GOAL, "--metric", metavar="NAME")] = (
        None
    )
    limit: Annotated[
        list[str], option("A limit, like p95_ttft_s<=0.5 or mean_e2e_s<=1.05*baseline.", GOAL, "--limit", metavar="EXPR")
    ] = field(default_factory=list)
    min_success: Annotated[
        float | None,
        option("Least share of requests that must succeed. Default 0.99.", GOAL, "--min-success", min=0.0, max=1.0),
    ] = None
    no_guard: Annotated[bool, option("Do not limit what the answer may cost on the other metrics.", GOAL, "--no-guard")] = False
    rate: Rate = None
    window: Window = None
    requests: Requests = None
    trials: Annotated[int, option("Engine starts of search and screening, baseline included.", BUDGET, "--trials", min=1)] = 16
    rounds: Annotated[int, option("Confirmation rounds of three arms; 0/1: unconfirmed.", BUDGET, "--rounds", min=0, max=5)] = 3
    time_budget: Annotated[
        float,
        option(
            "Wall time; confirmation and soak are reserved first. Default: 2h.",
            BUDGET,
            "--time-budget",
            parser=duration_s,
            metavar="TIME",
        ),
    ] = 7200.0
    soak: Annotated[
        float,
        option(
            "How long the winner runs at peak load at the end. Default: 10m.",
            BUDGET,
            "--soak",
            parser=duration_s,
            metavar="TIME",
        ),
    ] = 600.0
    dry_run: Annotated[bool, option("Print the plan with times per phase, start nothing.", BUDGET, "--dry-run")] = False
    explain: Annotated[bool, option("Afterwards measure what each kept flag is worth.", BUDGET, "--explain")] = False
    seed_from: Annotated[
        str | None, option("Start with the best few of an earlier study.", BUDGET, "--seed-from", metavar="STUDY")
    ] = None
    sampler: Annotated[str, option("auto (our own model), gp, tpe or random (Optuna's).", MACHINERY, "--sampler")] = "auto"
    engine: EngineKind = "vllm"
    storage: Storage = "sqlite:///studies.db"
    study: Annotated[str | None, option("Name of the study. Default: <model>-<goal>-<n>.", MACHINERY, "--study")] = None
    data_dir: DataDir = None
    disk_budget: Annotated[
        int,
        option(
            "Most disk that caches and logs may take. Default: 10G.",
            MACHINERY,
            "--disk-budget",
            parser=size_bytes,
            metavar="SIZE",
        ),
    ] = 10 * 2**30
    no_serve: Annotated[bool, option("Confirm in-process instead of as served commands.", MACHINERY, "--no-serve")] = False
    notify: Notify = None
    quiet: Annotated[bool, option("Only the answer and what is important.", OUTPUT, "--quiet", "-q")] = False


StudyName = Annotated[
    str | None,
    typer.Argument(metavar="[STUDY]", help="A name, a unique beginning of one, or nothing for the latest.", show_default=False),
]


@dataclass(frozen=True, kw_only=True)
class StoredOptions:
    """What every verb that reads a study shares."""

    study: StudyName = None
    storage: Storage = "sqlite:///studies.db"
    data_dir: DataDir = None


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(StoredOptions):
    """Go on after an interruption, a crash, or with a larger budget; what is not given stays as it was."""

    trials: Annotated[int | None, option("A new trial budget; a finished search goes on.", BUDGET, "--trials", min=1)] = None
    rounds: Annotated[
        int | None, option("Confirmation rounds, no fewer than were begun.", BUDGET, "--rounds", min=0, max=5)
    ] = None
    time_budget: Annotated[
        float | None, option("Wall time from now on.", BUDGET, "--time-budget", parser=duration_s, metavar="TIME")
    ] = None
    soak: Annotated[float | None, option("A new soak.", BUDGET, "--soak", parser=duration_s, metavar="TIME")] = None
    notify: Notify = None
    json: Json = False
    quiet: Annotated[bool, option("Only the answer and what is important.", OUTPUT, "--quiet", "-q")] = False


@dataclass(frozen=True, kw_only=True)
class ShowOptions(StoredOptions):
    """Studies, or one study."""

    all: Annotated[bool, option("List the studies instead of showing the latest.", OUTPUT, "--all", "-a")] = False
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions(StoredOptions):
    """The answer to take away."""

    format: Annotated[str, option("shell, yaml, json, docker or k8s.", OUTPUT, "--format")] = "shell"
    trial: Annotated[str | None, option("Export this trial instead of the answer.", OUTPUT, "--trial", metavar="N")] = None
    output: Annotated[Path | None, option("Write there instead of to stdout.", OUTPUT, "--output", "-o")] = None


@dataclass(frozen=True, kw_only=True)
class ReportOptions(StoredOptions):
    """One self-contained HTML page."""

    output: Annotated[Path | None, option("Where to write the page. Default: <study>.html.", OUTPUT, "--output", "-o")] = None


@dataclass(frozen=True, kw_only=True)
class DashboardOptions(StoredOptions):
    """optuna-dashboard on a read-only copy, on 127.0.0.1."""

    port: Annotated[int, option("The port on 127.0.0.1.", MACHINERY, "--port", min=0, max=65535)] = 8080


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """One configuration, a running server, or a study's recommendation, measured."""

    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- --flag …]", help="Engine arguments, or a whole 'vllm serve …'.", show_default=False),
    ] = None
    model: Model = None
    url: Annotated[str | None, option("A running OpenAI-compatible server.", SUBJECT, "--url")] = None
    endpoint: Annotated[str, option("completions (token ids) or chat.", SUBJECT, "--endpoint")] = "completions"
    api_key_file: Annotated[Path | None, option("A file that holds the server's key.", SUBJECT, "--api-key-file")] = None
    tokenizer: Annotated[
        Path | None, option("Directory with the model's tokenizer.json, for --url.", SUBJECT, "--tokenizer")
    ] = None
    set: Set = field(default_factory=list)
    python: Python = None
    workload: WorkloadOption = "chat"
    concurrency: Concurrency = None
    rate: Rate = None
    window: Window = None
    requests: Requests = None
    arrivals: Annotated[
        str | None,
        option(
            "closed, poisson, constant, or replay (the workload file's times). Default: poisson with --rate, else closed.",
            LOAD,
            "--arrivals",
            metavar="KIND",
        ),
    ] = None
    slo: Annotated[list[str], option("A limit per request for goodput, like ttft_s<=0.5.", LOAD, "--slo", metavar="EXPR")] = (
        field(default_factory=list)
    )
    client_processes: Annotated[
        int | None,
        option(
            "Processes that load a server. Default: by concurrency or rate, and cores.",
            LOAD,
            "--client-processes",
            min=1,
            max=64,
        ),
    ] = None
    repeat: Annotated[int, option("Loads on one engine, and as many fresh engines.", BUDGET, "--repeat", min=1)] = 1
    study: Annotated[
        str | None, option("Measure this study's winner and baseline again.", SUBJECT, "--study", metavar="STUDY")
    ] = None
    gate: Annotated[
        float | None,
        option("With --study: exit 5 when it lost more than this.", GOAL, "--gate", metavar="PERCENT", parser=percent),
    ] = None
    engine: EngineKind = "vllm"
    simulate: Simulate = None
    vllm_version: VllmVersion = None
    gpus: Gpus = None
    storage: Storage = "sqlite:///studies.db"
    data_dir: DataDir = None
    records: Annotated[Path | None, option("Write raw request records there (gzip JSON lines).", OUTPUT, "--records")] = None
    seed: Seed = 0
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class CheckedSpaceOptions(SpaceOptions):
    """What can be varied here; or what is wrong with a command."""

    goal: Annotated[str, option("throughput, latency or goodput: chooses the mode.", GOAL, "--goal", metavar="GOAL")] = (
        "throughput"
    )
    check: Annotated[
        str | None,
        option(
            "Check this launch command instead: the text, or a file that holds it.", SUBJECT, "--check", metavar="COMMAND|FILE"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """A workload file from the histograms of a running vLLM; prompts are not needed."""

    from_metrics: Annotated[str | None, option("The server's URL.", LOAD, "--from-metrics", metavar="URL")] = None
    for_s: Annotated[
        float,
        option("How long to watch it. Default: 10m.", LOAD, "--for", parser=duration_s, metavar="TIME"),
    ] = 600.0
    output: Annotated[Path, option("Where to write the workload.", OUTPUT, "--output", "-o")] = Path("workload.json")
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is installed, which GPUs, free memory, leftovers, and what to do about each."""

    python: Python = None
    storage: Storage = "sqlite:///studies.db"
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class CleanOptions:
    """Remove leftovers of dead searches, and caches beyond a budget."""

    disk_budget: Annotated[
        int,
        option("Most disk that caches may keep. Default: 10G.", MACHINERY, "--disk-budget", parser=size_bytes, metavar="SIZE"),
    ] = 10 * 2**30
    dry_run: Annotated[bool, option("Say what would go, remove nothing.", OUTPUT, "--dry-run")] = False


Options = TypeVar("Options")


def command(cls: type[Options], body: Callable[[Options], None]) -> Callable[..., None]:
    """A function whose signature Typer reads as the fields of ``cls``, and that calls ``body`` with one ``cls``."""
    hints = get_type_hints(cls, include_extras=True)
    parameters = []
    for spec in dataclasses.fields(cls):  # type: ignore[arg-type]  # every options class is a dataclass
        default = spec.default
        if spec.default_factory is not dataclasses.MISSING:
            default = spec.default_factory()
        parameters.append(
            inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[spec.name])
        )

    def run(**values: Any) -> None:
        body(cls(**values))

    run.__name__, run.__doc__ = body.__name__, body.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect.signature
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
