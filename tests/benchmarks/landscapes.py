"""Analytic landscapes that stand in for engines: known truth, seeded noise, crashes and limits. Used by tests and benchmarks.

Nothing here was measured on an engine; what the families imitate is said at each.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
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


# -- the families ---------------------------------------------------------------------------------------------------------

_SPECULATION = ("off", *(f"ngram:{k}" for k in range(1, 6)), *(f"mtp:{k}" for k in range(1, 6)))


def _engine_parameters() -> tuple[Parameter, ...]:
    return (
        parameter("performance_mode", ("balanced", "interactivity", "throughput"), "balanced", ordered=False),
        parameter("max_num_seqs", [2**k for k in range(4, 11)], 256),
        parameter("max_num_batched_tokens", [2**k for k in range(10, 16)], 8192),
        parameter("gpu_memory_utilization", [round(0.85 + 0.01 * k, 2) for k in range(13)], 0.92),
        parameter("enable_prefix_caching", (False, True), True, ordered=False),
        parameter("speculation", _SPECULATION, "off", ordered=False),
        parameter("kv_cache_dtype", ("auto", "fp8"), "auto", ordered=False),
        parameter("moe_backend", ("auto", "triton", "cutlass"), "auto", ordered=False),
        parameter("cudagraph_mode", ("full_and_piecewise", "piecewise", "full"), "full_and_piecewise", ordered=False),
    )


_PRIORS: tuple[Mapping[str, Any], ...] = (
    {"performance_mode": "throughput", "max_num_batched_tokens": 16384},
    {"performance_mode": "throughput", "max_num_seqs": 512},
    {"speculation": "mtp:1"},
    {"kv_cache_dtype": "fp8"},
)


def random_landscape(seed: int) -> Landscape:
    """The random family: 648,648 points, about a third crash (memory and illegal pairs), many of the rest break the success
    limit, the raw optimum among them; effects, memory, concurrency and pairs are redrawn for each seed."""
    for attempt in itertools.count():
        found = _random_landscape(np.random.default_rng([seed, attempt]), f"random-{seed}")
        if found is not None:
            return found
    raise AssertionError


@cache
def _grid(sizes: tuple[int, ...]) -> Any:
    """Every point as positions, shape (points, dimensions)."""
    return np.asfortranarray(np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=1).astype(np.int8))


def _random_landscape(rng: np.random.Generator, name: str) -> Landscape | None:
    parameters = _engine_parameters()
    sizes = [len(p.values) for p in parameters]
    default = np.array([p.index(p.default) for p in parameters])
    grid = _grid(tuple(sizes))
    effects = [rng.normal(0, 0.04, size) for size in sizes]
    for j, width in ((1, 0.10), (2, 0.06)):  # one broad peak, anywhere in the upper part
        peak = rng.uniform(0.4, 1.0) * (sizes[j] - 1)
        effects[j] = -width * ((np.arange(sizes[j]) - peak) / (sizes[j] - 1) * 2) ** 2
    effects[3] = np.linspace(0, rng.uniform(0, 0.04), sizes[3])
    rise = rng.uniform(0.02, 0.12)
    tired = rng.uniform(0.1, 0.4)
    k = np.arange(1, 6)
    effects[5] = np.concatenate(
        [[0.0], rng.normal(0, 0.03) + 0.01 * k - 0.006 * k**2, rise * np.log1p(k) - tired * rise * (k - 1) / 2]
    )
    value = np.zeros(len(grid))
    for j in range(len(sizes)):
        value += effects[j][grid[:, j]]
    for _ in range(4):  # pairs that do not add up
        one, two = rng.choice(len(sizes), 2, replace=False)
        table = rng.normal(0, 0.02, (sizes[one], sizes[two]))
        value = value + table[grid[:, one], grid[:, two]]
    load = (
        rng.uniform(0.5, 1.0) * grid[:, 1] / 6
        + rng.uniform(0.3, 0.9) * grid[:, 2] / 5
        + rng.uniform(0.5, 1.0) * grid[:, 3] / 12
        + rng.uniform(0, 0.3) * (grid[:, 5] > 5)
        - rng.uniform(0, 0.3) * (grid[:, 6] == 1)
    )
    crash = load > np.quantile(load, 0.70)
    for _ in range(2):  # illegal pairs of two settings
        one, two = rng.choice([0, 5, 6, 7, 8], 2, replace=False)
        crash |= (grid[:, one] == rng.integers(1, sizes[one])) & (grid[:, two] == rng.integers(1, sizes[two]))
    strain = (
        rng.uniform(0.5, 1.5) * np.maximum(0, grid[:, 5] - 5) / 5
        + rng.uniform(0.2, 1.0) * grid[:, 1] / 6
        + rng.normal(0, 0.15, sizes[7])[grid[:, 7]]
    )
    success = np.where(strain > np.quantile(strain, 0.57), 0.985 - 0.5 * (strain - np.quantile(strain, 0.57)), 1.0)
    success = np.clip(success, 0.3, 1.0)
    at = int(np.ravel_multi_index(tuple(default), sizes))
    ok = ~crash & (success >= 0.99)
    runs = ~crash
    if not ok[at] or success[np.flatnonzero(runs)[np.argmax(value[runs])]] >= 0.99:
        return None
    strides = np.array([math.prod(sizes[j + 1 :]) for j in range(len(sizes))])
    level = value - value[at]
    made = space(*parameters, seeds=_PRIORS)

    def truth(point: Point) -> Truth:
        index = int(sum(stride * p.index(point[p.name]) for stride, p in zip(strides, parameters, strict=True)))
        if crash[index]:
            return Truth(0.0, 0.0, FailureKind.OOM_START)
        return Truth(10_000 * math.exp(level[index]), float(success[index]))

    landscape = Landscape(name, made, truth, mode={"performance_mode": "throughput"}, noise=0.02)
    landscape.__dict__["best"] = math.log(10_000) + float(level[ok].max())
    return landscape


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
