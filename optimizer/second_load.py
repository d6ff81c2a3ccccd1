"""The open loop that follows the closed one on the same engine, for two goals that no single load can show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

from vopt.objectives.metrics import LATENCIES, Metrics, compute_metrics
from vopt.objectives.records import LoadResult, LoadStatus
from vopt.optimizer.first_load import LOWER, LOWER_GOODPUT, LOWERED, MOST_LOADS, NUMBERS_APART, LoadOnce, first_load, found_rate
from vopt.optimizer.history import TrialRecord
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.measurement import Asked

PLAN = "second_load_plan"
"""Where a record's environment keeps the plan of its second load."""


def second_source(source: RequestSource) -> RequestSource:
    """The same requests with prompts that no first load and no probe had."""
    return replace(source, first_number=source.first_number + MOST_LOADS // 2 * NUMBERS_APART)


def found_plan(
    asked: Asked, closed: LoadResult, load_once: LoadOnce, say: Callable[[str], None]
) -> tuple[LoadResult, LoadPlan | None]:
    """The baseline's second load, and the plan that all later ones have (``None``: it did not come to its end).

    The rate is what was asked for, else ``found_rate`` of the requests per second that the closed loop before it finished,
    lowered (at most twice, as ``first_load`` does) where the baseline's queue grows at it.
    """
    rate, tries = asked.rate, 1
    if rate is None:
        rate, tries = found_rate(asked, compute_metrics(closed)["requests_per_s"], load_once, say, []), LOWERED + 1
    while True:
        found = first_load(replace(asked, rate=rate), load_once, say)
        tries -= 1
        if found.load.status is not LoadStatus.OVERLOADED or not tries:
            return found.load, found.measurement.plan if found.measurement is not None else None
        rate *= LOWER_GOODPUT if asked.slos else LOWER
        say(f"rate: {rate:.3g} requests/s, for the baseline's queue grew at more")


def stored_plan(records: Iterable[TrialRecord]) -> LoadPlan | None:
    """The plan of the second load as a study's own starts keep it; ``None`` before there was one."""
    for record in records:
        data: dict[str, Any] | None = record.environment.get(PLAN)
        if data is not None:
            known = {part.name for part in fields(LoadPlan)}  # a study of an earlier version may hold more
            values = {name: value for name, value in data.items() if name in known}
            return LoadPlan(**{**values, "arrivals": Arrivals(data["arrivals"])})
    return None


def joined(closed: Metrics, opened: Metrics) -> Metrics:
    """Both loads as one: latencies and goodput of the open loop, everything else of the closed one, requests of both."""
    parts = tuple(f"_{latency}_s" for latency in LATENCIES)

    def of_open(name: str) -> bool:
        return name.endswith(parts) or name == "goodput_per_s"

    values = {name: value for name, value in closed.values.items() if not of_open(name)}
    values |= {name: value for name, value in opened.values.items() if of_open(name)}
    succeeded, failed = closed.succeeded + opened.succeeded, closed.failed + opened.failed
    if succeeded + failed:
        values["success_rate"] = succeeded / (succeeded + failed)
    intervals = {name: interval for name, interval in closed.intervals.items() if not of_open(name)}
    return replace(
        closed,
        values=values,
        intervals=intervals | {name: interval for name, interval in opened.intervals.items() if of_open(name)},
        succeeded=succeeded,
        failed=failed,
        censored=closed.censored + opened.censored,
        failures={**opened.failures, **closed.failures},
        notes=(*closed.notes, *(note for note in opened.notes if note not in closed.notes)),
    )


def worse_status(closed: LoadStatus, opened: LoadStatus) -> LoadStatus:
    """The status of a start of both loads: whichever came to the worse end."""
    order = (LoadStatus.COMPLETE, LoadStatus.UNSTEADY)
    if opened not in order:
        return opened
    return LoadStatus.UNSTEADY if LoadStatus.UNSTEADY in (closed, opened) else closed
