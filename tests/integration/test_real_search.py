"""The main job on the real vLLM for the CPU: engines start, are loaded, confirmed and soaked, and an answer comes out."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.segments import SegmentWatch

from vopt.optimizer.engine.kin import descendants
from vopt.optimizer.history import Arm, Stage, StudyRecord
from vopt.optimizer.load.workload import named
from vopt.optimizer.recommend import Verdict
from vopt.optimizer.study import read_study
from vopt.optimizer.trial import EngineConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

SMALL = [
    *("--set", "load_format=dummy", "--set", "enforce_eager=true", "--set", "gpu_memory_utilization=0.2"),
    *("--set", "max_model_len=4096", "--concurrency", "32", "--window", "5", "--seed", "1"),
]
Search = Callable[..., tuple[subprocess.CompletedProcess[str], StudyRecord]]


@pytest.fixture
def search(tmp_path: Path, engine_cache: Path) -> Search:
    def run(model: Path, *words: str, code: int = 0) -> tuple[subprocess.CompletedProcess[str], StudyRecord]:
        command = [sys.executable, "-m", "vopt.optimizer", "search", "--model", str(model), *SMALL, *words, "--json"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(engine_cache), "HF_TOKEN": "hf_" + "x" * 32}
        with SegmentWatch() as watch:
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == code, done.stderr
            assert descendants(os.getpid()) == ()
            assert watch.left() == []
        assert holders_of(tmp_path, "hf_" + "x" * 32) == []
        return done, read_study(f"sqlite:///{tmp_path / 'studies.db'}")

    return run


def holders_of(folder: Path, secret: str) -> list[str]:
    """Files below ``folder`` that hold ``secret``."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_throughput_from_defaults_to_a_confirmed_answer(search: Search, tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    done, study = search(
        tiny_models[0],
        *("--goal", "throughput", "--trials", "8", "--rounds", "3", "--soak", "10s", "--no-guard", "--no-serve"),
        *(
            "--vary",
            "max_num_seqs=16,64,256",
            "--vary",
            "max_num_batched_tokens=512,2048,8192",
            "--vary",
            "enable_prefix_caching",
        ),
    )
    answer = json.loads(done.stdout)
    assert answer["format_version"] == 1
    assert answer["verdict"] in {Verdict.BETTER, Verdict.NO_GAIN}
    assert not answer["simulated"]
    searched = [trial for trial in study.trials if trial.stage is Stage.SEARCH]
    assert len(searched) + sum(trial.stage is Stage.SCREENING for trial in study.trials) >= 6
    assert searched[0].config == EngineConfig()
    assert searched[0].resolved["max_num_seqs"] == 128
    confirmed = [trial for trial in study.trials if trial.stage is Stage.CONFIRMATION]
    if confirmed:  # on a noisy machine nothing may come out above the defaults, and then nothing is confirmed
        assert {trial.arm for trial in confirmed} >= {Arm.BASELINE, Arm.FINALIST}
        assert all(trial.metrics is not None and not trial.served for trial in confirmed)
    else:
        assert answer["verdict"] == Verdict.NO_GAIN
    assert all((Path(trial.directory) / "engine.log").stat().st_size > 0 for trial in study.trials)
    exported = export(tmp_path, "shell")
    script = tmp_path / "serve.sh"
    script.write_text(exported)
    assert words_of(script, tmp_path)[: len(answer["argv"]) - 1] == answer["argv"][1:]
    assert json.loads(export(tmp_path, "json"))["argv"] == answer["argv"]


def export(folder: Path, form: str) -> str:
    command = [sys.executable, "-m", "vopt.optimizer", "export", "--format", form]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def words_of(script: Path, folder: Path) -> list[str]:
    """What ``vllm`` receives when the script runs, seen by a stand-in on the PATH."""
    stub = folder / "bin" / "vllm"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{stub.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_latency_at_a_rate_of_a_hybrid_model(search: Search, tiny_models: tuple[Path, Path]) -> None:
    done, study = search(
        tiny_models[1],
        *("--goal", "latency", "--rate", "2", "--trials", "3", "--rounds", "0", "--soak", "0"),
        *("--set", "language_model_only=true", "--vary", "max_num_batched_tokens=512,2048", "--vary", "max_num_seqs=32,128"),
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["verdict"] in {Verdict.UNCONFIRMED, Verdict.NO_GAIN}
    assert answer["metric"] == "mean_e2e_s"
    measured = [trial for trial in study.trials if trial.metrics is not None]
    assert len(measured) >= 2
    assert all(trial.environment["load_plan"]["rate"] == 2.0 for trial in measured)
    assert shlex.split(answer["command"]) == answer["argv"]


def test_ngram_speculation_on_dummy_weights_is_an_artefact(
    search: Search, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Greedy decoding of dummy weights repeats itself, so n-grams guess it as they would guess no real text."""
    greedy = tmp_path / "greedy.json"
    greedy.write_text(json.dumps(named("chat").with_sampling({"temperature": 0.0}).to_json()))
    _, study = search(
        tiny_models[0],
        *("--goal", "throughput", "--trials", "3", "--rounds", "0", "--soak", "0", "--no-guard"),
        *("--vary", "speculation=off,ngram:3", "--keep", "max_num_seqs", "--keep", "max_num_batched_tokens"),
        *("--keep", "enable_prefix_caching", "--keep", "prefill_schedule_interval", "--workload", str(greedy)),
    )
    speculative = [trial for trial in study.trials if "speculative_config" in trial.config]
    assert speculative
    assert all("artefact_acceptance" in trial.flags for trial in speculative if trial.metrics is not None)
    assert study.recommendation is not None
    winner = study.recommendation.winner_config
    assert winner is None or "speculative_config" not in winner
