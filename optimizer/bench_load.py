"""What was typed of a bench's load, checked before anything starts."""

from __future__ import annotations

import math
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vopt.objectives.goals import GoalError, Limit, check_limits, parse_limit
from vopt.objectives.metrics import SLO_NAMES
from vopt.optimizer.errors import UsageError
from vopt.optimizer.first_load import MOST_LOADS, NUMBERS_APART
from vopt.optimizer.load.concurrency import LEVELS
from vopt.optimizer.load.plan import Arrivals
from vopt.optimizer.load.target import checked_rate
from vopt.optimizer.load.workload import Workload
from vopt.optimizer.measurement import SHORTEST_WINDOW_S, Asked
from vopt.optimizer.options import BenchOptions
from vopt.optimizer.prepare import concurrency_of

DESCRIPTORS_BESIDE = 64
"""Files and sockets that this process has open beside one socket for each request in flight."""
OPEN_LOOP_DESCRIPTORS = 65_535
"""What vLLM raises its own limit to (``vllm/utils/system_utils.py``): an open loop has no bound on requests in flight."""
PROBES = 2 + len(LEVELS)
"""Most loads that finding a concurrency, and then a window, can take."""
LONGEST_WINDOW_S = 7 * 86400.0
FEW_IN_FLIGHT = 64


