"""``vopt bench --study``: a simulated study, measured again through the command line; and the judgement about it."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vopt.optimizer import bench_study
from vopt.optimizer.bench_duel import Answer, find_duel, judge_duel
from vopt.optimizer.check import FlagStatus, modernised
from vopt.optimizer.cli import app
from vopt.optimizer.errors import UsageError
from vopt.optimizer.evaluate import Evaluator
from vopt.optimizer.raw_records import SECOND_RECORDS
from vopt.optimizer.report.raw import read_records
from vopt.optimizer.resumption import stored_variables
from vopt.optimizer.study import read_study
from vopt.optimizer.trial import TrialSpec
from vopt.search_spaces.arguments import stored_arguments

SEARCH = (
    *("search", "--goal", "throughput", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--trials", "4", "--soak", "0"),
    *("--concurrency", "64", "--window", "5s", "--quiet"),
)


def vopt(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two studies: ``confirmed`` in one round, and ``quick``, unconfirmed, with a retired argument."""
    directory = tmp_path_factory.mktemp("studies")
    storage = ("--storage", f"sqlite:///{directory}/studies.db")
    assert vopt(*SEARCH, *storage, "--study", "confirmed", "--rounds", "1").exit_code == 0
    old = ("--vllm-version", "0.22.1", "--set", "max_num_partial_prefills=1")
    slow = ("--", "vllm", "serve", "Qwen/Qwen3-8B", "--max-num-seqs", "16")
    result = vopt(*SEARCH, *storage, "--study", "quick", "--rounds", "0", "--trials", "2", "--no-guard", *old, *slow)
    assert result.exit_code == 0, result.output
    return directory


def again(place: Path, *words: str) -> Result:
    return vopt("bench", "--storage", f"sqlite:///{place}/studies.db", *words)


