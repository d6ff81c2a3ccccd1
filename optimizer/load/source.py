"""Where the requests of a load come from: endless, seeded, unique, the same for every trial of a study.

Standard library only: a source travels into trial processes as JSON.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vopt.optimizer.load.plan import Request

HEADER_DIGITS = 8
"""Decimal digits of the header that makes each prompt unique."""


@dataclass(frozen=True, slots=True)
class RequestSource:
    """Request *i* for every *i* >= 0.

    ``lengths`` holds (prompt tokens, output tokens) in whole blocks of 64 and repeats for ever. Prompts are cut from
    ``bodies`` (token ids of natural text, one per entry, at least as long as the longest prompt or repeated). Each begins
    with the shared prefix ``shared_prefixes[i % n]`` if there are any, then a header: the request's number spelled with
    ``digit_ids``. vLLM's prefix cache hashes blocks as a chain, so prompts that differ in their first block share none:
    the header makes prompts unique without new text for each. Without ``bodies`` (a simulation, which needs only lengths)
    ``prompt_token_ids`` is empty.

    ``observed_output_tokens`` are natural ends that the baseline saw, by request index; those requests are replayed at that
    length with ``ignore_eos``, so that every trial does the same work.
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
    first_number: int = 0

    def request(self, index: int) -> Request:
        """Request ``index``; equal arguments give equal requests."""
        prompt_tokens, output_tokens = self.lengths[index % len(self.lengths)]
        observed = self.observed_output_tokens.get(index)
        prompt = self._prompt(index, prompt_tokens)
        return Request(
            index=index,
            prompt_token_ids=prompt,
            prompt_tokens=prompt_tokens,
            max_tokens=output_tokens if observed is None else observed,
            ignore_eos=self.ignore_eos or observed is not None,
            sampling=self.sampling,
            prompt_sha256=hashlib.sha256(array("q", prompt).tobytes()).hexdigest() if prompt else "",
            scheduled_s=self.scheduled_s[index] if index < len(self.scheduled_s) else None,
            session=self.sessions[index % len(self.sessions)] if self.sessions else None,
        )

    def _prompt(self, index: int, prompt_tokens: int) -> tuple[int, ...]:
        if not self.bodies:
            return ()
        prefix = self.shared_prefixes[index % len(self.shared_prefixes)] if self.shared_prefixes else ()
        header = tuple(self.digit_ids[int(digit)] for digit in f"{self.first_number + index:0{HEADER_DIGITS}d}")
        body = self.bodies[index % len(self.bodies)]
        needed = max(0, prompt_tokens - len(prefix) - len(header))
        repeats = -(-needed // len(body)) if body else 0
        return (*prefix, *header, *(body * repeats)[:needed])[:prompt_tokens]

    def with_observed(self, observed: Mapping[int, int]) -> RequestSource:
        """The same requests, replayed at the output lengths that the baseline saw."""
        return replace(self, observed_output_tokens=dict(observed), ignore_eos=True)

    def to_json(self) -> dict[str, Any]:
        return {
            "lengths": self.lengths,
            "bodies": self.bodies,
            "digit_ids": self.digit_ids,
            "shared_prefixes": self.shared_prefixes,
            "sampling": dict(self.sampling),
            "ignore_eos": self.ignore_eos,
            "scheduled_s": self.scheduled_s,
            "sessions": self.sessions,
            "observed_output_tokens": {str(index): tokens for index, tokens in self.observed_output_tokens.items()},
            "first_number": self.first_number,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RequestSource:
        return cls(
            lengths=tuple((prompt, output) for prompt, output in data["lengths"]),
            bodies=tuple(tuple(body) for body in data["bodies"]),
            digit_ids=tuple(data["digit_ids"]),
            shared_prefixes=tuple(tuple(prefix) for prefix in data["shared_prefixes"]),
            sampling=data["sampling"],
            ignore_eos=data["ignore_eos"],
            scheduled_s=tuple(data["scheduled_s"]),
            sessions=tuple(data["sessions"]),
            observed_output_tokens={int(index): tokens for index, tokens in data["observed_output_tokens"].items()},
            first_number=data["first_number"],
        )
