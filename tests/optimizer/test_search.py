"""The whole loop on analytic landscapes: what wins, what never may, what ends it, and what is said about it."""

from __future__ import annotations

import math

import pytest
from landscapes import Landscape, Truth, parameter, small_landscape, space
from published import POOLED_NOISE, RESTART_NOISE, published_landscape
from searched import flat_landscape, run

from vopt.optimizer.events import Event, Note, StageBegan, TrialBegan, TrialEnded
from vopt.optimizer.history import Stage
from vopt.optimizer.recommend import Verdict
from vopt.optimizer.setup import Budget, Pinned
from vopt.optimizer.trial import EngineConfig


def test_the_same_seed_gives_the_same_answer_and_the_same_trials() -> None:
    first, one = run(small_landscape(), 5)
    second, two = run(small_landscape(), 5)
    assert first == second
    assert one.records() == two.records()


@pytest.mark.parametrize("seed", range(4))
def test_a_real_gain_is_found_and_measured(seed: int) -> None:
    landscape = small_landscape()
    answer, study = run(landscape, seed)
    assert answer.verdict is Verdict.BETTER
    assert answer.winner_config is not None
    assert landscape.regret(answer.winner_config) < 0.03
    assert answer.gain is not None
    assert answer.gain.low is not None
    assert answer.gain.high is not None
    truth = math.exp(landscape.merit(landscape.space.point_of(answer.winner_config))) / 10_000
    assert answer.gain.low < truth < answer.gain.high
    assert answer.gain.low > 1
    assert answer.argv is not None
    assert answer.argv != answer.baseline_argv
    stages = [record.stage for record in study.records()]
    assert stages[-1] is Stage.SOAK
    assert sum(stage in (Stage.SEARCH, Stage.SCREENING) for stage in stages) <= 16


@pytest.mark.parametrize("seed", range(4))
def test_half_of_the_requests_lost_never_wins_whatever_the_rate(seed: int) -> None:
    answer, study = run(small_landscape(), seed)
    broken = [r for r in study.records() if r.config.get("speculative_config")]
    assert broken, "the tempting configuration was measured"
    assert max(r.metrics["tokens_per_s"] for r in broken if r.metrics) > 14_000
    assert answer.winner_config is not None
    assert "speculative_config" not in answer.winner_config
    rejected = next(row for row in answer.rejected if "speculative_config" in row.config)
    assert rejected.kind == "limit:success_rate"
    assert "%" in rejected.reason
    assert "99 %" in rejected.reason


def test_nothing_to_gain_is_said() -> None:
    verdicts = [run(flat_landscape(), seed)[0] for seed in range(4)]
    assert sum(answer.verdict is Verdict.NO_GAIN for answer in verdicts) >= 3
    none = next(answer for answer in verdicts if answer.verdict is Verdict.NO_GAIN)
    assert none.winner_config is None
    assert none.argv == none.baseline_argv
    assert "no measurable gain" in none.reason


def test_no_configuration_is_measured_twice_by_accident() -> None:
    for seed in range(4):
        _, study = run(small_landscape(), seed)
        searched = [record.config for record in study.records() if record.stage is Stage.SEARCH]
        assert len(searched) == len(set(searched))


def test_an_exhausted_space_ends_the_search() -> None:
    made = space(parameter("max_num_seqs", (128, 256, 512), 256))
    landscape = Landscape("tiny", made, lambda p: Truth(10_000 + p["max_num_seqs"]), noise=0.001)
    events: list[Event] = []
    _, study = run(landscape, events=events, budget=Budget(trials=30, rounds=0, time_s=None, soak_s=0))
    assert sum(record.stage is Stage.SEARCH for record in study.records()) == 3
    assert any(isinstance(event, Note) and "exhausted" in event.text for event in events)


def test_a_time_budget_keeps_confirmation_and_soak() -> None:
    landscape = small_landscape()
    budget = Budget(trials=16, rounds=3, time_s=3000.0, soak_s=300)
    _, study = run(landscape, budget=budget)
    spent = sum(sum(record.phase_s.values()) for record in study.records())
    stages = [record.stage for record in study.records()]
    assert stages.count(Stage.SEARCH) < 13
    assert stages.count(Stage.CONFIRMATION) >= 6
    assert spent <= 3000


