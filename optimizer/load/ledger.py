"""The account of one load: each request that was sent is in flight or has exactly one record.

Standard library only: this module travels into trial processes.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from vopt.objectives.records import RequestFailure, RequestFailureKind, RequestRecord
from vopt.optimizer.engine.base import Engine
from vopt.optimizer.load.plan import Request

_NUMBERS = re.compile(r"\d+")


@dataclass(slots=True, eq=False)
class Flight:
    """A request that was sent and has not ended. Times are seconds since the load began."""

    request: Request
    scheduled_s: float
    sent_s: float
    task: asyncio.Task[RequestRecord]


class Progress(NamedTuple):
    """What a request in flight has had: when it was sent, its last chunk (``None``: none yet), and, since the moment that was
    asked about, output tokens and whether its first one is among them. Seconds since the load began."""

    sent_s: float
    last_s: float | None
    tokens: float
    first_since: bool


@runtime_checkable
class TellsProgress(Protocol):
    """An engine that tells a request's progress without handing out every chunk: of 512 streams with 4,000 chunks each that
    is a tenth of a second, which each second's look would keep the client from reading."""

    def progress(self, index: int, since_s: float) -> Progress | None: ...


@runtime_checkable
class Recounts(Protocol):
    """An engine that is not told what each chunk holds, and knows better once other requests have finished."""

    def recounted(self, records: Sequence[RequestRecord]) -> list[RequestRecord]: ...


def recounted(engine: Engine, records: list[RequestRecord]) -> list[RequestRecord]:
    """``records`` with tokens counted as well as ``engine`` can."""
    return engine.recounted(records) if isinstance(engine, Recounts) else records


def progress_from(engine: Engine) -> Callable[[int, float], Progress | None]:
    """How to ask ``engine`` for the progress of a request, by its index; ``None`` when it knows none."""
    if isinstance(engine, TellsProgress):
        return engine.progress

    def progress(index: int, since_s: float) -> Progress | None:
        partial = engine.partial(index)
        if partial is None:
            return None
        sent_s, times, counts = partial
        first = bisect_left(times, since_s)
        return Progress(sent_s, times[-1] if times else None, sum(counts[first:]), bool(times) and first == 0)

    return progress


@dataclass(slots=True)
class Ledger:
    """``progress_s`` is the last moment at which the engine is known to have produced something."""

    records: list[RequestRecord] = field(default_factory=list)
    in_flight: dict[int, Flight] = field(default_factory=dict)
    sent: int = 0
    succeeded: int = 0
    failed: int = 0
    progress_s: float = 0.0
    equal_errors: int = 0
    window_opened_s: float | None = None
    window_tokens: float = 0.0
    _last_error: tuple[RequestFailureKind, str] | None = None

    def send(self, flight: Flight) -> None:
        if not self.in_flight and self._last_error is None:
            self.progress_s = flight.sent_s  # nobody waited, so nothing was late
        self.in_flight[flight.request.index] = flight
        self.sent += 1

    def end(self, record: RequestRecord) -> None:
        """Enter the one record of a request in flight; a second one is ignored (an engine that outlived its cancelling)."""
        if self.in_flight.pop(record.index, None) is None:
            return
        self.records.append(record)
        if record.failure is not None:
            self.failed += 1
            error = (record.failure.kind, _NUMBERS.sub("#", record.failure.message))
            self.equal_errors = self.equal_errors + 1 if error == self._last_error else 1
            self._last_error = error
        elif not record.censored:
            self.succeeded += 1
            self.equal_errors, self._last_error = 0, None
        if record.chunk_times_s:
            self.progress_s = max(self.progress_s, record.chunk_times_s[-1])
        if self.window_opened_s is not None:
            self.window_tokens += tokens_since(record, self.window_opened_s)

    @property
    def ended(self) -> int:
        return self.succeeded + self.failed

    @property
    def timed_out(self) -> bool:
        """Whether the latest thing that the engine said was nothing for too long."""
        return self._last_error is not None and self._last_error[0] is RequestFailureKind.TIMEOUT_IDLE

    def standing(self, engine: Engine, now_s: float) -> list[RequestRecord]:
        """All records as if the load ended now: what is in flight is censored."""
        in_flight = [unfinished(flight, engine, now_s) for flight in self.in_flight.values()]
        return recounted(engine, [*self.records, *in_flight])

    def give_up(self, engine: Engine, now_s: float, failure: RequestFailure, flights: list[Flight]) -> None:
        """Cancel ``flights`` and record each as a failure, with the chunks it had."""
        for flight in flights:
            self.end(unfinished(flight, engine, now_s, failure))
            flight.task.cancel()

    def close(self, engine: Engine, now_s: float, *, failure: RequestFailure | None, stall_after_s: float | None) -> None:
        """Cancel everything in flight: failed if ``failure`` says so or if older than ``stall_after_s``, else censored."""
        for flight in list(self.in_flight.values()):
            age_s = now_s - flight.sent_s
            stalled = None
            if failure is None and stall_after_s is not None and age_s > stall_after_s:
                words = f"in flight for {age_s:.1f} s when the load ended; the limit is {stall_after_s:.1f} s"
                stalled = RequestFailure(RequestFailureKind.STALLED, words)
            self.end(unfinished(flight, engine, now_s, failure or stalled))
            flight.task.cancel()


def unfinished(flight: Flight, engine: Engine, now_s: float, failure: RequestFailure | None = None) -> RequestRecord:
    """The record of a request that has not ended by itself; censored when there is no ``failure``."""
    partial = engine.partial(flight.request.index)
    sent_s, times, tokens = partial if partial is not None else (flight.sent_s, (), ())
    request = flight.request
    return RequestRecord(
        index=request.index,
        scheduled_s=flight.scheduled_s,
        sent_s=sent_s,
        ended_s=max(now_s, sent_s),
        prompt_tokens=request.prompt_tokens,
        requested_output_tokens=request.max_tokens,
        output_tokens=sum(tokens),
        chunk_times_s=times,
        chunk_tokens=tokens,
        failure=failure,
        censored=failure is None,
        prompt_sha256=request.prompt_sha256,
        session=request.session,
    )


def tokens_since(record: RequestRecord, opened_s: float) -> float:
    """Output tokens since ``opened_s``, and the prompt's if its prefill ended since then; failures credit nothing."""
    times = record.chunk_times_s
    if record.failure is not None or not times or times[-1] < opened_s:
        return 0.0
    first = bisect_left(times, opened_s)
    return sum(record.chunk_tokens[first:]) + (record.prompt_tokens if first == 0 else 0)
