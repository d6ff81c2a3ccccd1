"""The plan of one load and the requests in it. Standard library only: this module travels into trial processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

CLOSING_S = 5.0
"""Most seconds that aborting what is in flight may take; an engine that needs longer is left behind."""


STOOD_STILL_S = 10.0
"""A wait that ends so much later than it should: the process was stopped (Ctrl-Z, a frozen container), not merely busy."""


class StoodStill(Exception):
    """Who drives a load stood still meanwhile: its figures and timeouts say nothing of the engine."""


class Arrivals(StrEnum):
    """When requests are sent: as others finish, at random, evenly, or at recorded times."""

    CLOSED = "closed"
    POISSON = "poisson"
    CONSTANT = "constant"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Either token ids (completions, in-process) or chat messages; lengths are in tokens.

    ``sampling`` holds OpenAI/vLLM names (``temperature``, ``top_p``, ``top_k``, ...), complete: what is absent is the
    engine's neutral value, not the model's. ``scheduled_s`` is seconds after the load began, for open-loop arrivals.
    ``turn`` counts the earlier requests of the same ``session``; it is sent ``think_s`` after the one before it ended.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    ignore_eos: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()
    prompt_sha256: str = ""
    scheduled_s: float | None = None
    session: str | None = None
    turn: int = 0
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How one load runs. Every trial of a study gets the same plan, window included.

    ``concurrency`` is set for closed loops and ``rate`` (requests per second) for the others. The window opens after
    ``warmup_factor`` x concurrency requests finished and KV usage levelled (open loop: after ``warmup_s``), lasts
    ``window_s``, and doubles at most ``max_doublings`` times: when its halves disagree (open loop: when it looks overloaded),
    or when fewer than ``min_requests`` requests finished in it (with no failure in 400 the upper 95 % bound of the failure
    share is 0.75 %, so that a success rate of 99 % can be told from a lower one). ``stall_after_s``: a request in flight for
    longer when the window closes has stalled.
    ``max_requests`` ends the sending; what is in flight then runs to its end. A request without a chunk for
    ``idle_timeout_s``, or in flight for ``total_timeout_s`` (``None``: no such limit), is given up as a failure. The load has
    ended ``deadline_s`` after it began, whatever the engine does.
    """

    arrivals: Arrivals
    window_s: float
    concurrency: int | None = None
    rate: float | None = None
    warmup_factor: float = 1.5
    warmup_s: float = 5.0
    max_doublings: int = 1
    min_requests: int = 400
    max_requests: int | None = None
    stall_after_s: float | None = None
    idle_timeout_s: float = 120.0
    deadline_s: float = 1800.0
    tick_s: float = 1.0
    repeated_errors: int = 20
    seed: int = 0
    total_timeout_s: float | None = None

    @property
    def limit_s(self) -> float:
        """When a load that is still going on is ended, so that its deadline leaves time to abort what is in flight."""
        return self.deadline_s - min(CLOSING_S, 0.05 * self.deadline_s)


@dataclass(frozen=True, slots=True)
class Tick:
    """Progress of a running load, once per ``tick_s``. Counts are cumulative; ``window_*`` are since the window opened."""

    at_s: float
    window_open_s: float | None
    sent: int
    succeeded: int
    failed: int
    running: int
    window_tokens: float
    window_s: float
    kv_usage: float | None = None