def test_the_users_command_is_the_baseline_and_nothing_slower_is_the_answer() -> None:
    landscape = small_landscape(noise=0.002)
    best = EngineConfig({"max_num_seqs": 512, "max_num_batched_tokens": 16384, "performance_mode": "throughput"})
    answer, study = run(landscape, baseline=best, pinned=(Pinned(EngineConfig(), "the bare defaults"),))
    assert [dict(record.config) for record in study.records()[:2]] == [dict(best), {}]
    assert answer.verdict is Verdict.NO_GAIN
    assert answer.argv == study.records()[0].argv


def test_explain_measures_each_override_without_it() -> None:
    events: list[Event] = []
    answer, study = run(small_landscape(noise=0.002), events=events, explain=True)
    kept = [row for row in answer.overrides if row.kept]
    assert kept
    explained = [record for record in study.records() if record.stage is Stage.EXPLAIN]
    assert len(explained) == 2 * len(kept)
    assert [event.trials for event in events if isinstance(event, StageBegan) and event.stage == "explain"] == [len(explained)]
    assert all(row.worth is not None and row.worth.ratio > 1 for row in kept)


def test_explain_measures_what_the_winner_leaves_out_of_the_command_in_use() -> None:
    given = EngineConfig({"max_num_batched_tokens": 2048})
    answer, study = run(small_landscape({"max_num_batched_tokens=16384": -0.05}, noise=0.002), baseline=given, explain=True)
    assert answer.winner_config is not None
    explained = {record.label: record.config for record in study.records() if record.stage is Stage.EXPLAIN}
    assert "max_num_batched_tokens" not in answer.winner_config
    assert explained["explain-max_num_batched_tokens-1"] == answer.winner_config | given
    (row,) = [row for row in answer.overrides if row.name == "max_num_batched_tokens"]
    assert row.kept is False
    assert row.worth is not None
    assert row.worth.ratio > 1


def test_events_tell_the_whole_story() -> None:
    events: list[Event] = []
    _, study = run(small_landscape(), events=events)
    began = [event.request.label for event in events if isinstance(event, TrialBegan)]
    ended = [event.record.label for event in events if isinstance(event, TrialEnded)]
    assert began == ended == [record.label for record in study.records()]
    stages = [event.stage for event in events if isinstance(event, StageBegan)]
    assert stages == ["search", "screening", "confirmation", "soak"]


@pytest.mark.parametrize("name", ["9b-throughput", "35b-throughput"])
def test_published_trials_reject_the_configuration_that_lost_half_its_requests(name: str) -> None:
    answer, _ = run(published_landscape(name), 1)
    rejected = [row for row in answer.rejected if row.kind == "limit:success_rate"]
    assert len(rejected) == 1
    assert rejected[0].config["speculative_config"]["num_speculative_tokens"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("reading", ["rows", "classes", "shrunk"])
@pytest.mark.parametrize("noise", [RESTART_NOISE, POOLED_NOISE])
def test_whatever_the_published_rows_are_taken_for_the_printed_interval_holds_the_truth(reading: str, noise: float) -> None:
    landscape = published_landscape("9b-throughput", reading, noise)
    base = landscape.merit(landscape.space.default_point())
    missed = 0
    for seed in range(12):
        answer, _ = run(landscape, seed)
        gain = answer.gain
        if answer.verdict is Verdict.BETTER and gain is not None and gain.low is not None and gain.high is not None:
            assert answer.winner_config is not None
            truth = math.exp(landscape.merit(landscape.space.point_of(answer.winner_config)) - base)
            missed += not gain.low <= truth <= gain.high
    assert missed <= 2


@pytest.mark.parametrize("name", ["9b-latency", "35b-latency"])
def test_published_trials_let_one_speculated_token_win_latency(name: str) -> None:
    answer, _ = run(published_landscape(name), 1)
    assert answer.verdict is Verdict.BETTER
    assert answer.winner_config is not None
    assert answer.winner_config["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 1}
    assert answer.gain is not None
    assert answer.gain.ratio > 1.05
