"""Whole searches on analytic landscapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from landscapes import Landscape, MemoryStudy, small_landscape

from vopt.optimizer.events import Event
from vopt.optimizer.history import FailureSummary, TrialRecord, TrialRequest
from vopt.optimizer.recommend import Recommendation
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, Pinned, SearchSetup
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase

Evaluate = Callable[[TrialRequest], TrialRecord]


def run(
    landscape: Landscape, seed: int = 0, evaluate: Evaluate | None = None, events: list[Event] | None = None, **changes: Any
) -> tuple[Recommendation, MemoryStudy]:
    values: dict[str, Any] = {"budget": Budget(trials=16, time_s=None, soak_s=60), "seed": seed}
    if landscape.mode:
        values["pinned"] = (Pinned(EngineConfig(landscape.mode), "the bare mode"),)
    setup = SearchSetup(**({"goal": landscape.goal, "space": landscape.space} | values | changes))
    study = MemoryStudy()
    heard = events if events is not None else []
    return search(setup, study, evaluate or landscape.evaluator(seed), heard.append), study


def flat_landscape(noise: float = 0.01) -> Landscape:
    return replace(
        small_landscape({"max_num_seqs=512": 0, "max_num_batched_tokens=16384": 0, "performance_mode=throughput": 0}),
        noise=noise,
    )


def infrastructure(request: TrialRequest, kind: FailureKind) -> TrialRecord:
    record = small_landscape().evaluator(0)(replace(request, config=EngineConfig()))
    return replace(record, config=request.config, metrics=None, status=None, failure=FailureSummary(Phase.START, kind, "taken"))
