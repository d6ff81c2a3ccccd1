"""Trials of tiny models on the real vLLM for the CPU, and what to look for around them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vopt.optimizer.engine.kin import Status, descendants
from vopt.optimizer.engine.supervised import SupervisedProcess
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.trial import Deadlines, EngineConfig, TrialSpec

SMALL = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 2048, "gpu_memory_utilization": 0.08}
"""Arguments that let a tiny model start on a small shared machine."""


def spec(directory: Path, model: Path | str, python: str, cache: Path | None = None, **arguments: Any) -> TrialSpec:
    return TrialSpec(
        label="0",
        model=str(model),
        arguments=EngineConfig({**SMALL, **arguments}),
        directory=directory,
        python=python,
        cache_root=cache,
        deadlines=Deadlines(start_s=240.0, load_s=120.0, stop_s=20.0),
    )


def source(prompt: int = 100, output: int = 20) -> RequestSource:
    """A block of 64 requests around these lengths, of token ids that a tiny vocabulary has."""
    return RequestSource(
        lengths=tuple((prompt + index % 32, output + index % 16) for index in range(64)),
        bodies=(tuple(range(20, 700)),),
        digit_ids=tuple(range(8, 18)),
    )


def plan(window_s: float = 5.0, concurrency: int = 16) -> LoadPlan:
    return LoadPlan(
        arrivals=Arrivals.CLOSED, window_s=window_s, concurrency=concurrency, min_requests=10, max_doublings=0, deadline_s=90.0
    )


def named(part: str, below: int | None = None) -> tuple[Status, ...]:
    """Descendants whose name holds ``part``: vLLM calls its processes ``VLLM::EngineCor`` and ``VLLM::Worker`` (15 letters)."""
    return tuple(entry for entry in descendants(below or os.getpid()) if part in entry.name)


def leader_of(process: SupervisedProcess) -> int:
    """The pid of a supervised command, which its supervisor tells a moment after the spawn."""
    eventually(lambda: process.poll() is not None or process.pid, 20.0)
    assert process.pid, process.spawn_error
    return process.pid


def eventually(condition: Callable[[], Any], patience_s: float = 60.0) -> Any:
    until = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)
    return found
