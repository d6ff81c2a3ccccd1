"""The first load on an engine: finds what the user left open (concurrency, rate, window), then freezes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vopt.objectives.metrics import Metrics, compute_metrics
from vopt.objectives.records import LoadResult, LoadStatus
from vopt.optimizer.engine.base import OnTick
from vopt.optimizer.errors import UsageError
from vopt.optimizer.goodput_rate import nothing_missed, rate_where_missed
from vopt.optimizer.load.concurrency import RATE_SHARE, MeasureNext, auto_concurrency, rate_for_latency
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.shares import client_processes
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.measurement import SHORTEST_WINDOW_S, STALL_FACTOR, Asked, Measurement, natural_ends
from vopt.optimizer.soak import peak_in_flight
from vopt.optimizer.trial import EngineFailure, Failed, FailureKind, Phase

NUMBERS_APART = 1_000_000
"""Request numbers between two loads on one engine: prompts are unique by their number, so no load finds another one's in a
prefix cache. Prompts have eight digits for it, which is room for a hundred loads."""
MOST_LOADS = 100
PROBE_WINDOW_SHARE = 1 / 3
"""A probe only ranks concurrency levels 5 % apart, so it needs a third of a measurement's window."""
LEAST_PROBE_S = 10.0
"""Shorter probes rank by chance, unless the window itself is shorter: on a simulated H200 probes of 3.3 and 6.7 s of Qwen3.5-9B
found 128 and 512 in flight, and with them 7.9 and 12.1 requests/s for its latency."""

LOWERED, LOWER, LOWER_GOODPUT = 2, 0.75, 0.9
"""How often a rate that was found is lowered, and to what of it, where the baseline's queue grows at it (a goodput goal's has
just been tried: it is too high by little)."""
ROOM_FOR_FEWER = 1.2
LONGEST_FOUND_WINDOW_S = 900.0
"""Half of a load's deadline: a window may double once."""

LoadOnce = Callable[[LoadPlan], LoadResult]
"""One load, with prompts that no load before it on the same engine had."""


@dataclass(slots=True)
class NumberedLoads:
    """Loads of one source, each with prompts of its own: the first has the source's own numbers."""

    source: RequestSource
    on_tick: OnTick
    made: int = field(default=0)

    def on(self, load: Callable[[RequestSource, LoadPlan, OnTick], LoadResult]) -> LoadOnce:
        """A ``LoadOnce`` over one session's ``load``."""

        def once(plan: LoadPlan) -> LoadResult:
            source = replace(self.source, first_number=self.source.first_number + self.made * NUMBERS_APART)
            self.made += 1
            return load(source, plan, self.on_tick)

        return once


@dataclass(frozen=True, slots=True)
class FirstLoad:
    """``load`` decides; ``probes`` came before it. ``measurement`` is ``None`` when the load did not come to its end."""

    load: LoadResult
    probes: tuple[LoadResult, ...]
    measurement: Measurement | None


def first_load(asked: Asked, load_once: LoadOnce, say: Callable[[str], None]) -> FirstLoad:
    """Probe for what ``asked`` leaves open, load, and load again if the window turned out too short.

    Raises:
        EngineFailure: the engine failed, or a probe finished no request.
        UsageError: no window of a sensible length has the successes that the objective needs.
    """
    window_s = asked.window_s or SHORTEST_WINDOW_S
    probes: list[LoadResult] = []
    plan, sustained = _found_plan(asked, window_s, load_once, say, probes)
    load = load_once(plan)
    better = _fitted(asked, plan, load)
    if better != plan:
        plan = better
        probes.append(load)
        load = load_once(plan)
    for _ in range(LOWERED):
        if asked.rate is not None or plan.rate is None or load.status is not LoadStatus.OVERLOADED:
            break
        plan = replace(plan, rate=(LOWER_GOODPUT if asked.slos else LOWER) * plan.rate)
        say(f"rate: {plan.rate:.3g} requests/s, for the baseline's queue grew at more")
        probes.append(load)
        load = load_once(plan)
    if asked.slos and plan.rate is not None and (said := nothing_missed(compute_metrics(load, slos=asked.slos).values)):
        say(said)
    measurement = None
    if load.status in (LoadStatus.COMPLETE, LoadStatus.UNSTEADY):
        p99_s = compute_metrics(load).get("p99_e2e_s")
        plan = replace(_frozen(plan, load), stall_after_s=None if p99_s is None else STALL_FACTOR * p99_s)
        measurement = Measurement(
            plan,
            natural_ends(load.records),
            _finished_in(load),
            client_processes(plan),
            peak_in_flight(load.records),
            sustained,
        )
    return FirstLoad(load, tuple(probes), measurement)


def _frozen(plan: LoadPlan, load: LoadResult) -> LoadPlan:
    """The plan of all later loads. In an open loop its window is the one that the baseline's load turned out to need: how many
    requests are due in it is the arrivals' doing. If each load counted those that end in it, a slower engine would be measured
    over other requests than a fast one. A recording has its own length."""
    if plan.rate is None or load.window is None or not load.window.doublings:
        return plan if plan.rate is None else replace(plan, min_requests=0)
    return replace(plan, window_s=plan.window_s * 2**load.window.doublings, min_requests=0)


