"""A request of a simulated engine, from its sending to its record."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from vopt.objectives.records import RequestFailure, RequestRecord
from vopt.optimizer.engine.simulated_state import Sequence
from vopt.optimizer.load.plan import Request


@dataclass(slots=True, eq=False)
class Flight:
    """A request in flight. ``origin_s`` is its load's zero on the engine's clock; ``errors``: it will end in an error."""

    sequence: Sequence
    future: asyncio.Future[RequestFailure | None]
    origin_s: float
    sent_s: float
    idle_timeout_s: float
    errors: bool


def since(times: tuple[float, ...], origin_s: float) -> tuple[float, ...]:
    """Moments of the engine's clock as seconds since ``origin_s``."""
    return tuple([time - origin_s for time in times]) if origin_s else times


def record(
    request: Request,
    origin_s: float,
    scheduled_s: float,
    sent_s: float,
    ended_s: float,
    times: tuple[float, ...],
    tokens: tuple[int, ...],
    failure: RequestFailure | None,
    hit: int | None = None,
) -> RequestRecord:
    stamps = since(times, origin_s)
    return RequestRecord(
        index=request.index,
        scheduled_s=scheduled_s,
        sent_s=sent_s - origin_s,
        ended_s=ended_s - origin_s,
        prompt_tokens=request.prompt_tokens,
        requested_output_tokens=request.max_tokens,
        output_tokens=sum(tokens),
        chunk_times_s=stamps,
        chunk_tokens=tokens,
        first_content_s=stamps[0] if stamps else None,
        finish_reason="length" if failure is None else None,
        failure=failure,
        prompt_sha256=request.prompt_sha256,
        cached_prompt_tokens=hit,
        session=request.session,
    )
