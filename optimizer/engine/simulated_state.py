"""What a simulated scheduler keeps of each request, what it counts, and what it decided to run."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


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

    def __init__(
        self, number: int, index: int, prompt: int, output: int, queued_s: float, prefix: tuple[int, int] | None = None
    ) -> None:
        """``prefix`` is the (key, tokens) of what the prompt shares with others."""
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
class PrefixCache:
    """Tokens kept of each shared beginning, in whole blocks, the least recently used evicted first."""

    block_size: int
    full_groups: int
    blocks: int = 0
    _tokens: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def look_up(self, sequence: Sequence) -> tuple[int, int]:
        """(tokens, blocks) of a prompt that the cache holds; never its last token, which has to be computed."""
        if sequence.prefix is None:
            return 0, 0
        most = (sequence.prompt - 1) // self.block_size * self.block_size
        tokens = min(self._tokens.get(sequence.prefix[0], 0), most)
        if tokens <= 0:
            return 0, 0
        self._tokens.move_to_end(sequence.prefix[0])
        return tokens, tokens // self.block_size * self.full_groups

    def remember(self, sequence: Sequence, free: float) -> None:
        """A computed prompt leaves its shared beginning behind; what exceeds the ``free`` blocks is evicted."""
        if sequence.prefix is None:
            return
        key, length = sequence.prefix
        tokens = min(length, sequence.prompt) // self.block_size * self.block_size
        known = self._tokens.get(key, 0)
        if tokens > known:
            self._tokens[key] = tokens
            self.blocks += (tokens - known) // self.block_size * self.full_groups
        while self._tokens and self.blocks > free:
            self.blocks -= self._tokens.popitem(last=False)[1] // self.block_size * self.full_groups
