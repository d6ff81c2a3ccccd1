"""When a search stops proposing, in which order it starts engines, what an early end is worth, and where a search begins."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from landscapes import THROUGHPUT, Landscape, MemoryStudy, Truth, parameter, space
from typer.testing import CliRunner

from vopt.objectives.records import LoadStatus
from vopt.optimizer.cli import app
from vopt.optimizer.history import Stage, TrialRecord, TrialRequest
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.search_spaces.space import Point

Evaluate = Callable[[TrialRequest], TrialRecord]


def landscape(worth: Callable[[Point], float] = lambda point: 0.0, noise: float = 0.0) -> Landscape:
    made = space(
        parameter("max_num_seqs", (64, 128, 256, 512, 1024), 256),
        parameter("max_num_batched_tokens", (2048, 4096, 8192, 16384), 8192),
        parameter("moe_backend", ("auto", "triton", "cutlass"), "auto", ordered=False, compiled=True),
        seeds=(
            {"moe_backend": "triton"},
            {"max_num_seqs": 512},
            {"moe_backend": "triton", "max_num_seqs": 128},
            {"max_num_seqs": 128},
        ),
    )
    return Landscape("ends", made, lambda point: Truth(10_000 * math.exp(worth(point))), THROUGHPUT, noise=noise)


def searched(of: Landscape, budget: Budget, evaluate: Evaluate | None = None) -> MemoryStudy:
    study = MemoryStudy()
    setup = SearchSetup(goal=of.goal, space=of.space, budget=budget, early_end=False)
    search(setup, study, evaluate or of.evaluator(0), lambda event: None)
    return study


def configs(study: MemoryStudy) -> list[dict[str, Any]]:
    return [record.config.to_json() for record in study.records() if record.stage is Stage.SEARCH]


def test_patience_ends_a_search_in_which_nothing_gains() -> None:
    budget = Budget(trials=40, rounds=0, time_s=None, soak_s=0, patience=6)
    assert len(configs(searched(landscape(), budget))) == 1 + 4 + 6  # baseline, seeds, and as many as it has patience


def test_what_gains_less_than_the_noise_renews_no_patience() -> None:
    small = landscape(lambda point: 0.002 * math.log2(point["max_num_seqs"] / 64))
    budget = Budget(trials=40, rounds=0, time_s=None, soak_s=0, patience=6)
    assert len(configs(searched(small, budget))) == 1 + 4 + 6


def test_a_gain_above_the_noise_renews_it() -> None:
    steep = landscape(lambda point: 0.1 * math.log2(point["max_num_batched_tokens"] / 2048))
    budget = Budget(trials=40, rounds=0, time_s=None, soak_s=0, patience=6)
    assert len(configs(searched(steep, budget))) > 1 + 4 + 6


def test_seeds_of_one_compile_key_are_started_next_to_each_other() -> None:
    seeds = configs(searched(landscape(), Budget(trials=16, rounds=0, time_s=None, soak_s=0)))[1:5]
    # After the baseline, whose key is that of "auto".
    assert [seed.get("moe_backend", "auto") for seed in seeds] == ["auto", "auto", "triton", "triton"]


def test_a_trial_that_was_ended_early_is_told_its_bound_and_is_no_finalist() -> None:
    of = landscape(lambda point: 0.3 if point["max_num_seqs"] == 512 else 0.0)
    plain, told = of.evaluator(0), list[tuple[str, float]]()

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = plain(request)
        rate = 100.0 if not request.config else 60.0
        curve = tuple(rate * (second + 1) for second in range(30))
        ended = bool(request.config) and request.config.get("max_num_seqs") == 512 and request.stage is Stage.SEARCH
        return replace(record, token_curve=curve, status=LoadStatus.STOPPED_EARLY if ended else LoadStatus.COMPLETE)

    class Listening(MemoryStudy):
        def finish(self, record: TrialRecord, values: Any, violations: Any, *, charged: bool) -> None:
            super().finish(record, values, violations, charged=charged)
            if record.status is LoadStatus.STOPPED_EARLY:
                told.append((record.label, values[0]))

    study = Listening()
    setup = SearchSetup(goal=of.goal, space=of.space, budget=Budget(12, rounds=3, time_s=None, soak_s=0))
    answer = search(setup, study, evaluate, lambda event: None)
    assert told
    # 60 % of the incumbent's tokens over the same seconds: the bound, and not the 35 % more that its window seemed to show.
    assert all(5_500 < value < 7_000 for _, value in told)
    assert answer.trials["stopped_early"] == len(told)
    later = [record for record in study.records() if record.stage is not Stage.SEARCH]
    assert all(record.config.get("max_num_seqs") != 512 for record in later)


@pytest.mark.slow
def test_an_earlier_study_seeds_a_new_one_and_is_never_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["search", "--model", "Qwen/Qwen3.5-9B", "--simulate", "h200", "--soak", "0", "--quiet", "--json", "--rounds", "0"]

    def run(*more: str) -> Any:
        return CliRunner().invoke(app, [*words, *more])

    first = run("--goal", "throughput", "--concurrency", "64", "--trials", "10", "--window", "20")
    assert first.exit_code == 0, first.stderr
    earlier = json.loads(CliRunner().invoke(app, ["show", "--json"]).stdout)
    best = max((s for s in earlier["starts"] if s["feasible"] and s["stage"] == "search"), key=lambda s: s["value"])
    name = earlier["study"]
    second = run("--goal", "throughput", "--concurrency", "64", "--trials", "5", "--window", "20", "--seed-from", name)
    assert second.exit_code == 0, second.stderr
    again = json.loads(CliRunner().invoke(app, ["show", "--json"]).stdout)
    assert again["study"] != name
    measured = [start["engine_config"] for start in again["starts"] if start["stage"] == "search"]
    assert best["engine_config"] in measured
    other = run("--goal", "latency", "--seed-from", name)
    assert (other.exit_code, "goal = 'throughput'" in other.stderr) == (2, True)
    unknown = run("--goal", "throughput", "--seed-from", "nothing-7")
    assert (unknown.exit_code, name in unknown.stderr) == (2, True)