def _found_plan(
    asked: Asked, window_s: float, load_once: LoadOnce, say: Callable[[str], None], probes: list[LoadResult]
) -> tuple[LoadPlan, float | None]:
    """The plan, and the requests per second that a closed loop sustains where the rate was found from them."""
    if asked.arrivals is Arrivals.REPLAY:
        return _plan(asked, window_s), None
    concurrency, rate = asked.concurrency, asked.rate
    if concurrency is None and (not asked.open_loop or rate is None):
        concurrency = _find_concurrency(asked, window_s, load_once, say, probes)
    if not asked.open_loop:
        return _closed(asked, concurrency or 1, window_s), None
    sustained = None
    if rate is None:
        assert concurrency is not None, "found above"
        probe = load_once(replace(_closed(asked, concurrency, window_s), max_requests=None))
        probes.append(probe)
        sustained = _needed(probe, concurrency, "requests_per_s")
        rate = found_rate(asked, sustained, load_once, say, probes)
    return replace(_plan(asked, window_s), rate=rate), sustained


def found_rate(
    asked: Asked, sustained: float, load_once: LoadOnce, say: Callable[[str], None], probes: list[LoadResult]
) -> float:
    """Requests per second of an open loop, from those that a closed loop sustains on the same engine."""
    if asked.slos:
        plan = _plan(asked, _probe_s(asked.window_s or SHORTEST_WINDOW_S))
        return rate_where_missed(plan, sustained, asked.slos, load_once, say, probes)
    rate = rate_for_latency(sustained)
    say(f"rate: {rate:.3g} requests/s, {RATE_SHARE:g} of what the baseline sustains")
    return rate


def _fitted(asked: Asked, plan: LoadPlan, load: LoadResult) -> LoadPlan:
    """The plan with a window of twice the mean E2E, and, in an open loop, a warm-up of the p90 E2E: before that the engine is
    still filling, which reads as low latency. A replay has the recording's own length."""
    if asked.arrivals is Arrivals.REPLAY:
        return plan
    metrics = compute_metrics(load)
    mean_s, p90_s = metrics.get("mean_e2e_s"), metrics.get("p90_e2e_s")
    if asked.window_s is None and mean_s is not None and 2 * mean_s > plan.window_s:
        plan = replace(plan, window_s=2 * mean_s)
    if asked.window_s is None and asked.least_successes:
        plan = replace(plan, window_s=max(plan.window_s, _window_for(asked.least_successes, load, metrics)))
    if asked.open_loop and p90_s is not None and p90_s > plan.warmup_s:
        plan = replace(plan, warmup_s=p90_s)
    return plan


def _window_for(successes: int, load: LoadResult, metrics: Metrics) -> float:
    """The window in which as many requests succeed, with room for configurations that have fewer."""
    length_s = load.window.length_s if load.window is not None else 0.0
    window_s = ROOM_FOR_FEWER * successes * length_s / max(1, metrics.succeeded)
    if window_s > LONGEST_FOUND_WINDOW_S or not length_s:
        raise UsageError(
            f"{metrics.succeeded} requests succeeded in {length_s:.0f} s: a p99 rests on {successes:,}, which would take "
            f"windows of {window_s / 60:.0f} minutes",
            hint="a p95 as --metric, a shorter workload, or --window with a length to insist on a p99 of fewer",
        )
    return window_s


def _find_concurrency(
    asked: Asked, window_s: float, load_once: LoadOnce, say: Callable[[str], None], probes: list[LoadResult]
) -> int:
    points: dict[int, float] = {}
    while isinstance(answer := auto_concurrency(points), MeasureNext):
        level = answer.concurrency
        plan = _closed(asked, level, _probe_s(window_s))
        probe = load_once(replace(plan, max_doublings=0, min_requests=0, max_requests=None))
        probes.append(probe)
        points[level] = _needed(probe, level, "tokens_per_s")
    say(f"concurrency: {answer.concurrency} ({answer.reason})")
    return answer.concurrency


def _probe_s(window_s: float) -> float:
    return max(PROBE_WINDOW_SHARE * window_s, min(LEAST_PROBE_S, window_s))


def _closed(asked: Asked, concurrency: int, window_s: float) -> LoadPlan:
    return replace(_plan(asked, window_s), arrivals=Arrivals.CLOSED, concurrency=concurrency)


def _plan(asked: Asked, window_s: float) -> LoadPlan:
    return LoadPlan(
        arrivals=asked.arrivals,
        window_s=window_s,
        max_requests=asked.max_requests,
        deadline_s=asked.deadline_s,
        seed=asked.seed,
    )


def _needed(probe: LoadResult, concurrency: int, name: str) -> float:
    """A figure above 0 of a probe; ``EngineFailure`` with the load's own words when there is none."""
    metrics = compute_metrics(probe)
    value = metrics.get(name)
    if value is not None and value > 0:
        return value
    words = f"the probe at concurrency {concurrency} finished no request: {_why(probe, metrics)}"
    raise EngineFailure(Failed(Phase.LOAD, FailureKind.LOW_SUCCESS, words, load=probe))


def _why(probe: LoadResult, metrics: Metrics) -> str:
    first = next(iter(metrics.failures.items()), None)
    if first is not None:
        kind, count = first
        return f"{count.n} x {kind}: {count.first_message}"
    return probe.detail or f"the load ended as {probe.status}"


def _finished_in(load: LoadResult) -> int:
    """Requests of the whole load that came to an end, well or not."""
    return sum(not record.censored for record in load.records)
