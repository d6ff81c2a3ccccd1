"""``vopt space`` of real models on real GPUs with the arguments of every stored release, as it is typed and printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vopt.optimizer.options import CheckedSpaceOptions
from vopt.optimizer.space_of import describe_space
from vopt.optimizer.space_report import left_out, space_text
from vopt.search_spaces.arguments import stored_versions
from vopt.search_spaces.space import SearchSpace

GOLDEN = Path(__file__).parents[1] / "golden"
NINE, MOE = "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B-FP8"
LLAMA, MLA = "meta-llama/Llama-3.3-70B-Instruct", "deepseek-ai/DeepSeek-V3"


def asked(model: str, gpus: int, version: str) -> CheckedSpaceOptions:
    return CheckedSpaceOptions(model=model, simulate="h200", gpus=str(gpus), vllm_version=version)


@pytest.mark.parametrize("version", stored_versions())
@pytest.mark.parametrize(("model", "gpus"), [(NINE, 1), (MOE, 1), (LLAMA, 1), (LLAMA, 2), (LLAMA, 4), (MLA, 8)])
def test_every_combination_builds_prints_and_is_read_back(model: str, gpus: int, version: str) -> None:
    answer = describe_space(asked(model, gpus, version))
    assert f"vLLM {version}" in answer.text.splitlines()[0]
    assert f"{gpus} x NVIDIA H200" in answer.text.splitlines()[0]
    document = json.loads(json.dumps(answer.document))
    space = SearchSpace.from_json(document)
    assert space.digest == document["digest"]
    assert all(not space.violations(seed.point) for seed in space.seeds)
    if gpus > 1:
        assert max(space["tensor_parallel_size"].values) == gpus
    if (model, gpus) == (LLAMA, 1):
        assert "vLLM's defaults cannot start here" in answer.text  # 131.4 GiB of weights, 129.2 GiB may be used


@pytest.mark.parametrize(("model", "gpus", "version"), [(MOE, 1, "0.33.0"), (LLAMA, 4, "0.22.1")])
def test_what_is_printed(model: str, gpus: int, version: str) -> None:
    name = f"space_{model.rsplit('/', 1)[-1].lower()}-{gpus}-{version}.txt"
    assert describe_space(asked(model, gpus, version)).text == (GOLDEN / name).read_text()


def test_what_a_workload_cannot_show_is_named_with_its_reason_and_the_rest_is_counted() -> None:
    made = SearchSpace.from_json(describe_space(asked("Qwen/Qwen3-8B", 1, "0.33.0")).document)
    (said,) = left_out(made)
    for entry in made.inactive:
        assert (f"{entry.name} ({entry.reason})" in said) is (entry.reopens_on is not None)
    assert f"and {sum(entry.reopens_on is None for entry in made.inactive)} more, all in vopt space" in said


def test_a_users_rules_are_printed_with_their_reason() -> None:
    made = SearchSpace.from_json(describe_space(asked("Qwen/Qwen3-8B", 1, "0.33.0")).document)
    rules = [{"conditions": {"max_num_seqs": 512, "max_num_batched_tokens": {"at_most": 4096}}, "why": "too small a step"}]
    text = space_text(replace(made, facts={**made.facts, "forbidden": rules}))
    assert "never together\n  max_num_seqs = 512, max_num_batched_tokens at most 4096: too small a step\n" in text
