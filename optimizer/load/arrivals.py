"""When the visits of an open loop begin. Standard library only: this module travels into trial processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, islice, takewhile

from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource


def arrival_times(plan: LoadPlan, source: RequestSource) -> Iterator[float]:
    """Seconds after the load began at which visit 0, 1, 2, ... is due, never falling.

    Endless for Poisson and constant arrivals; as long as the recording for a replay. ``ValueError`` for a plan without a
    usable rate or a source without recorded times.
    """
    match plan.arrivals:
        case Arrivals.CLOSED:
            raise ValueError("a closed loop sends when others finish; it has no arrival times")
        case Arrivals.REPLAY:
            if not source.scheduled_s:
                raise ValueError("a replay needs recorded times; this workload has none")
            return iter(sorted(source.scheduled_s))
        case Arrivals.POISSON | Arrivals.CONSTANT:
            rate = plan.rate
            if rate is None or not 0 < rate < float("inf"):
                raise ValueError(f"{plan.arrivals} arrivals need a rate above 0 requests per second, not {rate}")
            return (
                _poisson(rate, plan.seed)
                if plan.arrivals is Arrivals.POISSON
                else ((number + source.phase) / rate for number in count())
            )


def _poisson(rate: float, seed: int) -> Iterator[float]:
    """Exponential gaps. A generator of its own: nothing else the seed is used for may shift the arrivals."""
    draw = random.Random(f"arrivals-{seed}")
    at_s = 0.0
    while True:
        at_s += draw.expovariate(rate)
        yield at_s


def check_plan(plan: LoadPlan, source: RequestSource) -> None:
    """The rules of a plan; ``ValueError`` names the one that is broken and its value."""
    if plan.arrivals is Arrivals.CLOSED and (plan.concurrency is None or plan.concurrency < 1):
        raise ValueError(f"a closed loop needs a concurrency of 1 or more, not {plan.concurrency}")
    if plan.arrivals is not Arrivals.CLOSED:
        next(iter(arrival_times(plan, source)), None)
    if not source.lengths:
        raise ValueError("the workload has no requests")
    for name in ("window_s", "tick_s", "deadline_s", "idle_timeout_s"):
        value = getattr(plan, name)
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be above 0 seconds, not {value}")
    if plan.max_requests is not None and plan.max_requests < 1:
        raise ValueError(f"max_requests must be 1 or more, not {plan.max_requests}")


def planned_requests(plan: LoadPlan, source: RequestSource, closes_s: float | None) -> int:
    """How many requests a load was to send at least: its cap, or what a window needs.

    Open loop: the visits due before the window's end at ``closes_s`` (``None``: it never opened). Sessions count as one
    request each, since their later turns depend on the answers.
    """
    if plan.arrivals is Arrivals.CLOSED:
        return plan.max_requests or plan.min_requests
    end_s = plan.warmup_s + plan.window_s if closes_s is None else min(closes_s, plan.deadline_s)
    due = takewhile(lambda at_s: at_s < end_s, arrival_times(plan, source))
    return sum(1 for _ in islice(due, plan.max_requests))
