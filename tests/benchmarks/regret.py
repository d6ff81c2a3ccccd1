"""How near to the best configuration each way of searching comes, by engine starts.

    python tests/benchmarks/regret.py [--seeds N] [--first-seed N] [--family NAME ...]
        [--budgets 8,12,16,30] [--methods ...] [--jobs N] [--json] [--all]

Regret is the share of the true feasible optimum that the recommended configuration loses; 100 % is a recommendation that
crashes or breaks the limit. Ours runs the whole search with screening and confirmation (whose starts are not counted); the
others recommend the best that they observed within the limits, the defaults being their first trial.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small matrices: more threads only wait for each other

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent))

import families
from landscapes import MemoryStudy

from vopt.objectives.goals import Goal
from vopt.optimizer.history import Stage, TrialRecord, TrialRequest
from vopt.optimizer.judge import judge, told_value
from vopt.optimizer.recommend import Verdict
from vopt.optimizer.samplers import suggest
from vopt.optimizer.search import search
from vopt.optimizer.setup import SearchSetup
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.space import SearchSpace

BUDGETS = (8, 12, 16, 30)


class Landscape(Protocol):
    """What every family makes of a seed: a space with a goal, measured starts, and the truth behind them."""

    @property
    def space(self) -> SearchSpace: ...
    @property
    def goal(self) -> Goal: ...
    def setup(self, trials: int, seed: int) -> SearchSetup: ...
    def evaluator(self, seed: int) -> Callable[[TrialRequest], TrialRecord]: ...
    def regret(self, config: Mapping[str, Any] | None) -> float: ...


Regrets = dict[int, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: the regret and whether it is worse than the defaults, broke a limit or crashed, and how many starts crashed."""

    regret: float
    worse: bool
    infeasible: bool
    crashes: int


def outcome(landscape: Landscape, config: Mapping[str, Any] | None, crashes: int) -> Outcome:
    regret = landscape.regret(config)
    return Outcome(regret, regret > landscape.regret({}) + 0.002, regret >= 1.0, crashes)


def ours(landscape: Landscape, seed: int, budget: int) -> Outcome:
    """The whole search with screening and confirmation, as a user gets it."""
    setup = landscape.setup(budget, seed)
    study = MemoryStudy()
    answer = search(setup, study, landscape.evaluator(seed), lambda event: None)
    crashes = sum(r.failure is not None for r in study.records() if r.stage in (Stage.SEARCH, Stage.SCREENING))
    chosen = answer.winner_config if answer.verdict is Verdict.BETTER else EngineConfig()
    return outcome(landscape, chosen, crashes)


class Observed:
    """A plain searcher's memory: measures, and recommends the best that it observed within the limits."""

    def __init__(self, landscape: Landscape, seed: int) -> None:
        self.landscape, self.evaluate = landscape, landscape.evaluator(seed)
        self.judged: list[Any] = []
        self.points: list[dict[str, Any]] = []

    def measure(self, point: Mapping[str, Any]) -> Any:
        config = EngineConfig(self.landscape.space.config(point))
        record: TrialRecord = self.evaluate(TrialRequest(str(len(self.judged)), config, Stage.SEARCH))
        baseline = self.judged[0].record.metrics if self.judged else None
        self.points.append(dict(point))
        self.judged.append(judge(record, self.landscape.goal, baseline))
        return self.judged[-1]

    def seen(self, point: Mapping[str, Any]) -> bool:
        return dict(point) in self.points

    def best(self, starts: int) -> Outcome:
        won = [(j.merit, j.record.config) for j in self.judged[:starts] if j.may_win]
        crashes = sum(j.record.failure is not None for j in self.judged[:starts])
        return outcome(self.landscape, max(won, key=lambda pair: pair[0])[1] if won else None, crashes)


def with_sampler(kind: str) -> Callable[[Landscape, int, Sequence[int]], dict[int, Outcome]]:
    """Optuna's sampler from the defaults; crashes are told, rules and repeats filtered, which helps it."""

    def run(landscape: Landscape, seed: int, budgets: Sequence[int]) -> dict[int, Outcome]:
        space, watch = landscape.space, Observed(landscape, seed)
        watch.measure(space.default_point())
        up = landscape.goal.direction.value == "maximize"
        while len(watch.judged) < max(budgets):
            told = [
                (p, told_value(j, watch.judged[:i], landscape.goal.direction, 1800.0), j.violations)
                for i, (p, j) in enumerate(zip(watch.points, watch.judged, strict=True))
            ]
            point = suggest(
                kind,
                space,
                told,
                lambda p: not space.violations(p) and not watch.seen(p),
                maximize=up,
                seed=seed * 1000 + len(told),
            )
            if point is None:
                break
            watch.measure(point)
        return {budget: watch.best(budget) for budget in budgets}

    return run


