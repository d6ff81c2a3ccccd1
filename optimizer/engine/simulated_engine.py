"""The engine of a simulation: requests in, records out, on the clock of a virtual-time event loop."""

from __future__ import annotations

import asyncio
import math

from vopt.objectives.records import CounterSample, RequestFailure, RequestFailureKind, RequestRecord
from vopt.optimizer.engine.simulated_failures import FIRST_WAVE, CrashRegion
from vopt.optimizer.engine.simulated_flight import Flight, record, since
from vopt.optimizer.engine.simulated_scheduler import Scheduler
from vopt.optimizer.engine.simulated_state import Beginnings, Run, Sequence
from vopt.optimizer.load.ledger import Progress
from vopt.optimizer.load.plan import Request
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.trial import FailureKind

OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB."
DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."
ERRORED = "finish_reason error: Internal error during generation"


class SimulatedEngine:
    """Implements ``Engine``. ``attach`` puts it on a running loop; between loads it keeps its clock and its caches."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        max_model_len: int,
        crash_regions: tuple[CrashRegion, ...] = (),
        most_decoding: float = math.inf,
    ) -> None:
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._regions = crash_regions
        self._most_decoding = most_decoding
        self._flights: dict[int, Flight] = {}
        self._by_number: dict[int, Flight] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._source: RequestSource | None = None
        self._base_s = 0.0
        self._number = 0
        self._run: Run | None = None
        self._settled = 0
        self._timer: asyncio.Handle | None = None
        self._peak = 0
        self._succeeded = 0
        self._long_output = math.inf
        self.dead: str | None = None
        self.dead_kind = FailureKind.ENGINE_DIED

    def attach(self, loop: asyncio.AbstractEventLoop, source: RequestSource | None = None) -> None:
        """Continue on ``loop``, whose clock may begin anew; ``source`` says what prompts share."""
        self._base_s = max(self._base_s, self._scheduler.step_times[-1]) - loop.time() + 0.0
        self._loop, self._source = loop, source
        self._peak = self._succeeded = 0
        if source is not None:
            outputs = sorted(output for _, output in source.lengths)
            share = max((region.failing_share for region in self._regions), default=0.0)
            self._long_output = outputs[min(len(outputs) - 1, int((1 - share) * len(outputs)))]

    def detach(self) -> None:
        """Leave the loop: abort what is left and stop the clock."""
        if self._loop is None:
            return
        self._base_s = self.now()
        for flight in list(self._flights.values()):
            self._scheduler.remove(flight.sequence)
        self._flights.clear()
        self._by_number.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._run, self._timer, self._loop = None, None, None

    def now(self) -> float:
        return self._base_s + (self._loop.time() if self._loop is not None else 0.0)

    async def run(self, request: Request, *, origin_s: float, scheduled_s: float, idle_timeout_s: float) -> RequestRecord:
        now_s = self.now()
        failure = self._refusal(request)
        if failure is not None or self._loop is None:
            return record(request, origin_s, scheduled_s, now_s, now_s, (), (), failure)
        sequence, errors = self._sequence(request, now_s)
        flight = Flight(sequence, self._loop.create_future(), origin_s, now_s, idle_timeout_s, errors)
        self._flights[request.index] = flight
        self._by_number[sequence.number] = flight
        self._peak = max(self._peak, len(self._flights))
        self._scheduler.add(sequence)
        self._arrived()
        try:
            failure = await flight.future
        finally:
            self._flights.pop(request.index, None)
            self._by_number.pop(sequence.number, None)
            if not sequence.gone:  # cancelled, timed out, or the engine died
                self._sync()
                times, tokens = self._scheduler.chunks(sequence)
                self._scheduler.remove(sequence)
            else:
                times, tokens = sequence.chunk_times, sequence.chunk_tokens
        ended_s = self.now() if failure is not None or not times else times[-1]
        hit = sequence.hit if self._scheduler.resolved.prefix_caching else None
        return record(request, origin_s, scheduled_s, now_s, ended_s, times, tokens, failure, hit)

    def partial(self, index: int) -> tuple[float, tuple[float, ...], tuple[int, ...]] | None:
        flight = self._flights.get(index)
        if flight is None:
            return None
        if self._run is not None and self._run.steps > 1:
            self._sync()
        times, tokens = self._scheduler.chunks(flight.sequence)
        return flight.sent_s - flight.origin_s, since(times, flight.origin_s) if flight.origin_s else times, tokens

    def progress(self, index: int, since_s: float) -> Progress | None:
        flight = self._flights.get(index)
        if flight is None:
            return None
        if self._run is not None and self._run.steps > 1:
            self._sync()
        origin_s = flight.origin_s
        last_s, tokens, first_since = self._scheduler.progress(flight.sequence, since_s + origin_s)
        return Progress(flight.sent_s - origin_s, None if last_s is None else last_s - origin_s, tokens, first_since)

    async def counters(self, *, origin_s: float) -> CounterSample:
        self._sync()
        scheduler, counters = self._scheduler, self._scheduler.counters
        speculation, caching = scheduler.resolved.speculation, scheduler.resolved.prefix_caching
        return CounterSample(
            at_s=self.now() - origin_s,
            running=len(scheduler.running),
            waiting=len(self._flights) - len(scheduler.running),
            kv_usage=scheduler.kv_usage,
            preemptions=counters.preemptions,
            prefix_queries=counters.prefix_queries if caching else None,
            prefix_hits=counters.prefix_hits if caching else None,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generated_tokens,
            drafts=counters.drafts if speculation else None,
            draft_tokens=counters.drafts * speculation.tokens if speculation else None,
            accepted_tokens=counters.accepted_tokens if speculation else None,
            engine_steps=counters.steps,
            full_budget_steps=counters.full_budget_steps,
        )

    # Requests

    def _refusal(self, request: Request) -> RequestFailure | None:
        if self.dead is not None:
            return RequestFailure(RequestFailureKind.ENGINE_DIED, self.dead)
        if request.prompt_tokens + request.max_tokens > self._max_model_len:
            words = (
                f"400: This model's maximum context length is {self._max_model_len} tokens. However, you requested "
                f"{request.max_tokens} output tokens and your prompt contains {request.prompt_tokens} input tokens."
            )
            return RequestFailure(RequestFailureKind.HTTP_STATUS, words)
        return None

    def _sequence(self, request: Request, now_s: float) -> tuple[Sequence, bool]:
        """The sequence of a request, and whether it will end in an error (half-way)."""
        output, errors = max(1, request.max_tokens), False
        region = self._region()
        if region is not None and not region.dies and output >= self._long_output:
            output, errors = max(1, output // 2), True
        self._number += 1
        prompt = max(1, request.prompt_tokens)
        return Sequence(self._number, request.index, prompt, output, now_s, self._beginnings(request)), errors

    def _region(self) -> CrashRegion | None:
        """The crash region that the load has entered: its first wave must have finished."""
        if not self._regions or self._succeeded < self._peak:
            return None
        return next((region for region in self._regions if region.holds(self._peak)), None)

    def _beginnings(self, request: Request) -> Beginnings:
        """What a prompt shares with others; of no use without a cache of them."""
        if self._source is None or not self._scheduler.resolved.prefix_caching:
            return ()
        return self._source.beginnings(request.index, request.prompt_tokens)

    # Steps

    def _arrived(self) -> None:
        """A request came: begin a step, or cut a long run short so that it can join the next one."""
        if self._run is None:
            if self._timer is None and self._loop is not None:
                self._timer = self._loop.call_soon(self._begin)  # after all that arrive at this moment
        elif self._run.steps > 1 and len(self._scheduler.running) < self._scheduler.resolved.max_num_seqs:
            done = max(self._settled, math.floor((self.now() - self._run.start_s) / self._run.step_s + 1e-9))
            if done + 1 < self._run.steps:
                self._run = Run(self._run.start_s, self._run.step_s, done + 1)
                self._schedule()

    def _begin(self) -> None:
        """Plan and start the next run."""
        self._timer = None
        self._give_up()
        scheduler = self._scheduler
        if self.dead is not None or scheduler.idle:
            return
        if scheduler.decoding > self._most_decoding:
            self._die(OUT_OF_MEMORY, FailureKind.OOM_LOAD)
            return
        self._run, self._settled = scheduler.plan(self.now()), 0
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert self._loop is not None
        assert self._run is not None
        self._timer = self._loop.call_at(self._run.end_s - self._base_s, self._ended)

    def _rest(self) -> Run:
        """What of the current run is not settled."""
        run = self._run
        assert run is not None
        return Run(run.start_s + run.step_s * self._settled, run.step_s, run.steps - self._settled, run.chunks)

    def _sync(self) -> None:
        """Settle the steps of the current run that lie in the past; its last step ends by its timer."""
        run = self._run
        if run is None or run.steps == 1:
            return
        done = min(run.steps - 1, math.floor((self.now() - run.start_s) / run.step_s + 1e-9))
        if done > self._settled:
            self._scheduler.settle(self._rest(), done - self._settled)
            self._settled = done

    def _ended(self) -> None:
        """The current run ended: answer those that finished and go on."""
        rest = self._rest()
        finished = self._scheduler.settle(rest, rest.steps)
        self._run = None
        finished.sort(key=lambda sequence: sequence.number)
        for sequence in finished:
            flight = self._by_number.get(sequence.number)
            if flight is None or flight.future.done():
                continue
            if flight.errors:
                flight.future.set_result(RequestFailure(RequestFailureKind.STREAM_ERROR, ERRORED))
                continue
            flight.future.set_result(None)
            self._succeeded += 1
            if self._regions and self._succeeded >= FIRST_WAVE * self._peak:
                region = self._region()
                if region is not None and region.dies:
                    self._die(DIED, FailureKind.ENGINE_DIED)
                    return
        self._begin()

    def _give_up(self) -> None:
        """Time out the oldest waiting requests; those that were preempted had a token after they came."""
        now_s, waiting = self.now(), self._scheduler.waiting
        while waiting:
            sequence = waiting[0]
            flight = self._by_number.get(sequence.number)
            if flight is not None and not flight.future.done() and not sequence.gone:
                last_s = sequence.chunk_times[-1] if sequence.chunk_times else sequence.queued_s
                if now_s - last_s < flight.idle_timeout_s:
                    return
                words = f"no token for {flight.idle_timeout_s:g} s"
                flight.future.set_result(RequestFailure(RequestFailureKind.TIMEOUT_IDLE, words))
            waiting.popleft()

    def _die(self, words: str, kind: FailureKind) -> None:
        self.dead, self.dead_kind = words, kind
        for flight in self._flights.values():
            if not flight.future.done():
                flight.future.set_result(RequestFailure(RequestFailureKind.ENGINE_DIED, words))