def test_a_recommendation_that_holds(place: Path) -> None:
    result = again(place, "--study", "confirmed", "--repeat", "2", "--gate", "8%", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["study"], document["holds"], document["gate_failed"], document["simulated"]) == (
        "confirmed",
        True,
        False,
        True,
    )
    assert document["changed"] == {}
    assert [len(arm["starts"]) for arm in document["arms"].values()] == [2, 2]
    assert document["gain"]["low"] < document["gain"]["ratio"] < document["gain"]["high"]
    for arm in document["arms"].values():
        now = [start["metrics"]["tokens_per_s"] for start in arm["starts"]]
        assert now == pytest.approx([arm["then"]["tokens_per_s"]] * 2, rel=0.08)
    assert len(read_study(f"sqlite:///{place}/studies.db", "confirmed").trials) == 3 + 2, "the study itself is left alone"


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_every_note_on_the_studys_command_is_said_again(
    as_json: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(
        "export CUDA_VISIBLE_DEVICES=1\ncd /srv\nvllm serve Qwen/Qwen3-8B --port 8001 --max-num-seqs 16\n"
    )
    words = [word for word in SEARCH if word not in ("--model", "Qwen/Qwen3-8B")]
    done = vopt(*words, "--from", "run.sh", "--trials", "2", "--rounds", "0", "--no-guard")
    assert done.exit_code == 0, done.output
    result = vopt("bench", "--study", "qwen3", *as_json)
    assert result.exit_code == 0, result.output
    left_out = ("cd /srv", "CUDA_VISIBLE_DEVICES of the command is left out")
    for said in left_out:
        assert said in result.stderr
    said_too = "for the server in front of the engine"
    assert (said_too in result.stderr) is not bool(as_json)
    if as_json:
        notes = json.loads(result.stdout)["notes"]
        assert all(any(said in note for note in notes) for said in (*left_out, said_too))
        assert not [note for note in notes if note.startswith("asking")]


def test_it_is_measured_under_the_studys_own_load(place: Path) -> None:
    stored = read_study(f"sqlite:///{place}/studies.db", "confirmed")
    measured = next(trial for trial in stored.trials if trial.label == "confirm-1-baseline")
    before = {record.index: record for record in read_records(Path(measured.directory))}
    document = json.loads(again(place, "--study", "confirmed", "--json").stdout)
    for arm in document["arms"].values():
        now = {record.index: record for record in read_records(Path(arm["starts"][0]["directory"]))}
        both = set(now) & set(before)
        assert len(both) > 200
        for index in both:
            assert now[index].prompt_tokens == before[index].prompt_tokens
            assert now[index].requested_output_tokens == before[index].requested_output_tokens


def test_served_starts_are_loaded_as_the_study_settled_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its served baseline sustained less than the engine alone: at the rate of the search every arm would be overloaded."""
    stored = read_study(f"sqlite:///{place}/studies.db", "confirmed")
    at_its_rate = tuple(
        replace(
            trial, served=True, environment={**trial.environment, "load_plan": {**trial.environment["load_plan"], "rate": 3.0}}
        )
        if trial.arm is not None
        else trial
        for trial in stored.trials
    )
    monkeypatch.setattr(bench_study, "read_study", lambda *args, **more: replace(stored, trials=at_its_rate))
    seen: list[Evaluator] = []
    real = bench_study._measure

    def watched(evaluate: Evaluator, *others: Any) -> Any:
        seen.append(evaluate)
        return real(evaluate, *others)

    monkeypatch.setattr(bench_study, "_measure", watched)
    assert again(place, "--study", "confirmed").exit_code == 0
    (evaluator,) = seen
    assert evaluator.served_load.rate == 3.0
    assert evaluator.served_load.stall_s is not None


def test_a_study_of_two_goals_is_measured_in_both_loads(tmp_path: Path) -> None:
    """Throughput in the closed loop, latency in the open one at the study's own rate, and their balance decides."""
    storage = ("--storage", f"sqlite:///{tmp_path}/studies.db")
    budget = ("--study", "both", "--rounds", "0", "--trials", "2")
    slow = ("--", "vllm", "serve", "Qwen/Qwen3-8B", "--max-num-seqs", "16")
    done = vopt(*SEARCH, "--goal", "latency", *storage, *budget, *slow)
    assert done.exit_code == 0, done.output
    result = again(tmp_path, "--study", "both", "--gate", "8%", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["metric"], document["holds"]) == ("balance", True)
    rates = {trial.environment["second_load_plan"]["rate"] for trial in read_study(storage[1], "both").trials}
    for arm in document["arms"].values():
        for metric in ("balance", "tokens_per_s", "mean_e2e_s"):
            now = [start["metrics"][metric] for start in arm["starts"]]
            assert now == pytest.approx([arm["then"][metric]], rel=0.25), (
                metric
            )  # 16 at once and a queue: noisy in the open loop
        with gzip.open(Path(arm["starts"][0]["directory"]) / SECOND_RECORDS, "rt") as lines:
            due = [json.loads(line)["scheduled_s"] for line in lines]
        assert [len(due) / (max(due) - min(due))] == pytest.approx(list(rates), rel=0.2)


def test_a_gate_of_nothing_fails_with_its_exit_code(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any) -> Answer:
        return replace(judge_duel(*args), holds=False, reason="it has lost 9 %")

    monkeypatch.setattr("vopt.optimizer.bench_study.judge_duel", lost)
    gated, free = (again(place, "--study", "confirmed", *more) for more in (["--gate", "3%"], []))
    assert (gated.exit_code, free.exit_code) == (5, 0), gated.output
    assert "does not hold any more: it has lost 9 %" in gated.stdout
    assert "no interval from one start each" in gated.stdout


def test_retired_arguments_are_named_with_what_to_write_today(place: Path) -> None:
    result = again(place, "--study", "quick", "--vllm-version", "0.33.0")
    assert result.exit_code == 0, result.output
    assert "Retired: --max-num-partial-prefills 1: gone since 0.27.0" in result.stdout
    assert "0.22.1 -> 0.33.0" in result.stdout
    assert "winner against baseline" in result.stdout
    assert "partial" not in result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "words", [("--concurrency", "3"), ("--model", "m"), ("--slo", "ttft_s<=1"), ("--", "--max-num-seqs", "3")]
)
def test_what_the_study_fixes_cannot_be_given(place: Path, words: tuple[str, ...]) -> None:
    result = again(place, "--study", "confirmed", *words)
    assert result.exit_code == 2
    assert "the study fixes it" in result.stderr


