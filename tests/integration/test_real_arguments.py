"""What the installed vLLM says of itself, against what is stored and computed here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asked import read_arguments

from vopt.optimizer import caches
from vopt.optimizer.check import check_command
from vopt.optimizer.command import to_words
from vopt.optimizer.command_reader import parse_command
from vopt.optimizer.engine.arguments import VllmProbe
from vopt.optimizer.errors import EnvironmentLacks
from vopt.search_spaces.arguments import Argument, Arguments, Kind, stored_arguments
from vopt.search_spaces.build import Subject
from vopt.search_spaces.defaults import Gpu
from vopt.search_spaces.model import known_model
from vopt.search_spaces.rules import rule_violations

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def installed() -> Arguments:
    return read_arguments(sys.executable)


@pytest.fixture(scope="module")
def judge() -> Iterator[VllmProbe]:
    with VllmProbe(sys.executable) as asked:
        yield asked


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


@pytest.mark.vllm
def test_the_stored_release_is_what_the_installed_one_says(installed: Arguments) -> None:
    stored = stored_arguments(installed.version)
    if stored.release != installed.release:
        pytest.skip(f"vLLM {installed.version} is not stored")
    assert dict(stored.arguments) == dict(installed.arguments)
    assert stored.hidden == installed.hidden


@pytest.mark.vllm
def test_the_answer_is_kept_and_read_again(tmp_path: Path) -> None:
    first = read_arguments(sys.executable, cache=tmp_path)
    (kept,) = tmp_path.iterdir()
    document = json.loads(kept.read_text())
    kept.write_text(json.dumps({**document, "device": "from the file"}))
    assert read_arguments(sys.executable, cache=tmp_path).device == "from the file"
    kept.write_text("{ truncated")
    assert read_arguments(sys.executable, cache=tmp_path) == first


@pytest.mark.vllm
def test_an_engine_reads_what_asking_learned_of_the_models_class(tmp_path: Path, tiny_model: str) -> None:
    where = caches.asking_environment(tmp_path, bytecode=True)
    with VllmProbe(sys.executable, environment=where) as probe:
        assert probe.ask(tiny_model, {"max_model_len": 512}).accepted
    (learned,) = (tmp_path / "asked" / "modelinfos").iterdir()
    caches.lend_inspections(tmp_path)
    lent = tmp_path / "vllm" / "modelinfos" / learned.name
    assert lent.read_text() == learned.read_text()
    untouched = lent.stat().st_ino  # vLLM replaces the file when it inspects

    engines = caches.engine_environment(tmp_path, cpu_build=True, offline=True)
    with VllmProbe(sys.executable, environment=engines) as probe:
        assert probe.ask(tiny_model, {"max_model_len": 512}).accepted
    assert lent.stat().st_ino == untouched
    assert [path.name for path in lent.parent.iterdir()] == [lent.name]


def sample(argument: Argument) -> list[Any]:
    """Values of this argument that vLLM's parser must read back."""
    if argument.choices and argument.kind is not Kind.LIST:
        return [argument.choices[0], argument.choices[-1]]
    match argument.kind:
        case Kind.BOOL:
            return [True, False]
        case Kind.FLAG:
            return [True]
        case Kind.INT:
            return [7, -1]
        case Kind.FLOAT:
            return [0.5, -1.5e-07]
        case Kind.LIST:
            items = list(argument.choices or {"int": (3, 4), "float": (0.5, 2.0)}.get(argument.element, ("a b", "c")))
            return [items[:1], items[:2]]
        case Kind.COMMA:
            return [[0, 1, "GPU-x"]]
        case Kind.OPTIONAL:
            return [True]
        case Kind.JSON:
            return []  # each has a schema of its own: below
        case Kind.JSON_OR_STR:
            return ["plain text", {"a": [1, {"b": None}], "c d": "-x"}]
        case _:
            return ["plain", "--dashes and 'quotes'", "/a path/with.dots=1"] if not isinstance(argument.default, int) else [2]


CHECKED_BY_VALUE = {"model", "hf_token"}  # the model is positional, a token is no value to pass
DATACLASSES = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    "override_generation_config": {"temperature": 0.5, "stop": ["a b", "--c"]},
    "limit_mm_per_prompt": {"image": 0, "video": 0},
}


