"""One signal, or two, in the start, the load and the stop of each engine of a search, confirmation and soak included."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vopt.optimizer.cli import app
from vopt.optimizer.engine.simulated import SimulatedSession
from vopt.optimizer.study import read_study

pytestmark = pytest.mark.usefixtures("signal_handlers")

SEARCH = (
    *("search", "--goal", "throughput", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--trials", "4", "--rounds", "1"),
    *("--concurrency", "512", "--window", "1s", "--soak", "1s", "--quiet", "--no-guard"),
    *("--vary", "max_num_seqs=128,512", "--", "vllm", "serve", "Qwen/Qwen3-8B", "--max-num-seqs", "32"),
)


def vopt(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def told() -> list[tuple[str, str, dict[str, Any]]]:
    trials = read_study("sqlite:///studies.db").trials
    assert all(record.failure is None and record.metrics is not None for record in trials)
    return [(record.label, str(record.stage), dict(record.config)) for record in trials]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, dict[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        done = vopt(*SEARCH)
        assert done.exit_code == 0, done.output
        found = told()
    assert {stage for _, stage, _ in found} >= {"search", "confirmation", "soak"}
    return found


def signalled(call: Callable[..., Any], calls: list[int], at: int, number: signal.Signals, times: int) -> Callable[..., Any]:
    def interrupted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == at + 1:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return call(*arguments, **named)

    return interrupted


@pytest.mark.parametrize("phase", ["load", *(pytest.param(phase, marks=pytest.mark.slow) for phase in ("start", "close"))])
@pytest.mark.parametrize(
    ("number", "times"),
    [(signal.SIGTERM, 1), *(pytest.param(n, 2, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM))],
)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.fault("interrupted in a phase of each engine of a search")
def test_nothing_is_lost_or_repeated_wherever_it_is_interrupted(
    whole: list[tuple[str, str, dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    number: signal.Signals,
    times: int,
    every: bool,
) -> None:
    for at in range(len(whole)) if every else (0, len(whole) - 1):
        (tmp_path / str(at)).mkdir()
        monkeypatch.chdir(tmp_path / str(at))
        calls: list[int] = []
        with monkeypatch.context() as patched:
            call = getattr(SimulatedSession, phase)
            patched.setattr(SimulatedSession, phase, signalled(call, calls, at, number, times))
            ended = vopt(*SEARCH)
        assert ended.exit_code == 130, (at, ended.output)
        assert "Traceback" not in ended.stderr
        assert "try: vopt resume qwen3-8b-throughput-1" in ended.stderr
        kept = told()
        resumed = vopt("resume", "--quiet")
        assert resumed.exit_code == 0, (at, resumed.output)
        found = told()
        assert found[: len(kept)] == kept, (at, "what was measured is kept")
        labels = [label for label, _, _ in found]
        assert len(labels) == len(set(labels)), (at, "nothing is there twice")
        searched = [str(config) for _, stage, config in found if stage == "search"]
        assert len(searched) == len(set(searched)) == sum(stage == "search" for _, stage, _ in whole)
        assert read_study("sqlite:///studies.db").recommendation is not None
