"""Metrics: one definition of each, with its unit, its better direction and its name in ``vllm bench serve``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np

from vopt.objectives.consistency import contradictions
from vopt.objectives.intervals import counts_per_part, share_interval
from vopt.objectives.records import CAPPED, LoadResult, LoadStatus, RequestFailureKind, RequestRecord
from vopt.objectives.whole_run import whole_run_figures
from vopt.objectives.window_figures import PERCENTILES, add_counters, add_latencies, add_rates, token_events

LATENCIES = ("ttft", "tpot", "e2e")
FEW_FOR_P99 = 1000
"""Below this many succeeded requests a p99 is a handful of them: its coefficient of variation is 7 % at 1,000 and 18 % at 100
(Monte Carlo, lognormal TTFT with sigma 0.6)."""

SLO_NAMES = ("ttft_s", "tpot_s", "e2e_s")
"""What a service-level objective may bound, per request, in seconds."""


class Direction(StrEnum):
    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """What a metric is. ``bench_serve`` is the field of ``vllm bench serve``'s JSON (milliseconds there), if it has one."""

    name: str
    unit: str
    direction: Direction
    label: str
    bench_serve: str | None = None


def _registry() -> dict[str, MetricInfo]:
    rows: list[MetricInfo] = []
    for latency, serve in zip(LATENCIES, ("ttft", "tpot", "e2el"), strict=True):
        rows.append(MetricInfo(f"mean_{latency}_s", "s", Direction.MINIMIZE, f"mean {latency.upper()}", f"mean_{serve}_ms"))
        for percent in PERCENTILES:
            field_name = f"median_{serve}_ms" if percent == 50 else f"p{percent}_{serve}_ms"
            label = f"p{percent} {latency.upper()}"
            rows.append(MetricInfo(f"p{percent}_{latency}_s", "s", Direction.MINIMIZE, label, field_name))
    for statistic in ("mean", "p95"):
        for latency in ("ttft", "e2e"):
            label = f"{statistic} {latency.upper()} from the real send"
            rows.append(MetricInfo(f"{statistic}_sent_{latency}_s", "s", Direction.MINIMIZE, label))
    up, down = Direction.MAXIMIZE, Direction.MINIMIZE
    rows += [
        MetricInfo("success_rate", "ratio", up, "success rate"),
        MetricInfo("tokens_per_s", "tok/s", up, "throughput (prompt and output)", "total_token_throughput"),
        MetricInfo("output_tokens_per_s", "tok/s", up, "output throughput", "output_throughput"),
        MetricInfo("requests_per_s", "req/s", up, "requests per second", "request_throughput"),
        MetricInfo("goodput_per_s", "req/s", up, "goodput", "request_goodput"),
        MetricInfo("kv_peak", "ratio", down, "peak KV cache usage"),
        MetricInfo("preemptions", "count", down, "preemptions"),
        MetricInfo("queued_share", "ratio", down, "share of the window with requests waiting"),
        MetricInfo("front_end_share", "ratio", down, "requests in flight that were not in the engine"),
        MetricInfo("full_budget_share", "ratio", down, "engine steps that filled the token budget"),
        MetricInfo("peak_running", "count", up, "most sequences running at once"),
        MetricInfo("acceptance_length", "tok/step", up, "tokens per verified step", "spec_decode_acceptance_length"),
        MetricInfo("acceptance_rate", "ratio", up, "drafted tokens accepted"),
        MetricInfo("prefix_hit_rate", "ratio", up, "prefix cache hit rate"),
    ]
    return {row.name: row for row in rows}


METRICS: Mapping[str, MetricInfo] = MappingProxyType(_registry())
"""Every metric by name, in the order in which they are shown. ``*_sent_*`` exist for open loops only: there the plain names
count from the scheduled send, and the difference is what the client itself was late."""


@dataclass(frozen=True, slots=True)
class FailureCount:
    """How many requests failed in one way, and the first message of that kind."""

    n: int
    first_message: str


