"""Searches on the real vLLM for the CPU that are killed at random moments, or interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.killing import begin, check_study, kill_at_random
from support.segments import SegmentWatch
from support.sessions import eventually, named

from vopt.optimizer.engine.kin import descendants

pytestmark = pytest.mark.vllm


def search_words(model: Path) -> tuple[str, ...]:
    """A search of twelve from a command in use that runs two of eight requests at a time: whatever the noise of a 3 s window,
    most other configurations beat it, and the screening finds the three that it has room for."""
    return (
        *("search", "--goal", "throughput", "--trials", "12", "--time-budget", "24h"),
        *("--window", "3", "--soak", "0", "--rounds", "0", "--concurrency", "8", "--no-guard"),
        *("--set", "load_format=dummy", "--set", "enforce_eager=true", "--set", "max_model_len=2048"),
        *("--set", "gpu_memory_utilization=0.1", "--workload", "throughput"),
        *("--vary", "max_num_seqs=16,24,32,64,128", "--vary", "max_num_batched_tokens=1024,1536,2048"),
        *("--", "vllm", "serve", str(model), "--max-num-seqs", "2"),
    )


@pytest.mark.fault("search interrupted: once under load, then twice in a start")
def test_ctrl_c_ends_the_search_and_its_engine(
    tmp_path: Path, vllm_python: str, tiny_models: tuple[Path, Path], engine_cache: Path
) -> None:
    environment = {"XDG_CACHE_HOME": str(engine_cache)}
    for words, times in ((search_words(tiny_models[0]), 1), (("resume",), 2)):
        running = begin(tmp_path, words, environment)
        try:
            if times == 1:
                eventually(lambda: list(tmp_path.glob("studies/*/*/source-*.json")), 240.0)  # there while a load goes on
            else:
                eventually(lambda pid=running.pid: named("VLLM::EngineCor", pid), 240.0)
            for _ in range(times):
                running.send_signal(signal.SIGINT)
            assert running.wait(30) == 130, (tmp_path / "said.txt").read_text()[-3000:]
            assert descendants(os.getpid()) == ()
        finally:
            running.kill()
            running.wait()
        said = (tmp_path / "said.txt").read_text()
        assert "vopt resume tiny-qwen3-throughput-1" in said
        assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.fault("ten SIGKILLs of a search")
def test_ten_kills_lose_nothing_and_repeat_nothing(
    tmp_path: Path, vllm_python: str, tiny_models: tuple[Path, Path], engine_cache: Path
) -> None:
    with SegmentWatch() as watch:
        study = kill_at_random(
            tmp_path, search_words(tiny_models[0]), {"XDG_CACHE_HOME": str(engine_cache)}, kills=10, seed=4, trial_s=15.0
        )
        check_study(study, 12)
        assert descendants(os.getpid()) == ()
        assert watch.left() == []
