"""What a simulated scheduler keeps of each request, what it counts, and what it decided to run."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

Beginnings = tuple[tuple[int, int], ...]
"""(key, tokens from the prompt's start to the part's end), each part behind the one before it; equal keys, equal tokens."""


class Sequence:
    """One request inside the engine. Steps are counted over the engine's life."""

    __slots__ = (
        "allocated",
        "chunk_times",
        "chunk_tokens",
        "computed",
        "emitted",
        "finish_step",
        "first_step",
        "first_time",
        "gone",
        "growth",
        "held",
        "hit",
        "index",
        "number",
        "output",
        "prefix",
        "prompt",
        "queued_s",
        "rate",
        "steps",
        "stride",
    )

    def __init__(self, number: int, index: int, prompt: int, output: int, queued_s: float, prefix: Beginnings = ()) -> None:
        """``prefix`` is what the prompt shares with others."""
        self.number, self.index, self.prompt, self.output, self.queued_s = number, index, prompt, output, queued_s
        self.prefix = prefix
        self.emitted = 0  # tokens that left before the last preemption
        self.chunk_times: tuple[float, ...] = ()
        self.chunk_tokens: tuple[int, ...] = ()
        self.computed = self.hit = 0
        self.first_step = -1
        self.first_time = 0.0
        self.steps = self.finish_step = 0
        self.rate = 1.0
        self.stride = 1
        self.growth = self.allocated = 0.0
        self.gone = False
        self.held: tuple[int, ...] = ()  # keys of the shared beginnings whose blocks it uses

    @property
    def decoding(self) -> bool:
        return self.first_step >= 0


@dataclass(slots=True)
class Counters:
    """Cumulative since the engine's start, as vLLM counts them."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    first_tokens: int = 0
    decoded_tokens: float = 0.0
    drafts: int = 0
    steps: int = 0
    full_budget_steps: int = 0

    def found(self, prompt: int, hit: int) -> None:
        """A prompt was looked up in the prefix cache."""
        self.prefix_queries += prompt
        self.prefix_hits += hit

    @property
    def generated_tokens(self) -> int:
        return self.first_tokens + round(self.decoded_tokens)

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that were kept: what each verification gave beyond the model's own token."""
        return max(0, round(self.decoded_tokens - self.drafts))


@dataclass(frozen=True, slots=True)
class Run:
    """``steps`` equal steps of ``step_s`` seconds each, from ``start_s``; prompts end only in runs of one step."""

    start_s: float
    step_s: float
    steps: int
    chunks: tuple[tuple[Sequence, int], ...] = ()

    @property
    def end_s(self) -> float:
        return self.start_s + self.step_s * self.steps


@dataclass(slots=True)
class _Kept:
    """One part of a beginning: cached up to ``tokens`` of the prompt in ``blocks`` blocks, for ``users`` running sequences."""

    tokens: int
    blocks: int
    users: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """What of a prompt is cached: ``tokens`` in ``blocks``, of which ``idle`` ones nobody uses yet; ``keys`` of its parts."""

    tokens: int = 0
    blocks: int = 0
    idle: int = 0
    keys: tuple[int, ...] = ()


@dataclass(slots=True)
class PrefixCache:
    """Blocks of shared beginnings, as vLLM's block pool keeps them: used by all running sequences that share them, counted
    once; kept when nobody uses them as long as there is room; the least recently used given up first, from its end."""

    block_size: int
    full_groups: int
    idle: int = 0
    """Blocks that no running sequence uses: free for whoever needs them."""
    _kept: OrderedDict[int, _Kept] = field(default_factory=OrderedDict)

    def look_up(self, sequence: Sequence) -> Hit:
        """What of a prompt is cached; never its last token, which has to be computed."""
        most = self._whole(sequence.prompt - 1)
        tokens, idle, keys = 0, 0, []
        for key, end in sequence.prefix:
            kept = self._kept.get(key)
            if kept is None or min(kept.tokens, end, most) <= tokens:
                break
            tokens = self._whole(min(kept.tokens, end, most))
            keys.append(key)
            idle += 0 if kept.users else kept.blocks
            if tokens < self._whole(min(end, most)):
                break
        return Hit(tokens, tokens // self.block_size * self.full_groups, idle, tuple(keys)) if tokens else Hit()

    def use(self, sequence: Sequence, hit: Hit) -> None:
        """``sequence`` runs with what it hit; idle blocks of it are idle no more."""
        for key in hit.keys:
            kept = self._kept[key]
            self.idle -= 0 if kept.users else kept.blocks
            kept.users += 1
        sequence.held = hit.keys

    def remember(self, sequence: Sequence) -> int:
        """Keep what ``sequence`` has computed of its beginnings; how many of its own blocks are shared from now on."""
        shared, start = 0, 0
        for key, end in sequence.prefix:
            done = self._whole(min(end, sequence.computed))
            if done > start:
                shared += self._grown(sequence, key, start, done)
            if done < self._whole(end):
                break
            start = done
        return shared

    def _grown(self, sequence: Sequence, key: int, start: int, done: int) -> int:
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _Kept(start, 0)
        if kept.tokens >= done:
            return 0  # cached already: by itself, or by another that was computed at the same time
        if key not in sequence.held:
            if not kept.users:  # what was left of it becomes a part of what was computed anew
                self.idle -= kept.blocks
                kept.tokens, kept.blocks = start, 0
            kept.users += 1
            sequence.held = (*sequence.held, key)
        more = (done - kept.tokens) // self.block_size * self.full_groups
        kept.tokens, kept.blocks = done, kept.blocks + more
        return more

    def give_back(self, sequence: Sequence) -> int:
        """``sequence`` runs no more; how many blocks nobody uses from now on. The end of a prompt is given up before its
        beginning."""
        idle = 0
        for key in reversed(sequence.held):
            kept = self._kept[key]
            kept.users -= 1
            idle += 0 if kept.users else kept.blocks
            self._kept.move_to_end(key)
        sequence.held = ()
        self.idle += idle
        return idle

    def evict(self, free: float) -> None:
        """Give up idle blocks beyond the ``free`` ones."""
        gone = []
        for key, kept in self._kept.items():
            if self.idle <= free:
                break
            if kept.users:
                continue
            rows = -(-min(kept.blocks, self.idle - math.floor(max(0.0, free))) // max(1, self.full_groups))
            blocks = min(kept.blocks, rows * self.full_groups)
            self.idle -= blocks
            kept.blocks, kept.tokens = kept.blocks - blocks, kept.tokens - rows * self.block_size
            if kept.blocks <= 0:
                gone.append(key)
        for key in gone:
            del self._kept[key]

    def _whole(self, tokens: int) -> int:
        return tokens // self.block_size * self.block_size