@dataclass(frozen=True, slots=True)
class Metrics:
    """The figures of one load. A metric that is undefined for it is absent from ``values``: never 0, never NaN.

    ``intervals`` are 95 % bootstrap intervals within this run; they describe it and support no comparison between engine
    starts. ``whole_run`` holds the figures that ``vllm bench serve`` would print, under its names; they decide nothing.
    Counts are of the window (of the whole load, if no window opened). ``contradictory``: records of the load that contradict
    themselves (``consistency.contradictions``); the first is described in ``notes``.
    """

    values: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    succeeded: int = 0
    failed: int = 0
    censored: int = 0
    not_sent: int = 0
    failures: Mapping[str, FailureCount] = field(default_factory=dict)
    whole_run: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    contradictory: int = 0

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def get(self, name: str) -> float | None:
        return self.values.get(name)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Metrics:
        return cls(
            **{
                **data,
                "intervals": {name: (low, high) for name, (low, high) in data.get("intervals", {}).items()},
                "failures": {kind: FailureCount(**count) for kind, count in data.get("failures", {}).items()},
                "notes": tuple(data.get("notes", ())),
            }
        )


def compute_metrics(
    load: LoadResult, *, slos: Mapping[str, float] | None = None, seed: int = 0, resamples: int = 1000
) -> Metrics:
    """The metrics of ``load``'s window.

    Closed loop: requests that succeeded and ended in the window; failures count if they ended after it opened, those that
    its end turned into ``stalled`` included. Open loop (no concurrency): requests that were *due* in the window, which the
    driver follows to their end; TTFT and E2E count from the scheduled send, and requests, goodput and success rate are of
    those that were due. (Those that ended in a window lack the long ones that began in it: of requests of 2 and 18 s, a
    window of 30 s that opens after 2 s shows a mean E2E of 7.2 s where 10.0 s is true and those due in it have 9.99 s.)

    Requests that were never sent count as failures only when the engine died. Without a window there are counts and a
    success rate of the whole load, and no other metric.

    ``slos`` (names of ``SLO_NAMES``, seconds) define goodput; a one-token output meets any TPOT, which it does not have.
    Raises ``ValueError`` for an unknown SLO name. ``seed`` and ``resamples`` belong to the bootstrap.
    """
    unknown = sorted(set(slos or ()) - set(SLO_NAMES))
    if unknown:
        raise ValueError(f"unknown SLO {unknown[0]!r}; there are {', '.join(SLO_NAMES)}")
    outcome = _Outcome.of(load)
    values: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    notes: list[str] = []
    rng = np.random.default_rng(seed)
    not_sent = max(load.not_sent, outcome.not_sent)
    died = load.status is LoadStatus.ENGINE_DIED
    counted = len(outcome.succeeded) + len(outcome.failed) + (not_sent if died else 0)
    if counted:
        values["success_rate"] = len(outcome.succeeded) / counted
        intervals["success_rate"] = share_interval(len(outcome.succeeded), counted)
    if load.window is not None and load.window.length_s > 0:
        good = (
            [record for record in outcome.succeeded if _within(record, slos, open_loop=load.concurrency is None)]
            if slos
            else None
        )
        add_rates(load, load.window, outcome.succeeded, good, values, intervals, rng, resamples)
        add_latencies(outcome.succeeded, load.concurrency is None, values, intervals, rng, resamples)
        notes += add_counters(load, load.window, outcome.succeeded, values)
        if 0 < len(outcome.succeeded) < FEW_FOR_P99:
            notes.append(f"p99 rests on {len(outcome.succeeded)} succeeded requests; below {FEW_FOR_P99} it is mostly chance")
        if outcome.failed_before:
            notes.append(f"{outcome.failed_before} requests failed before the window opened and are in no figure")
    marked = [(record.index, found[0]) for record in load.records if (found := contradictions(record))]
    if marked:
        notes.append(f"{len(marked)} records contradict themselves; request {marked[0][0]}: {marked[0][1]}")
    return Metrics(
        values={name: values[name] for name in METRICS if name in values},
        intervals={name: intervals[name] for name in METRICS if name in intervals},
        succeeded=len(outcome.succeeded),
        failed=len(outcome.failed),
        censored=outcome.censored,
        not_sent=not_sent,
        failures=_failure_counts(outcome.failed),
        whole_run=whole_run_figures(load, None if slos is None else lambda record: _within(record, slos, open_loop=False)),
        notes=tuple(notes),
        contradictory=len(marked),
    )