def auto_tune_grid(landscape: Landscape, seed: int, budgets: Sequence[int]) -> dict[int, Outcome]:
    """The order of vLLM's benchmarks/auto_tune/auto_tune.sh: max_num_seqs outside, max_num_batched_tokens inside; the other
    arguments stay at their defaults."""
    space, watch = landscape.space, Observed(landscape, seed)
    watch.measure(space.default_point())
    outer = [n for n in ("max_num_seqs",) if n in space.names]
    inner = [n for n in ("max_num_batched_tokens",) if n in space.names]
    for a in space[outer[0]].values if outer else (None,):
        for b in space[inner[0]].values if inner else (None,):
            point = space.default_point() | ({outer[0]: a} if outer else {}) | ({inner[0]: b} if inner else {})
            if not watch.seen(point) and not space.violations(point) and len(watch.judged) < max(budgets):
                watch.measure(point)
    return {budget: watch.best(budget) for budget in budgets}


def coordinate_descent(landscape: Landscape, seed: int, budgets: Sequence[int]) -> dict[int, Outcome]:
    """From the defaults: one argument at a time in random order, neighbours first, a better value is kept."""
    space, watch = landscape.space, Observed(landscape, seed)
    rng = np.random.default_rng(seed)
    best = watch.measure(space.default_point())
    here = space.default_point()
    moved = True
    while moved and len(watch.judged) < max(budgets):
        moved = False
        for name in rng.permutation(list(space.names)):
            parameter = space[str(name)]
            at = parameter.index(here[parameter.name])
            around = [at + 1, at - 1] if parameter.ordered else list(rng.permutation(len(parameter.values)))
            for index in around:
                if not 0 <= index < len(parameter.values) or len(watch.judged) >= max(budgets):
                    continue
                point = here | {parameter.name: parameter.values[int(index)]}
                if watch.seen(point) or space.violations(point):
                    continue
                judged = watch.measure(point)
                if judged.may_win and (not best.may_win or judged.merit > best.merit):
                    best, here, moved = judged, point, True
                    break
    return {budget: watch.best(budget) for budget in budgets}


def our_search(landscape: Landscape, seed: int, budgets: Sequence[int]) -> dict[int, Outcome]:
    return {budget: ours(landscape, seed, budget) for budget in budgets}


METHODS: dict[str, Callable[[Landscape, int, Sequence[int]], dict[int, Outcome]]] = {
    "ours": our_search,
    "random": with_sampler("random"),
    "tpe": with_sampler("tpe"),
    "gp": with_sampler("gp"),
    "auto_tune": auto_tune_grid,
    "coordinate": coordinate_descent,
}


@lru_cache(maxsize=4)
def landscape_of(family: str, seed: int) -> Landscape:
    """The landscape of one family and seed."""
    if family not in families.FAMILIES:
        raise SystemExit(f"no family {family!r}; there are {', '.join(families.FAMILIES)}")
    return families.FAMILIES[family](seed)


def prepared(family: str, seed: int) -> float:
    """Simulate what a family has to know whatever the method, and keep it; the regret of the defaults."""
    return landscape_of(family, seed).regret({})


def run(family: str, methods: Sequence[str], seed: int, budgets: Sequence[int]) -> list[dict[int, Outcome]]:
    """Each method on one landscape, at every budget."""
    return [METHODS[method](landscape_of(family, seed), seed, budgets) for method in methods]


