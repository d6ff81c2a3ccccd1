"""A whole search as a process of its own: killed, interrupted, terminated, and gone on with."""

from __future__ import annotations

import os
import pty
import signal
from pathlib import Path

import pytest
from support.killing import begin, check_study, kill_at_random, results
from support.sessions import eventually

from vopt.optimizer.engine.kin import descendants

SIMULATED = (
    *("search", "--goal", "throughput", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--concurrency", "256"),
    *("--window", "120", "--soak", "0", "--rounds", "0", "--trials", "12", "--time-budget", "24h"),
    *("--vary", "max_num_seqs=64,128,256,512,1024,2048", "--vary", "max_num_batched_tokens=2048,4096,8192,16384,32768"),
)


@pytest.mark.slow
@pytest.mark.fault("ten SIGKILLs of a simulated search")
def test_ten_kills_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    check_study(kill_at_random(tmp_path, SIMULATED, {}, kills=10, seed=1, trial_s=0.5), 12)


@pytest.mark.parametrize(
    ("number", "times"),
    [
        (signal.SIGINT, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((signal.SIGINT, 2), (signal.SIGTERM, 1), (signal.SIGTERM, 2))
        ),
    ],
)
@pytest.mark.fault("search interrupted")
def test_a_signal_ends_the_search_with_the_resume_line(tmp_path: Path, number: signal.Signals, times: int) -> None:
    before = {entry.identity for entry in descendants(os.getpid())}
    leader, follower = pty.openpty()
    try:
        running = begin(tmp_path, SIMULATED, {}, stdin=follower, start_new_session=True)
        try:
            eventually(lambda: results(tmp_path) >= 1 or running.poll() is not None, 60.0)
            for _ in range(times):
                running.send_signal(number)
            assert running.wait(30) == 130, (tmp_path / "said.txt").read_text()
        finally:
            running.kill()
            running.wait()
    finally:
        os.close(leader)
        os.close(follower)
    said = (tmp_path / "said.txt").read_text()
    assert "vopt resume qwen3-8b-throughput-1" in said
    assert "best so far: trial" in said
    assert "Traceback" not in said
    assert {entry.identity for entry in descendants(os.getpid())} <= before