def token_curve(load: LoadResult) -> tuple[float, ...]:
    """Cumulative tokens of the window (prompt and output, as in ``tokens_per_s``) after each whole second of it."""
    if load.window is None or load.window.length_s < 1:
        return ()
    edges = [load.window.opened_s + second for second in range(int(load.window.length_s + 1e-9) + 1)]
    output, prompt = token_events(load.records)
    return tuple(np.cumsum(counts_per_part(*output, edges) + counts_per_part(*prompt, edges)).tolist())


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The records of a load that count, by what became of them.

    A closed loop counts what ended in the window: in flight are always as many, so ends are as good a sample as sends. An
    open loop counts what was due in it, or the longest requests would be missing from its figures.
    """

    succeeded: list[RequestRecord]
    failed: list[RequestRecord]
    censored: int
    not_sent: int
    failed_before: int

    @classmethod
    def of(cls, load: LoadResult) -> _Outcome:
        counts = _due_in_window(load) if load.concurrency is None else _ended_in_window(load)
        succeeded, failed = [], []
        censored = not_sent = before = 0
        for record in load.records:
            place = counts(record)
            if record.failure is not None and record.failure.kind is RequestFailureKind.NOT_SENT:
                not_sent += 1
            elif record.failure is not None and place is _Place.BEFORE:
                before += 1
            elif place is not _Place.INSIDE:
                continue
            elif record.censored:
                censored += 1
            elif record.failure is None:
                succeeded.append(record)
            else:
                failed.append(record)
        return cls(succeeded, failed, censored, not_sent, before)


class _Place(Enum):
    """Where a record lies relative to what the window counts."""

    BEFORE = "before"
    INSIDE = "inside"
    BEHIND = "behind"


def _ended_in_window(load: LoadResult) -> Callable[[RequestRecord], _Place]:
    """By the end. What failed or was censored as the window closed, or behind it, still belongs to it."""
    opened = load.window.opened_s if load.window else float("-inf")
    closed = load.window.closed_s if load.window else float("inf")

    def place(record: RequestRecord) -> _Place:
        if record.censored:
            return _Place.INSIDE
        if record.ended_s < opened:
            return _Place.BEFORE
        return _Place.INSIDE if record.ended_s <= closed or record.failure is not None else _Place.BEHIND

    return place


def _due_in_window(load: LoadResult) -> Callable[[RequestRecord], _Place]:
    """By the scheduled send, in the half-open window. One that was cut short ends with its last send, which is inside."""
    if load.window is None:
        return lambda record: _Place.INSIDE
    opened, closed = load.window.opened_s, load.window.closed_s
    last = closed if CAPPED in load.flags else float(np.nextafter(closed, -np.inf))

    def place(record: RequestRecord) -> _Place:
        if record.scheduled_s < opened:
            return _Place.BEFORE
        return _Place.INSIDE if record.scheduled_s <= last else _Place.BEHIND

    return place


def _within(record: RequestRecord, slos: Mapping[str, float], *, open_loop: bool) -> bool:
    """Whether a succeeded request met every SLO."""
    figures = {
        "ttft_s": record.scheduled_ttft_s if open_loop else record.ttft_s,
        "tpot_s": record.tpot_s,
        "e2e_s": record.scheduled_e2e_s if open_loop else record.e2e_s,
    }
    return all((figure := figures[name]) is None or figure <= bound for name, bound in slos.items())


def _failure_counts(failed: Iterable[RequestRecord]) -> dict[str, FailureCount]:
    """Failures by kind, in the order in which they first happened, each with its first message."""
    counts: dict[str, FailureCount] = {}
    for record in sorted(failed, key=lambda record: record.ended_s):
        if record.failure is not None:
            kind = record.failure.kind.value
            seen = counts.get(kind)
            counts[kind] = FailureCount(seen.n + 1, seen.first_message) if seen else FailureCount(1, record.failure.message)
    return counts
