"""What a user has set for NCCL, CUDA or vLLM itself reaches every process of an engine, in trials and served alike."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from vopt.optimizer.engine.process import ProcessSession
from vopt.optimizer.engine.server import ServerSession
from vopt.optimizer.trial import Deadlines, EngineConfig, EngineFailure, TrialSpec

STUB = Path(__file__).parents[2] / "support" / "stub_vllm"

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""Where several tenants share the NVLink switches of one host, a program that uses multicast can take the GPUs of all of them
out of service; who says so by these must be able to rely on it."""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialSpec:
    """A trial whose interpreter writes its environment down before it becomes Python."""
    for name, value in NO_MULTICAST.items():
        monkeypatch.setenv(name, value)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *trial_process*) env >{tmp_path}/trial;; *" serve "*) env >{tmp_path}/served;; esac\n'
        f'exec {os.path.realpath(sys.executable)} -S -s "$@"\n'
    )
    python.chmod(0o755)
    return TrialSpec(
        label="0",
        model="some/model",
        arguments=EngineConfig({}),
        directory=tmp_path / "0",
        python=str(python),
        environment={"PYTHONPATH": str(STUB), "STUB_FAULT": "", "STUB_MESSAGE": ""},
        deadlines=Deadlines(start_s=20.0, load_s=20.0, stop_s=5.0),
        cache_root=tmp_path / "cache",
    )


def written(path: Path) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in path.read_text().splitlines())


def test_in_a_trial(spec: TrialSpec, tmp_path: Path) -> None:
    session = ProcessSession(spec)
    try:
        session.start(lambda phase, words: None)
    finally:
        assert session.close() == ()
    assert NO_MULTICAST.items() <= written(tmp_path / "trial").items()


def test_in_a_served_engine(spec: TrialSpec, tmp_path: Path) -> None:
    session = ServerSession(spec, ("vllm", "serve", "some/model"))
    with contextlib.suppress(EngineFailure):  # the stub serves nothing
        session.start(lambda phase, words: None)
    assert session.close() == ()
    assert NO_MULTICAST.items() <= written(tmp_path / "served").items()
