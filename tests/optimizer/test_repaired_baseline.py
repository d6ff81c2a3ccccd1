"""Defaults that do not start: what repairs them, what of the repair stays in which trial, and what the answer says of it.

Starts fail as the simulated engine's do; rates are the roofline's, without a simulation of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from landscapes import MemoryStudy

from vopt.objectives.metrics import Metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer.answer_baseline import left_out_notes
from vopt.optimizer.engine.roofline import estimate
from vopt.optimizer.engine.simulated_failures import start_failure
from vopt.optimizer.history import Arm, FailureSummary, Stage, StudyRecord, TrialRecord, TrialRequest
from vopt.optimizer.judge import judge
from vopt.optimizer.load.workload import named
from vopt.optimizer.options import SearchOptions
from vopt.optimizer.prepare import find_asked, find_goal
from vopt.optimizer.progress import Progress
from vopt.optimizer.recommend import Recommendation, Verdict
from vopt.optimizer.report.document import answer_document
from vopt.optimizer.report.shell import shell_script
from vopt.optimizer.report.show import trials_table
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.optimizer.space_of import find_space, search_setup
from vopt.optimizer.subject import Subject, find_subject
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.memory import memory_plan

WIDTH = 128


def setup_of(gpu: str, gpus: int = 1, model: str = "Qwen/Qwen3-32B", **typed: Any) -> tuple[SearchSetup, Subject]:
    options = SearchOptions(**{"model": model, "simulate": gpu, "gpus": str(gpus), "goal": ["throughput"], **typed})
    subject, goal = find_subject(options), find_goal(options)
    asked = find_asked(options, goal)
    space = find_space(options, subject, named("chat"), goal.name, asked.concurrency)
    made = search_setup(options, subject, goal, space, "auto", asked)
    return replace(made, budget=Budget(12, rounds=3, time_s=None, soak_s=0), early_end=False), subject


def engine(subject: Subject, counters: Mapping[str, float]) -> Any:
    shape, hardware = subject.shape, subject.machine.hardware
    assert shape is not None
    assert hardware is not None
    lengths, version = named("chat").request_lengths(), subject.schema.version

    def evaluate(request: TrialRequest) -> TrialRecord:
        plan = memory_plan(shape, hardware.gpu, request.config, version)
        failed = start_failure(shape, hardware.gpu, request.config, plan, subject.machine.count)
        base = TrialRecord(
            label=request.label,
            config=request.config,
            stage=request.stage,
            arm=request.arm,
            attempt=request.attempt,
            status=LoadStatus.COMPLETE,
            metrics=None,
            failure=None,
            argv=subject.argv(request.config),
            resolved={},
            kv_cache_tokens=plan.logged_tokens,
            kv_cache_bytes=plan.kv_bytes,
            start_class=None,
            phase_s={},
            start_parts_s={},
            began_at="",
            directory="",
            environment={"load_plan": {"concurrency": WIDTH}},
        )
        if failed is not None:
            failure = FailureSummary(failed.phase, failed.kind, failed.detail, hint=failed.hint)
            return replace(base, status=None, failure=failure, kv_cache_tokens=None, kv_cache_bytes=None)
        rate = estimate(shape, hardware, request.config, lengths, WIDTH, version).tokens_per_s
        values = {"tokens_per_s": rate, "success_rate": 1.0, "p95_ttft_s": 0.1, "p95_tpot_s": 0.01, **counters}
        return replace(base, metrics=Metrics(values=values, succeeded=2000, failed=0))

    return evaluate


def searched(
    gpu: str, gpus: int = 1, counters: Mapping[str, float] | None = None, **typed: Any
) -> tuple[Recommendation, list[TrialRecord]]:
    setup, subject = setup_of(gpu, gpus, **typed)
    study = MemoryStudy()
    answer = search(setup, study, engine(subject, counters or {"kv_peak": 1.0}), lambda event: None)
    return answer, [record for record in study.records() if record.stage is Stage.SEARCH]


@pytest.mark.parametrize("gpus", [2, 4])
def test_more_gpus_come_before_a_shorter_context(gpus: int) -> None:
    """The engine itself suggests a shorter context, which refuses requests; the GPUs are there."""
    answer, starts = searched("h100", gpus)
    assert starts[0].failure is not None
    assert "max_model_len" in starts[0].failure.hint
    assert dict(starts[1].config) == {"tensor_parallel_size": 2}
    assert not any("max_model_len" in start.config for start in starts)
    assert answer.argv is not None
    assert "--max-model-len" not in answer.argv
    assert any(start.config.get("tensor_parallel_size") == gpus for start in starts[:6])


def test_what_is_measured_whatever_the_model_says_carries_the_repair() -> None:
    _, starts = searched("h100", 2)
    (bare,) = [start for start in starts if "performance_mode" in start.config]
    assert bare.config["tensor_parallel_size"] == 2
    assert bare.failure is None


def test_on_one_gpu_a_larger_share_comes_before_a_shorter_context() -> None:
    answer, starts = searched("h100")
    assert dict(starts[1].config) == {"gpu_memory_utilization": 0.94}
    assert not any("max_model_len" in start.config for start in starts)
    assert answer.repair is not None


@pytest.mark.parametrize("overhead_gib", [0.1, 0.2, 0.4, 0.8])
def test_a_repair_that_came_up_stays_the_baseline(overhead_gib: float) -> None:
    """What it teaches about memory would choose another repair: that would be compared with something that nobody chose."""
    setup, subject = setup_of("h100")
    evaluate, study = engine(subject, {"kv_peak": 1.0}), MemoryStudy()

    def tighter(request: TrialRequest) -> TrialRecord:
        record = evaluate(request)
        if record.kv_cache_bytes is None:
            return record
        return replace(record, kv_cache_bytes=int(record.kv_cache_bytes - overhead_gib * 2**30))

    search(setup, study, tighter, lambda event: None)
    records = study.records()
    first = next(record.config for record in records if record.failure is None)
    assert {record.config for record in records if record.arm is Arm.BASELINE} == {first}


def test_a_repair_stays_only_where_nothing_starts_without_it() -> None:
    """With half the bytes for each cached token the whole context fits: the cut is not for those configurations."""
    typed = {"allow_lossy": ["kv_cache_dtype"], "keep": ["gpu_memory_utilization"]}
    answer, starts = searched("h100", **typed)
    assert list(starts[1].config) == ["max_model_len"]
    ran = [start for start in starts if start.failure is None]
    halved = [start for start in ran if start.config.get("kv_cache_dtype") == "fp8"]
    assert halved
    assert any("max_model_len" not in start.config for start in halved)
    assert all("max_model_len" in start.config for start in ran if start not in halved)
    assert answer.winner_config is not None
    assert "max_model_len" not in answer.winner_config
    assert any(
        f"--max-model-len {starts[1].config['max_model_len']} of the repaired baseline is left out" in note
        for note in answer.notes
    )


def test_what_the_user_keeps_or_sets_is_not_repaired() -> None:
    answer, starts = searched("h100", 2, keep=["tensor_parallel_size", "gpu_memory_utilization", "max_model_len"])
    assert answer.verdict is Verdict.NOTHING_FEASIBLE
    assert not any({"tensor_parallel_size", "gpu_memory_utilization", "max_model_len"} & set(start.config) for start in starts)
    setup, subject = setup_of("h100", set=["max_model_len=40960", "gpu_memory_utilization=0.92"])
    evaluate, study = engine(subject, {}), MemoryStudy()

    def with_set(request: TrialRequest) -> TrialRecord:
        whole = evaluate(replace(request, config=subject.fixed | request.config))
        return replace(whole, config=request.config)

    assert search(setup, study, with_set, lambda event: None).verdict is Verdict.NOTHING_FEASIBLE
    assert not any("max_model_len" in record.config for record in study.records())


def test_the_answer_says_that_the_defaults_do_not_start_and_in_flags_what_gains_are_against() -> None:
    answer, starts = searched("h100", 1, keep=["gpu_memory_utilization"])
    setup = {
        "goal": {"name": "throughput", "metric": "tokens_per_s", "direction": "maximize"},
        "options": {},
        "simulated": True,
    }
    view = StudyView.of(StudyRecord("s", "2026-01-01T00:00:00+00:00", setup, tuple(starts), answer))
    length = starts[1].config["max_model_len"]
    told = f"vLLM's defaults, repaired by --max-model-len {length} (as given they do not start here)"
    assert told in view.verdict_line()
    assert told in shell_script(view, answer.argv or ())
    assert answer_document(view)["baseline"]["repaired"]["engine_config"] == {"max_model_len": length}
    assert Recommendation.from_json(answer.to_json()) == answer
    note = next(note for note in answer.notes if "does not start here" in note)
    assert "kv_too_small" in note
    assert f"repaired baseline, with --max-model-len {length}" in note
    assert any(f"the load of {WIDTH} in flight was found on the repaired baseline" in note for note in answer.notes)
    assert any("takes something from clients" in note for note in answer.notes)
    assert not any("{'" in note for note in answer.notes)
    rows = trials_table(view).rows
    assert rows[1][2] == "0.0 %"
    stated, _ = searched("h100", 1, keep=["gpu_memory_utilization"], concurrency=str(WIDTH))
    assert not any("was found on" in note for note in stated.notes)


def test_defaults_that_start_are_called_the_defaults() -> None:
    answer, starts = searched("h200", 2)
    assert answer.repair is None
    assert starts[0].config == EngineConfig()
    splits = [dict(start.config) for start in starts[:4]]
    assert {"tensor_parallel_size": 2} in splits
    assert {"data_parallel_size": 2} in splits


def test_a_flag_of_the_command_in_use_does_not_vanish_silently() -> None:
    command = ["vllm", "serve", "Qwen/Qwen3-8B", "--max-num-seqs", "64"]
    answer, _ = searched("h200", counters={"queued_share": 0.5, "full_budget_share": 0.5}, model=None, command=command)
    assert answer.winner_config is not None
    if "max_num_seqs" in answer.winner_config:
        pytest.fail("the landscape is meant to be better at vLLM's own value")
    row = next(row for row in answer.overrides if row.name == "max_num_seqs")
    assert (row.value, row.kept) == (64, False)
    assert "vLLM's own value (1024)" in row.reason
    assert any(note.startswith("--max-num-seqs 64 of the command in use is left out") for note in answer.notes)


def test_what_the_repair_added_is_not_said_to_be_of_the_command_in_use() -> None:
    command = ["vllm", "serve", "Qwen/Qwen3-32B", "--max-num-seqs", "64"]
    setup, subject = setup_of("h100", model=None, command=command)
    failed = engine(subject, {})(TrialRequest("0", setup.baseline, Stage.SEARCH))
    progress = Progress(setup, (judge(failed, setup.goal, None),))
    assert list(progress.repaired) == ["gpu_memory_utilization"]
    notes = left_out_notes(progress, EngineConfig())
    assert {note.partition(" is left out")[0].partition(" of ")[::2] for note in notes} == {
        ("--max-num-seqs 64", "the command in use"),
        ("--gpu-memory-utilization 0.94", "the repaired baseline"),
    }
