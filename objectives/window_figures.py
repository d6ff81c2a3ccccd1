"""The figures of a load's window, each added to ``values`` (and ``intervals``) under its metric name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from vopt.objectives.intervals import RATE_BLOCKS, Array, counts_per_part, mean_interval, percentile_interval, rate_interval
from vopt.objectives.records import CounterSample, LoadResult, LoadWindow, RequestRecord
from vopt.objectives.steadiness import sub_window_edges, token_scale

PERCENTILES = (50, 90, 95, 99)


def token_events(records: Iterable[RequestRecord]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """(time, tokens) of every chunk, and of every prompt at the end of its prefill; failed requests credit nothing."""
    counted = [record for record in records if record.failure is None and record.chunk_times_s]
    lengths = [len(record.chunk_times_s) for record in counted]
    at = np.fromiter(chain.from_iterable(record.chunk_times_s for record in counted), np.float64, sum(lengths))
    chunks = (_chunk_tokens(record, n) for record, n in zip(counted, lengths, strict=True))
    tokens = np.fromiter(chain.from_iterable(chunks), np.float64, sum(lengths))
    tokens *= np.repeat([token_scale(record) for record in counted], lengths)
    first = np.array([record.chunk_times_s[0] for record in counted], np.float64)
    return (at, tokens), (first, np.array([record.prompt_tokens for record in counted], np.float64))


def _chunk_tokens(record: RequestRecord, n: int) -> tuple[int, ...]:
    """One count for each of ``n`` chunks, also where a record contradicts itself."""
    if not record.chunk_tokens:
        return (1,) * n
    return record.chunk_tokens if len(record.chunk_tokens) == n else (*record.chunk_tokens, *(0,) * n)[:n]


def add_rates(
    load: LoadResult,
    window: LoadWindow,
    succeeded: Sequence[RequestRecord],
    good: Sequence[RequestRecord] | None,
    values: dict[str, float],
    intervals: dict[str, tuple[float, float]],
    rng: np.random.Generator,
    resamples: int,
) -> None:
    """Rates over the window, with intervals from its blocks of time. Tokens count when they come; requests when they end,
    in an open loop when they are due."""
    edges = sub_window_edges(window.opened_s, window.closed_s, RATE_BLOCKS)
    closing = (*edges[:-1], np.nextafter(window.closed_s, np.inf))  # a request that ends with the window ended in it
    output, prompt = token_events(load.records)
    out = counts_per_part(*output, edges)
    blocks = {
        "tokens_per_s": out + counts_per_part(*prompt, edges),
        "output_tokens_per_s": out,
        "requests_per_s": counts_per_part(_counted_at(succeeded, load), None, closing),
    }
    if good is not None:
        blocks["goodput_per_s"] = counts_per_part(_counted_at(good, load), None, closing)
    for name, counts in blocks.items():
        values[name] = float(counts.sum()) / window.length_s
        interval = rate_interval(counts, window.length_s / RATE_BLOCKS, rng, resamples)
        if interval is not None:
            intervals[name] = interval


def _counted_at(records: Sequence[RequestRecord], load: LoadResult) -> Array:
    """When each request counts, shape (n,), seconds."""
    open_loop = load.concurrency is None
    return np.array([record.scheduled_s if open_loop else record.ended_s for record in records], np.float64)


def add_latencies(
    succeeded: Sequence[RequestRecord],
    open_loop: bool,
    values: dict[str, float],
    intervals: dict[str, tuple[float, float]],
    rng: np.random.Generator,
    resamples: int,
) -> None:
    """Means and percentiles over succeeded requests."""
    sent: dict[str, Sequence[float | None]] = {
        "ttft": [record.ttft_s for record in succeeded],
        "e2e": [record.e2e_s for record in succeeded],
    }
    figures: dict[str, Sequence[float | None]] = {
        "ttft": [record.scheduled_ttft_s for record in succeeded] if open_loop else sent["ttft"],
        "tpot": [record.tpot_s for record in succeeded],
        "e2e": [record.scheduled_e2e_s for record in succeeded] if open_loop else sent["e2e"],
    }
    if open_loop:
        figures |= {"sent_ttft": sent["ttft"], "sent_e2e": sent["e2e"]}
    for latency, raw in figures.items():
        ordered = np.sort(np.array([value for value in raw if value is not None], np.float64))
        ordered = ordered[np.isfinite(ordered)]
        if not len(ordered):
            continue
        found = {f"mean_{latency}_s": (float(ordered.mean()), mean_interval(ordered, rng, resamples))}
        for percent, value in zip(PERCENTILES, np.percentile(ordered, PERCENTILES), strict=True):
            found[f"p{percent}_{latency}_s"] = float(value), percentile_interval(ordered, percent)
        for name, (value, interval) in found.items():
            values[name] = value
            if interval is not None:
                intervals[name] = interval


def add_counters(
    load: LoadResult, window: LoadWindow, succeeded: Sequence[RequestRecord], values: dict[str, float]
) -> list[str]:
    """What the engine's own counters say about the window; notes on counters that cannot be used."""
    inside = [sample for sample in load.samples if window.opened_s <= sample.at_s <= window.closed_s]
    usage = [sample.kv_usage for sample in inside if sample.kv_usage is not None]
    if usage:
        values["kv_peak"] = max(usage)
    waiting = [sample.waiting > 0 for sample in inside if sample.waiting is not None]
    if waiting:
        values["queued_share"] = sum(waiting) / len(waiting)
    running = [sample.running for sample in inside if sample.running is not None]
    if running:
        values["peak_running"] = float(max(running))
    outside = _outside_engine(load.records, inside)
    if outside is not None:
        values["front_end_share"] = outside
    steps = ("engine_steps", "full_budget_steps")
    names = (*steps, "preemptions", "prefix_queries", "prefix_hits", "drafts", "draft_tokens", "accepted_tokens")
    grown = {name: _growth(load.samples, window, name) for name in names}
    backward = [name for name, growth in grown.items() if growth is not None and growth < 0]
    known = {name: growth for name, growth in grown.items() if growth is not None and growth >= 0}
    if known.get("engine_steps") and "full_budget_steps" in known:
        values["full_budget_share"] = known["full_budget_steps"] / known["engine_steps"]
    if "preemptions" in known:
        values["preemptions"] = known["preemptions"]
    if known.get("prefix_queries") and "prefix_hits" in known:
        values["prefix_hit_rate"] = known["prefix_hits"] / known["prefix_queries"]
    else:
        told = [(r.cached_prompt_tokens, r.prompt_tokens) for r in succeeded if r.cached_prompt_tokens is not None]
        if asked := sum(prompt for _, prompt in told):
            values["prefix_hit_rate"] = sum(cached for cached, _ in told) / asked
    if known.get("drafts") and "accepted_tokens" in known:
        values["acceptance_length"] = 1 + known["accepted_tokens"] / known["drafts"]
    if known.get("draft_tokens") and "accepted_tokens" in known:
        values["acceptance_rate"] = known["accepted_tokens"] / known["draft_tokens"]
    return [f"the engine's counter of {name} ran backwards in the window (a restart?) and is not used" for name in backward]