@pytest.mark.vllm
def test_vllms_own_parser_reads_back_every_argument(installed: Arguments, judge: VllmProbe) -> None:
    wrong = []
    cases = [
        (argument.name, value)
        for argument in installed.arguments.values()
        if not argument.front_end and argument.name not in CHECKED_BY_VALUE
        for value in sample(argument)
    ] + list(DATACLASSES.items())
    for name, value in cases:
        words = to_words({name: value}, installed)
        given, refusal = judge.read_back(words)
        if given is None:
            wrong.append(f"{words}: refused: {refusal}")
        elif value != installed[name].default and not alike(given.get(name), value):
            wrong.append(f"{words}: {given.get(name)!r}, not {value!r}")
        ours = parse_command(["vllm", "serve", "m", *words], installed).config
        if dict(ours) != {name: value}:
            wrong.append(f"{words}: read here as {dict(ours)!r}")
    assert wrong == []
    assert len(cases) > 300


@pytest.mark.vllm
def test_the_command_that_takes_a_guides_place_is_accepted(installed: Arguments, judge: VllmProbe) -> None:
    guide = (
        "--model Qwen-14B --max-num-seqs 256 --max-model-len 8192 --gpu-memory-utilization 0.95 --enable-prefix-caching "
        "--scheduling-policy lof --num-scheduler-steps 8 --speculative-model Qwen-0.5B --num-speculative-tokens 8"
    )
    report = check_command(guide, Subject(installed, Gpu("NVIDIA H200", 150754820096), known_model("Qwen/Qwen3-14B"), 1))
    assert report.accepted is not None
    assert report.accepted[:3] == ("vllm", "serve", "Qwen-14B")
    given, refusal = judge.read_back(report.accepted[3:])
    assert given is not None, refusal
    assert given["max_num_seqs"] == 256
    assert judge.read_back(["--num-scheduler-steps", "8"])[0] is None


def alike(theirs: Any, ours: Any) -> bool:
    """vLLM keeps a level as text, and completes what it knows the fields of."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return all(alike(theirs.get(key), value) for key, value in ours.items())
    return bool(theirs == ours or str(theirs) == str(ours))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({}, None),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "tokens_below_sequences"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_num_seqs": 4}, "tokens_below_length"),
        ({"max_num_active_seqs": 64, "max_num_seqs": 8}, "active_above_sequences"),
        ({"long_prefill_token_threshold": 4096}, "long_prefill_above_length"),
        ({"gpu_memory_utilization": 1.2}, "utilization_out_of_range"),
        ({"stream_interval": 0}, "size_below_one"),
        ({"max_num_seqs": -3}, "size_below_one"),
        ({"tensor_parallel_size": 0}, "size_below_one"),
        ({"block_size": 0}, "size_below_one"),
        ({"max_model_len": -5}, "size_below_one"),
        ({"max_model_len": 4096}, "length_above_model"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 64}, None),
        ({"mamba_block_size": 64, "enable_prefix_caching": False}, "state_block_without_caching"),
        ({"cudagraph_capture_sizes": [1, 2], "compilation_config": {"cudagraph_capture_sizes": [1, 2]}}, "capture_given_twice"),
        ({"speculative_config": {"method": "ngram"}}, "tokens_missing"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "no_mtp_layers"),
        ({"enable_expert_parallel": True}, "expert_parallel_on_dense"),
        ({"numa_bind_nodes": [0]}, "numa_without_bind"),
        ({"per_request_spec_decode_metrics": "summary"}, "metrics_without_speculation"),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_length": 4.0,
                }
            },
            "synthetic_acceptance",
        ),
        ({"scheduling_policy": "lof"}, "unknown_policy"),
    ],
)
def test_rules_agree_with_vllm(judge: VllmProbe, tiny_model: str, config: dict[str, Any], rule: str | None) -> None:
    facts = {
        "version": "0.32.0",
        "gpus": 1,
        "resolved": {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "max_model_len": 2048, "enable_prefix_caching": True},
        "model": {
            "q_heads": 4,
            "kv_heads": 2,
            "hybrid": False,
            "moe": False,
            "mla": False,
            "mtp_layers": 0,
            "quantization": None,
            "dtype": "bfloat16",
            "max_position": 2048,
        },
    }
    verdict = judge.ask(tiny_model, {"skip_tokenizer_init": True, **config})
    ours = [violation.rule for violation in rule_violations(config, facts)]
    assert verdict.accepted is (rule is None), (verdict.kind, verdict.message)
    assert ours == ([rule] if rule else [])
    if verdict.accepted:
        assert verdict.resolved["max_num_seqs"] == config.get("max_num_seqs", 128)
    else:
        assert verdict.reason


def test_an_interpreter_without_vllm_is_named(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    fake.chmod(0o755)
    with pytest.raises(EnvironmentLacks, match="has no vLLM"):
        read_arguments(str(fake))
    with pytest.raises(EnvironmentLacks, match="there is no interpreter"):
        read_arguments(str(tmp_path / "absent"))
