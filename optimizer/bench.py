"""``vopt bench``: one or several loads, and the document about them. Nothing here prints.

The document has the fields of ``vllm bench serve``'s result JSON (vLLM 0.32, ``benchmarks/serve.py``) with their units
(milliseconds, whole run), so that existing scripts read it, and everything of ours under the one key ``vopt``. Differences: a
request that failed in its stream is counted as failed, not as completed, and what is undefined is ``null`` or absent, not 0.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vopt.objectives.confidence import start_spread
from vopt.objectives.metrics import FailureCount, Metrics, compute_metrics
from vopt.objectives.records import LoadResult, RequestRecord
from vopt.optimizer.compile_watch import WatchedLoads
from vopt.optimizer.engine.base import OnPhase, OnTick, Session
from vopt.optimizer.first_load import NumberedLoads, first_load
from vopt.optimizer.load.metrics_text import Traffic, from_histograms, parse
from vopt.optimizer.load.plan import LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.measurement import Asked, Measurement
from vopt.optimizer.trial import Phase, Started

FORMAT_VERSION = 1
SPREAD_METRICS = ("tokens_per_s", "output_tokens_per_s", "requests_per_s", "mean_ttft_s", "mean_tpot_s", "mean_e2e_s")


@dataclass(frozen=True, slots=True)
class BenchLabels:
    """What a document says about its subject, beside the figures."""

    model: str
    backend: str = "vllm"
    endpoint: str = "completions"
    label: str | None = None
    tokenizer: str | None = None
    workload: str = ""
    workload_hash: str = ""
    environment: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """One load with its figures."""

    load: LoadResult
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class BenchResult:
    """``starts[i]`` are the loads on engine start *i*; ``started[i]`` what that engine said of itself.
    ``plan`` is what every load had (``None``: the first one did not come to its end)."""

    starts: tuple[tuple[MeasuredLoad, ...], ...]
    started: tuple[Started, ...]
    leftovers: tuple[str, ...] = ()
    plan: LoadPlan | None = None

    @property
    def first(self) -> MeasuredLoad:
        return self.starts[0][0]


@dataclass(frozen=True, slots=True)
class BenchOutcome:
    """What ``vopt bench`` prints: the JSON document, or the text."""

    document: dict[str, Any]
    text: str
    gate_failed: bool = False


def run_bench(
    open_session: Callable[[int], Session],
    source: RequestSource,
    plan: LoadPlan | Asked,
    *,
    repeat: int = 1,
    fresh_starts: bool = True,
    replay_ends: bool = True,
    slos: Mapping[str, float] | None = None,
    on_tick: OnTick = lambda tick: True,
    on_phase: OnPhase = lambda phase, words: None,
    say: Callable[[str], None] = lambda text: None,
    log_of: Callable[[int], Path | None] = lambda start: None,
) -> BenchResult:
    """``repeat`` loads on the first engine and, unless it is somebody else's server, one on each of ``repeat - 1`` fresh ones.

    ``open_session(i)`` makes the session of start *i*. Every load has prompts of its own. What an ``Asked`` leaves open is
    found on the first engine and kept for all later loads, which also replay the output lengths that the first one saw
    (``replay_ends``). A first load that does not come to its end is the last. ``log_of(i)``: where the output of start *i*
    goes; a load whose window saw a compilation there is measured once more. Raises ``EngineFailure`` when an engine fails;
    sessions are closed either way.
    """
    starts: list[tuple[MeasuredLoad, ...]] = []
    started: list[Started] = []
    leftovers: list[str] = []
    frozen = Measurement(plan, {}) if isinstance(plan, LoadPlan) else None
    numbered = NumberedLoads(source, on_tick)
    for start in range(repeat if fresh_starts else 1):
        session = open_session(start)
        try:
            started.append(session.start(on_phase))
            loads: list[MeasuredLoad] = []
            once = numbered.on(WatchedLoads(session.load, log_of(start), say).load)
            for number in range(repeat if start == 0 else 1):
                on_phase(Phase.LOAD, "sending requests" if repeat == 1 else f"number {sum(map(len, starts)) + number + 1}")
                if frozen is None and isinstance(plan, Asked):
                    found = first_load(plan, once, say)
                    frozen, load = found.measurement, found.load
                    if frozen is not None and replay_ends and frozen.observed_output_tokens:
                        numbered.source = source.with_observed(frozen.observed_output_tokens)
                else:
                    assert frozen is not None, "a first load without a measurement is the last"
                    load = once(frozen.plan)
                loads.append(MeasuredLoad(load, compute_metrics(load, slos=slos)))
                if frozen is None:
                    break
            starts.append(tuple(loads))
        finally:
            on_phase(Phase.STOP, "stopping")
            leftovers += session.close()
        if frozen is None:
            break
    return BenchResult(tuple(starts), tuple(started), tuple(leftovers), frozen.plan if frozen is not None else None)


def bench_document(
    load: LoadResult, metrics: Metrics, labels: BenchLabels, *, started: Started | None = None, at: datetime | None = None
) -> dict[str, Any]:
    """The result document of one load."""
    seeing = max((record.ended_s for record in load.records), default=0.0)
    document: dict[str, Any] = {
        "date": (at or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if labels.endpoint == "chat" else "openai",
        "backend": labels.backend,
        "label": labels.label,
        "model_id": labels.model,
        "tokenizer_id": labels.tokenizer,
        "num_prompts": len(load.records) + load.not_sent,
        "request_rate": "inf" if load.rate is None else load.rate,
        "burstiness": 1.0,
        "max_concurrency": load.concurrency,
        **{name: _plain(value) for name, value in metrics.whole_run.items()},
        "max_concurrent_requests": most_in_flight(load.records),
        **_spec_decode(load),
    }
    if seeing > 0:
        document["max_output_tokens_per_s"] = busiest_second(load.records)
    document["vopt"] = _ours(load, metrics, labels, started)
    return document


def _ours(load: LoadResult, metrics: Metrics, labels: BenchLabels, started: Started | None) -> dict[str, Any]:
    window = load.window
    return {
        "format_version": FORMAT_VERSION,
        "status": load.status.value,
        "detail": load.detail,
        "flags": list(load.flags),
        "window": None
        if window is None
        else {"opened_s": window.opened_s, "closed_s": window.closed_s, "doublings": window.doublings},
        "metrics": dict(metrics.values),
        "intervals_95": {name: list(interval) for name, interval in metrics.intervals.items()},
        "requests": {
            "succeeded": metrics.succeeded,
            "failed": metrics.failed,
            "censored": metrics.censored,
            "not_sent": metrics.not_sent,
            "contradictory": metrics.contradictory,
        },
        "failures": {kind: {"n": count.n, "first_message": count.first_message} for kind, count in failures(load).items()},
        "notes": list(metrics.notes),
        "client": {
            "max_lag_s": load.client.max_lag_s,
            "cpu_share": load.client.cpu_share,
            "requested_rate": load.client.requested_rate,
            "achieved_rate": load.client.achieved_rate,
            "limited": load.client.limited,
        },
        "workload": {"name": labels.workload, "sha256": labels.workload_hash},
        "engine": None
        if started is None
        else {
            "vllm_version": started.vllm_version,
            "kv_cache_tokens": started.kv_cache_tokens,
            "start_parts_s": dict(started.start_parts_s),
        },
        "environment": dict(labels.environment or {}),
    }


def failures(load: LoadResult) -> dict[str, FailureCount]:
    """Failed requests of the whole load by kind, each with its first message; the window's are in its metrics."""
    found: dict[str, FailureCount] = {}
    for record in sorted(load.records, key=lambda record: record.ended_s):
        if record.failure is not None:
            kind = record.failure.kind.value
            before = found.get(kind)
            found[kind] = FailureCount(1, record.failure.message) if before is None else replace(before, n=before.n + 1)
    return found