MORE_THAN_OURS = 0.05
"""An engine that holds so much more than our requests in flight serves others too; less is two clocks that differ a little."""


def _outside_engine(records: Sequence[RequestRecord], samples: Sequence[CounterSample]) -> float | None:
    """The share of our requests in flight that the engine neither ran nor had waiting, over all ``samples``: they were in the
    front end, on their way in or out. By Little's law the share of the E2E latency that is spent there.

    ``None`` where the engine does not tell both, nothing was in flight, or the engine has others' requests too.
    """
    told = [(s.at_s, s.running + s.waiting) for s in samples if s.running is not None and s.waiting is not None]
    sent = np.sort([record.sent_s for record in records])
    ended = np.sort([record.ended_s for record in records])
    at = [moment for moment, _ in told]
    in_flight = int((np.searchsorted(sent, at, "right") - np.searchsorted(ended, at, "right")).sum())
    if in_flight <= 0:
        return None
    share = 1 - sum(inside for _, inside in told) / in_flight
    return None if share < -MORE_THAN_OURS else max(0.0, share)


def _growth(samples: Sequence[CounterSample], window: LoadWindow, name: str) -> float | None:
    """Growth of a cumulative counter between the samples nearest to the window's ends; ``None`` without two of them."""
    told = [(sample.at_s, value) for sample in samples if (value := getattr(sample, name)) is not None]
    if not told:
        return None
    begin = min(told, key=lambda point: abs(point[0] - window.opened_s))
    end = min(told, key=lambda point: abs(point[0] - window.closed_s))
    return float(end[1] - begin[1]) if end[0] > begin[0] else None
