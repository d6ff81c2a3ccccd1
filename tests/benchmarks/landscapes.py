"""Analytic landscapes that stand in for engines: known truth, seeded noise, crashes and limits. Used by tests and benchmarks.

Nothing here was measured on an engine; what the families imitate is said at each.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from vopt.objectives.goals import Goal, Limit
from vopt.objectives.metrics import Direction, Metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer.history import FailureSummary, Pending, Stage, TrialRecord, TrialRequest
from vopt.optimizer.recommend import Recommendation
from vopt.optimizer.setup import Budget, Pinned, SearchSetup
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase, StartClass
from vopt.search_spaces.space import Parameter, Point, SearchSpace, Seed, Violation

THROUGHPUT = Goal("throughput", "tokens_per_s", Direction.MAXIMIZE, (Limit("success_rate", ">=", 0.99),))
LATENCY = Goal("latency", "mean_e2e_s", Direction.MINIMIZE, (Limit("success_rate", ">=", 0.99),))
REQUESTS = 500


class PlainSpace(SearchSpace):
    """A space whose points are engine configs as they stand, with one rule given as a function."""

    __slots__ = ()

    def violations(self, point: Point) -> tuple[Violation, ...]:
        rule: Callable[[Point], bool] | None = self.facts.get("rule")
        learned = tuple(self.learned.violations(point, self.default_point()))
        return learned if rule is None or rule(point) else (*learned, Violation("rule", "not allowed here"))

    def compile_key(self, point: Point, version: str | None = None) -> str:
        return "-".join(str(point[p.name]) for p in self.parameters if p.in_compile_key)


def parameter(name: str, values: Sequence[Any], default: Any, *, ordered: bool = True, compiled: bool = False) -> Parameter:
    return Parameter(name, tuple(values), default, ordered, "test", "test", in_compile_key=compiled)


def space(
    *parameters: Parameter, seeds: Sequence[Mapping[str, Any]] = (), rule: Callable[[Point], bool] | None = None
) -> PlainSpace:
    default = {p.name: p.default for p in parameters}
    points = tuple(Seed({**default, **seed}, f"prior {dict(seed)}") for seed in seeds)
    return PlainSpace(tuple(parameters), seeds=points, facts={"rule": rule} if rule else {})


@dataclass(frozen=True)
class Truth:
    """What a point really is: ``value`` in the goal's unit, its success rate, and what kills it (if anything does)."""

    value: float
    success: float = 1.0
    crash: FailureKind | None = None
    hint: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Landscape:
    """A space, the truth at each of its points, and a goal. ``mode`` is the bare performance mode's override."""

    name: str
    space: PlainSpace
    truth: Callable[[Point], Truth]
    goal: Goal = THROUGHPUT
    mode: Mapping[str, Any] = field(default_factory=dict)
    noise: float = 0.01

    def setup(self, trials: int, seed: int) -> SearchSetup:
        """The search as a user gets it, with its bare mode and without a bound on time."""
        pinned = (Pinned(EngineConfig(self.mode), "the bare mode"),) if self.mode else ()
        budget = Budget(trials=trials, time_s=None, soak_s=0)
        return SearchSetup(self.goal, self.space, budget, pinned=pinned, seed=seed, early_end=False)

    def feasible(self, point: Point) -> bool:
        truth = self.truth(point)
        return truth.crash is None and truth.success >= 0.99

    def merit(self, point: Point) -> float:
        value = self.truth(point).value
        return math.log(value) if self.goal.direction is Direction.MAXIMIZE else -math.log(value)

    @cached_property
    def best(self) -> float:
        """Merit of the true feasible optimum."""
        return max(self.merit(p) for p in self.points() if not self.space.violations(p) and self.feasible(p))

    def points(self) -> Any:
        for values in itertools.product(*(p.values for p in self.space.parameters)):
            yield dict(zip(self.space.names, values, strict=True))

    def regret(self, config: Mapping[str, Any] | None) -> float:
        """Share of the optimum that a configuration loses; 1.0 for what crashes or breaks the limit."""
        if config is None:
            return 1.0
        point = self.space.point_of(config)
        if not self.feasible(point):
            return 1.0
        return 1 - math.exp(self.merit(point) - self.best)

    def evaluator(
        self, seed: int, noise: Callable[[np.random.Generator], float] | None = None
    ) -> Callable[[TrialRequest], TrialRecord]:
        """An ``evaluate`` with start noise and a binomial success rate; the draw depends on seed, label and config alone."""

        def evaluate(request: TrialRequest) -> TrialRecord:
            name = f"{request.label}|{request.config.digest}|{request.attempt}"
            key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
            rng = np.random.default_rng([seed, key])
            start_noise = noise(rng) if noise is not None else float(rng.normal(0, self.noise))
            return record(self, request, rng, start_noise)

        return evaluate