def measured(
    names: Sequence[str], methods: Sequence[str], seeds: Sequence[int], budgets: Sequence[int], jobs: int
) -> dict[str, dict[str, list[dict[int, Outcome]]]]:
    """Outcomes by family, method and seed; families in the order in which they are named, ``jobs`` runs at once."""
    results: dict[str, dict[str, list[dict[int, Outcome]]]] = {}
    with ProcessPoolExecutor(jobs) as pool:
        for _ in pool.map(prepared, names, [seeds[0]] * len(names)):
            pass
        for name in names:
            began = time.monotonic()
            if landscape_of(name, seeds[0]).regret({}) >= 1.0:
                print(f"{name}: left out, its defaults break a limit themselves", file=sys.stderr, flush=True)
                continue
            runs = [pool.submit(run, name, methods, seed, budgets).result for seed in seeds]
            rows = [result() for result in runs]
            results[name] = {method: [row[i] for row in rows] for i, method in enumerate(methods)}
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return results


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjustment of p-values."""
    adjusted, worst = {}, 0.0
    for rank, (name, value) in enumerate(sorted(values.items(), key=lambda pair: pair[1])):
        worst = max(worst, min(1.0, value * (len(values) - rank)))
        adjusted[name] = worst
    return adjusted


def wilcoxon(first: Sequence[float], second: Sequence[float], alternative: str) -> float:
    """Paired one-sided p-value; 1.0 when every pair is equal."""
    if all(a == b for a, b in zip(first, second, strict=True)):
        return 1.0
    return float(stats.wilcoxon(first, second, alternative=alternative, zero_method="zsplit").pvalue)


def table(results: Mapping[str, Mapping[str, list[dict[int, Outcome]]]], budgets: Sequence[int]) -> list[str]:
    lines = []
    for family, methods in results.items():
        lines.append(f"\n{family}")
        lines.append(
            f"  {'method':<12}" + "".join(f"{f'@{b}':>16}" for b in budgets) + f"{'worse':>8}{'infeas.':>9}{'crashes':>9}"
        )
        for method, runs in methods.items():
            cells = []
            for budget in budgets:
                regrets = [run[budget].regret for run in runs]
                cells.append(f"{median(regrets):>7.1%}/{max(regrets):<7.1%}")
            every = [run[budget] for run in runs for budget in budgets]
            worse = np.mean([o.worse for o in every])
            broken = np.mean([o.infeasible for o in every])
            crashes = np.mean([run[max(budgets)].crashes for run in runs])
            lines.append(f"  {method:<12}" + "".join(f"{c:>16}" for c in cells) + f"{worse:>8.0%}{broken:>9.0%}{crashes:>9.1f}")
    return lines


def significance(results: Mapping[str, Mapping[str, list[dict[int, Outcome]]]], budgets: Sequence[int]) -> list[str]:
    lines = ["\nOurs against each row: Holm-adjusted one-sided p (paired Wilcoxon)"]
    for budget in budgets:
        pooled: dict[str, tuple[list[float], list[float]]] = {}
        worse: dict[str, float] = {}
        for family, methods in results.items():
            if "ours" not in methods:
                continue
            mine = [run[budget].regret for run in methods["ours"]]
            for method, runs in methods.items():
                if method == "ours":
                    continue
                theirs = [run[budget].regret for run in runs]
                first, second = pooled.setdefault(method, ([], []))
                first += mine
                second += theirs
                worse[f"{family}/{method}"] = wilcoxon(mine, theirs, "greater")
        better = holm({method: wilcoxon(a, b, "less") for method, (a, b) in pooled.items()})
        bad = [name for name, p in holm(worse).items() if p < 0.05]
        lines.append(
            f"  @{budget}: pooled better than "
            + ", ".join(f"{m} p={p:.2g}" for m, p in better.items())
            + f"; worse than: {bad or 'none'}"
        )
    return lines


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--first-seed", type=int, default=1000, help="seeds below 1000 are for tuning, [1000] and up for judging"
    )
    parser.add_argument("--family", action="append", help=f"one of {', '.join(families.FAMILIES)}")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--all", action="store_true", help="also the families that are left out by default")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    budgets = [int(b) for b in options.budgets.split(",")]
    names = options.family or list(families.FAMILIES if options.all else families.DEFAULT)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    results = measured(names, options.methods.split(","), seeds, budgets, options.jobs)
    if options.json:
        plain = {
            f: {m: [{b: asdict(o) for b, o in run.items()} for run in runs] for m, runs in ms.items()}
            for f, ms in results.items()
        }
        print(json.dumps({"format_version": 1, "budgets": budgets, "results": plain}))
    else:
        print("\n".join([*table(results, budgets), *significance(results, budgets)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
