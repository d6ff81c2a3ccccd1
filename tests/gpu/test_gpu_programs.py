"""The programs for a GPU host, tried on a simulated one: they go on where they stopped, and write what is read later."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vopt.optimizer import gpus, host
from vopt.optimizer.cli import app
from vopt.optimizer.engine.process import ProcessSession, engine_environment
from vopt.optimizer.locks import Locked
from vopt.optimizer.study import read_study
from vopt.optimizer.trial import EngineFailure, Failed, FailureKind, Phase

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import in_process_vs_served
import journal_of_study
import noise
import pairs
import record_table
import recorded
import run_studies
import side_by_side
import starts
import table_rows
import tensor_parallel

TRY = ["--simulate", "h200", "--window", "2", "--budget", "1000"]
SMALL = ["--model", "Qwen/Qwen3-0.6B", "--set", "load_format=dummy", "--set", "max_model_len=8192"]


def test_the_table_has_at_least_60_distinct_rows_the_most_informative_first() -> None:
    rows = table_rows.rows()
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows) >= 60
    assert rows[0] == {}
    assert rows == table_rows.rows()
    alone = [row for row in rows if len(row) == 1]
    for name, values in table_rows.SPACE.items():
        assert [row[name] for row in alone if name in row and row not in table_rows.BROKEN] == list(values[1:])
    assert max(rows.index(row) for row in alone) < 30
    assert all(len(row) <= 4 for row in rows)


def test_every_row_has_two_starts_and_the_noise_is_known_early() -> None:
    order = table_rows.starts()
    assert set(order) == {(row, start) for row in range(table_rows.ROWS) for start in (0, 1)}
    assert len(order) == len(set(order))
    assert order.index((0, 1)) == 3
    repeats = [start for _, start in order[:96]]
    assert sum(repeats) == 24


def test_a_table_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.jsonl"
    words = [*SMALL, "--rows", "2", "--levels", "4,16", "--out", str(out), *TRY]
    assert record_table.main([*words, "--budget", "0"]) == starts.WORK_REMAINS
    assert record_table.main(words) == 0
    lines = out.read_text().splitlines()
    assert len(lines) == 1 + 4
    out.write_text("\n".join([*lines[:3], lines[3][:40]]))  # a break in the middle of a line
    assert record_table.main(words) == 0
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["row"], row["start"]) for row in again[1:]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert "2 of 2 configurations, 4 starts, 0 remain" in capsys.readouterr().out
    table = recorded.read_table(out)
    assert table.header["workload_digest"]
    assert set(table.starts[0].levels) == {4, 16}
    assert recorded.recorded_landscape(out).regret({}) < 1.0


def test_a_table_is_recorded_in_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--rows", "4", "--levels", "4", "--out", str(tmp_path / "table.jsonl"), *TRY]
    for place in (0, 1):
        assert record_table.main([*words, "--part", f"{place}/2"]) == 0
    first, second = (tmp_path / f"table-{place}-of-2.jsonl" for place in (0, 1))
    with first.open("a") as file:
        file.writelines(second.read_text().splitlines(keepends=True)[1:])
    table = recorded.read_table(first)
    assert len(table.starts) == 8
    first.rename(tmp_path / "table.jsonl")
    assert record_table.main([*words, "--budget", "0"]) == 0, "together they are the whole table"
    with pytest.raises(SystemExit):
        record_table.main([*words, "--part", "2/2"])


def test_a_table_of_something_else_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--rows", "1", "--levels", "4", "--out", str(tmp_path / "table.jsonl"), *TRY]
    assert record_table.main(words) == 0
    assert record_table.main([*words, "--levels", "8"]) == 2
    assert "begun with levels" in capsys.readouterr().err


def test_failures_of_a_configuration_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "table.jsonl"
    monkeypatch.setattr(record_table, "rows", lambda count: ({}, *table_rows.BROKEN))
    assert record_table.main(["--rows", "5", "--levels", "4", "--out", str(out), *SMALL, *TRY]) == 0
    kinds = [start.failure and start.failure.value for start in recorded.read_table(out).starts]
    assert kinds.count(None) == 2
    assert set(kinds) == {None, "kv_too_small", "invalid_config"}


def test_what_the_machine_failed_in_is_tried_again_and_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real, seen = tmp_path / "table.jsonl", starts.measured_start, []

    def failing(stand: starts.Stand, config: Mapping[str, Any], *rest: Any, label: str, **options: Any) -> dict[str, Any]:
        seen.append(label)
        if label == "1-0" and seen.count(label) <= 2:
            raise EngineFailure(Failed(Phase.START, FailureKind.MEMORY_HELD, "somebody else holds it"))
        return real(stand, config, *rest, label=label, **options)

    monkeypatch.setattr(starts, "measured_start", failing)
    words = [*SMALL, "--rows", "2", "--levels", "4", "--out", str(out), *TRY]
    assert record_table.main(words) == 0
    assert seen == ["0-0", "1-0", "0-1", "1-1", "1-0", "1-0"]
    assert len(recorded.read_table(out).starts) == 4


def test_where_the_defaults_do_not_start_nothing_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "table.jsonl"
    assert record_table.main([*SMALL, "--rows", "2", "--set", "kv_cache_memory_bytes=1000", "--out", str(out), *TRY]) == 3
    assert len(out.read_text().splitlines()) == 1


def test_a_machine_that_goes_on_failing_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> dict[str, Any]:
        raise EngineFailure(Failed(Phase.START, FailureKind.GPU_LOST, "GPU 0 is gone"))

    monkeypatch.setattr(starts, "measured_start", failing)
    assert record_table.main([*SMALL, "--rows", "2", "--levels", "4", "--out", str(tmp_path / "t.jsonl"), *TRY]) == 3


def test_noise_prints_the_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--starts", "3", "--loads", "2", "--concurrency", "8", "--out", str(tmp_path / "noise.jsonl"), *TRY]
    assert noise.main(words) == 0
    assert noise.main(words) == 0
    printed = capsys.readouterr().out
    assert "3 starts of 2 loads" in printed
    assert "tokens_per_s" in printed
    assert printed.count("Qwen3-0.6B-1:") == 1, "what is recorded is not measured again"


def test_both_ways_of_measuring_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--pairs", "2", "--levels", "8", "--out", str(tmp_path / "served.jsonl"), *TRY]
    assert in_process_vs_served.main(words) == 0
    printed = capsys.readouterr().out
    assert "served / in-process over 2 pairs" in printed
    entries = [json.loads(line) for line in next(tmp_path.glob("served-*.jsonl")).read_text().splitlines()[1:]]
    assert [entry["served"] for entry in entries] == [False, True, True, False]


def test_of_two_gpus_each_engine_has_its_own_and_nobody_else_has_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = tuple(gpus.Gpu(f"GPU-{index}", index, "NVIDIA H200", 140 << 30, 0) for index in (0, 1))
    monkeypatch.setattr(gpus, "inventory", lambda: both)
    monkeypatch.setattr(host, "reserved", partial(host.reserved, folder=tmp_path / "locks"))
    parser = argparse.ArgumentParser()
    starts.add_options(parser, out=str(tmp_path / "o.jsonl"))
    simulated = starts.stand_of(parser.parse_args([*SMALL[2:], "--simulate", "h200"]), "Qwen/Qwen3-0.6B")
    machine = replace(simulated.subject.machine, hardware=None, uuids=("GPU-0", "GPU-1"), count=2)
    stand = replace(simulated, subject=replace(simulated.subject, machine=machine))
    specs = []
    for place in (0, 1):
        session = starts.session_of(starts.on_one_gpu(stand, place), {}, label="one")
        assert isinstance(session, ProcessSession)
        specs.append(session._spec)
        assert engine_environment(session._spec)[0]["CUDA_VISIBLE_DEVICES"] == str(place)
    assert specs[0].directory != specs[1].directory
    assert specs[0].deadlines.start_s == 420.0
    with starts.reserved(starts.on_one_gpu(stand, 0), "one"):
        with starts.reserved(starts.on_one_gpu(stand, 1), "two"):
            pass
        with pytest.raises(Locked, match="GPU-0 is in use by one of Qwen3"), starts.reserved(stand, "three"):
            pass


def test_one_gpu_against_two(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    for name in tensor_parallel.NO_MULTICAST.keys() - {"NCCL_NVLS_ENABLE"}:
        monkeypatch.setenv(name, "")  # so that what the program sets goes with the test
        monkeypatch.delenv(name)
    words = [*SMALL, "--pairs", "2", "--levels", "4,16", "--out", str(tmp_path / "tp.jsonl"), *TRY]
    assert tensor_parallel.main([*words, "--budget", "0"]) == starts.WORK_REMAINS
    assert tensor_parallel.main(words) == 0
    printed = capsys.readouterr().out
    assert "two GPUs / one GPU over 2 pairs" in printed
    header, *entries = [json.loads(line) for line in (tmp_path / "tp-Qwen3-0.6B.jsonl").read_text().splitlines()]
    assert len(header["gpus"]) == 2
    assert header["switched"] == tensor_parallel.NO_MULTICAST | {"NCCL_NVLS_ENABLE": "1"}, "what was set stays"
    assert [entry["config"]["tensor_parallel_size"] for entry in entries] == [1, 2, 2, 1]
    one, two = (entry["started"]["kv_cache_tokens"] for entry in entries[:2])
    assert two > 1.8 * one
    assert f"{one:,}" in printed
    assert tensor_parallel.main([*words, "--gpus", "1"]) == 2


def test_a_measurement_alone_against_one_beside_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--rounds", "2", "--concurrency", "8", "--out", str(tmp_path / "side.jsonl"), *TRY]
    assert side_by_side.main([*words, "--rounds", "1"]) == 0
    assert "too few rounds to say" in capsys.readouterr().out
    assert side_by_side.main(words) == 0
    printed = capsys.readouterr().out
    assert "beside / alone over 2 rounds" in printed
    assert "while another engine is under load: " in printed
    entries = [json.loads(line) for line in (tmp_path / "side-Qwen3-0.6B.jsonl").read_text().splitlines()[1:]]
    assert [list(entry["loads"]) for entry in entries] == [list(order) for order in side_by_side.ORDERS]
    logs = tmp_path / "side-logs" / "Qwen3-0.6B"
    assert {path.relative_to(logs).as_posix() for path in logs.glob("*/*")} == {"gpu-0/1", "gpu-0/2", "gpu-1/1", "gpu-1/2"}


def test_what_happens_to_the_other_engine_spoils_what_was_measured_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--rounds", "1", "--concurrency", "8", *TRY]
    monkeypatch.setattr(side_by_side.Neighbour, "_load", lambda self: None)
    assert side_by_side.main([*words, "--out", str(tmp_path / "a.jsonl")]) == 3
    assert "ended before" in capsys.readouterr().err

    def lost(self: side_by_side.Neighbour) -> None:
        raise EngineFailure(Failed(Phase.START, FailureKind.GPU_LOST, "GPU 1 is gone"))

    monkeypatch.setattr(side_by_side.Neighbour, "_start", lost)
    assert side_by_side.main([*words, "--out", str(tmp_path / "b.jsonl")]) == 3
    assert "GPU 1 is gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ([[0.001, 0.002, -0.001], [0.0, 0.003, 0.001]], "may run side by side"),
        ([[-0.05, -0.06, -0.055], [0.001, 0.0, 0.002]], "disturbed"),
        ([[-0.05, 0.06, 0.01], [0.0, 0.001, 0.002]], "not known"),
        ([[0.0], [0.0]], "too few"),
    ],
)
def test_what_the_rounds_say(figures: list[list[float]], said: str) -> None:
    assert said in side_by_side.verdict(figures)


def test_the_interval_of_a_ratio_is_that_of_students_t() -> None:
    low, high = pairs.interval([0.0, 0.02])
    assert low == pytest.approx(math.exp(0.01 - 12.706 * 0.01), rel=1e-4)
    assert high == pytest.approx(math.exp(0.01 + 12.706 * 0.01), rel=1e-4)


def test_a_study_becomes_a_journal_of_its_in_process_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = f"sqlite:///{tmp_path}/studies.db"
    words = [
        "search",
        "--model",
        "Qwen/Qwen3-0.6B",
        "--goal",
        "throughput",
        "--simulate",
        "h200",
        "--trials",
        "3",
        "--rounds",
        "1",
    ]
    words += ["--concurrency", "16", "--window", "1s", "--soak", "0", "--quiet", "--storage", storage, "--study", "one"]
    assert CliRunner().invoke(app, words).exit_code == 0
    capsys.readouterr()
    assert journal_of_study.main([storage, "one"]) == 0
    path = tmp_path / "journal.jsonl"
    path.write_text(capsys.readouterr().out)
    table, study = recorded.read_table(path), read_study(storage, "one")
    assert table.header["levels"] == [16]
    assert table.header["fixed"] == study.setup["fixed"]
    assert len(table.starts) == len(study.trials), "a simulation serves nothing"
    for start, trial in zip(table.starts, study.trials, strict=True):
        assert start.config == trial.config
        assert trial.metrics is not None
        assert start.levels[16]["tokens_per_s"] == pytest.approx(trial.metrics["tokens_per_s"], rel=1e-5)
        assert start.started["kv_cache_tokens"] == trial.kv_cache_tokens


@pytest.mark.slow
def test_studies_are_gone_on_with_and_their_answers_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "8b-throughput", "--model", "Qwen/Qwen3-8B", "--set", "load_format=dummy", "--simulate", "h200"]
    words += ["--out", str(tmp_path / "s.db"), "--window", "5", "--words=--trials 2"]
    assert run_studies.main([*words, "--budget", "1"]) == starts.WORK_REMAINS, "nothing is begun that would be cut off at once"
    assert run_studies.main([*words, "--budget", "300"]) == 0
    kept = tmp_path / "8b-throughput.json"
    answer = json.loads(kept.read_text())
    kept.unlink()  # as if a break had come before the answer was written
    assert run_studies.main([*words, "--budget", "300"]) == 0
    again = json.loads(kept.read_text())
    assert again["verdict"] == answer["verdict"]
    assert again["trials"] == answer["trials"]
    printed = capfd.readouterr().out
    assert printed.count("8b-throughput: begun") == 1
    assert printed.count("8b-throughput: resumed") == 1


def test_a_search_that_outlasts_the_budget_is_interrupted_as_by_ctrl_c() -> None:
    script = "import signal, sys, time; signal.signal(2, lambda *_: sys.exit(130)); print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline()
        assert run_studies.interrupted(process) == 130
