"""Spaces of real models on real GPUs: what is in, what is out, and why."""

from __future__ import annotations

from typing import Any

import pytest

from vopt.search_spaces.arguments import stored_arguments, stored_versions
from vopt.search_spaces.build import Subject, build_space
from vopt.search_spaces.choices import Choices, parse_choices, split_settings
from vopt.search_spaces.defaults import Gpu
from vopt.search_spaces.evidence import BaselineFacts, WorkloadFacts, pressures, surplus
from vopt.search_spaces.learned import Learned
from vopt.search_spaces.model import known_model
from vopt.search_spaces.parse import SpaceFileError, base_declarations, parse_space
from vopt.search_spaces.space import SearchSpace

H200 = Gpu("NVIDIA H200", 150754820096)
NINE, MOE, DENSE = "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B-FP8", "Qwen/Qwen3-8B"
LLAMA, DEEPSEEK = "meta-llama/Llama-3.3-70B-Instruct", "deepseek-ai/DeepSeek-V3"


def subject(model: str, version: str = "0.32.0", gpus: int = 1) -> Subject:
    shape = known_model(model)
    assert shape is not None
    return Subject(stored_arguments(version), H200, shape, gpus)


def reasons(space: SearchSpace) -> dict[str, str]:
    return {entry.name: entry.reason for entry in space.inactive}


@pytest.mark.parametrize(
    ("version", "goal"), [(v, "throughput") for v in stored_versions()] + [("0.33.0", "latency"), ("0.33.0", "goodput")]
)
@pytest.mark.parametrize(("model", "gpus"), [(NINE, 1), (MOE, 1), (DENSE, 1), (LLAMA, 2), (LLAMA, 4), (DEEPSEEK, 8)])
def test_every_space_is_searchable(version: str, model: str, gpus: int, goal: str) -> None:
    space = build_space(subject(model, version, gpus), goal=goal)
    assert 2 <= len(space.parameters) <= 9
    assert all(parameter.default in parameter.values for parameter in space.parameters)
    assert {p.name for p in space.parameters} | set(reasons(space)) == {d.name for d in base_declarations()}
    assert space["max_num_seqs"].default == 1024
    assert space["max_num_batched_tokens"].default == 8192
    assert space.seeds
    assert all(not space.violations(seed.point) for seed in space.seeds)
    assert all(bound.text and bound.source for p in space.parameters for bound in p.bounds)


def test_throughput_on_one_gpu_is_hundreds_of_points() -> None:
    assert 100 <= build_space(subject(NINE)).size <= 4000
    assert 100 <= build_space(subject(MOE)).size <= 4000


def test_what_a_release_lacks_is_named() -> None:
    old = reasons(build_space(subject(NINE, "0.20.0")))
    assert old["linear_backend"] == "vLLM 0.20.0 has it not yet (since 0.22.0)"
    assert old["prefill_schedule_interval"] == "vLLM 0.20.0 has it not yet (since 0.24.0)"
    assert build_space(subject(NINE, "0.20.0"))["max_num_seqs"].values[0] == 256


def test_a_choice_that_a_release_lacks_is_named() -> None:
    choices = Choices(vary={"kv_cache_dtype": ("auto", "fp8", "nvfp4_4over6")}, allow_lossy=frozenset({"kv_cache_dtype"}))
    space = build_space(subject(DENSE, "0.22.1"), choices=choices)
    assert space["kv_cache_dtype"].values == ("auto", "fp8")
    assert "'nvfp4_4over6' is left out" in space["kv_cache_dtype"].bounds[0].text


def test_prefix_caching_of_hybrids_follows_the_release() -> None:
    assert build_space(subject(NINE, "0.28.0"))["enable_prefix_caching"].default is True
    assert "enable_prefix_caching" not in build_space(subject(NINE, "0.26.0"))
    shared = WorkloadFacts(shared_prefix_tokens=4096)
    assert build_space(subject(NINE, "0.26.0"), workload=shared)["enable_prefix_caching"].default is False
    assert "enable_prefix_caching" not in build_space(subject(NINE, "0.28.0"), workload=shared)
    short = reasons(build_space(subject(NINE, "0.26.0"), workload=WorkloadFacts(shared_prefix_tokens=300)))
    assert short["enable_prefix_caching"] == "the shared prefix of 300 tokens is below one block of 528"