def busiest_second(records: Sequence[RequestRecord]) -> float:
    """Most output tokens in one of the load's whole seconds."""
    seconds: dict[int, int] = {}
    for record in records:
        if record.failure is None:
            for at, tokens in zip(record.chunk_times_s, record.chunk_tokens, strict=False):
                seconds[int(at)] = seconds.get(int(at), 0) + tokens
    return float(max(seconds.values(), default=0))


def most_in_flight(records: Sequence[RequestRecord]) -> int:
    """Most requests in flight at any one time."""
    ends = sorted(record.ended_s for record in records)
    begins = sorted(record.sent_s for record in records)
    return max((place + 1 - bisect_right(ends, at) for place, at in enumerate(begins)), default=0)


def _spec_decode(load: LoadResult) -> dict[str, Any]:
    """Speculation over the whole run, from the first and last counters; empty without drafts."""
    told = [sample for sample in load.samples if sample.drafts is not None]
    if len(told) < 2:
        return {}
    grown = {name: getattr(told[-1], name) - getattr(told[0], name) for name in ("drafts", "draft_tokens", "accepted_tokens")}
    if grown["drafts"] <= 0 or grown["draft_tokens"] <= 0:
        return {}
    return {
        "spec_decode_num_drafts": grown["drafts"],
        "spec_decode_draft_tokens": grown["draft_tokens"],
        "spec_decode_accepted_tokens": grown["accepted_tokens"],
        "spec_decode_acceptance_rate": 100 * grown["accepted_tokens"] / grown["draft_tokens"],  # a percentage there
        "spec_decode_acceptance_length": 1 + grown["accepted_tokens"] / grown["drafts"],
    }


def _plain(value: float) -> float | int:
    return int(value) if isinstance(value, int) else float(value)


def repeat_summary(result: BenchResult, names: Iterable[str] = SPREAD_METRICS) -> dict[str, Any]:
    """How much repeated loads differ, by metric: relative standard deviations within one engine and from start to start.

    ``supports_comparison`` is true only for the latter, and only if there were two starts or more: loads on one engine share
    its memory layout, compiled kernels and clocks, so they agree better with each other than with the next start.
    """
    metrics: dict[str, Any] = {}
    for name in names:
        starts = [[load.metrics[name] for load in loads if (load.metrics.get(name) or 0.0) > 0] for loads in result.starts]
        if not any(starts):
            continue
        spread = start_spread(starts)
        metrics[name] = {
            "starts": starts,
            "within_engine": spread.within,
            "between_starts": spread.between,
            "of_starts": spread.of_starts,
        }
    return {
        "starts": len(result.starts),
        "loads": sum(map(len, result.starts)),
        "supports_comparison": len(result.starts) > 1,
        "metrics": metrics,
    }


def write_records(records: Iterable[RequestRecord], path: Path) -> None:
    """Raw request records as gzip-compressed JSON lines, readable by the owner alone. They hold lengths and hashes only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as raw, gzip.open(raw, "wt", encoding="utf-8", compresslevel=3) as lines:
        for record in records:
            lines.write(json.dumps(record.to_json(), separators=(",", ":")) + "\n")


def watch_traffic(
    scrape: Callable[[], str],
    for_s: float,
    *,
    name: str = "measured",
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Traffic:
    """The workload of a running server: its ``/metrics`` (``client.read_metrics``) now and ``for_s`` seconds later."""
    began, before = clock(), parse(scrape())
    sleep(max(0.0, for_s))
    after = parse(scrape())
    return from_histograms(before, after, seconds=clock() - began, name=name)
