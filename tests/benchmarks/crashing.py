"""Spaces in which 60 % of the configurations crash, and how a search of 30 engine starts learns to stay out of them.

    PYTHONPATH=build/names:tests/benchmarks python tests/benchmarks/crashing.py [--seeds N] [--first SEED]

Each space is drawn anew from its seed: which values need what is not installed (they always fail), which pairs of settings are
refused, which speculation dies under load, and how much memory each size takes; the memory limit then makes it 60 % in all. The
space's own seeds know nothing of it. Seeds below 1000 may be used while the search is tuned, those from 1000 on never.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from landscapes import THROUGHPUT, Landscape, MemoryStudy, PlainSpace, Truth, parameter, space

from vopt.optimizer.history import Stage
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.optimizer.trial import FailureKind
from vopt.search_spaces.parameter import Parameter, Point

STARTS = 30
SCREENED = 3  # starts that the budget keeps for screening, beyond the search
CRASHING = 0.60

SIZES = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_cudagraph_capture_size")
CHOICES = ("attention_backend", "moe_backend", "cudagraph_mode", "speculation", "kv_cache_dtype", "async_scheduling")
SPECULATION = ("off", "ngram:2", "ngram:4", "mtp:1", "mtp:2", "mtp:3", "mtp:4")


def parameters() -> tuple[Parameter, ...]:
    """1.2 million points of ten arguments."""
    return (
        parameter("max_num_seqs", [2**k for k in range(5, 12)], 256),
        parameter("max_num_batched_tokens", [2**k for k in range(10, 17)], 8192),
        parameter("gpu_memory_utilization", [round(0.86 + 0.02 * k, 2) for k in range(6)], 0.92),
        parameter("max_cudagraph_capture_size", [2**k for k in range(5, 11)], 256),
        parameter("attention_backend", ("auto", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"), "auto", ordered=False),
        parameter("moe_backend", ("auto", "triton", "cutlass", "marlin", "deep_gemm"), "auto", ordered=False),
        parameter("cudagraph_mode", ("FULL_AND_PIECEWISE", "PIECEWISE", "FULL"), "FULL_AND_PIECEWISE", ordered=False),
        parameter("speculation", SPECULATION, "off", ordered=False),
        parameter("kv_cache_dtype", ("auto", "fp8"), "auto", ordered=False),
        parameter("async_scheduling", (False, True), True, ordered=False),
    )


@dataclass(frozen=True)
class Faults:
    """What one space holds against its configurations. ``weights`` are the memory that the top of each size takes."""

    weights: Mapping[str, float]
    drafts: float
    saved: float
    dead: frozenset[tuple[str, Any]]
    pairs: tuple[tuple[tuple[str, Any], tuple[str, Any]], ...]
    dies: str
    dies_from: int
    limit: float = math.inf

    def memory(self, point: Point, places: Mapping[str, Mapping[Any, float]]) -> float:
        load = sum(weight * places[name][point[name]] for name, weight in self.weights.items())
        return load + self.drafts * (point["speculation"] != "off") - self.saved * (point["kv_cache_dtype"] == "fp8")

    def other(self, point: Point) -> FailureKind | None:
        """What fails whatever the memory is."""
        if any(point[name] == value for name, value in self.dead):
            return FailureKind.UNSUPPORTED
        if any(point[one[0]] == one[1] and point[two[0]] == two[1] for one, two in self.pairs):
            return FailureKind.INVALID_CONFIG
        if point["speculation"].startswith(self.dies) and point["max_num_seqs"] >= self.dies_from:
            return FailureKind.ENGINE_DIED
        return None


def crashing_landscape(seed: int) -> Landscape:
    """The space of one seed, 60 % of whose points crash; the defaults do not."""
    rng = np.random.default_rng([seed, 60])
    made = parameters()
    places = {p.name: {v: i / (len(p.values) - 1) for i, v in enumerate(p.values)} for p in made if p.name in SIZES}
    by_name = {p.name: p for p in made}
    sample = [_random_point(rng, made) for _ in range(4000)]
    while True:
        faults = _faults(rng, by_name)
        loads = np.array([math.inf if faults.other(point) else faults.memory(point, places) for point in sample])
        if np.isinf(loads).mean() > CRASHING - 0.1:
            continue
        limit = float(np.quantile(loads, 1 - CRASHING))
        home = {p.name: p.default for p in made}
        if faults.other(home) is None and faults.memory(home, places) <= limit:
            break
    effects = {p.name: dict(zip(p.values, rng.normal(0, 0.03, len(p.values)), strict=True)) for p in made}
    for name in SIZES[:2]:  # throughput rises with these, towards the memory's end
        width = rng.uniform(0.05, 0.15)
        effects[name] = {value: width * place for value, place in places[name].items()}

    def truth(point: Point) -> Truth:
        crash = faults.other(point)
        if crash is None and faults.memory(point, places) > limit:
            crash = FailureKind.OOM_START
        if crash is not None:
            return Truth(0.0, 0.0, crash)
        return Truth(10_000 * math.exp(sum(effects[name][point[name]] for name in effects)))

    seeds = [dict(_few_changes(rng, made)) for _ in range(4)]
    return Landscape(f"crashing-{seed}", space(*made, seeds=seeds), truth, THROUGHPUT, noise=0.01)


def _faults(rng: np.random.Generator, by_name: Mapping[str, Parameter]) -> Faults:
    weights = dict(zip(SIZES, rng.uniform(0.2, 1.0, len(SIZES)), strict=True))
    settings = [(name, v) for name in CHOICES for v in by_name[name].values if v != by_name[name].default]
    backends = [setting for setting in settings if setting[0] in CHOICES[:3]]
    chosen = rng.choice(len(backends), int(rng.integers(1, 4)), replace=False)
    dead = frozenset(backends[int(i)] for i in chosen)
    alive = [setting for setting in settings if setting not in dead]
    pairs = []
    while len(pairs) < 2:
        one, two = (alive[int(i)] for i in rng.choice(len(alive), 2, replace=False))
        if one[0] != two[0]:
            pairs.append((one, two))
    dies = str(rng.choice(["ngram", "mtp", "mtp:3", "mtp:4"]))
    return Faults(weights, rng.uniform(0, 0.3), rng.uniform(0, 0.3), dead, tuple(pairs), dies, int(2 ** rng.integers(8, 11)))


def _random_point(rng: np.random.Generator, made: Sequence[Parameter]) -> dict[str, Any]:
    return {p.name: p.values[int(rng.integers(len(p.values)))] for p in made}


def _few_changes(rng: np.random.Generator, made: Sequence[Parameter]) -> dict[str, Any]:
    """Two arguments at other values than their defaults: a prior that was not made for this space."""
    changed = [made[int(i)] for i in rng.choice(len(made), 2, replace=False)]
    others = [(p, [v for v in p.values if v != p.default]) for p in changed]
    return {p.name: values[int(rng.integers(len(values)))] for p, values in others}


@dataclass(frozen=True)
class Crashes:
    """The starts of one search in order: which crashed, whether a configuration failed twice, and the share of the space."""

    seed: int
    crashed: tuple[bool, ...]
    repeated: bool
    share: float
    gain: float

    @property
    def thirds(self) -> tuple[int, int, int]:
        third = STARTS // 3
        return sum(self.crashed[:third]), sum(self.crashed[third : 2 * third]), sum(self.crashed[2 * third :])


def crash_share(landscape: Landscape, seed: int, points: int = 4000) -> float:
    """Share of the space's points that crash, from a sample."""
    rng = np.random.default_rng([seed, 61])
    drawn = [_random_point(rng, landscape.space.parameters) for _ in range(points)]
    return sum(landscape.truth(point).crash is not None for point in drawn) / points


