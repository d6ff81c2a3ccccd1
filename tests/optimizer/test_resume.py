"""``vopt resume`` of a finished, an interrupted, a changed and a moved study, through the command line."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from landscapes import small_landscape
from typer.testing import CliRunner, Result

from vopt.optimizer import launch as launching
from vopt.optimizer.cli import app
from vopt.optimizer.environment import first_difference
from vopt.optimizer.evaluate import Evaluator
from vopt.optimizer.history import Arm, Stage, StudyRecord, TrialRecord, TrialRequest
from vopt.optimizer.options import ResumeOptions
from vopt.optimizer.report.raw import RECORDS
from vopt.optimizer.resumption import measurement_of, resumption, unspent
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.optimizer.study import read_study
from vopt.optimizer.trial import Phase

ASSETS = Path(__file__).parents[1] / "assets"
URL = "sqlite:///studies.db"
NAME = "qwen3-8b-throughput-1"
COMMAND = "vllm serve Qwen/Qwen3-8B --max-num-seqs 64"
SEARCH = (
    *("search", "--goal", "throughput", "--simulate", "h200", "--from", "c.sh", "--trials", "3", "--rounds", "1"),
    *("--soak", "0", "--concurrency", "16", "--window", "1s", "--no-guard", "--quiet"),
)


def vopt(*words: str, **variables: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200", **variables})


def resume(*words: str, **variables: str) -> Result:
    return vopt("resume", "--quiet", *words, **variables)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished study of one confirmation round, and the command in use."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "c.sh").write_text(f"{COMMAND} --enable-lora\n")
        done = vopt(*SEARCH)
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def place(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it."""
    shutil.copytree(finished, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def stored() -> StudyRecord:
    return read_study(URL)


def arm(of: Arm) -> list[TrialRecord]:
    return [trial for trial in stored().trials if trial.arm is of]


# -- what has to be as it was ------------------------------------------------------------------------------------------


def slow(command: str, said: str) -> Any:
    return pytest.param(command, said, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (COMMAND, "the baseline's enable_lora True, here it is not set"),
        slow(f"{COMMAND} --enable-lora --dtype float16", "the baseline's dtype not set, here it is 'float16'"),
        slow(f"{COMMAND} --enable-lora --seed 3", "the baseline's seed not set, here it is 3"),
        slow(f"{COMMAND} --enable-lora --load-format dummy", "the baseline's load_format not set, here it is 'dummy'"),
        (f"{COMMAND} --enable-lora --no-enforce-eager", "the baseline's enforce_eager not set, here it is False"),
        slow(f"{COMMAND}0 --enable-lora", "the baseline's max_num_seqs 64, here it is 640"),
        (
            f"{COMMAND} --enable-lora --api-server-count 2",
            "its command had no flags for the server in front of the engine, now it has --api-server-count 2",
        ),
        (f"VLLM_USE_X=1 {COMMAND} --enable-lora", "the environment variable VLLM_USE_X not set, here it is '1'"),
    ],
)
@pytest.mark.fault("another command on resume")
def test_another_command_is_refused_with_what_differs_and_both_ways_on(place: Path, command: str, said: str) -> None:
    before = stored()
    (place / "c.sh").write_text(command)
    refused = resume("--rounds", "3")
    assert refused.exit_code == 2, refused.output
    assert said in refused.stderr
    assert f"--seed-from {NAME}" in refused.stderr
    assert f"or: vopt resume {NAME}   # with c.sh as it was" in refused.stderr
    assert stored() == before, "nothing was stored"


def test_a_study_that_forgot_its_baseline_knows_it_from_its_first_start(place: Path) -> None:
    """Versions before did not store it."""
    study = optuna.load_study(storage=URL, study_name=NAME)
    setup = {name: value for name, value in study.user_attrs["setup"].items() if name != "baseline"}
    study.set_user_attr("setup", setup)
    (place / "c.sh").write_text(COMMAND)
    assert "the baseline's enable_lora True, here it is not set" in resume("--rounds", "3").stderr


