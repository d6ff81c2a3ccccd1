"""The main job on the simulated engine, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vopt.optimizer.cli import app
from vopt.optimizer.history import Stage
from vopt.optimizer.recommend import Verdict
from vopt.optimizer.study import read_study

MODEL = "Qwen/Qwen3.5-35B-A3B-FP8"
WORDS = ["search", "--goal", "throughput", "--model", MODEL, "--simulate", "h200", "--json"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def search(*words: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*WORDS, *words])
    assert done.exit_code == code, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("study", "created_at")}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_answer_and_everything_says_simulated() -> None:
    first, second = (search("--trials", "8", "--rounds", "3", "--soak", "1m", "--seed", "7") for _ in range(2))
    assert comparable(first) == comparable(second)
    assert [answer["study"].rsplit("-", 1)[1] for answer in (first, second)] == ["1", "2"]
    assert first["simulated"] is True
    assert first["verdict"] in {Verdict.BETTER, Verdict.NO_GAIN}
    assert "simulated" in CliRunner().invoke(app, ["export"]).stdout.lower()
    assert "SIMULATED" in CliRunner().invoke(app, ["show"]).stdout


@pytest.mark.slow
def test_speculation_that_fails_half_its_requests_is_rejected_although_it_is_the_fastest() -> None:
    answer = search(
        *("--trials", "8", "--rounds", "0", "--soak", "0", "--concurrency", "256", "--no-guard"),
        *("--vary", "speculation=off,mtp:4"),
    )
    study = read_study("sqlite:///studies.db")
    searched = [trial for trial in study.trials if trial.stage is Stage.SEARCH and trial.metrics is not None]
    fastest = max(searched, key=lambda trial: trial.metrics["tokens_per_s"] if trial.metrics else 0.0)
    assert fastest.config["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 4}
    assert fastest.metrics is not None
    assert fastest.metrics["success_rate"] < 0.6
    (rejected,) = [row for row in answer["rejected"] if row["trial"] == fastest.label]
    assert rejected["kind"].startswith("limit:success_rate")
    assert "99 %" in rejected["reason"]
    assert f"{100 * fastest.metrics['success_rate']:.1f} %" in rejected["reason"]
    assert "speculative_config" not in (answer["winner"] or {}).get("engine_config", {})


def test_where_nothing_can_vary_the_answer_is_the_baseline() -> None:
    kept = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "speculation", "gpu_memory_utilization")
    small = ("--trials", "4", "--rounds", "0", "--soak", "0", "--window", "5", "--concurrency", "16", "--mode", "balanced")
    answer = search(*small, *(word for name in kept for word in ("--keep", name)))
    assert answer["verdict"] == Verdict.NO_GAIN
    assert answer["winner"] is None
    assert answer["argv"] == ["vllm", "serve", MODEL, "--host", "127.0.0.1"]


def test_limits_that_nothing_meets_end_with_exit_code_4_and_the_lowest_value_seen() -> None:
    answer = search(
        *(
            "--trials",
            "2",
            "--rounds",
            "0",
            "--soak",
            "0",
            "--window",
            "5",
            "--concurrency",
            "64",
            "--limit",
            "p95_ttft_s<=1ms",
        ),
        code=4,
    )
    assert answer["verdict"] == Verdict.NOTHING_FEASIBLE
    assert answer["command"] is None
    assert any("p95_ttft_s" in note for note in (answer["reason"], *answer["notes"]))


@pytest.mark.slow
def test_what_changes_outputs_is_marked_in_the_answer() -> None:
    words = ("--model", "Qwen/Qwen3-8B", "--trials", "6", "--rounds", "0", "--soak", "0", "--concurrency", "512", "--no-guard")
    answer = search(*words, "--allow-lossy", "kv_cache_dtype")
    assert answer["winner"]["engine_config"]["kv_cache_dtype"] == "fp8"
    assert any("kv_cache_dtype changes the outputs" in note for note in answer["notes"])
