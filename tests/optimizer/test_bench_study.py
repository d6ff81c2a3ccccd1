"""``vopt bench --study``: a simulated study, measured again through the command line; and the judgement about it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vopt.objectives.goals import Goal, built_in_goal
from vopt.objectives.metrics import Metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer.bench_duel import Answer, Duel, find_duel, judge_duel, order
from vopt.optimizer.check import FlagStatus, modernised
from vopt.optimizer.cli import app
from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.history import FailureSummary, Stage, TrialRecord
from vopt.optimizer.raw_records import SECOND_RECORDS
from vopt.optimizer.report.raw import read_records
from vopt.optimizer.study import read_study
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase
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


# The judgement

GOAL = built_in_goal("throughput", guard=False)
DUEL = Duel("winner", {"baseline": EngineConfig(), "winner": EngineConfig({"max_num_seqs": 512})}, 1.2)


def start(
    label: str, tokens_per_s: float, success: float = 1.0, flags: tuple[str, ...] = (), failure: Any = None
) -> TrialRecord:
    values = {"tokens_per_s": tokens_per_s, "success_rate": success}
    return TrialRecord(
        label=label,
        config=EngineConfig(),
        stage=Stage.CONFIRMATION,
        arm=None,
        attempt=1,
        status=LoadStatus.COMPLETE,
        metrics=Metrics(values),
        failure=failure,
        argv=(),
        resolved={},
        kv_cache_tokens=None,
        start_class=None,
        phase_s={},
        start_parts_s={},
        began_at="",
        directory="",
        flags=flags,
    )


def judged(baseline: Sequence[TrialRecord], winner: Sequence[TrialRecord], gate: float | None, goal: Goal = GOAL) -> Answer:
    starts: Mapping[str, Sequence[TrialRecord]] = {"baseline": baseline, "winner": winner}
    return judge_duel(DUEL, starts, goal, gate)


def test_the_gate_compares_leads() -> None:
    base = [start("a", 100.0), start("b", 101.0)]
    kept = judged(base, [start("c", 119.0), start("d", 120.0)], 0.03)
    assert kept.holds
    assert kept.lost == pytest.approx(1 - kept.now.ratio / 1.2 if kept.now else 0)
    assert kept.now is not None
    assert kept.now.low is not None
    lost = judged(base, [start("c", 114.0), start("d", 115.0)], 0.03)
    assert not lost.holds
    assert judged(base, [start("c", 114.0), start("d", 115.0)], 0.08).holds


def test_an_upgrade_that_makes_both_faster_alike_loses_nothing() -> None:
    assert judged([start("a", 200.0)], [start("b", 240.0)], 0.0).lost == pytest.approx(0.0)


def test_a_recommendation_that_fails_or_breaks_a_limit_does_not_hold() -> None:
    died = FailureSummary(Phase.LOAD, FailureKind.ENGINE_DIED, "gone")
    failed = judged([start("a", 100.0)], [start("b", 130.0, failure=died)], 0.9)
    assert not failed.holds
    assert "engine_died" in failed.reason
    broken = judged([start("a", 100.0)], [start("b", 130.0, success=0.9)], 0.9)
    assert not broken.holds
    assert "success_rate" in broken.reason


def test_it_holds_where_the_alternative_does_not_even_run() -> None:
    died = FailureSummary(Phase.START, FailureKind.OOM_START, "no memory")
    assert judged([start("a", 1.0, failure=died)], [start("b", 1.0)], 0.0).holds


def test_a_client_that_was_the_limit_allows_no_claim() -> None:
    with pytest.raises(EnvironmentLacks, match="client"):
        judged([start("a", 100.0, flags=("client_limited",))], [start("b", 120.0)], 0.03)


def test_arms_alternate() -> None:
    assert [name[0] for _, name in order(DUEL, 3)] == list("bwwbbw")


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
