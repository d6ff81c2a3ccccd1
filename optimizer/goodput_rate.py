"""The rate of a goodput goal: where the baseline begins to miss its bounds, so that a better one has room to show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from vopt.objectives.metrics import compute_metrics
from vopt.objectives.records import LoadResult, LoadStatus
from vopt.optimizer.load.plan import LoadPlan

SHARES = (0.6, 0.7, 0.8)
"""Rates that are tried, as shares of the request rate that the baseline sustains in a closed loop. Above them a start in a few
is overloaded (simulated Qwen3-8B on an H200: some at 0.8, most at 0.9), which says nothing of its bounds."""
KEPT = 0.95
"""A baseline that is within its bounds for more of its requests has begun to miss nothing: goodput is at most the rate, so no
configuration could gain more than the rest."""
ALL_KEPT = 0.99
WARMUP_AT_MOST = 0.5
"""Of a probe's window: what fills the engine is left out of it."""


def rate_where_missed(
    plan: LoadPlan,
    sustained: float,
    slos: Mapping[str, float],
    load_once: Callable[[LoadPlan], LoadResult],
    say: Callable[[str], None],
    probes: list[LoadResult],
) -> float:
    """The least rate of ``SHARES`` x ``sustained`` (requests per second) at which the baseline keeps its bounds for ``KEPT`` of
    its requests or fewer; where it keeps them at all, the least, which is the safest. Each is tried with ``plan``; what was
    measured is added to ``probes``."""
    for share in SHARES:
        rate = share * sustained
        probe = load_once(replace(plan, rate=rate, max_doublings=0, min_requests=0, max_requests=None))
        probes.append(probe)
        if probe.status is LoadStatus.OVERLOADED:
            break
        metrics = compute_metrics(probe, slos=slos)
        good, finished = metrics.get("goodput_per_s"), metrics.get("requests_per_s")
        if good is not None and finished and good / finished <= KEPT:
            within = f"{good / finished:.0%} of the requests"
            say(f"rate: {rate:.3g} requests/s, {share:g} of what the baseline sustains: {within} are within the bounds")
            return rate
        e2e_s = metrics.get("p90_e2e_s") or 0.0
        plan = replace(plan, warmup_s=max(plan.warmup_s, min(e2e_s, WARMUP_AT_MOST * plan.window_s)))
    rate = SHARES[0] * sustained
    say(f"rate: {rate:.3g} requests/s, {SHARES[0]:g} of what the baseline sustains: up to {SHARES[-1]:g} it misses nothing")
    return rate


def nothing_missed(values: Mapping[str, float]) -> str | None:
    """What to say of a baseline with these metrics when all its requests are within the bounds; ``None``: they are not."""
    good, finished = values.get("goodput_per_s"), values.get("requests_per_s")
    if good is None or not finished or good / finished < ALL_KEPT:
        return None
    return (
        f"the baseline keeps every bound for {good / finished:.0%} of its requests at {finished:.3g} requests/s, and goodput "
        "is never above what is sent: a gain can only show under a higher --rate, or with tighter --limit bounds"
    )
