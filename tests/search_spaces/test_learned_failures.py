"""A failing region is not proposed again."""

from __future__ import annotations

import random
from typing import Any

import pytest

from vopt.search_spaces.learned import Learned
from vopt.search_spaces.parameter import Parameter
from vopt.search_spaces.space import SearchSpace


def parameter(name: str, values: tuple[Any, ...], default: Any, ordered: bool = True) -> Parameter:
    return Parameter(name, values, default, ordered, "scheduling", "why")


SPACE = SearchSpace(
    (
        parameter("max_num_seqs", (256, 512, 1024, 2048, 4096), 1024),
        parameter("max_num_batched_tokens", (4096, 8192, 16384, 32768, 65536), 8192),
        parameter("speculation", ("off", "mtp:1", "mtp:2"), "off", False),
        parameter("attention_backend", ("auto", "FLASHINFER"), "auto", False),
        parameter("moe_backend", ("auto", "triton", "deep_gemm"), "auto", False),
    )
)
DEFAULT = SPACE.default_point()


def test_a_named_bound_holds_where_related_values_are_equal() -> None:
    learned = Learned().failed(
        DEFAULT | {"max_num_seqs": 2048, "speculation": "mtp:1"},
        DEFAULT,
        kind="mamba_blocks",
        detail="at most 1100",
        hint={"max_num_seqs": {"at_most": 1100}},
    )
    space = SPACE.with_learned(learned)
    assert space.violations(DEFAULT | {"max_num_seqs": 4096, "max_num_batched_tokens": 4096, "speculation": "mtp:1"})
    assert not space.violations(DEFAULT | {"max_num_seqs": 1024, "speculation": "mtp:1"})
    assert not space.violations(DEFAULT | {"max_num_seqs": 4096})


def test_memory_failures_cover_hungrier_points_alone() -> None:
    space = SPACE.with_learned(Learned().failed(DEFAULT | {"max_num_seqs": 2048}, DEFAULT, kind="oom_start", detail="OOM"))
    assert space.violations(DEFAULT | {"max_num_seqs": 4096, "max_num_batched_tokens": 16384})
    assert not space.violations(DEFAULT | {"max_num_seqs": 4096, "max_num_batched_tokens": 4096})
    assert not space.violations(DEFAULT | {"max_num_seqs": 512})


def test_a_value_that_worked_once_is_no_culprit() -> None:
    good = Learned().succeeded(DEFAULT | {"moe_backend": "triton"}, DEFAULT)
    bad = DEFAULT | {"moe_backend": "triton", "speculation": "mtp:1"}
    space = SPACE.with_learned(good.failed(bad, DEFAULT, kind="engine_died", detail="illegal memory access"))
    assert "triton" in space["moe_backend"].values
    assert "mtp:1" not in space["speculation"].values


def crashes(point: dict[str, Any]) -> tuple[str, str] | None:
    """60 % of this space: two missing packages, a crash under speculation, memory."""
    if point["attention_backend"] == "FLASHINFER":
        return "unsupported", "Selected backend FLASHINFER is not valid for this configuration"
    if point["moe_backend"] == "deep_gemm":
        return "unsupported", "deep_gemm is not installed"
    if point["max_num_seqs"] * point["max_num_batched_tokens"] > 2048 * 32768:
        return "oom_start", "CUDA out of memory"
    return None


def all_points(space: SearchSpace) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = [{}]
    for p in space.parameters:
        points = [{**point, p.name: value} for point in points for value in p.values]
    return points


def test_the_example_space_crashes_in_more_than_half_of_its_points() -> None:
    points = all_points(SPACE)
    assert 0.6 <= sum(crashes(point) is not None for point in points) / len(points) <= 0.8


def propose(space: SearchSpace, chooser: random.Random) -> dict[str, Any]:
    while True:
        point = {p.name: chooser.choice(p.values) for p in space.parameters}
        if not space.violations(point):
            return DEFAULT | point


def crash_counts(seed: int) -> tuple[list[bool], list[str]]:
    """Thirty random proposals that respect what was learned: which crashed, and the configurations that did."""
    chooser, learned, crashed, failed = random.Random(seed), Learned(), [], []
    for _ in range(30):
        space = SPACE.with_learned(learned)
        point = propose(space, chooser)
        crash = crashes(point)
        crashed.append(crash is not None)
        if crash is None:
            learned = learned.succeeded(point, DEFAULT)
        else:
            failed.append(str(point))
            learned = learned.failed(point, DEFAULT, kind=crash[0], detail=crash[1])
    return crashed, failed


def test_crashes_become_rare_and_never_repeat() -> None:
    first = last = 0
    for seed in range(12):
        crashed, failed = crash_counts(seed)
        first, last = first + sum(crashed[:10]), last + sum(crashed[20:])
        assert len(set(failed)) == len(failed)
    assert last < first / 4


@pytest.mark.parametrize("kind", ["oom_start", "unsupported", "hang"])
def test_lessons_survive_storage(kind: str) -> None:
    learned = Learned().failed(DEFAULT | {"max_num_seqs": 2048}, DEFAULT, kind=kind, detail="why", hint={})
    assert Learned.from_json(learned.to_json()) == learned
