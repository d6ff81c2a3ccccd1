"""A small deterministic engine for tests of the driver: slots, a queue, a fixed step time, and faults on order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from vopt.objectives.records import CounterSample, RequestFailure, RequestFailureKind, RequestRecord
from vopt.optimizer.load.plan import Request


@dataclass
class QueueEngine:
    """``slots`` requests run at once, the rest queue. A prompt takes ``prefill_s`` per token, then each ``step_s``
    brings ``chunk`` tokens.

    Faults are by order of arrival (the k-th ``run``, from 0): ``dies_at``, ``hangs`` (no further token), ``errors``
    (fails at once with that message).
    """

    slots: int = 8
    step_s: float = 0.1
    prefill_s: float = 0.0001
    dies_at: int | None = None
    hangs: frozenset[int] = frozenset()
    errors: Mapping[int, str] = field(default_factory=dict)
    ignores_idle: bool = False
    ignores_cancel: bool = False
    chunk: int = 5
    dead: str | None = None
    runs: int = 0
    generated: int = 0
    sent: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free: asyncio.Semaphore | None = None
        self._state: dict[int, tuple[float, list[float], list[int]]] = {}
        self._death: asyncio.Event = asyncio.Event()

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def partial(self, index: int) -> tuple[float, tuple[float, ...], tuple[int, ...]] | None:
        if index not in self._state:
            return None
        sent_s, times, tokens = self._state[index]
        return sent_s, tuple(times), tuple(tokens)

    async def counters(self, *, origin_s: float) -> CounterSample:
        running = min(self.slots, len(self._state))
        return CounterSample(
            at_s=self.now() - origin_s,
            running=running,
            waiting=len(self._state) - running,
            kv_usage=running / self.slots,
            generation_tokens=self.generated,
        )

    async def run(self, request: Request, *, origin_s: float, scheduled_s: float, idle_timeout_s: float) -> RequestRecord:
        order, self.runs = self.runs, self.runs + 1
        sent_s = self.now() - origin_s
        self.sent.append(request.index)
        self._state[request.index] = (sent_s, [], [])
        failure: RequestFailure | None = None
        try:
            if order == self.dies_at:
                self.dead = "CUDA error: an illegal memory access was encountered"
                self._death.set()
            if order in self.errors:
                failure = RequestFailure(RequestFailureKind.STREAM_ERROR, self.errors[order])
            elif self.dead is None:
                failure = await self._serve(request, order, origin_s, idle_timeout_s)
            if failure is None and self.dead is not None:
                failure = RequestFailure(RequestFailureKind.ENGINE_DIED, self.dead)
        except asyncio.CancelledError:
            self.aborted.append(request.index)
            if not self.ignores_cancel:
                raise
        finally:
            _, times, tokens = self._state.pop(request.index)
        return RequestRecord(
            index=request.index,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            ended_s=self.now() - origin_s,
            prompt_tokens=request.prompt_tokens,
            requested_output_tokens=request.max_tokens,
            output_tokens=sum(tokens),
            chunk_times_s=tuple(times),
            chunk_tokens=tuple(tokens),
            finish_reason=None if failure else "length",
            failure=failure,
            prompt_sha256=request.prompt_sha256,
            session=request.session,
        )

    async def _serve(self, request: Request, order: int, origin_s: float, idle_timeout_s: float) -> RequestFailure | None:
        work = asyncio.ensure_future(self._generate(request, order, origin_s))
        death = asyncio.ensure_future(self._death.wait())
        try:
            idle = idle_timeout_s if order in self.hangs and not self.ignores_idle else None
            done, _ = await asyncio.wait({work, death}, timeout=idle, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return RequestFailure(RequestFailureKind.TIMEOUT_IDLE, f"no token for {idle_timeout_s:g} s")
            return None
        finally:
            work.cancel()
            death.cancel()

    async def _generate(self, request: Request, order: int, origin_s: float) -> None:
        if self._free is None:
            self._free = asyncio.Semaphore(self.slots)
        _, times, tokens = self._state[request.index]
        async with self._free:
            await asyncio.sleep(self.prefill_s * request.prompt_tokens)
            left = request.max_tokens
            while left > 0:
                await asyncio.sleep(self.step_s)
                if order in self.hangs:
                    await asyncio.get_running_loop().create_future()
                times.append(self.now() - origin_s)
                tokens.append(min(self.chunk, left))
                self.generated += tokens[-1]
                left -= tokens[-1]
