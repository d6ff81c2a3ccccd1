"""The stored arguments of vLLM releases say what the releases took."""

from __future__ import annotations

import pytest

from vopt.search_spaces.arguments import Kind, release_of, stored_arguments, stored_versions


def test_every_promised_release_is_stored() -> None:
    assert stored_versions() == ("0.20.0", "0.22.1", "0.26.0", "0.28.0", "0.30.0", "0.32.0", "0.33.0")


@pytest.mark.parametrize(
    ("name", "present", "absent"),
    [
        ("spec_method", "0.22.1", "0.20.0"),
        ("watermark", "0.26.0", "0.22.1"),
        ("max_num_queued_reqs", "0.30.0", "0.28.0"),
        ("max_num_active_seqs", "0.32.0", "0.30.0"),
        ("max_num_partial_prefills", "0.26.0", "0.28.0"),
        ("calculate_kv_scales", "0.26.0", "0.28.0"),
    ],
)
def test_arguments_come_and_go_with_releases(name: str, present: str, absent: str) -> None:
    assert name in stored_arguments(present)
    assert name not in stored_arguments(absent)


@pytest.mark.parametrize("version", stored_versions())
def test_guides_flags_exist_nowhere(version: str) -> None:
    arguments = stored_arguments(version)
    for name in ("num_scheduler_steps", "speculative_model", "swap_space", "use_v2_block_manager"):
        assert name not in arguments
    assert arguments["scheduling_policy"].choices == ("fcfs", "priority")


def test_kinds_follow_the_parser() -> None:
    arguments = stored_arguments("0.32.0")
    kinds = {
        "enable_prefix_caching": Kind.BOOL,
        "disable_log_stats": Kind.FLAG,
        "max_num_seqs": Kind.INT,
        "gpu_memory_utilization": Kind.FLOAT,
        "speculative_config": Kind.JSON,
        "cudagraph_capture_sizes": Kind.LIST,
        "hf_overrides": Kind.JSON_OR_STR,
        "device_ids": Kind.COMMA,
        "hf_token": Kind.OPTIONAL,
        "middleware": Kind.APPEND,
    }
    assert {name: arguments[name].kind for name in kinds} == kinds
    assert arguments["cudagraph_capture_sizes"].element == "int"
    assert arguments["max_num_batched_tokens"].human
    assert not arguments["max_num_seqs"].human
    assert arguments["port"].front_end
    assert arguments["enable_prefix_caching"].negative == "--no-enable-prefix-caching"
    assert arguments.by_flag["-tp"].name == "tensor_parallel_size"


def test_a_release_between_two_stored_ones_takes_the_older() -> None:
    assert stored_arguments("0.29.1").version == "0.28.0"
    assert stored_arguments("0.40.0").version == "0.33.0"
    with pytest.raises(ValueError, match=r"no arguments of vLLM 0\.11\.0"):
        stored_arguments("0.11.0")


def test_versions_with_suffixes() -> None:
    assert release_of("0.32.0+cpu") == (0, 32, 0)
    assert release_of("v0.22.1rc2") == (0, 22, 1)
    with pytest.raises(ValueError, match="is not a vLLM version"):
        release_of("latest")


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("max_num_seqs", 64, True),
        ("max_num_seqs", "64", False),
        ("max_num_seqs", True, False),
        ("gpu_memory_utilization", 1, True),
        ("kv_cache_dtype", "fp8", True),
        ("kv_cache_dtype", "fp9", False),
        ("enable_prefix_caching", "yes", False),
        ("speculative_config", {"method": "ngram"}, True),
        ("speculative_config", "ngram", False),
        ("served_model_name", ["a"], True),
        ("served_model_name", "a", False),
    ],
)
def test_values_are_held_against_the_argument(name: str, value: object, fits: bool) -> None:
    assert (stored_arguments("0.32.0").unlike(name, value) is None) is fits


@pytest.mark.parametrize("version", stored_versions())
def test_every_switch_of_every_release_can_be_switched_off(version: str) -> None:
    """0.33 pairs ``--enable-x`` with ``--disable-x`` and hides ``--no-enable-x``, which it still takes."""
    arguments = stored_arguments(version)
    switches = [a for a in arguments.arguments.values() if isinstance(a.default, bool)]
    assert len(switches) > 40
    assert {a.kind for a in switches} <= {Kind.BOOL, Kind.FLAG}
    caching = arguments["enable_prefix_caching"]
    assert (caching.kind, caching.negative) == (Kind.BOOL, "--no-enable-prefix-caching")
    for argument in arguments.arguments.values():
        if argument.kind is Kind.BOOL:
            assert argument.negative in argument.negatives
            assert argument.flag not in argument.negatives
    if release_of(version) >= (0, 33, 0):
        assert caching.negatives == ("--disable-prefix-caching", "--no-enable-prefix-caching")
        assert set(arguments["disable_cascade_attn"].negatives) == {"--enable-cascade-attn", "--no-disable-cascade-attn"}