@pytest.mark.parametrize(
    ("name", "refused"), [("VLLM_ATTENTION_BACKEND", True), ("VLLM_LOGGING_LEVEL", False), ("HF_HOME", False)]
)
@pytest.mark.usefixtures("place")
def test_a_variable_that_changes_the_engine_is_noticed(name: str, refused: bool) -> None:
    done = resume("--rounds", "2", **{name: "X"})
    assert (done.exit_code == 2) is refused, done.output
    assert (f"the environment variable {name} not set, here it is 'X'" in done.stderr) is refused


def test_what_an_earlier_version_did_not_store_is_not_known_to_differ() -> None:
    now = {"model": "m", "baseline": {"seed": 1}, "environment": {"variables": {"VLLM_X": "1"}}}
    assert first_difference({"model": "m"}, now) is None
    assert first_difference({"model": "m", "baseline": {}}, now) == "baseline:seed"
    assert first_difference({"model": "n"}, now) == "model"
    assert first_difference({"baseline": {"seed": None}}, {"baseline": {}}) == "baseline:seed"


@pytest.mark.parametrize("words", [(), pytest.param(("--trials", "8", "--rounds", "2"), marks=pytest.mark.slow)])
@pytest.mark.fault("database of an older format")
def test_a_study_of_format_1_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    shutil.copy(ASSETS / "studies-format-1.db", tmp_path / "studies.db")
    monkeypatch.chdir(tmp_path)
    before = len(stored().trials)
    done = resume(*words)
    assert done.exit_code == 0, done.output
    assert (len(stored().trials) > before) is bool(words)


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("place")
def test_rounds_that_a_resume_was_given_are_kept() -> None:
    assert resume("--rounds", "3").exit_code == 0
    raised = stored()
    assert raised.setup["options"]["rounds"] == 3
    assert raised.recommendation is not None
    assert raised.recommendation.gain is not None
    assert raised.recommendation.gain.low is not None
    assert resume().exit_code == 0
    assert (stored().recommendation, stored().trials) == (raised.recommendation, raised.trials)
    study = optuna.load_study(storage=URL, study_name=NAME)  # as an earlier version would have left it
    setup = dict(study.user_attrs["setup"])
    study.set_user_attr("setup", {**setup, "options": {**setup["options"], "rounds": 1}})
    assert resume().exit_code == 0
    assert (stored().recommendation, stored().trials) == (raised.recommendation, raised.trials)


@pytest.mark.usefixtures("place")
def test_fewer_rounds_than_were_measured_are_refused() -> None:
    before = stored()
    refused = resume("--rounds", "0")
    assert refused.exit_code == 2
    assert f"--rounds 0: round 1 of {NAME} has begun" in refused.stderr
    assert f"vopt resume {NAME} --rounds 1" in refused.stderr
    assert stored() == before


@pytest.mark.usefixtures("place", "signal_handlers")
@pytest.mark.fault("interrupted after a larger budget was given")
def test_a_larger_budget_outlives_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    call, calls = Evaluator.__call__, []

    def interrupted(self: Evaluator, request: TrialRequest) -> TrialRecord:
        calls.append(request.label)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return call(self, request)

    monkeypatch.setattr(Evaluator, "__call__", interrupted)
    ended = resume("--trials", "8", "--rounds", "2")
    assert ended.exit_code == 130
    assert f"vopt resume {NAME}\n" in ended.stderr
    done = resume()
    assert done.exit_code == 0, done.output
    stages = [trial.stage for trial in stored().trials]
    assert stages.count(Stage.SEARCH) == 6
    assert max(int(trial.label.split("-")[1]) for trial in stored().trials if trial.arm) == 2


@pytest.mark.usefixtures("place")
def test_a_finished_study_searches_on_with_more_trials() -> None:
    before = stored()
    done = resume("--trials", "8", "--json")
    assert done.exit_code == 0, done.output
    after = stored()
    assert after.trials[: len(before.trials)] == before.trials, "what was measured is kept"
    fresh = after.trials[len(before.trials) :]
    assert [trial.stage for trial in fresh].count(Stage.SEARCH) == 3
    assert len({trial.label for trial in after.trials}) == len(after.trials)
    document = json.loads(done.stdout)
    assert document["trials"]["search"] == 6
    finalists = {(trial.config, trial.label.endswith("-s2")) for trial in arm(Arm.FINALIST)}
    assert len({config for config, _ in finalists}) == len(finalists), "one confirmation for each finalist"


