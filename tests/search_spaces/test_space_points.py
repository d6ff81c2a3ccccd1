"""Points, configurations and the spaces made from a space."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.search_spaces.learned import Learned
from vopt.search_spaces.parameter import Bound, Inactive, Parameter, Seed, Violation
from vopt.search_spaces.space import SearchSpace


def parameter(name: str, values: tuple[Any, ...], default: Any, *, ordered: bool = True, key: bool = True) -> Parameter:
    return Parameter(name, values, default, ordered, "scheduling", "why", in_compile_key=key)


SPACE = SearchSpace(
    (
        parameter("max_num_seqs", (256, 512, 1024, 2048), 1024),
        parameter("max_num_batched_tokens", (512, 1024, 8192, 16384), 8192),
        parameter("gpu_memory_utilization", (0.9, 0.92, 0.95), 0.92, key=False),
        parameter("enable_prefix_caching", (True, False), True, ordered=False),
        parameter("speculation", ("off", "ngram:3", "mtp:2", "draft:org/tiny:4"), "off", ordered=False),
        parameter(
            "compilation_config.cudagraph_mode", ("FULL_AND_PIECEWISE", "PIECEWISE"), "FULL_AND_PIECEWISE", ordered=False
        ),
        parameter("limit_mm_per_prompt", ({}, {"image": 0}), {}, ordered=False),
        parameter("env:VLLM_SWITCH", (False, True), False, ordered=False),
    ),
    facts={
        "version": "0.32.0",
        "model": {"mtp_layers": 1, "q_heads": 32, "kv_heads": 8, "hybrid": False, "moe": False},
        "gpus": 1,
        "resolved": {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "max_model_len": 40960},
    },
)
points = st.fixed_dictionaries({p.name: st.sampled_from(p.values) for p in SPACE.parameters})


def test_the_default_point_is_the_empty_config() -> None:
    assert SPACE.config(SPACE.default_point()) == {}
    assert SPACE.environment(SPACE.default_point()) == {}


@given(points)
def test_configurations_and_points_are_inverse(point: dict[str, Any]) -> None:
    config = SPACE.full_config(point)
    assert SPACE.point_of(config) == point
    assert SPACE.point_of(json.loads(json.dumps(config))) == point


def test_a_configuration_is_what_vllm_wants() -> None:
    point = SPACE.default_point() | {
        "speculation": "draft:org/tiny:4",
        "compilation_config.cudagraph_mode": "PIECEWISE",
        "env:VLLM_SWITCH": True,
        "enable_prefix_caching": False,
    }
    assert SPACE.config(point) == {
        "speculative_config": {"method": "draft_model", "model": "org/tiny", "num_speculative_tokens": 4},
        "compilation_config": {"cudagraph_mode": "PIECEWISE"},
        "enable_prefix_caching": False,
    }
    assert SPACE.environment(point) == {"VLLM_SWITCH": "1"}


def test_dummy_weights_speculate_synthetically_at_the_stated_length() -> None:
    space = SearchSpace(SPACE.parameters, facts={**SPACE.facts, "acceptance_length": 2.4})
    config = space.config(space.default_point() | {"speculation": "mtp:2"})
    assert config["speculative_config"] == {
        "method": "mtp",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.4,
    }
    assert space.point_of(config)["speculation"] == "mtp:2"
    assert (
        space.config(space.default_point() | {"speculation": "ngram:3"})["speculative_config"]["synthetic_acceptance_length"]
        == 2.4
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_num_seqs": 300}, "max_num_seqs = 300 is not one of"),
        ({"max_num_seqs": "512"}, "is not one of"),
        ({"seed": 3}, "seed = 3 is no dimension"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 9}}, "speculation = 'ngram:9'"),
        ({"compilation_config": {"mode": 3}}, "is no dimension"),
    ],
)
def test_a_configuration_outside_the_space_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SPACE.point_of(config)


@given(points)
def test_a_repaired_point_breaks_no_rule_and_an_unbroken_one_is_left_alone(point: dict[str, Any]) -> None:
    repaired, notes = SPACE.repair(point)
    assert not SPACE.violations(repaired)
    if not SPACE.violations(point):
        assert repaired == point
        assert notes == ()
    else:
        assert notes


def test_repair_names_what_it_changed() -> None:
    point = SPACE.default_point() | {"max_num_seqs": 2048, "max_num_batched_tokens": 512}
    repaired, notes = SPACE.repair(point)
    assert repaired["max_num_seqs"] == 512
    assert "max_num_seqs: 2048 -> 512 (max_num_batched_tokens 512 is below max_num_seqs 2048)" in notes


def test_repair_searches_where_no_rule_names_a_way() -> None:
    def check(config: Any) -> Violation | None:
        return None if config.get("gpu_memory_utilization") == 0.95 else Violation("memory", "too little memory")

    space = SPACE.with_checks(check)
    repaired, notes = space.repair(space.default_point())
    assert repaired == space.default_point() | {"gpu_memory_utilization": 0.95}
    assert notes == ("gpu_memory_utilization: 0.92 -> 0.95 (too little memory)",)


@given(points)
def test_neighbours_differ_in_one_parameter_and_break_nothing(point: dict[str, Any]) -> None:
    for near in SPACE.neighbours(point):
        assert sum(near[name] != point[name] for name in point) == 1
        assert not SPACE.violations(near)


def test_narrowing_keeps_the_default_and_says_where_it_came_from() -> None:
    bound = Bound("at most 512: the engine has 600 blocks", "engine message")
    narrow = SPACE.narrow("max_num_seqs", lambda value: value <= 512, bound)
    assert narrow["max_num_seqs"].values == (256, 512, 1024)
    assert narrow["max_num_seqs"].bounds == (bound,)
    assert narrow.digest != SPACE.digest
    alone = SPACE.narrow("max_num_seqs", [1024], bound)
    assert "max_num_seqs" not in alone
    assert alone.inactive == (Inactive("max_num_seqs", bound.text),)
    assert SPACE.narrow("unknown", [], bound) is SPACE


def test_seeds_leave_with_the_values_they_need() -> None:
    seed = Seed(SPACE.default_point() | {"max_num_seqs": 2048}, "wide")
    space = SearchSpace(SPACE.parameters, seeds=(seed, Seed(SPACE.default_point() | {"enable_prefix_caching": False}, "off")))
    kept = space.narrow("max_num_seqs", lambda value: value <= 512, Bound("b", "s")).seeds
    assert [entry.reason for entry in kept] == ["off"]
    assert [entry.reason for entry in space.without("max_num_seqs", "gone").seeds] == ["off"]


def test_a_dormant_parameter_comes_back_with_its_reason() -> None:
    closed = SPACE.without("gpu_memory_utilization", "no pressure", "kv_pressure")
    assert closed.inactive == (Inactive("gpu_memory_utilization", "no pressure", "kv_pressure"),)
    again = closed.reopen("gpu_memory_utilization", "the KV cache was 93% full")
    assert again["gpu_memory_utilization"].values == (0.9, 0.92, 0.95)
    assert again["gpu_memory_utilization"].bounds[-1].text == "reopened: the KV cache was 93% full"
    assert again.inactive == ()
    assert again.dormant == ()


def test_json_round_trip() -> None:
    learned = Learned().failed(
        SPACE.default_point() | {"max_num_seqs": 2048}, SPACE.default_point(), kind="oom_start", detail="CUDA out of memory"
    )
    space = SPACE.without("gpu_memory_utilization", "no pressure", "kv_pressure").with_learned(learned)
    again = SearchSpace.from_json(json.loads(json.dumps(space.to_json())))
    assert again == space
    assert again.digest == space.digest


def test_compile_keys_separate_what_recompiles() -> None:
    default = SPACE.default_point()
    seqs = default | {"max_num_seqs": 512}
    assert SPACE.compile_key(default) == SPACE.compile_key(default | {"gpu_memory_utilization": 0.95})
    assert SPACE.compile_key(default) != SPACE.compile_key(seqs)
    assert SPACE.compile_key(default, "0.28.0") == SPACE.compile_key(seqs, "0.28.0")
    assert SPACE.compile_key(default) == SPACE.compile_key(default | {"enable_prefix_caching": False})
    hybrid = SearchSpace(SPACE.parameters, facts={**SPACE.facts, "model": {"hybrid": True}})
    assert hybrid.compile_key(default) != hybrid.compile_key(default | {"enable_prefix_caching": False})


def test_entries_of_a_users_command_that_no_dimension_covers_are_carried() -> None:
    assert SPACE.carried({"max_num_seqs": 300, "trust_remote_code": True, "speculative_config": {"method": "x"}}) == {
        "trust_remote_code": True
    }
