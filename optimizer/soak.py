"""How the winner is soaked: as many requests in flight as the measured load had at its peak, the longest of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vopt.objectives.records import RequestRecord
from vopt.optimizer.load.plan import Arrivals, LoadPlan


def peak_in_flight(records: Iterable[RequestRecord]) -> int | None:
    """Most requests that a load had between their send and their end at once; ``None`` of none."""
    ends = sorted((at, step) for record in records for at, step in ((record.sent_s, 1), (record.ended_s, -1)))
    now = most = 0
    for _, step in ends:
        now += step
        most = max(most, now)
    return most or None


def soak_plan(measured: LoadPlan, peak: int | None, soak_s: float, heavier: float) -> LoadPlan:
    """The plan of a soak of ``soak_s`` whose requests are ``heavier`` times as long as the ``measured`` load's.

    An open loop becomes a closed one with ``peak`` requests in flight, which puts at least the measured load on the engine: at
    the frozen rate the longer requests would be an overload, and at fewer of them by the second most of the engine would idle.
    No bound of the measured load applies: heavier requests wait and last longer, and do not stall for it. Where
    the peak is not known (``None``), the open loop stays and sends as many tokens per second as were measured.
    """
    closed = measured.arrivals is Arrivals.CLOSED
    plan = replace(
        measured,
        window_s=soak_s,
        max_doublings=0,
        min_requests=0,
        max_requests=None,
        stall_after_s=None,
        idle_timeout_s=measured.idle_timeout_s * heavier,
        deadline_s=soak_s + measured.deadline_s,
    )
    if closed:
        return plan
    if peak is None:
        return plan if plan.rate is None else replace(plan, rate=plan.rate / heavier)
    return replace(plan, arrivals=Arrivals.CLOSED, concurrency=peak, rate=None)