def searched(seed: int) -> Crashes:
    """One search of 30 engine starts over the space of ``seed``."""
    landscape = crashing_landscape(seed)
    body: PlainSpace = landscape.space
    study = MemoryStudy()
    budget = Budget(trials=STARTS + SCREENED, rounds=0, time_s=None, soak_s=0, patience=99)
    setup = SearchSetup(goal=THROUGHPUT, space=body, budget=budget, seed=seed, restart_noise=landscape.noise)
    search(setup, study, landscape.evaluator(seed), lambda _: None)
    records = study.records()
    crashed = tuple(record.failure is not None for record in records if record.stage is Stage.SEARCH)
    lost = [record.config for record in records if record.failure is not None]
    ran = [record for record in records if record.failure is None]
    best = max(landscape.merit(body.point_of(record.config)) for record in ran)
    gain = math.exp(best - landscape.merit(body.default_point())) - 1
    return Crashes(seed, crashed, len(lost) != len(set(lost)), crash_share(landscape, seed), gain)


def table(runs: Sequence[Crashes]) -> str:
    """One line a seed, and the thirds pooled over all."""
    lines = [f"{'seed':>6} {'space':>6} {'starts':>6}  first  second  last  {'gain':>7}  repeated"]
    for run in runs:
        first, second, last = run.thirds
        lines.append(
            f"{run.seed:>6} {run.share:>6.1%} {len(run.crashed):>6}  {first:>5}  {second:>6}  {last:>4}  {run.gain:>+7.1%}  "
            f"{'yes' if run.repeated else 'no'}"
        )
    first, second, last = (sum(run.thirds[i] for run in runs) for i in range(3))
    each = sum(run.thirds[2] < run.thirds[0] / 4 for run in runs)
    lines.append(f"   all thirds: {first}, {second}, {last} crashes; last/first {last / max(1, first):.3f}")
    lines.append(f"   under a quarter on its own: {each} of {len(runs)} seeds")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1000)
    given = parser.parse_args()
    print(table([searched(given.first + i) for i in range(given.seeds)]))


if __name__ == "__main__":
    main()
