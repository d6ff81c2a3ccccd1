"""Ten SIGKILLs of a search at random moments, on the real vLLM for the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.killing import check_study, kill_at_random

from vopt.optimizer.engine.kin import descendants

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.fault("ten SIGKILLs of a search")
def test_ten_kills_lose_nothing_and_repeat_nothing(
    tmp_path: Path, vllm_python: str, tiny_models: tuple[Path, Path], engine_cache: Path
) -> None:
    words = (
        *("search", "--goal", "throughput", "--model", str(tiny_models[0]), "--trials", "12", "--time-budget", "24h"),
        *("--window", "3", "--soak", "0", "--rounds", "0", "--concurrency", "8", "--no-guard"),
        *("--set", "load_format=dummy", "--set", "enforce_eager=true", "--set", "max_model_len=2048"),
        *("--set", "gpu_memory_utilization=0.1", "--workload", "throughput"),
    )
    before = set(os.listdir("/dev/shm"))
    check_study(kill_at_random(tmp_path, words, {"XDG_CACHE_HOME": str(engine_cache)}, kills=10, seed=4), 12)
    assert descendants(os.getpid()) == ()
    ours = {name for name in set(os.listdir("/dev/shm")) - before if os.stat(f"/dev/shm/{name}").st_uid == os.getuid()}
    assert not ours, "shared memory left behind"
