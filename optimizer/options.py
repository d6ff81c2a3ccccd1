"""What the user may type, declared once: each field is the option, its help, its default and its type.

``command`` turns a function of one options object into a Typer command, so help text, parsing and the typed value come from
the same declaration, and ``docs/reference/cli.md`` is generated from it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", re.IGNORECASE)
SECONDS = {"s": 1, "m": 60, "h": 3600, None: 1}
BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

GOAL = "Goal"
SUBJECT = "Subject: which model, which command"
LOAD = "Load"
SPACE = "Search space"
BUDGET = "Budget"
MACHINERY = "Machinery"
OUTPUT = "Output"


def duration_s(text: str | float) -> float:
    """Seconds from ``90``, ``90s``, ``10m``, ``2h``; ``BadParameter`` names the forms."""
    if isinstance(text, (int, float)):
        return float(text)
    match = DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration; type seconds, or a number with s, m or h, like 90s, 10m, 2h")
    return float(match[1]) * SECONDS[match[2]]


def size_bytes(text: str | int) -> int:
    """Bytes from ``10G``, ``512M``; powers of 1024."""
    if isinstance(text, int):
        return text
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; type a number with K, M, G or T, like 10G")
    return int(float(match[1]) * BYTES[match[2].upper()])


def percent(text: str | float) -> float:
    """A share from ``3%`` or ``3``; both mean three percent."""
    if isinstance(text, float):
        return text
    try:
        return float(text.strip().removesuffix("%")) / 100
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a percentage; type a number, like 3%") from None


def _option(help_text: str, panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=True, **settings)


Json = Annotated[bool, _option("Print one versioned JSON document on stdout.", OUTPUT, "--json")]
Storage = Annotated[
    str, _option("Where studies live: an SQLAlchemy URL.", MACHINERY, "--storage", metavar="URL", envvar="VOPT_STORAGE")
]
DataDir = Annotated[
    Path | None, _option("Where logs and raw records go. Default: 'studies' beside the SQLite file.", MACHINERY, "--data-dir")
]
Model = Annotated[str | None, _option("A hub id or a local directory with config.json.", SUBJECT, "--model", metavar="MODEL")]
From = Annotated[
    Path | None,
    _option("A file with the command in use (one 'vllm serve …', or vLLM's YAML): it is the baseline.", SUBJECT, "--from"),
]
Set = Annotated[
    list[str],
    _option(
        "An engine argument of every trial, baseline included. VALUE is JSON if it parses.",
        SUBJECT,
        "--set",
        metavar="NAME=VALUE",
    ),
]
Python = Annotated[
    Path | None,
    _option("The interpreter that has vLLM. Default: this one. A simulation takes its arguments from it.", SUBJECT, "--python"),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- vllm serve MODEL --flag …]", help="The command in use: it is the baseline.", show_default=False
    ),
]
WorkloadOption = Annotated[
    str, _option("chat, throughput, long-context, generation, or a file.", LOAD, "--workload", metavar="NAME|FILE")
]
Concurrency = Annotated[
    str | None,
    _option("Requests in flight, or auto (found on the baseline's engine).", LOAD, "--concurrency", metavar="C|auto"),
]
Rate = Annotated[float | None, _option("Requests per second, Poisson arrivals.", LOAD, "--rate", metavar="R")]
Window = Annotated[
    float | None,
    _option(
        "Seconds that one measurement lasts. Default: max(60 s, 2 x mean E2E).",
        LOAD,
        "--window",
        parser=duration_s,
        metavar="S",
    ),
]
Requests = Annotated[int | None, _option("At most so many requests a load (windows are by time).", LOAD, "--requests", min=1)]
Notify = Annotated[
    str | None,
    _option(
        "A command to run at the end; it finds VOPT_STUDY, VOPT_VERDICT and VOPT_COMMAND in its environment.",
        OUTPUT,
        "--notify",
        metavar="COMMAND",
    ),
]
Seed = Annotated[int, _option("Seed of workload, sampler and simulation.", BUDGET, "--seed", min=0)]
Gpus = Annotated[
    str | None, _option("GPUs to use, like 0,1 (with --simulate: how many). Default: a free one.", MACHINERY, "--gpus")
]
EngineKind = Annotated[
    str, _option("vllm (in-process), server (vllm serve), simulated, or the URL of a running server.", MACHINERY, "--engine")
]
Simulate = Annotated[
    str | None, _option("Simulate this GPU instead of using one: h200, h100, a100, …", MACHINERY, "--simulate", metavar="GPU")
]
VllmVersion = Annotated[
    str | None, _option("The vLLM that a simulation takes arguments from.", MACHINERY, "--vllm-version", metavar="VERSION")
]
Mode = Annotated[str, _option("Prior: auto (by goal), balanced, interactivity or throughput.", SPACE, "--mode", metavar="MODE")]
Vary = Annotated[
    list[str], _option("Search this argument, with these values if given.", SPACE, "--vary", metavar="NAME[=V1,V2…]")
]
Keep = Annotated[list[str], _option("Never vary this argument.", SPACE, "--keep", metavar="NAME")]
SpaceFile = Annotated[
    Path | None, _option("A search space of your own, on top of the built-in one.", SPACE, "--space", metavar="FILE")
]
AllowLossy = Annotated[
    list[str],
    _option("Search an argument that changes outputs (KV dtype, quantization).", SPACE, "--allow-lossy", metavar="NAME"),
]
AllowContract = Annotated[
    list[str],
    _option("Search an argument that changes what clients may send or see.", SPACE, "--allow-contract", metavar="NAME"),
]
NoMemoryCheck = Annotated[
    bool,
    _option(
        "Go on without the memory filter: where the model's shape is unknown, or the arithmetic is wrong.",
        SPACE,
        "--no-memory-check",
    ),
]
Acceptance = Annotated[
    float | None,
    _option("Acceptance length to assume for speculation where real text or weights are absent.", SPACE, "--acceptance-length"),
]


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

    goal: Annotated[list[str], _option("throughput, latency or goodput; two: a front.", GOAL, "--goal", metavar="GOAL")] = (
        field(default_factory=list)
    )
    metric: Annotated[
        str | None, _option("Another metric of that goal, like p95_ttft_s.", GOAL, "--metric", metavar="NAME")
    ] = None
    limit: Annotated[
        list[str], _option("A limit, like p95_ttft_s<=0.5 or mean_e2e_s<=1.05*baseline.", GOAL, "--limit", metavar="EXPR")
    ] = field(default_factory=list)
    min_success: Annotated[
        float | None,
        _option("Least share of requests that must succeed. Default 0.99.", GOAL, "--min-success", min=0.0, max=1.0),
    ] = None
    no_guard: Annotated[bool, _option("Do not limit what the answer may cost on the other metrics.", GOAL, "--no-guard")] = (
        False
    )
    rate: Rate = None
    window: Window = None
    requests: Requests = None
    trials: Annotated[int, _option("Engine starts of search and screening, baseline included.", BUDGET, "--trials", min=1)] = 16
    rounds: Annotated[int, _option("Confirmation rounds of three arms; 0: unconfirmed.", BUDGET, "--rounds", min=0, max=5)] = 3
    time_budget: Annotated[
        float,
        _option(
            "Wall time; confirmation and soak are reserved first.", BUDGET, "--time-budget", parser=duration_s, metavar="TIME"
        ),
    ] = 7200.0
    soak: Annotated[
        float, _option("How long the winner runs at peak load at the end.", BUDGET, "--soak", parser=duration_s, metavar="TIME")
    ] = 600.0
    dry_run: Annotated[bool, _option("Print the plan with times per phase, start nothing.", BUDGET, "--dry-run")] = False
    explain: Annotated[bool, _option("Afterwards measure what each kept flag is worth.", BUDGET, "--explain")] = False
    seed_from: Annotated[
        str | None, _option("Start with the best few of an earlier study.", BUDGET, "--seed-from", metavar="STUDY")
    ] = None
    sampler: Annotated[str, _option("auto (our own model), gp, tpe or random (Optuna's).", MACHINERY, "--sampler")] = "auto"
    engine: EngineKind = "vllm"
    storage: Storage = "sqlite:///studies.db"
    study: Annotated[str | None, _option("Name of the study. Default: <model>-<goal>-<n>.", MACHINERY, "--study")] = None
    data_dir: DataDir = None
    disk_budget: Annotated[
        int, _option("Most disk that caches and logs may take.", MACHINERY, "--disk-budget", parser=size_bytes, metavar="SIZE")
    ] = 10 * 2**30
    no_serve: Annotated[bool, _option("Confirm in-process instead of as served commands.", MACHINERY, "--no-serve")] = False
    notify: Notify = None
    quiet: Annotated[bool, _option("Only the answer and what is important.", OUTPUT, "--quiet", "-q")] = False


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

    trials: Annotated[int | None, _option("A new trial budget.", BUDGET, "--trials", min=1)] = None
    rounds: Annotated[int | None, _option("New confirmation rounds.", BUDGET, "--rounds", min=0, max=5)] = None
    time_budget: Annotated[
        float | None, _option("Wall time from now on.", BUDGET, "--time-budget", parser=duration_s, metavar="TIME")
    ] = None
    soak: Annotated[float | None, _option("A new soak.", BUDGET, "--soak", parser=duration_s, metavar="TIME")] = None
    notify: Notify = None
    json: Json = False
    quiet: Annotated[bool, _option("Only the answer and what is important.", OUTPUT, "--quiet", "-q")] = False


@dataclass(frozen=True, kw_only=True)
class ShowOptions(StoredOptions):
    """Studies, or one study."""

    all: Annotated[bool, _option("List the studies instead of showing the latest.", OUTPUT, "--all", "-a")] = False
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions(StoredOptions):
    """The answer to take away."""

    format: Annotated[str, _option("shell, yaml, json, docker or k8s.", OUTPUT, "--format")] = "shell"
    trial: Annotated[str | None, _option("Export this trial instead of the answer.", OUTPUT, "--trial", metavar="N")] = None
    output: Annotated[Path | None, _option("Write there instead of to stdout.", OUTPUT, "--output", "-o")] = None


@dataclass(frozen=True, kw_only=True)
class ReportOptions(StoredOptions):
    """One self-contained HTML page."""

    output: Annotated[Path | None, _option("Where to write the page. Default: <study>.html.", OUTPUT, "--output", "-o")] = None


@dataclass(frozen=True, kw_only=True)
class DashboardOptions(StoredOptions):
    """optuna-dashboard on a read-only copy, on 127.0.0.1."""

    port: Annotated[int, _option("The port on 127.0.0.1.", MACHINERY, "--port", min=0, max=65535)] = 8080


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """One configuration, a running server, or a study's recommendation, measured."""

    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- --flag …]", help="Engine arguments, or a whole 'vllm serve …'.", show_default=False),
    ] = None
    model: Model = None
    url: Annotated[str | None, _option("A running OpenAI-compatible server.", SUBJECT, "--url")] = None
    endpoint: Annotated[str, _option("completions (token ids) or chat.", SUBJECT, "--endpoint")] = "completions"
    api_key_file: Annotated[Path | None, _option("A file that holds the server's key.", SUBJECT, "--api-key-file")] = None
    tokenizer: Annotated[
        Path | None, _option("Directory with the model's tokenizer.json, for --url.", SUBJECT, "--tokenizer")
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
        _option(
            "closed, poisson, constant, or replay (the workload file's times). Default: poisson with --rate, else closed.",
            LOAD,
            "--arrivals",
            metavar="KIND",
        ),
    ] = None
    slo: Annotated[list[str], _option("A limit per request for goodput, like ttft_s<=0.5.", LOAD, "--slo", metavar="EXPR")] = (
        field(default_factory=list)
    )
    client_processes: Annotated[
        int | None,
        _option(
            "Processes that load a server. Default: by concurrency or rate, and cores.",
            LOAD,
            "--client-processes",
            min=1,
            max=64,
        ),
    ] = None
    repeat: Annotated[int, _option("Loads on one engine, and as many fresh engines.", BUDGET, "--repeat", min=1)] = 1
    study: Annotated[
        str | None, _option("Measure this study's winner and baseline again.", SUBJECT, "--study", metavar="STUDY")
    ] = None
    gate: Annotated[
        float | None,
        _option("With --study: exit 5 when it lost more than this.", GOAL, "--gate", metavar="PERCENT", parser=percent),
    ] = None
    engine: EngineKind = "vllm"
    simulate: Simulate = None
    vllm_version: VllmVersion = None
    gpus: Gpus = None
    storage: Storage = "sqlite:///studies.db"
    data_dir: DataDir = None
    records: Annotated[Path | None, _option("Write raw request records there (gzip JSON lines).", OUTPUT, "--records")] = None
    seed: Seed = 0
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class CheckedSpaceOptions(SpaceOptions):
    """What can be varied here; or what is wrong with a command."""

    goal: Annotated[str, _option("throughput, latency or goodput: chooses the mode.", GOAL, "--goal", metavar="GOAL")] = (
        "throughput"
    )
    check: Annotated[
        str | None,
        _option(
            "Check this launch command instead: the text, or a file that holds it.", SUBJECT, "--check", metavar="COMMAND|FILE"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """A workload file from the histograms of a running vLLM; prompts are not needed."""

    from_metrics: Annotated[str | None, _option("The server's URL.", LOAD, "--from-metrics", metavar="URL")] = None
    for_s: Annotated[float, _option("How long to watch it.", LOAD, "--for", parser=duration_s, metavar="TIME")] = 600.0
    output: Annotated[Path, _option("Where to write the workload.", OUTPUT, "--output", "-o")] = Path("workload.jsonl")
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
        int, _option("Most disk that caches may keep.", MACHINERY, "--disk-budget", parser=size_bytes, metavar="SIZE")
    ] = 10 * 2**30
    dry_run: Annotated[bool, _option("Say what would go, remove nothing.", OUTPUT, "--dry-run")] = False


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