def test_defaults_that_cannot_start_are_a_violation_not_an_answer() -> None:
    space = build_space(subject(LLAMA, gpus=4))
    assert [v.rule for v in space.violations(space.default_point())] == ["memory"]
    repaired, notes = space.repair(space.default_point())
    assert repaired["tensor_parallel_size"] > 1
    assert "weights take" in notes[0]


def test_speculation_needs_layers_text_and_weights() -> None:
    assert "mtp:1" in build_space(subject(NINE))["speculation"].values
    assert "multi-token prediction" in reasons(build_space(subject(DENSE)))["speculation"]
    assert "natural text" in reasons(build_space(subject(NINE), workload=WorkloadFacts(natural_text=False)))["speculation"]
    dummy = reasons(build_space(subject(NINE), workload=WorkloadFacts(dummy_weights=True)))
    assert "acceptance length" in dummy["speculation"]
    assumed = build_space(subject(NINE), workload=WorkloadFacts(dummy_weights=True, acceptance_length=1.8))
    config = assumed.config(assumed.default_point() | {"speculation": "mtp:1"})
    assert config["speculative_config"]["synthetic_acceptance_length"] == 1.8


def test_lossy_and_contract_knobs_wait_for_permission() -> None:
    assert "--allow-lossy kv_cache_dtype" in reasons(build_space(subject(NINE)))["kv_cache_dtype"]
    with pytest.raises(SpaceFileError, match="--allow-lossy kv_cache_dtype"):
        build_space(subject(NINE), choices=Choices(vary={"kv_cache_dtype": None}))
    allowed = Choices(allow_lossy=frozenset({"kv_cache_dtype"}), allow_contract=frozenset({"language_model_only"}))
    space = build_space(subject(NINE), choices=allowed)
    assert space["kv_cache_dtype"].changes_outputs
    assert space["language_model_only"].changes_contract


def test_a_users_words_come_first() -> None:
    choices = parse_choices(
        stored_arguments("0.32.0"),
        vary=["gpu_memory_utilization=0.9,0.95", "watermark=[0.0, 0.05]", "env:VLLM_X=0,1", "block_size"],
        keep=["max-num-seqs"],
        settings=["max_num_batched_tokens=4096"],
    )
    space = build_space(subject(NINE), choices=choices)
    found = reasons(space)
    assert found["max_num_seqs"] == "kept at vLLM's default by you"
    assert found["max_num_batched_tokens"] == "set by you to 4096"
    assert "is a hybrid" in found["block_size"]
    assert space["gpu_memory_utilization"].values == (0.9, 0.92, 0.95)
    assert space["watermark"].values == (0.0, 0.05)
    assert space.facts["set"] == {"max_num_batched_tokens": 4096}


def test_values_of_the_users_own_command_are_members() -> None:
    space = build_space(subject(NINE), baseline={"max_num_seqs": 100})
    assert space["max_num_seqs"].values[0] == 100
    assert space.point_of({"max_num_seqs": 100})["max_num_seqs"] == 100


