"""Spaces over several GPUs: which splits of a model are tried first, and that one GPU knows nothing of them."""

from __future__ import annotations

from typing import Any

import pytest

from vopt.search_spaces.arguments import stored_arguments
from vopt.search_spaces.build import Subject, build_space
from vopt.search_spaces.choices import Choices
from vopt.search_spaces.defaults import GIB, Gpu
from vopt.search_spaces.model import known_model
from vopt.search_spaces.parse import base_declarations, parse_space
from vopt.search_spaces.space import SearchSpace

H200 = Gpu("NVIDIA H200", 141 * GIB)
TENSOR, REPLICAS = "tensor_parallel_size", "data_parallel_size"


def made(gpus: int, goal: str = "throughput", model: str = "Qwen/Qwen3-32B", **options: Any) -> SearchSpace:
    return build_space(Subject(stored_arguments("0.33.0"), H200, known_model(model), gpus), goal=goal, **options)


def splits(space: SearchSpace) -> list[tuple[int, int]]:
    return [(seed.point.get(TENSOR, 1), seed.point.get(REPLICAS, 1)) for seed in space.seeds]


@pytest.mark.parametrize("goal", ["throughput", "latency", "goodput"])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_the_widest_split_is_the_first_seed_of_every_goal(gpus: int, goal: str) -> None:
    assert splits(made(gpus, goal))[0] == (gpus, 1)


def test_every_split_over_all_gpus_is_among_the_first() -> None:
    assert set(splits(made(8))[:4]) == {(8, 1), (4, 2), (2, 4), (1, 8)}
    assert set(splits(made(3))[:2]) == {(2, 1), (1, 2)}, "what divides the model's heads"


def test_a_split_whose_weights_do_not_fit_is_none() -> None:
    """Llama 70B: 131.4 GiB of weights."""
    assert set(splits(made(4, model="meta-llama/Llama-3.3-70B-Instruct"))[:2]) == {(4, 1), (2, 2)}


def test_other_seeds_use_every_gpu_too() -> None:
    assert all(tensor * replicas == 4 for tensor, replicas in splits(made(4)))


def test_the_rank_orders_the_splits_behind_the_widest_and_chooses_where_others_stand() -> None:
    space = made(4, rank=lambda config: float(config.get(REPLICAS, 1)))
    assert splits(space)[:3] == [(4, 1), (1, 4), (2, 2)]
    assert set(splits(space)[3:]) == {(1, 4)}


def test_what_the_user_fixed_of_a_split_stays() -> None:
    assert set(splits(made(4, choices=Choices(set={TENSOR: 2})))) == {(1, 2)}, "two replicas of the two GPUs each"
    assert set(splits(made(4, choices=Choices(keep=frozenset({REPLICAS}))))) == {(4, 1)}


def test_ranks_that_every_trial_carries_take_gpus_from_the_splits() -> None:
    piped = made(4, baseline={"pipeline_parallel_size": 2})
    assert set(splits(piped)) <= {(2, 1), (1, 2)}
    assert splits(piped)[0] == (2, 1)
    beyond = piped.violations({**piped.default_point(), TENSOR: 4})
    assert "more_ranks_than_gpus" in [violation.rule for violation in beyond], "no proposal may take more GPUs than there are"
    kept = made(8, baseline={REPLICAS: 2}, choices=Choices(keep=frozenset({REPLICAS})))
    assert REPLICAS not in kept
    assert {tensor for tensor, _ in splits(kept)} == {4}
    full = made(2, baseline={"pipeline_parallel_size": 2})
    assert full.seeds
    assert set(splits(full)) == {(1, 1)}, "no GPU is left to split over"


def test_seeds_of_the_users_own_file_come_before_all_splits_but_the_widest() -> None:
    text = "[[seeds]]\nset = { max_num_seqs = 512 }\n"
    space = made(8, user=parse_space(text, "own.toml", base_declarations()))
    assert "own.toml" in space.seeds[1].reason


@pytest.mark.parametrize("goal", ["throughput", "latency", "goodput"])
def test_one_gpu_has_no_splits(goal: str) -> None:
    space = made(1, goal)
    assert TENSOR not in space
    assert space.seeds
    assert not any("GPUs" in seed.reason for seed in space.seeds)
