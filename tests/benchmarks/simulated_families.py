"""Families on the simulated engine: real spaces, real limits, a known truth, and noise from start to start.

Each configuration is simulated once without noise and kept, by family, under ``build/regret/`` until a source file that
decides it changes. A measured start is that truth times one factor of its own: what a restart does (``RESTART_NOISE``). The
other ways of searching see the space as the baseline's counters opened it; ours opens it by itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from vopt.objectives.goals import Goal
from vopt.objectives.metrics import Metrics, compute_metrics
from vopt.objectives.records import LoadResult
from vopt.optimizer.engine.simulated import Noise, SimulatedCaches, SimulatedSession
from vopt.optimizer.first_load import NumberedLoads, first_load
from vopt.optimizer.history import FailureSummary, Stage, TrialRecord, TrialRequest
from vopt.optimizer.judge import Judged, judge
from vopt.optimizer.measurement import Measurement
from vopt.optimizer.opening import opening
from vopt.optimizer.options import SearchOptions
from vopt.optimizer.prepare import find_asked, find_goal, find_load
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.optimizer.space_of import find_space, search_setup
from vopt.optimizer.subject import find_subject
from vopt.optimizer.trial import EngineConfig, EngineFailure, Failed, TrialSpec
from vopt.search_spaces.learned import Learned
from vopt.search_spaces.space import Point, SearchSpace

RESTART_NOISE = 0.01
"""Standard deviation of the logarithm from start to start; 0.2 to 1 % is what others publish."""
CLEARLY = 3 * RESTART_NOISE
"""By how much of itself a limit is broken without noise where an answer counts as infeasible: nearer to it, noise decides."""
WHOLE = 700
"""Spaces of up to this many points are simulated whole; in larger ones the optimum is the best that ascents find."""

MODELS = {"dense": "Qwen/Qwen3-8B", "moe": "Qwen/Qwen3-30B-A3B", "hybrid": "Qwen/Qwen3.5-9B"}
GPUS = ("h200", "h100", "a100")
WORKLOADS = ("chat", "throughput", "long-context", "generation")
_ROOT = Path(__file__).resolve().parents[2]
_KEPT = _ROOT / "build" / "regret"


@dataclass(frozen=True)
class SimulatedLandscape:
    """One model on one GPU under one workload; its ``space`` is what is open once the defaults were measured."""

    name: str
    options: SearchOptions

    @cached_property
    def _parts(self) -> tuple[Any, Any, Goal, SearchSetup]:
        options = self.options
        subject, goal = find_subject(options), find_goal(options)
        load, asked = find_load(options, subject, lambda text: None), find_asked(options, goal)
        space = find_space(options, subject, load.workload, goal.name, asked.concurrency)
        # What earlier searches on this machine learned would make the benchmark depend on where it runs.
        space = replace(space, learned=Learned())
        return subject, (load, asked), goal, search_setup(options, subject, goal, space, "auto", asked)

    @property
    def goal(self) -> Goal:
        return self._parts[2]

    def setup(self, trials: int, seed: int) -> SearchSetup:
        return replace(self._parts[3], budget=Budget(trials, time_s=None, soak_s=0), seed=seed, early_end=False)

    @cached_property
    def space(self) -> SearchSpace:
        found = opening(self._parts[3].space, self.truth(EngineConfig()), ()).space
        return replace(found, learned=Learned())

    # -- the truth ------------------------------------------------------------------------------------------------------

    @cached_property
    def _known(self) -> dict[str, TrialRecord]:
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {digest: TrialRecord.from_json(data) for digest, data in kept.items()}

    @property
    def _file(self) -> Path:
        return _KEPT / f"{self.name}-{_sources()}.json"

    def keep(self) -> None:
        """Write what was simulated, whole or not at all."""
        _KEPT.mkdir(parents=True, exist_ok=True)
        text = json.dumps({digest: record.to_json() for digest, record in self._known.items()})
        with tempfile.NamedTemporaryFile("w", dir=_KEPT, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, self._file)

    def truth(self, config: EngineConfig) -> TrialRecord:
        """The start of a configuration without noise."""
        if config.digest not in self._known:
            self._known[config.digest] = self._simulated(config)
        return self._known[config.digest]

    @cached_property
    def _frozen(self) -> tuple[Measurement, TrialRecord]:
        """The measurement as the defaults froze it, and their start."""
        _subject, (load, asked), _goal, _ = self._parts
        session = self._session(EngineConfig())
        started = session.start(lambda phase, words: None)
        loads = NumberedLoads(load.requests.source, lambda tick: True)
        found = first_load(asked, loads.on(session.load), lambda text: None)
        assert found.measurement is not None, f"{self.name}: the defaults cannot be measured"
        record = self._record(EngineConfig(), started, found.load, None, found.measurement)
        return found.measurement, record

    def _simulated(self, config: EngineConfig) -> TrialRecord:
        measurement, first = self._frozen
        if not config:
            return first
        source = self._parts[1][0].requests.source.with_observed(measurement.observed_output_tokens)
        session = self._session(config)
        try:
            started = session.start(lambda phase, words: None)
            return self._record(config, started, session.load(source, measurement.plan, lambda tick: True), None, measurement)
        except EngineFailure as failure:
            return self._record(config, failure.failed.started, failure.failed.load, failure.failed, measurement)

    def _session(self, config: EngineConfig) -> SimulatedSession:
        subject = self._parts[0]
        spec = TrialSpec("0", subject.model.name, subject.fixed | config, Path(), "python")
        assert subject.shape is not None
        assert subject.machine.hardware is not None
        return SimulatedSession(
            spec,
            subject.shape,
            subject.machine.hardware,
            version=subject.schema.version,
            caches=SimulatedCaches({subject.shape.name}),
            noise=Noise(0.0, 0.0),
        )

    def _record(
        self, config: EngineConfig, started: Any, load: LoadResult | None, failed: Failed | None, measurement: Measurement
    ) -> TrialRecord:
        failure = FailureSummary(failed.phase, failed.kind, failed.detail, (), failed.hint) if failed else None
        return TrialRecord(
            label="",
            config=config,
            stage=Stage.SEARCH,
            arm=None,
            attempt=1,
            status=load.status if load else None,
            metrics=compute_metrics(load, slos=self.goal.slos) if load else None,
            failure=failure,
            argv=("vllm", "serve"),
            resolved={},
            kv_cache_tokens=started.kv_cache_tokens if started else None,
            start_class=None,
            phase_s={},
            start_parts_s={},
            began_at="",
            directory="",
            environment={"load_plan": measurement.to_json()},
        )

    def judged(self, config: EngineConfig) -> Judged:
        record = self.truth(config)
        return judge(record, self.goal, self.truth(EngineConfig()).metrics if config else None)

    def points(self) -> Iterator[dict[str, Any]]:
        for values in product(*(parameter.values for parameter in self.space.parameters)):
            yield dict(zip(self.space.names, values, strict=True))

    @cached_property
    def best(self) -> float:
        """Merit of the true feasible optimum, or of the best that ascents from the defaults and from each seed find."""
        legal = [point for point in self.points() if not self.space.violations(point)]
        if len(legal) <= WHOLE:
            merits = [self._merit(point) for point in legal]
        else:
            starts = [self.space.default_point(), *(self._open(seed.point) for seed in self.space.seeds)]
            merits = [self._ascent(start) for start in starts]
        self.keep()
        return max(merits)

    def _open(self, point: Point) -> dict[str, Any]:
        return {**self.space.default_point(), **{n: v for n, v in point.items() if n in self.space}}

    def _merit(self, point: Point) -> float:
        judged = self.judged(EngineConfig(self.space.full_config(point)))
        return judged.merit if judged.may_win and judged.merit is not None else -math.inf

    def _ascent(self, point: dict[str, Any]) -> float:
        merit = self._merit(point)
        while True:
            around = [
                point | {parameter.name: value}
                for parameter in self.space.parameters
                for value in parameter.values
                if value != point[parameter.name]
            ]
            best = max((near for near in around if not self.space.violations(near)), key=self._merit)
            if self._merit(best) <= merit:
                return merit
            point, merit = best, self._merit(best)

    def regret(self, config: Mapping[str, Any] | None) -> float:
        """Share of the optimum that a configuration loses; 1.0 for what crashes or clearly breaks a limit."""
        if config is None or not self.judged(EngineConfig()).feasible:
            return 1.0
        judged = self.judged(EngineConfig(config))
        if judged.merit is None or any(value > CLEARLY for value in judged.violations.values()):
            return 1.0
        return max(0.0, 1 - math.exp(judged.merit - self.best))

    def evaluator(self, seed: int) -> Callable[[TrialRequest], TrialRecord]:
        """An ``evaluate`` with start noise; the draw depends on seed, label and configuration alone."""

        def evaluate(request: TrialRequest) -> TrialRecord:
            key = hashlib.sha256(f"{seed}|{request.label}|{request.config.digest}|{request.attempt}".encode()).digest()
            noise = float(np.random.default_rng(list(key[:8])).normal(0, RESTART_NOISE))
            truth = self.truth(request.config)
            metrics = truth.metrics and _scaled(truth.metrics, math.exp(noise))
            return replace(
                truth, label=request.label, stage=request.stage, arm=request.arm, attempt=request.attempt, metrics=metrics
            )

        return evaluate


def _scaled(metrics: Metrics, faster: float) -> Metrics:
    """The figures of an engine that is ``faster`` times as fast."""
    values = {
        name: value * faster if name.endswith("_per_s") else value / faster if name.endswith("_s") else value
        for name, value in metrics.values.items()
    }
    return replace(metrics, values=values)


@cache
def _sources() -> str:
    """Digest of what decides a simulation."""
    digest = hashlib.sha256()
    for folder in ("optimizer/engine", "optimizer/load", "objectives", "search_spaces"):
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".toml", ".json"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@cache
def simulated_landscape(gpu: str, kind: str, workload: str, goal: str = "throughput") -> SimulatedLandscape:
    suffix = "" if goal == "throughput" else f"-{goal}"
    options = SearchOptions(goal=[goal], model=MODELS[kind], simulate=gpu, workload=workload, soak=0.0, time_budget=math.inf)
    return SimulatedLandscape(f"{gpu}-{kind}-{workload}{suffix}", options)


def simulated_families() -> dict[str, Callable[[int], SimulatedLandscape]]:
    """Every GPU, kind of model and workload for throughput, and the workloads of people who wait for latency."""
    families: dict[str, Callable[[int], SimulatedLandscape]] = {}
    for goal, workloads in (("throughput", WORKLOADS), ("latency", ("chat", "generation"))):
        for gpu, kind, workload in product(GPUS, MODELS, workloads):
            name = f"{gpu}-{kind}-{workload}" + ("" if goal == "throughput" else "-latency")
            families[name] = lambda seed, of=(gpu, kind, workload, goal): simulated_landscape(*of)
    return families
