"""What the load driver costs: tokens per second and CPU share of its thread beside an engine that only keeps books.

    PYTHONPATH=build/names python tests/benchmarks/load_driver.py [seconds] [concurrency]

The engine emits one token for each request every 20 ms. The target: above 10,000 tokens/s with the client not limited.
"""

from __future__ import annotations

import asyncio
import sys
import time

from vopt.objectives.records import CounterSample, RequestRecord
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Request
from vopt.optimizer.load.source import RequestSource

STEP_S = 0.02


class BookkeepingEngine:
    """No model: a timer appends a time stamp to every request in flight."""

    dead: str | None = None

    def __init__(self) -> None:
        self.tokens = 0
        self.cpu_s = 0.0
        self.origin_s = 0.0
        self.live: dict[int, tuple[float, list[float], int, asyncio.Future[None]]] = {}

    def now(self) -> float:
        return time.monotonic()

    def partial(self, index: int) -> tuple[float, tuple[float, ...], tuple[int, ...]] | None:
        if index not in self.live:
            return None
        sent_s, times, _, _ = self.live[index]
        return sent_s, tuple(times), (1,) * len(times)

    async def counters(self, *, origin_s: float) -> CounterSample:
        return CounterSample(self.now() - origin_s, running=len(self.live), kv_usage=0.5)

    async def step_for_ever(self) -> None:
        due_s = self.now()
        while True:
            began_s = time.thread_time()
            stamp_s = self.now() - self.origin_s
            for _, times, wanted, done in self.live.values():
                times.append(stamp_s)
                self.tokens += 1
                if len(times) >= wanted and not done.done():
                    done.set_result(None)
            self.cpu_s += time.thread_time() - began_s
            due_s += STEP_S
            await asyncio.sleep(max(0.0, due_s - self.now()))

    async def run(self, request: Request, *, origin_s: float, scheduled_s: float, idle_timeout_s: float) -> RequestRecord:
        self.origin_s = origin_s
        sent_s = self.now() - origin_s
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.live[request.index] = (sent_s, [], request.max_tokens, done)
        try:
            await done
        finally:
            _, times, _, _ = self.live.pop(request.index)
        return RequestRecord(
            request.index, scheduled_s, sent_s, self.now() - origin_s, request.prompt_tokens, request.max_tokens,
            len(times), tuple(times), (1,) * len(times), finish_reason="length",
        )  # fmt: skip


async def measure(seconds: float, concurrency: int) -> None:
    engine = BookkeepingEngine()
    lengths = tuple((342, 60 + 7 * number) for number in range(64))
    source = RequestSource(lengths, bodies=(tuple(range(5000)),), digit_ids=tuple(range(10)))
    plan = LoadPlan(Arrivals.CLOSED, window_s=seconds, concurrency=concurrency, min_requests=1)
    stepping = asyncio.create_task(engine.step_for_ever())
    cpu_s = time.thread_time()
    result = await drive(engine, source, plan)
    cpu_s = time.thread_time() - cpu_s
    stepping.cancel()
    elapsed_s = result.samples[-1].at_s
    print(f"{engine.tokens / elapsed_s:,.0f} tokens/s in {len(result.records)} requests, {result.status}, {result.client}")
    ours, theirs = (cost / engine.tokens * 1e6 for cost in (cpu_s - engine.cpu_s, engine.cpu_s))
    print(f"CPU seconds per million tokens: driver {ours:.2f}, engine {theirs:.2f}")


if __name__ == "__main__":
    asyncio.run(measure(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0, int(sys.argv[2]) if len(sys.argv) > 2 else 512))
