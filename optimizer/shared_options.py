"""The options that several verbs share: how each is written, what it means, and how its value is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

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


def option(help_text: str, panel: str, *names: str, **settings: Any) -> Any:
    measured = settings.get("parser") in (duration_s, size_bytes)  # their help says "Default: 2h", not 7200.0
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=not measured, **settings)


Json = Annotated[bool, option("Print one versioned JSON document on stdout.", OUTPUT, "--json")]
Storage = Annotated[
    str, option("Where studies live: an SQLAlchemy URL.", MACHINERY, "--storage", metavar="URL", envvar="VOPT_STORAGE")
]
DataDir = Annotated[
    Path | None, option("Where logs and raw records go. Default: 'studies' beside the SQLite file.", MACHINERY, "--data-dir")
]
Model = Annotated[str | None, option("A hub id or a local directory with config.json.", SUBJECT, "--model", metavar="MODEL")]
From = Annotated[
    Path | None,
    option("A file with the command in use (one 'vllm serve …', or vLLM's YAML): it is the baseline.", SUBJECT, "--from"),
]
Set = Annotated[
    list[str],
    option(
        "An engine argument of every trial, baseline included. VALUE is JSON if it parses.",
        SUBJECT,
        "--set",
        metavar="NAME=VALUE",
    ),
]
Python = Annotated[
    Path | None,
    option("The interpreter that has vLLM. Default: this one. A simulation takes its arguments from it.", SUBJECT, "--python"),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- vllm serve MODEL --flag …]", help="The command in use: it is the baseline.", show_default=False
    ),
]
WorkloadOption = Annotated[
    str, option("chat, throughput, long-context, generation, or a file.", LOAD, "--workload", metavar="NAME|FILE")
]
Concurrency = Annotated[
    str | None,
    option("Requests in flight, or auto (found on the baseline's engine).", LOAD, "--concurrency", metavar="C|auto"),
]
Rate = Annotated[float | None, option("Requests per second, Poisson arrivals.", LOAD, "--rate", metavar="R")]
Window = Annotated[
    float | None,
    option(
        "Seconds that one measurement lasts. Default: max(60 s, 2 x mean E2E).",
        LOAD,
        "--window",
        parser=duration_s,
        metavar="S",
    ),
]
Requests = Annotated[int | None, option("At most so many requests a load (windows are by time).", LOAD, "--requests", min=1)]
Notify = Annotated[
    str | None,
    option(
        "A command to run at the end, without a shell (for one: \"sh -c '…'\"); it finds VOPT_STUDY, VOPT_VERDICT and "
        "VOPT_COMMAND in its environment.",
        OUTPUT,
        "--notify",
        metavar="COMMAND",
    ),
]
Seed = Annotated[int, option("Seed of workload, sampler and simulation.", BUDGET, "--seed", min=0)]
Gpus = Annotated[
    str | None, option("GPUs to use, like 0,1 (with --simulate: how many). Default: a free one.", MACHINERY, "--gpus")
]
EngineKind = Annotated[
    str,
    option(
        "vllm (in-process), server (vllm serve) or simulated; with bench also the URL of a running server.",
        MACHINERY,
        "--engine",
    ),
]
Simulate = Annotated[
    str | None, option("Simulate this GPU instead of using one: h200, h100, a100, …", MACHINERY, "--simulate", metavar="GPU")
]
VllmVersion = Annotated[
    str | None, option("The vLLM that a simulation takes arguments from.", MACHINERY, "--vllm-version", metavar="VERSION")
]
Mode = Annotated[str, option("Prior: auto (by goal), balanced, interactivity or throughput.", SPACE, "--mode", metavar="MODE")]
Vary = Annotated[
    list[str], option("Search this argument, with these values if given.", SPACE, "--vary", metavar="NAME[=V1,V2…]")
]
Keep = Annotated[list[str], option("Never vary this argument.", SPACE, "--keep", metavar="NAME")]
SpaceFile = Annotated[
    Path | None, option("A search space of your own, on top of the built-in one.", SPACE, "--space", metavar="FILE")
]
AllowLossy = Annotated[
    list[str],
    option("Search an argument that changes outputs (KV dtype, quantization).", SPACE, "--allow-lossy", metavar="NAME"),
]
AllowContract = Annotated[
    list[str],
    option("Search an argument that changes what clients may send or see.", SPACE, "--allow-contract", metavar="NAME"),
]
NoMemoryCheck = Annotated[
    bool,
    option(
        "Go on without the memory filter: where the model's shape is unknown, or the arithmetic is wrong.",
        SPACE,
        "--no-memory-check",
    ),
]
Acceptance = Annotated[
    float | None,
    option(
        "Acceptance length to assume for speculation where real text or weights are absent.",
        SPACE,
        "--acceptance-length",
        metavar="L",
    ),
]
