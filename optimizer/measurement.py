"""How a study measures: fixed on the baseline's engine, frozen for every later trial, stored with each record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from vopt.objectives.records import RequestRecord
from vopt.optimizer.load.plan import Arrivals, LoadPlan

SHORTEST_WINDOW_S = 60.0
STALL_FACTOR = 3.0
CLIENT_LIMITED = "client_limited"
"""Flag of a start or a bench whose load the client bounded, not the engine."""
FRONT_END_LIMITED = "front_end_limited"
"""Flag of a start or a bench whose requests spent ``FRONT_END_BOUND`` of their time or more outside the engine."""
FRONT_END_BOUND = 0.15
"""Qwen3-8B, 256 in flight, H200, vLLM 0.22.1: 0.02 in-process, about 0.4 behind an API server that could not keep up."""
SCALE_OUT = "More API server processes may (vllm serve … --api-server-count 2)"
"""What helps a front end that is the limit; 0.20 to 0.33 have it."""


def front_end_limited(values: Mapping[str, float]) -> bool:
    """Whether so many requests in flight were outside the engine that its arguments are not what bounds the load."""
    return values.get("front_end_share", 0.0) >= FRONT_END_BOUND


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user fixed of the load; ``None`` is found on the baseline's engine. ``least_successes``: a window that is found
    is long enough for as many. ``slos``: most seconds per request of a goodput goal, whose rate is found by them."""

    arrivals: Arrivals
    concurrency: int | None = None
    rate: float | None = None
    window_s: float | None = None
    max_requests: int | None = None
    min_success: float = 0.99
    seed: int = 0
    deadline_s: float = 1800.0
    least_successes: int = 0
    slos: Mapping[str, float] = field(default_factory=dict)

    @property
    def open_loop(self) -> bool:
        return self.arrivals is not Arrivals.CLOSED


@dataclass(frozen=True, slots=True)
class Measurement:
    """The frozen plan. ``observed_output_tokens`` are the output lengths that the baseline saw, by request;
    ``expected_requests`` how many requests its load brought to an end. ``client_processes`` load every served start of the
    study: found once, because loads by one client and by several do not compare. ``peak_in_flight``: the most requests that the
    baseline's load had at once, which is what a soak keeps in flight. ``sustained_per_s``: the requests per second that the
    baseline's engine finished in a closed loop, of which a rate that was found is a share."""

    plan: LoadPlan
    observed_output_tokens: Mapping[int, int]
    expected_requests: int | None = None
    client_processes: int = 1
    peak_in_flight: int | None = None
    sustained_per_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        own = {
            "expected_requests": self.expected_requests,
            "client_processes": self.client_processes,
            "peak_in_flight": self.peak_in_flight,
            "sustained_per_s": self.sustained_per_s,
        }
        return {**asdict(self.plan), **own}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], observed: Mapping[int, int]) -> Measurement:
        known = {part.name for part in fields(LoadPlan)}  # a study of an earlier version may hold more
        values = {name: value for name, value in data.items() if name in known}
        plan = LoadPlan(**{**values, "arrivals": Arrivals(data["arrivals"])})
        return cls(
            plan,
            observed,
            data.get("expected_requests"),
            data.get("client_processes", 1),
            data.get("peak_in_flight"),
            data.get("sustained_per_s"),
        )


def natural_ends(records: Iterable[RequestRecord]) -> dict[int, int]:
    """Output lengths of the requests that came to their end, by index; none when all of them were as long as was asked.

    Those that reached their limit count too: that was their end. What was in flight or failed has none.
    """
    ended = [record for record in records if record.succeeded and record.output_tokens > 0]
    if not any(record.finish_reason == "stop" for record in ended):
        return {}
    return {record.index: record.output_tokens for record in ended}
