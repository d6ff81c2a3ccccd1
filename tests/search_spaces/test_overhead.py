"""What a start takes beside weights and cache: against recorded starts on H200s, and the rules that vLLM's sources give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.search_spaces.defaults import Gpu, resolve
from vopt.search_spaces.memory import Calibration, memory_plan
from vopt.search_spaces.model import ModelShape, known_config, known_model, shape_from_config
from vopt.search_spaces.overhead import Overhead, newer_runner, overhead_estimate, shown_bytes

RECORDS = Path(__file__).parents[1] / "assets" / "h200"
H200 = Gpu("NVIDIA H200", 150_754_820_096)
HYBRID, DENSE, MOE = "Qwen/Qwen3.5-9B", "Qwen/Qwen3-8B", "Qwen/Qwen3.5-35B-A3B"
TEXT = {"language_model_only": True, "max_model_len": 8192}


def shape(name: str) -> ModelShape:
    found = known_model(name)
    assert found is not None
    return found


def overhead(
    name: str, arguments: dict[str, Any], version: str = "0.22.1", *, gpu: Gpu = H200, compiled: bool = False
) -> Overhead:
    model = shape(name)
    return overhead_estimate(model, gpu, resolve(model, gpu, arguments, version), version, compiled=compiled)


def recorded() -> list[tuple[str, dict[str, Any], str, int]]:
    """(model, arguments, start class, tokens of KV cache) of every start whose log said them."""
    found = []
    for name in ("Qwen3-0.6B", DENSE.removeprefix("Qwen/"), HYBRID.removeprefix("Qwen/")):
        header, *rows = map(json.loads, (RECORDS / f"{name.lower()}-starts.jsonl").read_text(encoding="utf-8").splitlines())
        for row in rows:
            if row["started"]:
                # Of the one start whose class was not recorded, the compilation took 30 s: it was no known key.
                known = row["started"]["start_class"] or "new_key"
                found.append((f"Qwen/{name}", header["fixed"] | row["config"], known, row["started"]["kv_cache_tokens"]))
    study = json.loads((RECORDS / "qwen3.5-9b-throughput.json").read_text(encoding="utf-8"))
    found += [
        (HYBRID, TEXT | start["engine_config"], start["start_class"], start["kv_cache_tokens"])
        for start in study["starts"]
        if start["served"]
    ]
    bursts = json.loads((RECORDS / "bursts.json").read_text(encoding="utf-8"))
    found += [
        (row["model"], {"max_model_len": 32768}, row["start_class"], row["kv_cache_tokens"])
        for row in bursts["rows"]
        if "kv_cache_tokens" in row
    ]
    return found


@pytest.mark.parametrize(("name", "arguments", "start_class", "tokens"), recorded())
def test_recorded_caches(name: str, arguments: dict[str, Any], start_class: str, tokens: int) -> None:
    plan = memory_plan(shape(name), H200, arguments, "0.22.1", compiled=start_class == "known_key")
    assert plan.logged_tokens == pytest.approx(tokens, rel=0.001)


def test_there_are_fourteen_records() -> None:
    classes = [(name, start_class) for name, _, start_class, _ in recorded()]
    assert len(classes) == 14
    assert {start_class for name, start_class in classes if name == HYBRID} == {"first", "new_key", "known_key"}


@pytest.mark.parametrize(
    ("name", "version", "newer"),
    [
        (DENSE, "0.20.0", False),
        (DENSE, "0.22.1", True),
        ("Qwen/Qwen3-8B-FP8", "0.22.1", False),
        ("meta-llama/Llama-3.1-8B-Instruct", "0.22.1", False),
        (HYBRID, "0.22.1", False),
        ("meta-llama/Llama-3.1-8B-Instruct", "0.26.0", True),
        ("Qwen/Qwen3-30B-A3B", "0.28.0", False),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "0.28.0", True),
        (HYBRID, "0.28.0", False),
        (MOE, "0.30.0", True),
        (HYBRID, "0.33.0", True),
    ],
)
def test_which_model_runner_a_release_takes(name: str, version: str, newer: bool) -> None:
    model = shape(name)
    assert newer_runner(model, resolve(model, H200, {}, version), version) is newer


@pytest.mark.parametrize(
    ("method", "version", "newer"),
    [("ngram", "0.28.0", False), ("ngram", "0.30.0", True), ("suffix", "0.33.0", False), ("eagle3", "0.22.1", True)],
)
def test_speculation_that_the_newer_runner_lacks_takes_the_older_one(method: str, version: str, newer: bool) -> None:
    model, speculative = shape(DENSE), {"speculative_config": {"method": method, "num_speculative_tokens": 3}}
    assert newer_runner(model, resolve(model, H200, speculative, version), version) is newer


def test_the_highest_of_three_peaks_counts() -> None:
    sampler = overhead(HYBRID, TEXT)
    assert sampler.peak == sampler.sampler > sampler.compilation > sampler.forward
    few = TEXT | {"max_num_seqs": 256, "max_num_batched_tokens": 4096}
    compiling, known = overhead(HYBRID, few), overhead(HYBRID, few, compiled=True)
    assert compiling.peak == compiling.compilation > compiling.sampler
    assert known.peak == known.sampler
    assert compiling.total - known.total == compiling.compilation - known.sampler
    long = TEXT | {"max_num_seqs": 16, "max_num_batched_tokens": 65536}
    assert overhead(HYBRID, long).peak == overhead(HYBRID, long).forward


def test_what_is_not_compiled_takes_no_memory_for_it() -> None:
    assert overhead(DENSE, {"enforce_eager": True}).compilation == 0
    assert overhead(DENSE, {"optimization_level": 0}).compilation == 0
    assert overhead(DENSE, {"cudagraph_mode": "NONE"}).compilation > 1e9
    assert overhead(DENSE, {"tensor_parallel_size": 2}).compilation < 0.6 * overhead(DENSE, {}).compilation


def test_a_multimodal_model_looks_tokens_up_outside_the_compiled_graph() -> None:
    assert overhead(HYBRID, TEXT).compilation - overhead(HYBRID, {}).compilation == 248_320 * 4096 * 2


@pytest.mark.parametrize(
    ("name", "version", "counted"), [(HYBRID, "0.22.1", True), (DENSE, "0.22.1", False), (DENSE, "0.33.0", True)]
)
def test_the_newer_runner_counts_graphs_since_0_30(name: str, version: str, counted: bool) -> None:
    assert (overhead(name, {}, version).graphs > 0) is counted
    assert overhead(name, {"enforce_eager": True}, version).graphs == 0


def test_a_cpu_neither_captures_graphs_nor_times_kernels() -> None:
    found = overhead(DENSE, {}, gpu=Gpu("cpu", 64 * 2**30))
    assert (found.graphs, found.compilation) == (0, 0)


def test_what_cuda_shows_of_a_device() -> None:
    assert shown_bytes(H200) / 2**30 == pytest.approx(139.8, abs=0.005)
    assert shown_bytes(Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984)) / 2**30 == pytest.approx(79.19, abs=0.005)
    assert shown_bytes(Gpu("another", 12_345_678_901)) == 12_345_678_901


def test_the_table_of_sines_and_cosines() -> None:
    """vLLM logged 16.80 GiB for the weights of Qwen3.5-9B and 1.12 GiB for those of Qwen3-0.6B, tables included."""
    hybrid, small = shape(HYBRID), shape("Qwen/Qwen3-0.6B")
    assert (hybrid.weight_bytes(text_only=True) + 2 * hybrid.rotary_values) / 2**30 == pytest.approx(16.80, abs=0.006)
    assert (small.weight_bytes() + 2 * small.rotary_values) / 2**30 == pytest.approx(1.12, abs=0.006)
    config = known_config(DENSE) or {}
    half = shape_from_config(config | {"rope_parameters": {"partial_rotary_factor": 0.5}})
    assert half.rotary_values * 2 == shape(DENSE).rotary_values == 40_960 * 128


def test_a_start_teaches_by_its_class() -> None:
    """The same configuration with and without compilation: 1 GiB apart, and no contradiction."""
    model, few = shape(HYBRID), TEXT | {"max_num_seqs": 256, "max_num_batched_tokens": 4096}
    learnt = Calibration()
    for compiled, gib in ((False, 109.16), (True, 110.16)):
        learnt = learnt.learn(model, H200, few, round(gib * 2**30), "0.22.1", compiled=compiled)
    for compiled, gib in ((False, 109.16), (True, 110.16)):
        plan = memory_plan(model, H200, few, "0.22.1", learnt, compiled=compiled)
        assert plan.kv_bytes / 2**30 == pytest.approx(gib, abs=0.03)


@given(
    st.sampled_from([HYBRID, DENSE, MOE]), st.integers(1, 2048), st.integers(1, 32768), st.sampled_from(["0.22.1", "0.33.0"])
)
def test_larger_batches_never_take_less(name: str, seqs: int, tokens: int, version: str) -> None:
    def total(seqs: int, tokens: int) -> int:
        return overhead(name, {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}, version).total

    assert total(seqs, tokens) <= total(seqs + 1, tokens)
    assert total(seqs, tokens) <= total(seqs, tokens + 1)
