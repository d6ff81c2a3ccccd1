"""Quantization at load: what it leaves in memory, and what vLLM refuses to put on a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from vopt.search_spaces.arguments import stored_versions
from vopt.search_spaces.defaults import GIB
from vopt.search_spaces.memory import Calibration, Gpu, Possible, can_start, memory_plan
from vopt.search_spaces.model import known_model
from vopt.search_spaces.on_load import DEPRECATED, NEEDS_CONFIG, NEEDS_FILE, ON_LOAD, loaded, refusal
from vopt.search_spaces.shape import ModelShape

H200, H100 = Gpu("NVIDIA H200", 150_754_820_096), Gpu("NVIDIA H100 80GB HBM3", 85_029_158_912)
LLAMA, DENSE, MOE = "meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"


def model(name: str) -> ModelShape:
    shape = known_model(name)
    assert shape is not None
    return shape


def weights(name: str, **arguments: Any) -> int:
    return memory_plan(model(name), H200, arguments).weight_bytes


@pytest.mark.parametrize("method", ["fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"])
def test_eight_bits_halve_linear_layers_and_leave_embeddings_and_head(method: str) -> None:
    parts = model(DENSE).params
    kept = 2 * (parts["embeddings"] + parts["head"])
    assert weights(DENSE) == kept + 2 * (parts["attention"] + parts["mlp"])
    assert weights(DENSE, quantization=method) == pytest.approx(kept + parts["attention"] + parts["mlp"], rel=1e-3)


def test_a_model_that_does_not_fit_fits_in_eight_bits() -> None:
    """Llama 70B: 131.4 GiB of bfloat16 weights on an H200 with 139.8."""
    assert can_start(model(LLAMA), H200, {"max_model_len": 8192}).possible is Possible.CANNOT
    found = can_start(model(LLAMA), H200, {"max_model_len": 8192, "quantization": "fp8"})
    assert found.possible is Possible.CAN
    assert found.numbers["weight_bytes"] == pytest.approx(67.7 * GIB, rel=0.01)
    assert found.numbers["kv_bytes"] > 55 * GIB


def test_what_is_saved_is_cache() -> None:
    plain, eight = (memory_plan(model("Qwen/Qwen3-32B"), H100, arguments) for arguments in ({}, {"quantization": "fp8"}))
    assert eight.kv_bytes - plain.kv_bytes == pytest.approx(plain.weight_bytes - eight.weight_bytes, rel=0.01)
    assert eight.blocks > 4 * plain.blocks


def test_methods_for_experts_leave_the_rest() -> None:
    parts = model(MOE).params
    saved = weights(MOE) - weights(MOE, quantization="int8_per_channel_weight_only")
    assert saved == pytest.approx(parts["experts"], rel=1e-6)
    assert weights(DENSE, quantization="experts_int8") == weights(DENSE)


def test_a_method_is_known_from_the_release_that_brought_it() -> None:
    for version in stored_versions():
        shape = loaded(model(DENSE), {"quantization": "fp8_per_channel"}, version)
        assert (shape.quantization is not None) == (tuple(map(int, version.split(".")[:2])) >= (0, 26))
    shape = model(DENSE)
    assert loaded(shape, {"quantization": "none"}) is loaded(shape, {}) is shape


def test_a_quantized_checkpoint_stays_what_it_is() -> None:
    shape = model("Qwen/Qwen3-32B-AWQ")
    assert loaded(shape, {"quantization": "awq_marlin"}) is shape


def test_starts_with_it_calibrate_the_same_overhead() -> None:
    arguments = {"quantization": "fp8"}
    learnt = Calibration().learn(model(DENSE), H200, arguments, memory_plan(model(DENSE), H200, arguments).kv_bytes)
    (seen,) = learnt.observations
    assert seen.actual_bytes == pytest.approx(seen.estimated_bytes, abs=2)


@pytest.mark.parametrize(
    ("own", "asked", "words"),
    [
        *((None, method, "") for method in ON_LOAD),
        *((None, method, f"Cannot find the config file for {method}") for method in sorted(NEEDS_FILE)),
        *((None, method, "misses its arguments") for method in NEEDS_CONFIG),
        *((None, method, "deprecated") for method in sorted(DEPRECATED)),
        (None, None, ""),
        (None, "none", ""),
        ("fp8", "fp8", ""),
        ("fp8", "fp8_per_tensor", "does not match"),
        (
            "fp8",
            "awq",
            "model config (fp8) does not match the quantization method specified in the `quantization` argument (awq)",
        ),
        ("awq", "awq_marlin", ""),
        ("gptq", "gptq_marlin", ""),
        ("gptq", "awq", "does not match"),
        ("compressed-tensors", "fp8", "does not match"),
        ("mxfp4", "gpt_oss_mxfp4", ""),
    ],
)
def test_what_vllm_refuses(own: str | None, asked: str | None, words: str) -> None:
    found = refusal(own, {"quantization": asked})
    assert words in found if words else not found


def test_a_configuration_that_is_given_is_enough() -> None:
    assert not refusal(None, {"quantization": "online", "quantization_config": {"linear": "fp8_per_tensor"}})
    assert not refusal("fp_quant", {"quantization": "fp_quant", "allow_deprecated_quantization": True})
