"""One load on an engine of a queue, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter

from queue_engine import QueueEngine

from vopt.objectives.records import LoadResult
from vopt.optimizer.engine.base import OnTick
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Tick
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.virtual_time import run_virtual

SHORT = RequestSource(lengths=((100, 50), (40, 20), (300, 120), (10, 8)))
CLOSED = LoadPlan(Arrivals.CLOSED, window_s=30, concurrency=8, min_requests=10)
POISSON = LoadPlan(Arrivals.POISSON, window_s=60, rate=4, min_requests=10)


def load(engine: QueueEngine, plan: LoadPlan, source: RequestSource = SHORT, on_tick: OnTick | None = None) -> LoadResult:
    async def run() -> LoadResult:
        result = await drive(engine, source, plan, on_tick)
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not engine.ignores_cancel]
        assert not left, f"tasks outlived the load: {left}"
        return result

    return run_virtual(run())


def keep(ticks: list[Tick]) -> OnTick:
    def on_tick(tick: Tick) -> bool:
        ticks.append(tick)
        return True

    return on_tick


def kinds(result: LoadResult) -> Counter[str]:
    return Counter(r.failure.kind.value if r.failure else "censored" if r.censored else "ok" for r in result.records)


def assert_accounted(engine: QueueEngine, result: LoadResult) -> None:
    """Each request that reached the engine has exactly one record, and each record is one thing only."""
    assert Counter(record.index for record in result.records) == Counter(engine.sent)
    for record in result.records:
        assert [record.succeeded, record.failure is not None, record.censored].count(True) == 1
        assert record.scheduled_s <= record.sent_s <= record.ended_s
        assert record.output_tokens == sum(record.chunk_tokens)
