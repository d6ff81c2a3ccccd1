"""What brings up a configuration without taking from its clients, and the one estimate that search and check share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vopt.optimizer.engine.hardware import hardware
from vopt.optimizer.engine.simulated_failures import start_failure
from vopt.optimizer.trial import FailureKind
from vopt.search_spaces.memory import Possible, can_start, memory_plan
from vopt.search_spaces.model import known_model
from vopt.search_spaces.relief import more_gpus, more_memory

SIZES, SHARES = (1, 2, 4, 8), (0.9, 0.92, 0.94, 0.96)


def sure_from(size: int) -> Any:
    return lambda config: Possible.CAN if config["tensor_parallel_size"] >= size else Possible.UNKNOWN


def test_the_smallest_size_that_surely_fits_and_else_the_largest() -> None:
    assert more_gpus({}, 8, SIZES, sure_from(4)) == {"tensor_parallel_size": 4}
    assert more_gpus({}, 4, SIZES, sure_from(8)) == {"tensor_parallel_size": 4}
    assert more_gpus({}, 8, SIZES, None) == {"tensor_parallel_size": 8}


@pytest.mark.parametrize(
    ("config", "gpus"), [({}, 1), ({"tensor_parallel_size": 2}, 2), ({"data_parallel_size": 2}, 2), ({}, 0)]
)
def test_without_a_free_gpu_there_is_none(config: Mapping[str, Any], gpus: int) -> None:
    assert more_gpus(config, gpus, SIZES, None) is None


def test_other_ranks_keep_their_gpus() -> None:
    assert more_gpus({"data_parallel_size": 2}, 4, SIZES, None) == {"tensor_parallel_size": 2}


def test_more_memory_is_taken_only_where_it_surely_suffices() -> None:
    def fit(config: Mapping[str, Any]) -> Possible:
        return Possible.CAN if config["gpu_memory_utilization"] >= 0.94 else Possible.UNKNOWN

    assert more_memory({}, 0.92, SHARES, fit) == {"gpu_memory_utilization": 0.94}
    assert more_memory({"gpu_memory_utilization": 0.94}, 0.92, SHARES, fit) == {"gpu_memory_utilization": 0.96}
    assert more_memory({}, 0.92, SHARES, None) is None
    assert more_memory({}, 0.92, SHARES, lambda config: Possible.UNKNOWN) is None
    assert more_memory({"kv_cache_memory_bytes": 1}, 0.92, SHARES, fit) is None, "the share is ignored then"


MEMORY = {FailureKind.KV_TOO_SMALL, FailureKind.MAMBA_BLOCKS, FailureKind.OOM_START}


@settings(max_examples=150, deadline=None)
@given(
    model=st.sampled_from(["Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B"]),
    gpu=st.sampled_from(["rtx4090", "h100", "h200", "a100"]),
    tensor=st.sampled_from([1, 2]),
    share=st.sampled_from([0.8, 0.9, 0.92, 0.95]),
    length=st.sampled_from([None, 8192, 40960]),
    seqs=st.sampled_from([None, 64, 2048]),
)
def test_of_a_simulated_engine_the_exact_estimate_says_what_its_start_does(
    model: str, gpu: str, tensor: int, share: float, length: int | None, seqs: int | None
) -> None:
    shape, device = known_model(model), hardware(gpu).gpu
    assert shape is not None
    given_ = {
        "tensor_parallel_size": tensor,
        "gpu_memory_utilization": share,
        "max_model_len": length,
        "max_num_seqs": seqs,
    }
    config = {name: value for name, value in given_.items() if value is not None}
    failed = start_failure(shape, device, config, memory_plan(shape, device, config), tensor)
    verdict = can_start(shape, device, config, exact=True).possible
    if failed is None:
        assert verdict is Possible.CAN
    elif failed.kind in MEMORY:
        assert verdict is Possible.CANNOT
