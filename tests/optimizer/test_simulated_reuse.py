"""Prompts that begin alike, in a simulation: every kind of workload that reuses is found in the prefix cache as it says."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "engine"))

from simulation import closed

from vopt.objectives.metrics import Metrics, compute_metrics
from vopt.optimizer.engine.simulated import Noise, SimulatedSession
from vopt.optimizer.options import SearchOptions
from vopt.optimizer.prepare import Load, find_load
from vopt.optimizer.space_of import find_space
from vopt.optimizer.subject import Subject, find_subject
from vopt.optimizer.trial import EngineConfig, TrialSpec
from vopt.search_spaces.space import SearchSpace

DENSE, HYBRID = "Qwen/Qwen3-8B", "Qwen/Qwen3.5-9B"
LENGTHS = {
    "prompt": {"mean": 300, "sigma": 0.5, "least": 160, "most": 1000, "quantiles": []},
    "output": {"mean": 60, "sigma": 0.5, "least": 4, "most": 300, "quantiles": []},
    "pairs": [],
}
DECLARED: dict[str, Any] = {"format": "vopt-workload", "format_version": 1, "name": "w", "lengths": LENGTHS}


def log(prompts: int = 200, systems: int = 4) -> str:
    """JSON lines: questions behind one of a few long system prompts, as a production log has them."""
    lines = []
    for number in range(prompts):
        system = f"Assistant {number % systems} of a harbour town. " + "Name the ferry and the pier. " * 150
        lines.append(json.dumps({"prompt": f"{system}Question {number}: " + f"{number} boats, " * 40, "output_tokens": 60}))
    return "\n".join(lines)


REUSING = {
    "prefix repetition": json.dumps({"prefix_tokens": 1024, "suffix_tokens": 128, "prefixes": 10, "output_tokens": 60}),
    "declared": json.dumps({**DECLARED, "reuse": {"prefixes": 8, "prefix_tokens": 128, "share": 0.427}}),
    "sessions": json.dumps({**DECLARED, "sessions": {"turns": 5, "think_s": 0.5, "system_tokens": 320}}),
    "recorded prompts": log(),
}
SILENT = {"lengths alone": json.dumps({"prompt_tokens": 900, "output_tokens": 60}), "built-in": "chat"}


def subject_and_load(tmp_path: Path, text: str, model: str = DENSE) -> tuple[Subject, Load]:
    path = tmp_path / "workload.json"
    path.write_text(text, encoding="utf-8")
    options = SearchOptions(model=model, goal=("throughput",), simulate="h200", workload=text if text == "chat" else str(path))
    subject = find_subject(options)
    return subject, find_load(options, subject, lambda note: None)


def measured(subject: Subject, load: Load, arguments: Mapping[str, Any], concurrency: int = 64) -> Metrics:
    assert subject.shape is not None
    assert subject.machine.hardware is not None
    spec = TrialSpec("trial-0", subject.model.name, EngineConfig(arguments), Path("unused"), "python")
    session = SimulatedSession(spec, subject.shape, subject.machine.hardware, noise=Noise(0.0, 0.0))
    session.start(lambda phase, words: None)
    return compute_metrics(session.load(load.requests.source, closed(concurrency, 20.0), lambda tick: True), resamples=2)


@pytest.mark.parametrize("kind", REUSING)
def test_the_cache_finds_what_the_workload_says(kind: str, tmp_path: Path) -> None:
    subject, load = subject_and_load(tmp_path, REUSING[kind])
    on, off = measured(subject, load, {}), measured(subject, load, {"enable_prefix_caching": False})
    share = load.workload.facts()["reuse_share"]
    assert share > 0.3
    assert on["prefix_hit_rate"] == pytest.approx(share, abs=0.05)
    assert off.get("prefix_hit_rate") is None
    assert on["tokens_per_s"] > 1.1 * off["tokens_per_s"]


@pytest.mark.parametrize("kind", SILENT)
def test_lengths_alone_reuse_nothing(kind: str, tmp_path: Path) -> None:
    subject, load = subject_and_load(tmp_path, SILENT[kind])
    on, off = measured(subject, load, {}), measured(subject, load, {"enable_prefix_caching": False})
    assert on["prefix_hit_rate"] == 0
    assert on["tokens_per_s"] == pytest.approx(off["tokens_per_s"], rel=0.01)


def test_a_small_cache_loses_beginnings_between_the_turns_of_many_sessions(tmp_path: Path) -> None:
    talk = json.dumps({**DECLARED, "sessions": {"turns": 5, "think_s": 20.0, "system_tokens": 0}})
    subject, load = subject_and_load(tmp_path, talk)
    roomy = measured(subject, load, {}, 512)
    tight = measured(subject, load, {"kv_cache_memory_bytes": 24 * 2**30}, 512)
    assert tight["prefix_hit_rate"] < 0.8 * roomy["prefix_hit_rate"]


def test_a_full_cache_still_shares_what_running_requests_have_in_common(tmp_path: Path) -> None:
    """Their common blocks are counted once and cannot be evicted, so a cache too small for all of them hits as often."""
    subject, load = subject_and_load(tmp_path, REUSING["prefix repetition"])
    full = {"kv_cache_memory_bytes": 4 * 2**30, "max_model_len": 4096}
    on, off = measured(subject, load, full), measured(subject, load, {**full, "enable_prefix_caching": False})
    assert off["kv_peak"] > 0.9
    assert on["prefix_hit_rate"] > 0.8
    assert on["tokens_per_s"] > 1.5 * off["tokens_per_s"]


def space_of(tmp_path: Path, text: str, model: str, **typed: Any) -> SearchSpace:
    subject, load = subject_and_load(tmp_path, text, model)
    options = SearchOptions(model=model, goal=("throughput",), simulate="h200", **typed)
    return find_space(options, subject, load.workload, "throughput", 256)


@pytest.mark.parametrize("model", [DENSE, HYBRID])
@pytest.mark.parametrize("kind", [*(kind for kind in REUSING if kind != "declared"), *SILENT])
def test_whether_caching_is_searched_says_the_workload(kind: str, model: str, tmp_path: Path) -> None:
    space = space_of(tmp_path, (REUSING | SILENT)[kind], model)
    reasons = {part.name: part.reason for part in space.inactive}
    if kind in REUSING:
        assert reasons["enable_prefix_caching"] == "already on, and the workload reuses prefixes"
    else:
        assert "says nothing of beginnings" in reasons["enable_prefix_caching"]


def test_a_workload_that_states_no_reuse_lets_a_hybrid_turn_caching_off(tmp_path: Path) -> None:
    none = json.dumps({**DECLARED, "reuse": {"prefixes": 0, "prefix_tokens": 0, "share": 0.0}})
    assert "enable_prefix_caching" in space_of(tmp_path, none, HYBRID)
    assert "enable_prefix_caching" not in space_of(tmp_path, none, DENSE)
    assert "enable_prefix_caching" in space_of(tmp_path, "chat", HYBRID, vary=("enable_prefix_caching",))
