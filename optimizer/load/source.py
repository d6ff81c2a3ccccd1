"""Where the requests of a load come from: endless, seeded, unique, the same for every trial of a study.

Standard library only: a source travels into trial processes as JSON.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from vopt.optimizer.load.lengths import BLOCK
from vopt.optimizer.load.plan import Request

HEADER_DIGITS = 8
"""Decimal digits of the header that makes each prompt unique."""


def room_for_prefix(prompt_tokens: int) -> int:
    """How much of a prompt a shared beginning can be: behind it stands the header."""
    return max(0, prompt_tokens - HEADER_DIGITS)


@dataclass(frozen=True, slots=True)
class RequestSource:
    """Request *i* for every *i* >= 0.

    ``lengths`` holds (prompt tokens, output tokens) in whole blocks of 64 and repeats for ever. Prompts are cut from
    ``bodies`` (token ids of natural text, one per entry, at least as long as the longest prompt or repeated). Each begins
    with the shared prefix ``shared_prefixes[i % n]`` if there are any, as much of it as there is room for, then a header: the
    request's number spelled with ``digit_ids``. vLLM's prefix cache hashes blocks as a chain, so prompts that differ in their
    first block share none: the header makes prompts unique without new text for each. Without ``bodies`` (a simulation, which
    needs only lengths)
    ``prompt_token_ids`` is empty. ``header_at`` moves the header of a body behind that many of its tokens, for prompts
    whose shared beginnings are the workload.

    A *visit* is what one user does: one request, or the turns of a session. ``turns`` cuts ``lengths`` into sessions (turns
    of the first, of the second, ...; empty: every request is its own visit). All turns of a session are beginnings of one
    text, which is how a client that sends the history again looks to the engine; ``think_s`` is the pause before each turn.

    ``samplings`` (cycled like ``lengths``) add to ``sampling``. ``texts`` (likewise) are the prompts as text, for a chat
    endpoint; ``systems`` the system message before each.

    ``with_observed`` replays the output lengths that the baseline saw, with ``ignore_eos``, so that every trial does the
    same work; structured outputs end where their grammar does. ``observed_output_tokens`` are those of whole blocks, by
    request index. All other requests, which the baseline never sent or saw no end of, follow ``observed_ends``: by rank in
    the block (see ``_rank``), pairs of (observed, sampled) output tokens, cycled from block to block. At their sampled
    length they would be longer than the observed ones, and a faster engine, which gets further, would do more work.

    ``shared`` (a simulation, which has no token ids to compare) says what prompts share, cycled from visit to visit: parts of
    a prompt's beginning as (key, tokens from its start to the part's end). Prompts with a key in common are alike up to there.
    """

    lengths: tuple[tuple[int, int], ...]
    bodies: tuple[tuple[int, ...], ...] = ()
    digit_ids: tuple[int, ...] = ()
    shared_prefixes: tuple[tuple[int, ...], ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    scheduled_s: tuple[float, ...] = ()
    sessions: tuple[str, ...] = ()
    observed_output_tokens: Mapping[int, int] = field(default_factory=dict)
    observed_ends: tuple[tuple[tuple[int, int], ...], ...] = ()
    first_number: int = 0
    header_at: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    think_s: tuple[float, ...] = ()
    samplings: tuple[Mapping[str, Any], ...] = ()
    texts: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    shared: tuple[tuple[tuple[int, int], ...], ...] = ()

    def request(self, index: int) -> Request:
        """Request ``index``; equal arguments give equal requests."""
        entry = index % len(self.lengths)
        prompt_tokens, output_tokens = self.lengths[entry]
        observed = self._observed(index, output_tokens)
        visit, turn = self.place(index)
        sampling = {**self.sampling, **self.samplings[entry % len(self.samplings)]} if self.samplings else self.sampling
        prompt = self._prompt(visit, prompt_tokens)
        return Request(
            index=index,
            prompt_token_ids=prompt,
            prompt_tokens=prompt_tokens,
            max_tokens=output_tokens if observed is None else observed,
            ignore_eos=(self.ignore_eos or observed is not None) and "structured_outputs" not in sampling,
            sampling=sampling,
            messages=self._messages(visit, entry),
            prompt_sha256=hashlib.sha256(array("q", prompt).tobytes()).hexdigest() if prompt else "",
            scheduled_s=self.scheduled_s[visit] if turn == 0 and visit < len(self.scheduled_s) else None,
            session=self._session(visit),
            turn=turn,
            think_s=self.think_s[entry % len(self.think_s)] if self.think_s and turn else 0.0,
        )

    @property
    def phase(self) -> float:
        """When the first of even arrivals is due, in gaps between two of them."""
        return 0.0

    def place(self, index: int) -> tuple[int, int]:
        """(visit, turn) of request ``index``."""
        if not self.turns:
            return index, 0
        starts = _starts(self.turns)
        cycle, offset = divmod(index, starts[-1])
        session = bisect_right(starts, offset) - 1
        return cycle * len(self.turns) + session, offset - starts[session]

    def visit(self, number: int) -> range:
        """Indices of the requests of visit ``number``, in the order in which its user sends them."""
        if not self.turns:
            return range(number, number + 1)
        starts = _starts(self.turns)
        cycle, session = divmod(number, len(self.turns))
        first = cycle * starts[-1] + starts[session]
        return range(first, first + self.turns[session])

    @property
    def reuses(self) -> bool:
        """Whether prompts begin alike, so that a prefix cache finds something."""
        return bool(self.shared or self.shared_prefixes or self.turns or any(self.header_at))

    def beginnings(self, index: int, prompt_tokens: int) -> tuple[tuple[int, int], ...]:
        """What request ``index`` of ``prompt_tokens`` shares with others, part by part as in ``shared``: what its visit shares
        with others, then the earlier turns of its session."""
        visit, _ = self.place(index)
        room = room_for_prefix(prompt_tokens)
        parts: tuple[tuple[int, int], ...] = ()
        if self.shared:
            parts = self.shared[visit % len(self.shared)]
        elif self.shared_prefixes:
            key = visit % len(self.shared_prefixes)
            parts = ((key, len(self.shared_prefixes[key])),)
        elif self.header_at:
            key = visit % len(self.header_at)
            parts = ((key, self.header_at[key]),)
        parts = tuple((key, min(end, room)) for key, end in parts)
        return (*parts, (-visit - 1, prompt_tokens)) if self.turns else parts

    def _session(self, visit: int) -> str | None:
        if self.sessions:
            return self.sessions[visit % len(self.sessions)]
        return f"s{visit}" if self.turns else None

    def _prompt(self, visit: int, prompt_tokens: int) -> tuple[int, ...]:
        if not self.bodies:
            return ()
        prefix = self.shared_prefixes[visit % len(self.shared_prefixes)] if self.shared_prefixes else ()
        prefix = prefix[: room_for_prefix(prompt_tokens)]
        body = self.bodies[visit % len(self.bodies)]
        at = self.header_at[visit % len(self.header_at)] if self.header_at else 0
        head = (*prefix, *body[:at], *self._header(visit))
        rest = body[at:] or body
        needed = max(0, prompt_tokens - len(head))
        repeats = -(-needed // len(rest)) if rest else 0
        return (*head, *(rest * repeats)[:needed])[:prompt_tokens]

    def _header(self, visit: int) -> tuple[int, ...]:
        return tuple(self.digit_ids[int(digit)] for digit in f"{self.first_number + visit:0{HEADER_DIGITS}d}")

    def _messages(self, visit: int, entry: int) -> tuple[Mapping[str, str], ...]:
        if not self.texts:
            return ()
        system = self.systems[visit % len(self.systems)] if self.systems else ""
        text = f"{self.first_number + visit:0{HEADER_DIGITS}d} {self.texts[entry % len(self.texts)]}"
        user = {"role": "user", "content": text}
        return ({"role": "system", "content": system}, user) if system else (user,)

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a request, prompt and sampled output."""
        return sum(prompt + output for prompt, output in self.lengths) / len(self.lengths)

    def with_observed(self, observed: Mapping[int, int]) -> RequestSource:
        """The same requests, replayed at the output lengths that the baseline saw (by index, whatever it saw the end of).

        Blocks that it saw all of are the model of all others: partly seen ones would show their short requests only. Where
        it saw no whole block, each rank has the lengths that were seen of it anywhere, or stays as sampled.
        """
        seen: dict[int, list[int]] = {}
        for index in sorted(observed):
            seen.setdefault(index // BLOCK, []).append(index)
        whole = {block: indices for block, indices in seen.items() if len(indices) == BLOCK}
        ends: list[list[tuple[int, int]]] = [[] for _ in range(BLOCK)]
        for indices in (whole or seen).values():
            for index in indices:
                ends[self._rank(index)].append((observed[index], self.lengths[index % len(self.lengths)][1]))
        return replace(
            self,
            observed_output_tokens={index: observed[index] for indices in whole.values() for index in indices},
            observed_ends=tuple(map(tuple, ends)) if observed else (),
            ignore_eos=True,
        )

    def _observed(self, index: int, sampled: int) -> int | None:
        """The length that request ``index`` is replayed at; ``None`` where nothing like it was seen."""
        own = self.observed_output_tokens.get(index)
        if own is not None or not self.observed_ends:
            return own
        ends = self.observed_ends[self._rank(index)]
        if not ends:
            return None
        tokens, of = ends[index // BLOCK % len(ends)]
        return max(1, round(sampled * tokens / of))  # generated blocks hold equal lengths: then it is ``tokens`` itself

    def _rank(self, index: int) -> int:
        """Place of a request in its block of 64 by sampled length: requests of equal rank are alike from block to block."""
        first = index - index % BLOCK

        def size(other: int) -> tuple[int, int, int]:
            prompt, output = self.lengths[other % len(self.lengths)]
            return output, prompt, other

        mine = size(index)
        return sum(size(other) < mine for other in range(first, first + BLOCK))

    def to_json(self) -> dict[str, Any]:
        data = {part.name: getattr(self, part.name) for part in fields(self)}
        data["observed_output_tokens"] = {str(index): tokens for index, tokens in self.observed_output_tokens.items()}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RequestSource:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, (list, tuple)) else value for name, value in data.items()
        }
        for nested in ("lengths", "bodies", "shared_prefixes"):
            values[nested] = tuple(tuple(entry) for entry in data.get(nested, ()))
        values["shared"] = tuple(tuple((key, end) for key, end in parts) for parts in data.get("shared", ()))
        values["observed_ends"] = tuple(tuple((a, b) for a, b in ends) for ends in data.get("observed_ends", ()))
        values["observed_output_tokens"] = {int(k): tokens for k, tokens in data.get("observed_output_tokens", {}).items()}
        return cls(**values)


@lru_cache(maxsize=8)
def _starts(turns: tuple[int, ...]) -> tuple[int, ...]:
    """Offset of each session's first request, and behind them the requests of all sessions together."""
    return tuple(accumulate(turns, initial=0))