def test_engines_get_the_variables_that_the_studys_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its command and of the shell of that day, and those that belong to an arm."""
    storage = ("--storage", f"sqlite:///{tmp_path}/studies.db", "--data-dir", str(tmp_path))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_MARLIN_USE_ATOMIC_ADD", "1")
    with_variable = ("--set", "env:VLLM_USE_V2_MODEL_RUNNER=0", "--set", "load_format=dummy")
    made = vopt(*SEARCH, *storage, "--study", "own", "--rounds", "0", *with_variable)
    assert made.exit_code == 0, made.output
    monkeypatch.delenv("VLLM_MARLIN_USE_ATOMIC_ADD")
    specs: list[TrialSpec] = []
    real = bench_study.opener

    def watched(kind: str, subject: Any) -> Any:
        open_session = real(kind, subject)
        return lambda spec, served: specs.append(spec) or open_session(spec, served)

    monkeypatch.setattr(bench_study, "opener", watched)
    result = vopt("bench", *storage[:2], "--study", "own", "--repeat", "1")
    assert result.exit_code == 0, result.output
    assert len(specs) == 2
    for spec in specs:
        assert spec.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        assert spec.environment["VLLM_MARLIN_USE_ATOMIC_ADD"] == "1"
        assert not any(name.startswith("env:") for name in spec.arguments)


def test_a_secret_that_the_studys_engines_had_must_be_there_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = read_study(f"sqlite:///{place}/studies.db", "confirmed")
    environment = {**record.setup["environment"], "variables": {"VLLM_SOME_KEY": "[removed]", "VLLM_PLAIN": "1"}}
    changed = replace(record, setup={**record.setup, "environment": environment})
    with pytest.raises(UsageError, match="VLLM_SOME_KEY, a secret that is not stored") as raised:
        stored_variables(changed)
    assert "export VLLM_SOME_KEY=" in (raised.value.hint or "")
    monkeypatch.setenv("VLLM_SOME_KEY", "hidden")
    assert stored_variables(changed) == {"VLLM_PLAIN": "1"}


def test_what_a_search_decides_itself_is_not_taken_from_the_studys_shell(place: Path) -> None:
    """Variables of a specification win over those of every engine start, so these would come back over ours."""
    record = read_study(f"sqlite:///{place}/studies.db", "confirmed")
    ours = {
        "VLLM_CACHE_ROOT": "/elsewhere",
        "TRITON_CACHE_DIR": "/elsewhere",
        "VLLM_HOST_IP": "0.0.0.0",
        "VLLM_PORT": "8000",
        "VLLM_ENABLE_STARTUP_PLAN": "1",
        "VLLM_API_KEY": "[removed]",
        "CUDA_VISIBLE_DEVICES": "3",
        "HF_HUB_OFFLINE": "0",
        "VLLM_NO_USAGE_STATS": "0",
        "VLLM_ENGINE_READY_TIMEOUT_S": "5",
    }
    changed = replace(record, setup={**record.setup, "environment": {"variables": {**ours, "VLLM_USE_DEEP_GEMM": "0"}}})
    assert stored_variables(changed) == {"VLLM_USE_DEEP_GEMM": "0"}


def test_no_such_study(place: Path) -> None:
    assert again(place, "--study", "nobody").exit_code == 2
    assert vopt("bench", "--study", "x", "--gate", "150%").exit_code == 2


def test_a_workload_that_changed_is_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ['{"prompt_tokens": 100, "output_tokens": 20}'] * 64
    Path("mine.jsonl").write_text("\n".join(lines))
    words = [*SEARCH, "--workload", "mine.jsonl", "--trials", "2", "--rounds", "0"]
    assert vopt(*words, "--", "vllm", "serve", "Qwen/Qwen3-8B", "--max-num-seqs", "16").exit_code == 0
    Path("mine.jsonl").write_text("\n".join([*lines, '{"prompt_tokens": 900, "output_tokens": 9}']))
    result = vopt("bench", "--study", "qwen3")
    assert result.exit_code == 2, result.output
    assert "is not the one that" in result.stderr


def test_a_study_without_an_answer(place: Path) -> None:
    record = read_study(f"sqlite:///{place}/studies.db", "confirmed")
    with pytest.raises(UsageError, match="no answer yet"):
        find_duel(replace(record, recommendation=None))


def test_modern_forms() -> None:
    schema = stored_arguments("0.33.0")
    old = {
        "max_num_seqs": 64,
        "num_scheduler_steps": 8,
        "swap_space": 4,
        "speculative_model": "tiny",
        "num_speculative_tokens": 3,
    }
    config, findings = modernised(old, schema)
    assert config["max_num_seqs"] == 64
    assert config["speculative_config"] == {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3}
    assert not {"num_scheduler_steps", "swap_space", "speculative_model"} & set(config)
    assert {finding.status for finding in findings} == {FlagStatus.RETIRED}
    assert modernised({"max_num_seqss": 3}, schema)[1][0].status is FlagStatus.UNKNOWN


def test_a_latency_gain_reads_as_in_show_and_the_progress_has_the_studys_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "Qwen/Qwen3.5-9B", "--simulate", "h200", "--rate", "8", "--window", "20", "--soak", "0"]
    made = vopt("search", "--goal", "latency", *words, "--trials", "5", "--rounds", "3")
    shown = vopt("show").stdout
    gain = re.search(r"Change +(−[0-9.]+ %)", shown)
    assert gain is not None, shown
    again = vopt("bench", "--study", "qwen3.5")
    assert f"winner against baseline: mean E2E {gain[1]}\n" in again.stdout, made.output + again.output
    assert re.search(r"Now +winner against baseline: mean E2E −[0-9.]+ % \(no interval", again.stdout)
    assert "mean E2E, ms " in again.stdout
    assert "tokens/s" not in [line for line in again.stderr.splitlines() if "trial bench-1-winner:" in line][-1]
