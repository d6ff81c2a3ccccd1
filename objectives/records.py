"""Measurements as immutable records. Standard library only: this module travels into trial processes.

Times are seconds since the load began (``_s``); sizes are tokens unless the name says bytes; ratios are 0-1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any


class RequestFailureKind(StrEnum):
    """Why a request did not succeed. Values are stored: never remove one, only add."""

    HTTP_STATUS = "http_status"
    STREAM_ERROR = "stream_error"
    TRUNCATED = "truncated"
    SHORT_OUTPUT = "short_output"
    TIMEOUT_CONNECT = "timeout_connect"
    TIMEOUT_IDLE = "timeout_idle"
    TIMEOUT_TOTAL = "timeout_total"
    CONNECTION = "connection"
    ENGINE_DIED = "engine_died"
    STALLED = "stalled"
    NOT_SENT = "not_sent"


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The kind of a failed request and the engine's or transport's own words."""

    kind: RequestFailureKind
    message: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it.

    Exactly one of three holds: it succeeded (``failure is None and not censored``), it failed, or it is censored
    (in flight when the load ended: neither success nor failure). ``chunk_times_s[i]`` is when chunk *i* arrived and
    ``chunk_tokens[i]`` how many tokens it carried; chunks are not tokens under speculation or a stream interval.
    ``counted_prompt_tokens`` is the server's count of the prompt where it contradicts what was sent.
    """

    index: int
    scheduled_s: float
    sent_s: float
    ended_s: float
    prompt_tokens: int
    requested_output_tokens: int
    output_tokens: int
    chunk_times_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    first_content_s: float | None = None
    finish_reason: str | None = None
    failure: RequestFailure | None = None
    censored: bool = False
    prompt_sha256: str = ""
    cached_prompt_tokens: int | None = None
    session: str | None = None
    counted_prompt_tokens: int | None = None

    @property
    def succeeded(self) -> bool:
        return self.failure is None and not self.censored

    @property
    def ttft_s(self) -> float | None:
        """Send to first token of any kind; ``None`` when no token came."""
        return self.chunk_times_s[0] - self.sent_s if self.chunk_times_s else None

    @property
    def scheduled_ttft_s(self) -> float | None:
        """Scheduled send to first token: what a user of an open-loop load waits, a lagging client included."""
        return self.chunk_times_s[0] - self.scheduled_s if self.chunk_times_s else None

    @property
    def e2e_s(self) -> float:
        """Send to end."""
        return self.ended_s - self.sent_s

    @property
    def scheduled_e2e_s(self) -> float:
        """Scheduled send to end."""
        return self.ended_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1), from token counts; undefined below two tokens."""
        ttft = self.ttft_s
        return None if ttft is None or self.output_tokens < 2 else (self.e2e_s - ttft) / (self.output_tokens - 1)

    def to_json(self) -> dict[str, Any]:
        # Not asdict: it copies every token time one by one, which took longer than simulating the load.
        data = {name: getattr(self, name) for name in _RECORD_FIELDS}
        if self.failure is not None:
            data["failure"] = {"kind": self.failure.kind, "message": self.failure.message}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RequestRecord:
        failure = data.get("failure")
        return cls(
            **{
                **data,
                "chunk_times_s": tuple(data.get("chunk_times_s", ())),
                "chunk_tokens": tuple(data.get("chunk_tokens", ())),
                "failure": RequestFailure(RequestFailureKind(failure["kind"]), failure["message"]) if failure else None,
            }
        )


_RECORD_FIELDS = tuple(spec.name for spec in fields(RequestRecord))


@dataclass(frozen=True, slots=True)
class CounterSample:
    """The engine's own counters at one moment. Counters are cumulative since the engine's start; ``None``: not offered."""

    at_s: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    preemptions: int | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    engine_steps: int | None = None
    full_budget_steps: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class LoadStatus(StrEnum):
    """How one load ended. ``stopped_early`` loads are marked and never decide anything."""

    COMPLETE = "complete"
    UNSTEADY = "unsteady"
    OVERLOADED = "overloaded"
    STOPPED_EARLY = "stopped_early"
    ENGINE_DIED = "engine_died"
    REPEATED_ERRORS = "repeated_errors"
    DEADLINE = "deadline"


CAPPED = "capped"
"""Flag of a load whose window closed with its last request, because sending ended there."""


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """The measured part of a load, in seconds since the load began. What came before it was warm-up."""

    opened_s: float
    closed_s: float
    doublings: int = 0

    @property
    def length_s(self) -> float:
        return self.closed_s - self.opened_s


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """What the load client cost. ``limited`` says that the client, not the engine, bounded the load."""

    max_lag_s: float = 0.0
    cpu_share: float | None = None
    requested_rate: float | None = None
    achieved_rate: float | None = None
    limited: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Everything one load left behind; metrics are derived from it and from nothing else."""

    records: tuple[RequestRecord, ...] = field(repr=False)  # asyncio shows a task's result in passing: thousands of records
    window: LoadWindow | None
    status: LoadStatus
    detail: str = ""
    samples: tuple[CounterSample, ...] = ()
    concurrency: int | None = None
    rate: float | None = None
    not_sent: int = 0
    client: ClientHealth = ClientHealth()
    flags: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Without the records, which are stored as JSON lines beside it."""
        data = asdict(self)
        del data["records"]
        data["samples"] = [sample.to_json() for sample in self.samples]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any], records: tuple[RequestRecord, ...]) -> LoadResult:
        window = data.get("window")
        return cls(
            records=records,
            window=LoadWindow(**window) if window else None,
            status=LoadStatus(data["status"]),
            detail=data.get("detail", ""),
            samples=tuple(CounterSample(**sample) for sample in data.get("samples", ())),
            concurrency=data.get("concurrency"),
            rate=data.get("rate"),
            not_sent=data.get("not_sent", 0),
            client=ClientHealth(**data.get("client", {})),
            flags=tuple(data.get("flags", ())),
        )