def checked_load(options: BenchOptions, say: Callable[[str], None]) -> Asked:
    """The load that was asked for. Raises ``UsageError`` for the first thing that cannot be meant."""
    arrivals = _arrivals(options)
    rate = None if options.rate is None else checked_rate(options.rate)
    concurrency = concurrency_of(options.concurrency)
    if arrivals is Arrivals.CLOSED and rate is not None:
        raise UsageError("--arrivals closed sends as others finish, so it has no --rate", hint="--concurrency 64")
    if arrivals is not Arrivals.CLOSED and options.concurrency is not None:
        raise UsageError(
            f"--concurrency {options.concurrency} with {arrivals} arrivals: a load is either a closed loop at a concurrency or "
            "an open loop that sends whether or not others have finished",
            hint="leave one of them out",
        )
    if arrivals in (Arrivals.POISSON, Arrivals.CONSTANT) and rate is None:
        raise UsageError(f"--arrivals {arrivals} needs a rate", hint=f"--arrivals {arrivals} --rate 8")
    window_s = _checked_window(options.window)
    _check_requests(options)
    if concurrency is None and arrivals is Arrivals.CLOSED and options.requests is not None and options.concurrency is None:
        concurrency = max(1, min(FEW_IN_FLIGHT, options.requests // 4))
        say(f"concurrency: {concurrency} (--requests {options.requests} are too few to find one; --concurrency sets it)")
    check_descriptors(concurrency)
    return Asked(
        arrivals=arrivals,
        concurrency=concurrency,
        rate=rate,
        window_s=window_s,
        max_requests=options.requests,
        seed=options.seed,
        deadline_s=max(1800.0, 3 * (window_s or SHORTEST_WINDOW_S) + 600.0),
    )


def _arrivals(options: BenchOptions) -> Arrivals:
    if options.arrivals is None:
        return Arrivals.CLOSED if options.rate is None else Arrivals.POISSON
    try:
        arrivals = Arrivals(options.arrivals)
    except ValueError:
        raise UsageError(
            f"--arrivals {options.arrivals}: there are {', '.join(Arrivals)}", hint="--arrivals poisson --rate 8"
        ) from None
    if arrivals is Arrivals.REPLAY and options.rate is not None:
        raise UsageError("--arrivals replay sends at the recording's own times, so it has no --rate", hint="leave --rate out")
    return arrivals


def _checked_window(window_s: float | None) -> float | None:
    if window_s is not None and not 0 < window_s <= LONGEST_WINDOW_S:
        raise UsageError(f"--window {window_s:g}: a window is longer than 0 s and at most a week", hint="--window 60s")
    return window_s


def _check_requests(options: BenchOptions) -> None:
    """Prompts are unique by an eight-digit number; more loads or longer ones than it can count would repeat prompts."""
    if options.requests is not None and options.requests > NUMBERS_APART:
        raise UsageError(
            f"--requests {options.requests}: a load has at most {NUMBERS_APART:,} requests, beyond which prompts would repeat",
            hint="leave --requests out: a load is ended by its window",
        )
    most = (MOST_LOADS - PROBES) // 2
    if options.repeat > most:
        raise UsageError(
            f"--repeat {options.repeat}: at most {most}, because prompts are numbered up to {MOST_LOADS * NUMBERS_APART:,}",
            hint=f"--repeat {most}",
        )


def check_descriptors(concurrency: int | None) -> None:
    """``UsageError`` when this process may not open a socket for each request in flight; a soft limit is raised.

    The usual soft limit is 1,024 files, which an open loop or the search for a concurrency can exceed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unbounded = resource.RLIM_INFINITY
    needed = (2 * LEVELS[-1] if concurrency is None else concurrency) + DESCRIPTORS_BESIDE
    if concurrency is not None and hard != unbounded and needed > hard:
        raise UsageError(
            f"--concurrency {concurrency}: this process may open {hard} files, and each request in flight is one",
            hint=f"--concurrency {max(1, hard - DESCRIPTORS_BESIDE)}, or raise the limit: ulimit -Hn {needed}",
        )
    if concurrency is None:
        needed = max(needed, OPEN_LOOP_DESCRIPTORS)
    wanted = needed if hard == unbounded else min(needed, hard)
    if soft != unbounded and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def replayed(asked: Asked, workload: Workload) -> Asked:
    """A replay lasts as long as its recording, unless a window was given. ``UsageError`` for a workload without times."""
    if asked.arrivals is not Arrivals.REPLAY:
        return asked
    if not workload.has_times:
        raise UsageError(
            f"--arrivals replay: not every request of the workload {workload.name} has a time",
            hint='lines look like {"timestamp": 0.5, "prompt": "...", "output_tokens": 128}',
        )
    last_s = max(entry.at_s or 0.0 for entry in workload.recorded)
    window_s = asked.window_s or max(SHORTEST_WINDOW_S, last_s + 1.0)
    return Asked(
        arrivals=asked.arrivals,
        window_s=window_s,
        max_requests=asked.max_requests,
        seed=asked.seed,
        deadline_s=max(asked.deadline_s, last_s + 3 * window_s + 600.0),
    )


def find_slos(texts: Sequence[str]) -> Mapping[str, float]:
    """Seconds by SLO name from ``ttft_s<=500ms`` and the like. Raises ``UsageError``."""
    try:
        limits: list[Limit] = [parse_limit(text) for text in texts]
        check_limits(limits)
    except GoalError as error:
        known = ", ".join(SLO_NAMES)  # what is suggested for a limit may be a figure of the whole load
        hint = (
            error.hint
            if re.search(rf"\b({'|'.join(SLO_NAMES)})\b", error.hint)
            else f"--slo 'ttft_s<=500ms'; there are {known}"
        )
        raise UsageError(f"--slo {error}", hint=hint) from None
    for limit in limits:
        if not limit.slo:
            raise UsageError(
                f"--slo {limit.text}: it bounds a figure of the whole load; a bound on every request is on "
                f"{', '.join(SLO_NAMES[:-1])} or {SLO_NAMES[-1]}",
                hint="--slo 'ttft_s<=500ms'",
            )
        if not (limit.value > 0 and math.isfinite(limit.value)):
            raise UsageError(f"--slo {limit.text}: an SLO is a time above zero", hint=f"--slo '{limit.metric}<=500ms'")
    return {limit.metric: limit.value for limit in limits}


def checked_output(option: str, path: Path | None) -> None:
    """``UsageError`` when ``path`` surely cannot be written: better known before a measurement than after it."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path}: it is a directory; name a file", hint=f"{option} {path / 'records.jsonl.gz'}")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise UsageError(f"{option} {path}: {parent} is no directory", hint=f"{option} {path.name}   # in this directory")


def load_words(asked: Asked, concurrency: int | None, rate: float | None) -> str:
    """``closed loop, 64 in flight`` or ``poisson arrivals, 8 requests/s``."""
    match asked.arrivals:
        case Arrivals.CLOSED:
            return f"closed loop, {concurrency} in flight"
        case Arrivals.REPLAY:
            return "replay of the recorded times"
        case Arrivals.POISSON | Arrivals.CONSTANT:
            return f"{asked.arrivals} arrivals, {rate:g} requests/s"
