"""``vopt space --check`` and the report of a space, as people read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vopt.optimizer.check import FlagStatus, check_command, render_check
from vopt.optimizer.command import shell_line
from vopt.optimizer.command_reader import parse_command
from vopt.optimizer.engine.hardware import hardware
from vopt.optimizer.errors import UsageError
from vopt.optimizer.options import CheckedSpaceOptions
from vopt.optimizer.space_of import check_command as check_given
from vopt.optimizer.space_report import space_document, space_text
from vopt.search_spaces.arguments import stored_arguments, stored_versions
from vopt.search_spaces.build import Subject, build_space
from vopt.search_spaces.defaults import Gpu
from vopt.search_spaces.model import known_model

GOLDEN = Path(__file__).parents[1] / "golden"
H200 = Gpu("NVIDIA H200", 150754820096)
GUIDE = (
    "--model Qwen-14B --max-num-seqs 256 --max-model-len 8192 --gpu-memory-utilization 0.95 --enable-prefix-caching "
    "--scheduling-policy lof --num-scheduler-steps 8 --speculative-model Qwen-0.5B --num-speculative-tokens 8"
)


def subject(version: str = "0.32.0", model: str | None = "Qwen/Qwen3-14B", gpus: int = 1) -> Subject:
    return Subject(stored_arguments(version), H200, known_model(model) if model else None, gpus)


def test_the_guides_command_is_taken_apart() -> None:
    text = render_check(check_command(GUIDE, subject()))
    assert text == (GOLDEN / "check_guide.txt").read_text()


@pytest.mark.parametrize("version", stored_versions())
def test_the_guides_command_cannot_start_and_its_successor_can(version: str) -> None:
    report = check_command(GUIDE, subject(version))
    assert report.exit_code == 6
    assert [finding.status for finding in report.findings][-4:] == [
        FlagStatus.INVALID,
        FlagStatus.RETIRED,
        FlagStatus.RETIRED,
        FlagStatus.RETIRED,
    ]
    assert report.accepted is not None
    again = check_command(report.accepted, subject(version))
    assert again.exit_code in (0, 1)
    config = parse_command(report.accepted, stored_arguments(version)).config
    assert config["speculative_config"] == {"method": "draft_model", "model": "Qwen-0.5B", "num_speculative_tokens": 8}


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("vllm serve Qwen/Qwen3-14B --max-num-seqs 512", 0),
        ("vllm serve Qwen/Qwen3-14B --max-num-seqs 1024", 1),
        ("VLLM_USE_V1=1 vllm serve Qwen/Qwen3-14B", 1),
        ("vllm serve Qwen/Qwen3-14B --kv-offloading-backend lmcache --kv-offloading-size 8", 0),
        ("vllm serve Qwen/Qwen3-14B --eplb-config '{}'", 1),
        ("vllm serve Qwen/Qwen3-14B --swap-space 4", 6),
        ("vllm serve Qwen/Qwen3-14B --max-num-seqs 512 --max-num-batched-tokens 256", 6),
        ("vllm serve Qwen/Qwen3-14B --gpu-memory-utilization 0.15", 6),
        ("vllm serve Qwen/Qwen3-14B --max-model-len 999999", 6),
        ("vllm serve --max-num-seqs 512", 1),
    ],
)
def test_exit_codes(command: str, code: int) -> None:
    assert check_command(command, subject()).exit_code == code


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("version", stored_versions())
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "--speculative-model [ngram] --num-speculative-tokens 5 --ngram-prompt-lookup-max 4",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
        ),
        (
            "--num-speculative-tokens 5 --ngram-prompt-lookup-max 4 --speculative-model ngram",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
        ),
        (
            "--ngram-prompt-lookup-max 4 --num-speculative-tokens 5",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
        ),
        (
            "--num-speculative-tokens 5 --speculative-model small/draft",
            {"speculative_config": {"method": "draft_model", "model": "small/draft", "num_speculative_tokens": 5}},
        ),
        ("--guided-decoding-backend outlines", {"structured_outputs_config": {"backend": "outlines"}}),
        (f"--max-model-len 65536 --rope-scaling '{json.dumps(YARN)}'", {"hf_overrides": {"rope_parameters": YARN}}),
        ("--rope-theta 1000000", {"hf_overrides": {"rope_theta": 1000000}}),
        ("--enable-chunked-prefill=False --max-model-len 4096", {"enable_chunked_prefill": False}),
        ("--no-enable-prefix-caching=false", {"enable_prefix_caching": True}),
        ("--enforce-eager=true", {"enforce_eager": True}),
    ],
)
def test_old_words_become_todays(version: str, old: str, new: dict[str, object]) -> None:
    """What was meant is kept: nothing that has a modern form is dropped, and the context is not cut for it."""
    report = check_command(f"vllm serve Qwen/Qwen3-14B {old}", subject(version))
    assert report.exit_code == 6
    assert not any("dropped" in change for change in report.changes), report.changes
    assert report.accepted is not None
    config = parse_command(report.accepted, stored_arguments(version)).config
    assert new.items() <= config.items(), config
    if "65536" in old:
        assert config["max_model_len"] == 65536
    assert check_command(report.accepted, subject(version)).exit_code in (0, 1)


def test_a_broken_combination_is_repaired_in_the_accepted_command() -> None:
    report = check_command("vllm serve m --max-num-seqs 512 --max-num-batched-tokens 256 --port 80", subject())
    assert report.accepted == ("vllm", "serve", "m", "--max-num-batched-tokens", "256", "--max-num-seqs", "256", "--port", "80")
    assert report.changes == ("max_num_seqs: 512 -> 256 (max_num_batched_tokens 256 is below max_num_seqs 512)",)


H100 = hardware("h100").gpu


def close(gpus: int = 1) -> Subject:
    """Qwen3-32B with all of its context: 10 GiB of cache are needed, about 9 are left."""
    return Subject(stored_arguments("0.33.0"), H100, known_model("Qwen/Qwen3-32B"), gpus)


def test_memory_that_is_close_is_no_fine_command() -> None:
    report = check_command("vllm serve Qwen/Qwen3-32B", close())
    assert report.exit_code == 1
    assert "It may not start." in render_check(report)
    assert "about 2" in report.memory


def test_a_simulated_machine_is_judged_by_the_estimate_that_its_engines_have() -> None:
    report = check_command("vllm serve Qwen/Qwen3-32B", close(), simulated=True)
    assert report.exit_code == 6
    assert report.accepted == ("vllm", "serve", "Qwen/Qwen3-32B", "--gpu-memory-utilization", "0.94")
    short = check_command("vllm serve Qwen/Qwen3-32B --max-model-len 32768", close(), simulated=True)
    assert short.exit_code == 0
    wide = check_command("vllm serve Qwen/Qwen3-32B", close(2), simulated=True)
    assert wide.accepted == ("vllm", "serve", "Qwen/Qwen3-32B", "--tensor-parallel-size", "2")


def test_an_unknown_model_is_said_and_the_rest_goes_on() -> None:
    report = check_command("vllm serve org/own --enforce-eagr", subject(model=None))
    assert "not known" in report.memory
    assert "did you mean --enforce-eager?" in report.findings[0].message


def test_vllms_own_objection_wins() -> None:
    report = check_command("vllm serve m", subject(), ask=lambda model, config: f"ValueError: {model} is refused")
    assert report.exit_code == 6
    assert "ValueError: m is refused" in render_check(report)
    assert report.to_json()["engine"] == "ValueError: m is refused"


def test_the_report_of_a_space() -> None:
    space = build_space(subject(model="Qwen/Qwen3.5-9B"))
    assert space_text(space) == (GOLDEN / "space_qwen3.5-9b.txt").read_text()
    document = space_document(space)
    assert document["format_version"] == 1
    assert document["points"] == space.size


@pytest.mark.parametrize(
    ("flags", "status", "words", "left"),
    [
        ("--max-num-batched-tokens 8k", "good", "known: 8000 (without it: 8192)", "--max-num-batched-tokens 8000"),
        ("--max-num-seqs 1 --max-num-seqs 2", "no_effect", "the last one wins", "--max-num-seqs 2"),
        ("--cuda-graph-sizes 1 2 4", "retired", "renamed", "--cudagraph-capture-sizes 1 2 4"),
        ("--quantization gguf", "invalid", "gone since 0.24.0", ""),
        ("--load-format gguf", "invalid", "gone since 0.24.0", ""),
        ("--gpu-memory-utilization 1.5", "good", "known", "--gpu-memory-utilization 0.92"),
        ("--max-num-seqs 0", "good", "known", ""),
        ("--task generate", "retired", "--runner", ""),
        ("--kv-cache-dtype fp9", "invalid", "takes auto", ""),
        ("--speculative-config {method:ngram}", "invalid", "not valid JSON", ""),
        ("--hf-overrides foo --rope-theta 1e6", "good", "known", "--hf-overrides '{\"rope_theta\":1000000.0}'"),
        ("--rope-theta NaN", "retired", "part of the model", '--hf-overrides \'{"rope_theta":"NaN"}\''),
        ("--compilation-config.cudagraph_mode FULL", "good", "known", '--compilation-config \'{"cudagraph_mode":"FULL"}\''),
    ],
)
def test_what_is_said_of_one_flag_and_what_is_left_of_it(flags: str, status: str, words: str, left: str) -> None:
    report = check_command(f"vllm serve Qwen/Qwen3-8B {flags}", subject(model="Qwen/Qwen3-8B"))
    assert report.findings[0].status.value == status
    assert words in report.findings[0].message
    assert report.accepted is not None
    assert shell_line(report.accepted) == f"vllm serve Qwen/Qwen3-8B {left}".strip()
    again = check_command(report.accepted, subject(model="Qwen/Qwen3-8B"))
    assert again.exit_code <= 1, "what is proposed is accepted"


SCRIPT = """#!/usr/bin/env bash
set -euo pipefail
# vllm serve an/older-one
export CUDA_VISIBLE_DEVICES=0
exec vllm serve Qwen/Qwen3-8B \\
  --max-num-seqs 64 \\
  --port 8000 > log.txt 2>&1
"""


@pytest.mark.parametrize("script", [SCRIPT, (GOLDEN / "export-shell.sh").read_text()])
def test_a_script_is_checked_by_its_one_command(tmp_path: Path, script: str) -> None:
    """Ours included, whose last word are the script's own arguments."""
    path = tmp_path / "launch.sh"
    path.write_text(script)
    answer = check_given(CheckedSpaceOptions(check=str(path), simulate="h200"))
    assert answer.exit_code == 0, answer.text
    path.write_text(script + "vllm serve another\n")
    with pytest.raises(UsageError, match="holds 2 'vllm serve' commands"):
        check_given(CheckedSpaceOptions(check=str(path), simulate="h200"))