def record(landscape: Landscape, request: TrialRequest, rng: np.random.Generator, start_noise: float) -> TrialRecord:
    point = landscape.space.point_of(request.config)
    truth = landscape.truth(point)
    base = TrialRecord(
        label=request.label,
        config=request.config,
        stage=request.stage,
        arm=request.arm,
        attempt=request.attempt,
        status=LoadStatus.COMPLETE,
        metrics=None,
        failure=None,
        argv=("vllm", "serve", "m", *(f"--{n.replace('_', '-')}={v}" for n, v in request.config.items())),
        resolved=dict(point),
        kv_cache_tokens=100_000,
        start_class=StartClass.KNOWN_KEY,
        phase_s={Phase.START: 60.0, Phase.LOAD: 90.0, Phase.STOP: 5.0},
        start_parts_s={},
        began_at="2026-01-01T00:00:00+00:00",
        directory="",
    )
    if truth.crash is not None:
        failure = FailureSummary(Phase.START, truth.crash, "as this landscape wants it", hint=truth.hint)
        return replace(base, status=None, failure=failure, kv_cache_tokens=None, phase_s={Phase.START: 40.0, Phase.STOP: 5.0})
    n = REQUESTS * (10 if request.stage is Stage.SOAK else 1)
    failed = int(rng.binomial(n, 1 - truth.success))
    value = truth.value * math.exp(start_noise)
    values = {landscape.goal.metric: value, "success_rate": 1 - failed / n}
    return replace(base, metrics=Metrics(values=values, succeeded=n - failed, failed=failed))


class MemoryStudy:
    """A study store that keeps nothing: what the loop needs, without a database."""

    def __init__(self) -> None:
        self._records: list[TrialRecord] = []
        self._began = 0
        self.name = "memory"
        self.answer: Recommendation | None = None
        self.changes: list[Mapping[str, Any]] = []

    def records(self) -> tuple[TrialRecord, ...]:
        return tuple(self._records)

    def next_label(self) -> str:
        return str(self._began)

    def begin(self, request: TrialRequest, point: Point | None) -> None:
        self._began += 1

    def finish(self, record: TrialRecord, values: Sequence[float], violations: Mapping[str, float], *, charged: bool) -> None:
        self._records.append(record)

    def tell(self, record: TrialRecord, values: Sequence[float], violations: Mapping[str, float], *, charged: bool) -> None:
        self._records.append(record)

    def pending(self) -> tuple[Pending, ...]:
        return ()

    def abandon(self, pending: Pending, why: str) -> None:
        raise AssertionError("nothing is pending in memory")

    def deaths(self) -> list[EngineConfig]:
        return []

    def suggest(self, sampler: str, told: Any, allowed: Callable[[Point], bool], seed: int) -> Point | None:
        raise AssertionError("only our own proposals are used in memory")

    def keep_changes(self, changes: Sequence[Mapping[str, Any]]) -> None:
        self.changes = list(changes)

    def conclude(self, recommendation: Recommendation) -> None:
        self.answer = recommendation


def small_landscape(
    gains: Mapping[str, float] | None = None, *, noise: float = 0.005, base: float = 10_000.0, broken: float = 0.515
) -> Landscape:
    """A small readable landscape for tests: three knobs with stated gains (log units), and a speculative setting that shows
    the highest rate while it fails about half of its requests."""
    worth = {
        "max_num_seqs=512": 0.04,
        "max_num_batched_tokens=16384": 0.02,
        "performance_mode=throughput": 0.01,
        **(gains or {}),
    }
    made = space(
        parameter("performance_mode", ("balanced", "throughput"), "balanced", ordered=False),
        parameter("max_num_seqs", (128, 256, 512, 1024), 256),
        parameter("max_num_batched_tokens", (2048, 4096, 8192, 16384), 8192),
        parameter("speculation", ("off", "mtp:4"), "off", ordered=False, compiled=True),
        seeds=({"max_num_seqs": 512}, {"speculation": "mtp:4"}),
    )

    def truth(point: Point) -> Truth:
        if point["max_num_seqs"] == 1024:
            return Truth(0.0, 0.0, FailureKind.OOM_START, {"max_num_seqs": {"at_most": 512}})
        if point["speculation"] == "mtp:4":
            return Truth(base * 1.6, broken)
        level = sum(worth.get(f"{name}={value}", 0.0) for name, value in point.items())
        level -= 0.05 * (point["max_num_seqs"] == 128) + 0.03 * (point["max_num_batched_tokens"] < 8192)
        return Truth(base * math.exp(level))

    return Landscape("small", made, truth, mode={"performance_mode": "throughput"}, noise=noise)
