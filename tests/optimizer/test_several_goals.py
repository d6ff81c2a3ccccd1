"""Two goals at once: the front, its knee, each goal's own verdict, and the study that keeps both."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from landscapes import MemoryStudy, PlainSpace, parameter, space
from typer.testing import CliRunner

from vopt.objectives.goals import Limit, balance, joint_goal
from vopt.objectives.metrics import Metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer.cli import app
from vopt.optimizer.history import Arm, Stage, TrialRecord, TrialRequest
from vopt.optimizer.recommend import Recommendation, Verdict
from vopt.optimizer.search import StudyStore, search
from vopt.optimizer.second_load import joined, worse_status
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.optimizer.study import Study
from vopt.optimizer.trial import EngineConfig, Phase

GOAL = joint_goal(["throughput", "latency"])
FIGURES = {128: (8_000.0, 2.0), 256: (10_000.0, 3.0), 512: (13_000.0, 3.1), 1024: (13_600.0, 5.0)}
"""Tokens per second and mean E2E by ``max_num_seqs``: 256 is beaten by none alone, 512 is the knee."""


def made() -> PlainSpace:
    return space(parameter("max_num_seqs", tuple(FIGURES), 256), parameter("max_num_batched_tokens", (4096, 8192), 8192))


def evaluate(request: TrialRequest, noise: float = 0.002) -> TrialRecord:
    tokens, e2e = FIGURES[request.config.get("max_num_seqs", 256)]
    tokens *= 0.9 if request.config.get("max_num_batched_tokens", 8192) == 4096 else 1.0
    jitter = math.exp(noise * ((sum(request.label.encode()) % 7) - 3) / 3)
    values = {"tokens_per_s": tokens * jitter, "mean_e2e_s": e2e / jitter, "success_rate": 1.0}
    values["balance"] = balance(GOAL, values) or 0.0
    return TrialRecord(
        label=request.label,
        config=request.config,
        stage=request.stage,
        arm=request.arm,
        attempt=request.attempt,
        status=LoadStatus.COMPLETE,
        metrics=Metrics(values=values, succeeded=500),
        failure=None,
        argv=("vllm", "serve", "m"),
        resolved={},
        kv_cache_tokens=1000,
        start_class=None,
        phase_s={Phase.START: 10.0, Phase.LOAD: 10.0},
        start_parts_s={},
        began_at="2026-01-01T00:00:00+00:00",
        directory="",
    )


def run(study: StudyStore, trials: int = 10, goal: Any = GOAL) -> Recommendation:
    setup = SearchSetup(goal, made(), Budget(trials, rounds=3, time_s=None, soak_s=0), early_end=False)
    return search(setup, study, evaluate, lambda event: None)


def test_the_front_is_told_with_every_goal_and_its_knee_is_confirmed() -> None:
    answer = run(MemoryStudy())
    seqs = [member.config.get("max_num_seqs", 256) for member in answer.front]
    assert seqs == [1024, 512, 256, 128]
    assert [member.knee for member in answer.front] == [False, True, False, False]
    assert [member.baseline for member in answer.front] == [False, False, True, False]
    assert all(set(member.values) == {"tokens_per_s", "mean_e2e_s"} for member in answer.front)
    assert answer.verdict is Verdict.BETTER
    assert answer.winner_config == EngineConfig({"max_num_seqs": 512})


def test_each_goal_has_a_verdict_of_its_own() -> None:
    throughput, latency = run(MemoryStudy()).goals
    assert (throughput.name, throughput.verdict) == ("throughput", "better")
    assert throughput.gain.ratio == pytest.approx(1.3, abs=0.01)
    assert (latency.name, latency.verdict) == ("latency", "worse")
    assert latency.gain.ratio == pytest.approx(3.0 / 3.1, abs=0.01)


def test_a_limit_bounds_the_front() -> None:
    goal = joint_goal(["throughput", "latency"], limits=[Limit("mean_e2e_s", "<=", 1.0, relative_to_baseline=True)])
    answer = run(MemoryStudy(), goal=goal)
    assert {member.config.get("max_num_seqs", 256) for member in answer.front} == {256, 128}


def test_the_front_is_by_all_starts_and_holds_what_was_confirmed() -> None:
    """A lucky first start of one configuration must not take the confirmed one out of the front."""

    def lucky(request: TrialRequest) -> TrialRecord:
        record = evaluate(request)
        if request.stage is not Stage.SEARCH or request.config.get("max_num_seqs") != 1024 or record.metrics is None:
            return record
        values = {**record.metrics.values, "tokens_per_s": 15_000.0, "mean_e2e_s": 2.9}
        return replace(record, metrics=replace(record.metrics, values=values | {"balance": balance(GOAL, values) or 0.0}))

    setup = SearchSetup(GOAL, made(), Budget(10, rounds=3, time_s=None, soak_s=0), early_end=False)
    answer = search(setup, MemoryStudy(), lucky, lambda event: None)
    assert [member.config for member in answer.front if member.knee] != []


def test_one_round_says_nothing_about_a_goal() -> None:
    setup = SearchSetup(GOAL, made(), Budget(10, rounds=1, time_s=None, soak_s=0), early_end=False)
    answer = search(setup, MemoryStudy(), evaluate, lambda event: None)
    assert [goal.verdict for goal in answer.goals] == ["unconfirmed", "unconfirmed"]


def test_one_goal_has_no_front() -> None:
    goal = replace(GOAL, objectives=(), metric="tokens_per_s")
    answer = run(MemoryStudy(), goal=goal)
    assert (answer.front, answer.goals) == ((), ())


def test_an_answer_with_a_front_survives_storage() -> None:
    answer = run(MemoryStudy())
    assert Recommendation.from_json(json.loads(json.dumps(answer.to_json()))) == answer
    old = {name: value for name, value in answer.to_json().items() if name not in ("front", "goals")}
    assert Recommendation.from_json(old).front == ()


class _Killed(Exception):
    pass


def test_the_study_has_two_directions_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    setup = {"model": "m", "goal": GOAL.to_json(), "simulated": True, "space_digest": made().digest}
    directions = [objective.direction for objective in GOAL.objectives]
    search_setup = SearchSetup(GOAL, made(), Budget(10, rounds=3, time_s=None, soak_s=0), early_end=False)
    left = 3

    def dies(request: TrialRequest) -> TrialRecord:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Killed
        return evaluate(request)

    with Study.create(url, setup, made(), directions=directions) as study:
        assert study.name == "m-throughput-latency-1"
        with pytest.raises(_Killed):
            search(search_setup, study, dies, lambda event: None)
    with Study.reopen(url, None, made()) as study:
        answer = search(search_setup, study, evaluate, lambda event: None)
    assert answer.winner_config == EngineConfig({"max_num_seqs": 512})
    stored = optuna.load_study(study_name="m-throughput-latency-1", storage=url)
    assert [direction.name for direction in stored.directions] == ["MAXIMIZE", "MINIMIZE"]
    told = [trial.values for trial in stored.get_trials() if trial.values]
    assert any(tokens == pytest.approx(13_000, rel=0.01) and e2e == pytest.approx(3.1, rel=0.01) for tokens, e2e in told)
    best = {trial.user_attrs["engine_config"].get("max_num_seqs", 256) for trial in stored.best_trials}
    assert best == {128, 256, 512, 1024}


def test_a_start_of_two_loads_is_one_record() -> None:
    closed = Metrics(values={"tokens_per_s": 100.0, "mean_e2e_s": 9.0, "success_rate": 1.0}, succeeded=90, failed=0)
    opened = Metrics(values={"tokens_per_s": 60.0, "mean_e2e_s": 2.0, "p95_ttft_s": 0.2}, succeeded=45, failed=5)
    both = joined(closed, opened)
    assert both.values["tokens_per_s"] == 100.0
    assert both.values["mean_e2e_s"] == 2.0
    assert both.values["p95_ttft_s"] == 0.2
    assert both.values["success_rate"] == pytest.approx(135 / 140)
    assert (both.succeeded, both.failed) == (135, 5)
    assert worse_status(LoadStatus.COMPLETE, LoadStatus.OVERLOADED) is LoadStatus.OVERLOADED
    assert worse_status(LoadStatus.UNSTEADY, LoadStatus.COMPLETE) is LoadStatus.UNSTEADY


@pytest.mark.slow
def test_the_command_line_gives_a_front_and_the_study_keeps_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["search", "--goal", "throughput", "--goal", "latency", "--model", "Qwen/Qwen3.5-9B", "--simulate", "h200"]
    budget = ["--soak", "0", "--quiet", "--json", "--trials", "6", "--concurrency", "64", "--rounds", "1"]
    done = CliRunner().invoke(app, [*words, *budget])
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["goal"] == "throughput-latency"
    assert document["front"]
    assert all(set(member["metrics"]) == {"tokens_per_s", "mean_e2e_s"} for member in document["front"])
    assert [objective["metric"] for objective in document["objectives"]] == ["tokens_per_s", "mean_e2e_s"]
    starts = json.loads(CliRunner().invoke(app, ["show", "--json"]).stdout)["starts"]
    assert len({start["environment"]["second_load_plan"]["rate"] for start in starts if start["metrics"]}) == 1
    gone_on = CliRunner().invoke(app, ["resume", "--rounds", "2", "--json", "--quiet"])
    assert gone_on.exit_code == 0, gone_on.stderr
    more = json.loads(CliRunner().invoke(app, ["show", "--json"]).stdout)["starts"]
    assert len(more) > len(starts)
    assert len({start["environment"]["second_load_plan"]["rate"] for start in more if start["metrics"]}) == 1


def test_the_arms_are_measured_in_both_goals() -> None:
    study = MemoryStudy()
    run(study)
    arms = {record.arm for record in study.records() if record.stage is Stage.CONFIRMATION}
    assert arms == {Arm.BASELINE, Arm.FINALIST}
