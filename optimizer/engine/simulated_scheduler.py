"""vLLM's scheduler as a discrete-event model: pure state, no clock of its own and no asyncio.

Decoding sequences are not touched one by one: each knows at which step it finishes (a heap), the KV cache grows by a sum
of rates, and the times of the steps are kept once for all. A step therefore costs the same whatever the batch, and
runs of equal decode steps are taken at once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from vopt.optimizer.engine.roofline import StepTime
from vopt.optimizer.engine.simulated_state import Counters, Hit, PrefixCache, Run, Sequence
from vopt.search_spaces.defaults import Resolved
from vopt.search_spaces.kv_cache import KvLayout

CHUNK_STEPS = 16
CHUNK_S = 1.0
"""A stream's chunks are at most this many steps and about this long; its first token and its end are exact.

Each stream counts from its own first token, so the edges of a window cut the chunks of different streams at different
places; and a stream in flight shows whole chunks only, so that half a chunk a stream is counted too much where a window
opens and too little where it closes. What remains is noise well under 0.1 % of a window's tokens (a test holds that against
exact token times)."""

LONGEST_RUN = 64
"""Most equal steps taken at once: within so many, the growing context changes a step's time by under 1 %."""


@dataclass(slots=True)
class Scheduler:
    """Waiting and running sequences of one engine.

    ``plan`` decides what the next step holds, ``settle`` makes it have happened. ``draw_steps(sequence, tokens)`` says in
    how many verification steps a sequence under speculation produces ``tokens``.
    """

    resolved: Resolved
    layout: KvLayout
    blocks: int
    step_time: StepTime
    draw_steps: Callable[[Sequence, int], int] | None = None
    jitter: Callable[[int], float] = lambda step: 1.0
    waiting: deque[Sequence] = field(default_factory=deque)
    running: OrderedDict[int, Sequence] = field(default_factory=OrderedDict)
    prefilling: list[Sequence] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    step: int = 0
    decoding: int = 0
    context: float = 0.0
    context_growth: float = 0.0
    used: float = 0.0
    growth: float = 0.0
    step_times: list[float] = field(default_factory=lambda: [0.0])
    _finish: list[tuple[int, int, Sequence]] = field(default_factory=list)
    _prefixes: PrefixCache | None = None
    _limit: int = 0
    _query: int = 1

    def __post_init__(self) -> None:
        self._limit = self.resolved.max_num_seqs * self.resolved.data
        self._query = 1 + self.resolved.speculative_tokens
        self.blocks *= self.resolved.data
        if self.resolved.prefix_caching:
            self._prefixes = PrefixCache(self.layout.block_size, self.layout.full_groups)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    @property
    def kv_usage(self) -> float:
        return min(1.0, self.used / self.blocks) if self.blocks else 1.0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self, now_s: float) -> Run:
        """The next run of steps. Something must be waiting or running."""
        self._make_room()
        budget_total = self.resolved.max_num_batched_tokens * self.resolved.data
        verified = self.decoding * self._query
        passes = max(1.0, verified / budget_total)  # more drafts than budget: the rest waits for the next pass
        budget = budget_total - min(verified, budget_total)
        chunks, left = self._schedule(budget)
        if not chunks:
            steps = self._steps_alone()
            context = self.context + self.context_growth * (steps - 1) / 2
            step_s = self.step_time(self.decoding, context) * passes * self.jitter(self.step)
            return Run(now_s, step_s, steps)
        prompt, pairs, ended = 0, 0.0, 0
        for sequence, tokens in chunks:
            prompt += tokens
            pairs += tokens * (sequence.computed + tokens / 2)
            ended += sequence.computed + tokens >= sequence.prompt
        if left == 0 and (self.waiting or len(chunks) > ended):
            self.counters.full_budget_steps += 1
        step_s = self.step_time(self.decoding, self.context, prompt, pairs, ended) * passes * self.jitter(self.step)
        return Run(now_s, step_s, 1, tuple(chunks))

    def _schedule(self, budget: int) -> tuple[list[tuple[Sequence, int]], int]:
        """Prompt chunks of the next step: running prompts first, then waiting ones in order, while room lasts."""
        threshold = self.resolved.long_prefill_token_threshold
        chunks: list[tuple[Sequence, int]] = []

        def take(sequence: Sequence) -> bool:
            nonlocal budget
            tokens = min(sequence.prompt - sequence.computed, budget)
            if threshold:
                tokens = min(tokens, threshold)
            if not self.resolved.chunked_prefill and tokens < sequence.prompt - sequence.computed:
                return False
            if tokens > 0:
                chunks.append((sequence, tokens))
                budget -= tokens
            return tokens > 0

        for sequence in self.prefilling:
            take(sequence)
        while budget > 0 and self.waiting and len(self.running) < self._limit:
            sequence = self.waiting[0]
            if sequence.gone:
                self.waiting.popleft()
                continue
            if not self._admit(sequence):
                break
            if not take(sequence):
                self._release(sequence)
                break
            self.waiting.popleft()
            if self._prefixes is not None and not sequence.emitted:
                self.counters.found(sequence.prompt, sequence.hit)
            self.running[sequence.number] = sequence
            self.prefilling.append(sequence)
        return chunks, budget

    def _admit(self, sequence: Sequence) -> bool:
        """Reserve the blocks of a whole prompt (``scheduler_reserve_full_isl``); shared beginnings are not reserved twice."""
        needed, free, hit = self.layout.blocks_for(sequence.prompt), self.blocks - self.used, Hit()
        if self._prefixes is not None:
            self._prefixes.evict(free)  # decoding sequences have grown into what was idle
            hit = self._prefixes.look_up(sequence)
        if needed - hit.blocks + hit.idle > free and self.running:
            return False
        if self._prefixes is not None:
            self._prefixes.use(sequence, hit)
        sequence.allocated = needed - hit.blocks
        self.used += sequence.allocated + hit.idle
        sequence.computed = sequence.hit = hit.tokens
        return True

    def _make_room(self) -> None:
        """Preempt the newest sequences while the decodes of one step would not fit, as vLLM does."""
        while self.used + self.growth > self.blocks and len(self.running) > 1:
            _, victim = self.running.popitem()
            self.counters.preemptions += 1
            if victim.decoding:
                done = self.produced(victim)
                chunks = self._all_chunks(victim, self.step_times[-1], done - victim.emitted)
                victim.chunk_times, victim.chunk_tokens = chunks
                self._stop_decoding(victim)
                victim.prompt += done - victim.emitted
                victim.emitted = done
            else:
                self.prefilling.remove(victim)
            self._release(victim)
            self.waiting.appendleft(victim)

    def _release(self, sequence: Sequence) -> None:
        idle = self._prefixes.give_back(sequence) if self._prefixes is not None else 0
        self.used = max(0.0, self.used - sequence.allocated - idle)
        sequence.allocated = 0.0
        sequence.computed = 0

    def _steps_alone(self) -> int:
        """How many decode steps are alike: until the next end, or until the cache is full."""
        while self._finish and not self._current(self._finish[0]):
            heapq.heappop(self._finish)
        steps = self._finish[0][0] - self.step if self._finish else 1
        if self.growth > 0:
            steps = min(steps, int((self.blocks - self.used) / self.growth))
        return max(1, min(steps, LONGEST_RUN))

    @staticmethod
    def _current(entry: tuple[int, int, Sequence]) -> bool:
        """Whether an entry of the heap still holds: preempted and aborted sequences leave theirs behind."""
        return entry[2].decoding and entry[2].finish_step == entry[0]

    def settle(self, run: Run, steps: int) -> list[Sequence]:
        """Make the first ``steps`` steps of a run have happened; the sequences that finished, in no particular order.

        A run may be settled in parts, but one that holds prompts is a single step.
        """
        end_s = run.start_s + run.step_s * steps
        if steps == 1:
            self.step_times.append(end_s)
        else:
            self.step_times.extend([run.start_s + run.step_s * done for done in range(1, steps + 1)])
        self.step += steps
        self.counters.steps += steps
        self.counters.drafts += self.decoding * steps
        self.counters.decoded_tokens += self.context_growth * steps
        self.context += self.context_growth * steps
        self.used += self.growth * steps
        finished: list[Sequence] = []
        heap = self._finish
        while heap and heap[0][0] <= self.step:
            entry = heapq.heappop(heap)
            if self._current(entry):
                finished.append(entry[2])
                self._end(entry[2], end_s)
        for sequence, tokens in run.chunks:
            if not sequence.gone:
                self._prefilled(sequence, tokens, end_s, run.step_s, finished)
        return finished

    def _prefilled(self, sequence: Sequence, tokens: int, end_s: float, step_s: float, finished: list[Sequence]) -> None:
        """A chunk of a prompt was computed; at its end the first token comes out."""
        sequence.computed += tokens
        if self._prefixes is not None:
            sequence.allocated -= self._prefixes.remember(sequence)  # still used, but not by it alone
        if sequence.computed < sequence.prompt:
            return
        self.prefilling.remove(sequence)
        if not sequence.emitted:
            self.counters.prompt_tokens += sequence.prompt
        self.counters.first_tokens += 1
        sequence.first_step, sequence.first_time = self.step, end_s
        left = sequence.output - sequence.emitted - 1
        if left <= 0:
            sequence.steps, sequence.finish_step = 0, self.step
            self._close(sequence, end_s)
            finished.append(sequence)
            return
        sequence.stride = max(1, min(CHUNK_STEPS, int(CHUNK_S / step_s)))
        sequence.steps = left if self.draw_steps is None else self.draw_steps(sequence, left)
        sequence.rate = left / sequence.steps
        sequence.finish_step = self.step + sequence.steps
        more = self.layout.blocks_for(sequence.prompt + left) - self.layout.blocks_for(sequence.prompt)
        sequence.growth = more / sequence.steps
        heapq.heappush(self._finish, (sequence.finish_step, sequence.number, sequence))
        self.decoding += 1
        self.context += sequence.prompt + 1
        self.context_growth += sequence.rate
        self.growth += sequence.growth

    def _stop_decoding(self, sequence: Sequence) -> None:
        """Take a decoding sequence out of the sums; its blocks so far become what it releases."""
        past = self.step - sequence.first_step
        self.decoding -= 1
        self.context -= sequence.prompt + 1 + past * sequence.rate
        self.context_growth -= sequence.rate
        self.growth -= sequence.growth
        sequence.allocated += past * sequence.growth
        sequence.growth = 0.0
        sequence.first_step = -1
        if not self.decoding:  # sums of floats drift
            self.context = self.context_growth = self.growth = 0.0

    def _end(self, sequence: Sequence, end_s: float) -> None:
        first_step = sequence.first_step
        self._stop_decoding(sequence)
        sequence.first_step = first_step
        self._close(sequence, end_s)

    def _close(self, sequence: Sequence, end_s: float) -> None:
        """Write the last chunks and give everything back."""
        tokens = sequence.output - sequence.emitted
        sequence.chunk_times, sequence.chunk_tokens = self._all_chunks(sequence, end_s, tokens)
        sequence.emitted = sequence.output
        sequence.gone = True
        sequence.first_step = -1
        self.running.pop(sequence.number, None)
        self._release(sequence)
        if not self.running:
            self.used = 0.0

    def remove(self, sequence: Sequence) -> None:
        """Abort a sequence wherever it is."""
        if sequence.gone:
            return
        sequence.gone = True
        if sequence.number not in self.running:
            return  # waiting ones are skipped when their turn comes
        del self.running[sequence.number]
        if sequence.decoding:
            self._stop_decoding(sequence)
        else:
            self.prefilling.remove(sequence)
        self._release(sequence)

    def produced(self, sequence: Sequence) -> int:
        """Tokens that have left so far."""
        if not sequence.decoding:
            return sequence.emitted
        return sequence.emitted + 1 + int(sequence.rate * (self.step - sequence.first_step) + 1e-9)

    def chunks(self, sequence: Sequence) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """(times, tokens) of a stream so far, in whole chunks."""
        if sequence.first_step < 0:
            return sequence.chunk_times, sequence.chunk_tokens
        whole = (self.step - sequence.first_step) // sequence.stride
        return self._cut(sequence, sequence.first_step + whole * sequence.stride + 1)

    def progress(self, sequence: Sequence, since_s: float) -> tuple[float | None, int, bool]:
        """What ``chunks`` comes to: its last time, its tokens since ``since_s``, and whether its first one is among them.

        By arithmetic, without making the chunks: this is asked of every request in flight at every tick.
        """
        times = sequence.chunk_times
        at = bisect_left(times, since_s)
        tokens = sum(sequence.chunk_tokens[at:])
        first = sequence.first_step
        if first < 0:
            return times[-1] if times else None, tokens, bool(times) and at == 0
        whole = (self.step - first) // sequence.stride
        tokens += self._decoded(sequence, whole)
        if sequence.first_time >= since_s:
            tokens += 1
        else:
            since_step = bisect_left(self.step_times, since_s, first + 1)
            tokens -= self._decoded(sequence, min(whole, (since_step - first - 1) // sequence.stride))
        last_s = self.step_times[first + whole * sequence.stride] if whole else sequence.first_time
        return last_s, tokens, (times[0] if times else sequence.first_time) >= since_s

    @staticmethod
    def _decoded(sequence: Sequence, chunks: int) -> int:
        """Tokens of the first ``chunks`` chunks after that of the first token."""
        return int(sequence.rate * sequence.stride * chunks + 1e-9)

    def _cut(self, sequence: Sequence, end: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Chunks whose last step comes before step ``end``, behind those of earlier lives."""
        first, rate, stride = sequence.first_step, sequence.rate, sequence.stride
        between = self.step_times[first + stride : end : stride]
        if rate == 1.0:
            tokens = [1, *([stride] * len(between))]
        else:
            ends = [1 + self._decoded(sequence, chunk + 1) for chunk in range(len(between))]
            tokens = [1, *(after - before for before, after in zip([1, *ends], ends, strict=False))]
        return (*sequence.chunk_times, sequence.first_time, *between), (*sequence.chunk_tokens, *tokens)

    def _all_chunks(self, sequence: Sequence, end_s: float, tokens: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Chunks up to the current step, with the ``tokens`` of this life: at an end, or at a preemption."""
        times, counts = self._cut(sequence, self.step)
        left = tokens - (sum(counts) - sum(sequence.chunk_tokens))
        return ((*times, end_s), (*counts, left)) if left > 0 else (times, counts)
