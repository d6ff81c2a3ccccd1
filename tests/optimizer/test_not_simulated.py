"""What a simulation leaves out or assumes is said by bench, search and check; quantization is neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vopt.optimizer.cli import app
from vopt.optimizer.engine.simulated import MODELLED
from vopt.optimizer.not_simulated import PARTLY, WITHOUT_COST, assumptions, left_out
from vopt.search_spaces.arguments import stored_arguments
from vopt.search_spaces.model import known_model

DENSE, HYBRID = "Qwen/Qwen3-8B", "Qwen/Qwen3.5-9B"
GIVEN = ("--attention-backend", "FLASHINFER")
SMALL = ("--concurrency", "8", "--window", "5")
SEARCH = ("--goal", "throughput", "--trials", "2", "--rounds", "0", "--soak", "0", *SMALL)
MTP = '{"method":"mtp","num_speculative_tokens":1}'


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.stderr
    return done.stdout


def notes(*words: str) -> list[str]:
    document: dict[str, Any] = json.loads(run(*words))
    found: list[str] = document["vopt"]["notes"] if "vopt" in document else document["notes"]
    return found


def bench(model: str, *flags: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run("bench", "--model", model, "--simulate", "h100", *SMALL, "--json", "--", *flags))
    return document


@pytest.mark.parametrize("verb", ["bench", "search", "check"])
def test_every_verb_names_what_the_simulation_does_not_see(verb: str) -> None:
    command = ("vllm", "serve", DENSE, *GIVEN, "--max-num-seqs", "300", "--seed", "3", "--api-server-count", "2")
    if verb == "check":
        text = run("space", "--simulate", "h200", "--check", f"VLLM_USE_DEEP_GEMM=0 {' '.join(command)}")
        assert "not simulated: --attention-backend, --api-server-count, VLLM_USE_DEEP_GEMM:" in text
        return
    words = ("bench", *SMALL) if verb == "bench" else ("search", *SEARCH)
    document = json.loads(run(*words, "--simulate", "h200", "--json", "--", *command))
    found = document["vopt"]["notes"] if verb == "bench" else document["notes"]
    assert [note for note in found if note.startswith("not simulated: --attention-backend, --api-server-count:")]
    if verb == "search":
        assert "not simulated" in run("show")
        assert "not simulated" in run("export")
        run("report", "-o", "page.html")
        assert "not simulated" in Path("page.html").read_text(encoding="utf-8")


def test_nothing_is_said_of_what_is_simulated_or_costs_nothing() -> None:
    assert not left_out({"max_num_seqs": 8, "seed": 1, "quantization": "fp8", "dtype": "bfloat16"}, shape=known_model(DENSE))
    assert left_out({"dtype": "float16"}, shape=known_model(DENSE))
    assert left_out({"quantization": "humming"}, shape=known_model(DENSE)) == (
        "not simulated: --quantization humming: changes nothing in these figures, and may change much on a GPU",
    )
    assert left_out({"compilation_config": {"level": 3}}) == (
        "of --compilation-config the simulation sees whether there are CUDA graphs and no more",
    )
    names = set(stored_arguments("0.33.0").arguments)
    assert names >= MODELLED | PARTLY.keys()
    assert not WITHOUT_COST & (MODELLED | PARTLY.keys())


def test_the_acceptance_that_a_simulation_assumes_is_said() -> None:
    command = ("--", "vllm", "serve", HYBRID, "--speculative-config", MTP)
    (said,) = [note for note in notes("bench", *SMALL, "--simulate", "h200", "--json", *command) if "assumed" in note]
    assert "mtp" in said
    assert "0.75" in said
    assert "1.75 tokens a step" in said
    stated = {"method": "mtp", "num_speculative_tokens": 1, "synthetic_acceptance_length": 1.5}
    assert not assumptions({"speculative_config": stated}, known_model(HYBRID))
    assert not assumptions({}, known_model(HYBRID))


def test_an_answer_with_speculation_says_what_it_assumes() -> None:
    found = notes("search", *SEARCH, "--simulate", "h200", "--json", "--", "vllm", "serve", HYBRID, "--speculative-config", MTP)
    assert sum("assumed, not measured" in note for note in found) == 1


def test_eight_bit_weights_are_more_cache_and_more_speed() -> None:
    plain, eight = bench("Qwen/Qwen3-14B"), bench("Qwen/Qwen3-14B", "--quantization", "fp8")
    assert eight["vopt"]["engine"]["kv_cache_tokens"] > 1.2 * plain["vopt"]["engine"]["kv_cache_tokens"]
    assert eight["vopt"]["metrics"]["mean_tpot_s"] < 0.75 * plain["vopt"]["metrics"]["mean_tpot_s"]
    assert not any("simulated" in note for note in eight["vopt"]["notes"])


@pytest.mark.parametrize("flags", ["--quantization awq", "--quantization compressed-tensors"])
def test_a_method_without_its_checkpoint_is_refused_by_bench_and_check(flags: str) -> None:
    done = CliRunner().invoke(app, ["bench", "--model", DENSE, "--simulate", "h200", *SMALL, "--", *flags.split()])
    assert done.exit_code == 4
    assert "invalid_config during start" in done.stderr
    said = run("space", "--simulate", "h200", "--check", f"vllm serve {DENSE} {flags}", code=6)
    assert "quantization_without_checkpoint" in said
    assert f"\n  vllm serve {DENSE}\n" in f"{said}\n"


def test_a_checkpoint_that_only_fits_in_eight_bits_is_checked_so() -> None:
    command = "vllm serve meta-llama/Llama-3.1-70B-Instruct --max-model-len 8192"
    assert "cannot start" in run("space", "--simulate", "h200", "--check", command, code=6)
    assert "KV cache" in run("space", "--simulate", "h200", "--check", f"{command} --quantization fp8")


MOE = "Qwen/Qwen3.5-35B-A3B-FP8"
KEPT = [word for name in ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization") for word in ("--keep", name)]
CROWDED = (
    *("search", "--goal", "throughput", "--model", MOE, "--simulate", "h200", "--json", "--trials", "3", "--rounds", "0"),
    *("--soak", "0", "--concurrency", "512", "--window", "10", "--no-guard", "--mode", "balanced"),
    *("--set", f"speculative_config={MTP}", *KEPT),
)


def test_a_command_without_prefix_caching_says_what_that_rests_on() -> None:
    """Cached states of a hybrid take room from requests, so off is faster where nothing is shared, and only there."""
    answer = json.loads(run(*CROWDED, "--vary", "enable_prefix_caching"))
    assert "--no-enable-prefix-caching" in answer["argv"]
    (said,) = [note for note in answer["notes"] if note.startswith("prefix caching is off in this command")]
    assert "declared no reuse" in said
    assert "vopt workload --from-metrics URL" in said
    assert any(note.startswith("assumed, not measured") for note in answer["notes"]), "what --set fixes is in the winner too"
    run("report", "-o", "page.html")
    for text in (run("show"), run("export"), Path("page.html").read_text(encoding="utf-8")):
        assert "prefix caching is off in this command" in " ".join(text.split())


def test_a_silent_workload_leaves_prefix_caching_on_and_names_it() -> None:
    answer = json.loads(run(*CROWDED))
    assert "--no-enable-prefix-caching" not in answer["argv"]
    assert any(note.startswith("enable_prefix_caching was not searched: the workload says nothing") for note in answer["notes"])
