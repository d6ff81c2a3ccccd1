"""Searches on a small landscape that are given a larger budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from landscapes import Landscape, MemoryStudy

from vopt.optimizer.history import FailureSummary, TrialRecord, TrialRequest
from vopt.optimizer.recommend import Recommendation
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, EarlierBudget, Pinned, SearchSetup
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase

BEST = EngineConfig({"max_num_seqs": 512, "max_num_batched_tokens": 16384, "performance_mode": "throughput"})
FINALIST = EngineConfig({"max_num_seqs": 512})
Evaluate = Callable[[TrialRequest], TrialRecord]


def first_setup(landscape: Landscape, **budget: Any) -> SearchSetup:
    """A search that ends with ``FINALIST``: nothing but it and the baseline is measured."""
    values = {"trials": 2, "rounds": 2, "time_s": None, "soak_s": 0.0} | budget
    return SearchSetup(landscape.goal, landscape.space, Budget(**values), pinned=(Pinned(FINALIST, "first"),), early_end=False)


def more(setup: SearchSetup, study: MemoryStudy, *, reopened: bool = False, **budget: Any) -> SearchSetup:
    """The setup of the study that is resumed with another budget."""
    starts = frozenset(record.label for record in study.records())
    earlier = EarlierBudget(setup.budget.trials, setup.budget.rounds, starts, reopened)
    return replace(setup, budget=replace(setup.budget, **budget), earlier=(*setup.earlier, earlier))


def best_next(setup: SearchSetup) -> SearchSetup:
    return replace(setup, pinned=(*setup.pinned, Pinned(BEST, "found now")))


def ran(setup: SearchSetup, study: MemoryStudy, evaluate: Evaluate) -> tuple[Recommendation, list[TrialRecord]]:
    """The answer, and what was started for it."""
    before = len(study.records())
    answer = search(setup, study, evaluate, lambda event: None)
    return answer, list(study.records()[before:])


def scaled(landscape: Landscape, factor: Callable[[TrialRequest], float]) -> Evaluate:
    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        metrics = record.metrics
        if metrics is None:
            return record
        values = {**metrics.values, "tokens_per_s": metrics["tokens_per_s"] * factor(request)}
        return replace(record, metrics=replace(metrics, values=values))

    return evaluate


def dying(landscape: Landscape, dies: Callable[[TrialRequest], bool], factor: Callable[[TrialRequest], float]) -> Evaluate:
    """The engine dies in some starts, the others are as fast as the landscape times a factor."""

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = scaled(landscape, factor)(request)
        if not dies(request):
            return record
        failure = FailureSummary(Phase.LOAD, FailureKind.ENGINE_DIED, "illegal memory access")
        return replace(record, status=None, metrics=None, failure=failure)

    return evaluate