@pytest.mark.usefixtures("place")
def test_a_resume_that_has_nothing_to_do_says_so_and_what_to_type() -> None:
    before = stored()
    done = resume()
    assert f"{NAME} is finished, nothing was measured" in done.stderr
    assert f"vopt resume {NAME} --trials 11 or --rounds 5" in done.stderr
    assert "--trials 3: " in (done := resume("--trials", "3")).stderr
    assert f"vopt resume {NAME} --trials 11 goes on" in done.stderr
    assert "--rounds 1: " in (done := resume("--rounds", "1")).stderr
    assert "--rounds 2 goes on" in done.stderr
    assert stored().trials == before.trials


def test_more_trials_than_there_is_time_for_are_said_with_the_line_that_goes_on(finished: Path) -> None:
    record = read_study(f"sqlite:///{finished}/studies.db")
    long = tuple(replace(trial, phase_s={Phase.START: 60.0, Phase.LOAD: 1000.0, Phase.STOP: 5.0}) for trial in record.trials)
    record = replace(record, trials=long)
    spent = 1065.0 * len(long)
    landscape = small_landscape()
    setup = SearchSetup(landscape.goal, landscape.space, Budget(trials=8, rounds=1, time_s=spent + 600, soak_s=0))
    (said,) = unspent(setup, ResumeOptions(trials=8), record, record)
    assert said.startswith("--trials 8: no time is left for one more configuration")
    line = f"vopt resume {NAME} --trials 8 --time-budget "
    assert line in said
    minutes = int(said.split(line)[1].split("m")[0])
    going_on = resumption(record, ResumeOptions(trials=8, time_budget=60.0 * minutes)).options
    assert going_on.time_budget == spent + 60 * minutes, "a time budget counts from now on"
    roomy = replace(setup, budget=replace(setup.budget, time_s=going_on.time_budget))
    assert "no time is left" not in unspent(roomy, ResumeOptions(trials=8), record, record)[0]


# -- a study that was moved --------------------------------------------------------------------------------------------


def end_by_themselves(directory: Path) -> int:
    """Request records as a real model leaves them, some ended by the model: how many output lengths there are to replay."""
    path = directory / RECORDS
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    for row in rows[::3]:
        row["finish_reason"] = row["finish_reason"] and "stop"
    with gzip.open(path, "wt") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return len([row for row in rows if row["finish_reason"]])


def seen_by(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many output lengths each search that begins from now on replays."""
    seen: list[int] = []
    made: Callable[..., None] = Evaluator.__init__

    def watched(self: Evaluator, bench: Any, measurement: Any = None, *others: Any) -> None:
        seen.append(len(measurement.observed_output_tokens) if measurement is not None else 0)
        made(self, bench, measurement, *others)

    monkeypatch.setattr(Evaluator, "__init__", watched)
    return seen


@pytest.mark.fault("study moved")
def test_a_moved_study_replays_the_same_output_lengths(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    monkeypatch.chdir(first)
    shutil.copy(finished / "c.sh", first)
    assert vopt(*SEARCH, "--rounds", "0").exit_code == 0
    lengths = end_by_themselves(first / "studies" / NAME / "0")
    assert lengths > 20
    shutil.move(first, second)
    monkeypatch.chdir(second)
    seen = seen_by(monkeypatch)
    assert resume("--rounds", "1").exit_code == 0
    assert seen == [lengths]
    assert not first.exists()
    found = measurement_of(stored().trials)
    assert found is not None
    assert len(found.observed_output_tokens) == lengths


@pytest.mark.parametrize("damage", ["gone", "cut off"])
@pytest.mark.fault("request records of the baseline lost")
def test_output_lengths_that_are_lost_are_not_replaced_by_others(
    place: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    records = place / "studies" / NAME / "0" / RECORDS
    prepare = launching.prepare
    monkeypatch.setattr(launching, "prepare", lambda *given: replace(prepare(*given), replays=True))
    before = stored()
    if damage == "gone":
        records.unlink()
    else:
        records.write_bytes(records.read_bytes()[: records.stat().st_size // 2])
    refused = resume("--rounds", "3")
    assert refused.exit_code == 3, refused.output
    assert str(records) in refused.stderr
    assert f"vopt resume {NAME}" in refused.stderr
    assert stored() == before
