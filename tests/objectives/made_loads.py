"""Loads made for the tests of ``objectives``: seeded, small, and shaped like real ones."""

from __future__ import annotations

import heapq
import random

from vopt.objectives.records import (
    CounterSample,
    LoadResult,
    LoadStatus,
    LoadWindow,
    RequestFailure,
    RequestFailureKind,
    RequestRecord,
)


def record(
    index: int = 0,
    sent_s: float = 0.0,
    ttft_s: float = 0.1,
    tpot_s: float = 0.02,
    output_tokens: int = 11,
    prompt_tokens: int = 100,
    **changes: object,
) -> RequestRecord:
    """A request that succeeded, one token a chunk."""
    times = tuple(sent_s + ttft_s + tpot_s * token for token in range(output_tokens))
    fields: dict[str, object] = {
        "index": index,
        "scheduled_s": sent_s,
        "sent_s": sent_s,
        "ended_s": times[-1] if times else sent_s + ttft_s,
        "prompt_tokens": prompt_tokens,
        "requested_output_tokens": output_tokens,
        "output_tokens": output_tokens,
        "chunk_times_s": times,
        "chunk_tokens": (1,) * output_tokens,
        "finish_reason": "length",
    }
    return RequestRecord(**{**fields, **changes})  # type: ignore[arg-type]  # a test's free hand


def failed(index: int, ended_s: float, kind: RequestFailureKind, message: str = "boom") -> RequestRecord:
    return record(
        index, ended_s - 1, output_tokens=0, ended_s=ended_s, finish_reason=None, failure=RequestFailure(kind, message)
    )


def closed_loop(
    seed: int = 0, concurrency: int = 64, window_s: float = 60.0, output_tokens: int = 100, slower_half: float = 0.0
) -> LoadResult:
    """A closed loop of lognormal lengths whose TPOT grows by ``slower_half`` in the window's second half."""
    rng = random.Random(seed)
    opened, closed = 15.0, 15.0 + window_s
    slots = [(rng.uniform(0, 2), slot) for slot in range(concurrency)]
    heapq.heapify(slots)
    records = []
    while slots[0][0] < closed:
        at, slot = heapq.heappop(slots)
        tpot = 0.02 * rng.lognormvariate(0, 0.05) * (1 + slower_half * (at > opened + window_s / 2))
        made = record(
            len(records),
            at,
            0.1 * rng.lognormvariate(0, 0.6),
            tpot,
            max(2, int(output_tokens * rng.lognormvariate(-0.2, 0.6))),
            max(1, int(300 * rng.lognormvariate(-0.2, 0.6))),
        )
        heapq.heappush(slots, (made.ended_s, slot))
        records.append(cut(made, closed))
    return LoadResult(
        tuple(records), LoadWindow(opened, closed), LoadStatus.COMPLETE, concurrency=concurrency, samples=counters(closed)
    )


def cut(made: RequestRecord, closed_s: float) -> RequestRecord:
    """What is left of a request when the load ends: censored if it was still in flight."""
    if made.ended_s <= closed_s:
        return made
    times = tuple(time for time in made.chunk_times_s if time < closed_s)
    return RequestRecord(
        index=made.index,
        scheduled_s=made.scheduled_s,
        sent_s=made.sent_s,
        ended_s=closed_s,
        prompt_tokens=made.prompt_tokens,
        requested_output_tokens=made.requested_output_tokens,
        output_tokens=len(times),
        chunk_times_s=times,
        chunk_tokens=(1,) * len(times),
        censored=True,
    )


def counters(until_s: float) -> tuple[CounterSample, ...]:
    """One sample a second: 100 prefix queries, 3 hits, 10 drafts of 2 tokens of which 7 are accepted."""
    return tuple(
        CounterSample(
            float(second),
            kv_usage=min(0.6, 0.1 * second),
            preemptions=second // 10,
            prefix_queries=100 * second,
            prefix_hits=3 * second,
            drafts=10 * second,
            draft_tokens=20 * second,
            accepted_tokens=7 * second,
        )
        for second in range(int(until_s) + 1)
    )


def open_loop(
    seed: int, rate: float, servers: int, mean_s: float, *, window_s: float = 60.0, warmup_s: float = 5.0
) -> tuple[tuple[RequestRecord, ...], LoadWindow]:
    """Poisson arrivals at an M/M/c queue: the shape of a load that an engine with ``servers`` slots serves."""
    rng = random.Random(seed)
    closed = warmup_s + window_s
    free = [0.0] * servers
    records: list[RequestRecord] = []
    at = rng.expovariate(rate)
    while at < closed:
        began = max(at, heapq.heappop(free))
        done = began + rng.expovariate(1 / mean_s)
        heapq.heappush(free, done)
        first = min(done, began + 0.05 * rng.lognormvariate(0, 0.6))
        records.append(
            RequestRecord(
                index=len(records),
                scheduled_s=at,
                sent_s=at,
                ended_s=min(done, closed),
                prompt_tokens=100,
                requested_output_tokens=10,
                output_tokens=10,
                chunk_times_s=(first,) if first < closed else (),
                chunk_tokens=(10,) if first < closed else (),
                finish_reason="length",
                censored=done > closed,
            )
        )
        at += rng.expovariate(rate)
    return tuple(records), LoadWindow(warmup_s, closed)