def test_a_users_file_adds_narrows_and_forbids() -> None:
    text = """
    [parameters.watermark]
    values = [0.0, 0.1]
    [keep.max_num_seqs]
    at_most = 512
    why = "the load balancer stops there"
    [[rules]]
    forbid = { max_num_batched_tokens = { at_least = 32768 }, speculation = "mtp:2" }
    why = "crashed in May"
    """
    space = build_space(subject(NINE), user=parse_space(text, "mine.toml", base_declarations()))
    assert space["watermark"].values == (0.0, 0.1)
    assert space["max_num_seqs"].values == (256, 512, 1024)
    point = space.default_point() | {"max_num_batched_tokens": 32768, "speculation": "mtp:2"}
    assert [v.rule for v in space.violations(point)] == ["forbidden"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vary": ["max_num_seq=1,2"]}, "did you mean max_num_seqs"),
        ({"vary": ["max_num_seqs="]}, "empty range"),
        ({"vary": ["max_num_seqs=[1,"]}, "not a JSON list"),
        ({"vary": ["max_num_seqs=1,1"]}, "given twice"),
        ({"vary": ["speculation=mpt:1"]}, "not one of off"),
        ({"vary": ["watermark"]}, "say which values"),
        ({"keep": ["max_num_sequences"]}, "no such parameter"),
        ({"vary": ["max_num_seqs"], "keep": ["max_num_seqs"]}, "cannot be both"),
        ({"allow_lossy": ["max_num_seqs"]}, "it takes kv_cache_dtype"),
        ({"settings": ["max_num_seqs"]}, "NAME=VALUE"),
        ({"settings": ["max_num_seqs=lots"]}, "takes an integer"),
        ({"settings": ["max_num_seq=3"]}, "did you mean"),
    ],
)
def test_choices_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpaceFileError, match=message):
        parse_choices(stored_arguments("0.32.0"), **options)


def test_front_end_settings_are_taken_apart() -> None:
    engine, front = split_settings(["max_num_seqs=3", "port=8001", "enable_auto_tool_choice=true"], stored_arguments("0.32.0"))
    assert engine == ("max_num_seqs=3",)
    assert front == {"port": 8001, "enable_auto_tool_choice": True}


def test_counters_reopen_and_close() -> None:
    space = build_space(subject(NINE))
    assert "gpu_memory_utilization" not in space
    busy = BaselineFacts(kv_peak=0.93, queued=0.4, filled=0.5)
    full = space.reopen("gpu_memory_utilization", pressures(busy, space)["kv_pressure"])
    assert full["gpu_memory_utilization"].bounds[-1].text == "reopened: the KV cache was 93% full"
    assert not surplus(space, busy)
    idle = BaselineFacts(kv_peak=0.1, queued=0.0, filled=0.0)
    assert not pressures(idle, space)
    assert surplus(space, idle).keys() == {"max_num_seqs", "max_num_batched_tokens"}
    assert "never queued" in surplus(space, idle)["max_num_seqs"].text


def test_an_unknown_shape_leaves_model_knobs_out_and_goes_on() -> None:
    space = build_space(Subject(stored_arguments("0.32.0"), H200))
    assert "max_num_seqs" in space
    assert reasons(space)["moe_backend"] == "the model's shape is not known"
    assert space.checks == ()


def test_seeds_follow_the_rank() -> None:
    ranked = build_space(subject(NINE), rank=lambda config: float(config.get("max_num_seqs", 0)))
    assert ranked.seeds[0].point["max_num_seqs"] == 2048


def test_alternatives_that_were_asked_for_are_tried_first() -> None:
    asked = Choices(vary={"speculation": ("off", "mtp:1", "mtp:4"), "max_num_seqs": (256, 1024)})
    seeds = build_space(subject(NINE), choices=asked, rank=lambda config: -len(config)).seeds
    assert [seed.point["speculation"] for seed in seeds[:2]] == ["mtp:1", "mtp:4"]
    assert all(seed.reason.startswith("asked for by you") for seed in seeds[:2])
    points = [seed.point for seed in seeds]
    assert all(points.count(point) == 1 for point in points), "what a mode file also names is one seed"


def test_lessons_of_an_earlier_study_are_used() -> None:
    space = build_space(subject(NINE))
    bad = space.default_point() | {"attention_backend": "FLASHINFER"}
    learned = Learned().failed(
        bad, space.default_point(), kind="unsupported", detail="Selected backend FLASHINFER is not valid"
    )
    again = build_space(subject(NINE), learned=Learned.from_json(learned.to_json()))
    assert "attention_backend" not in again
    assert "Selected backend FLASHINFER" in reasons(again)["attention_backend"]
