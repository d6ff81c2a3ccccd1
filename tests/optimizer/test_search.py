"""The whole loop on analytic landscapes: what wins, what never may, what ends it, and what is said about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from landscapes import Landscape, MemoryStudy, Truth, parameter, small_landscape, space
from published import POOLED_NOISE, RESTART_NOISE, published_landscape

from vopt.objectives.goals import built_in_goal, parse_limit
from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.events import Event, Note, StageBegan, TrialBegan, TrialEnded
from vopt.optimizer.history import FailureSummary, Stage, TrialRecord, TrialRequest
from vopt.optimizer.recommend import Recommendation, Verdict
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, Pinned, SearchSetup
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase

Evaluate = Callable[[TrialRequest], TrialRecord]


def run(
    landscape: Landscape, seed: int = 0, evaluate: Evaluate | None = None, events: list[Event] | None = None, **changes: Any
) -> tuple[Recommendation, MemoryStudy]:
    values: dict[str, Any] = {"budget": Budget(trials=16, time_s=None, soak_s=60), "seed": seed}
    if landscape.mode:
        values["pinned"] = (Pinned(EngineConfig(landscape.mode), "the bare mode"),)
    setup = SearchSetup(**({"goal": landscape.goal, "space": landscape.space} | values | changes))
    study = MemoryStudy()
    heard = events if events is not None else []
    return search(setup, study, evaluate or landscape.evaluator(seed), heard.append), study


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


def flat_landscape(noise: float = 0.01) -> Landscape:
    return replace(
        small_landscape({"max_num_seqs=512": 0, "max_num_batched_tokens=16384": 0, "performance_mode=throughput": 0}),
        noise=noise,
    )


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


def infrastructure(request: TrialRequest, kind: FailureKind) -> TrialRecord:
    record = small_landscape().evaluator(0)(replace(request, config=EngineConfig()))
    return replace(record, config=request.config, metrics=None, status=None, failure=FailureSummary(Phase.START, kind, "taken"))


def test_an_accident_is_not_charged_to_the_configuration() -> None:
    landscape, unlucky = small_landscape(), []

    def evaluate(request: TrialRequest) -> TrialRecord:
        if dict(request.config) == {"max_num_seqs": 512} and request.attempt == 1 and request.stage is Stage.SEARCH:
            unlucky.append(request.label)
            return infrastructure(request, FailureKind.PORT)
        return landscape.evaluator(0)(request)

    answer, study = run(landscape, evaluate=evaluate)
    tries = [r for r in study.records() if dict(r.config) == {"max_num_seqs": 512} and r.stage is Stage.SEARCH]
    assert [r.attempt for r in tries] == [1, 2]
    assert len(unlucky) == 1
    assert not any(dict(row.config) == {"max_num_seqs": 512} and row.kind == "port" for row in answer.rejected)
    assert sum(r.stage is Stage.SEARCH for r in study.records()) <= 14


@pytest.mark.parametrize(
    "kind, error",
    [(FailureKind.GPU_LOST, EnvironmentLacks), (FailureKind.TOO_LONG, UsageError), (FailureKind.PORT, EnvironmentLacks)],
)
def test_what_no_configuration_can_mend_stops_the_study(kind: FailureKind, error: type[Exception]) -> None:
    calls = []

    def evaluate(request: TrialRequest) -> TrialRecord:
        calls.append(request)
        return infrastructure(request, kind)

    with pytest.raises(error):
        run(small_landscape(), evaluate=evaluate)
    assert len(calls) <= 2


def test_a_baseline_that_cannot_start_is_repaired_by_the_engines_own_words() -> None:
    landscape = small_landscape()

    def evaluate(request: TrialRequest) -> TrialRecord:
        if request.config.get("max_num_seqs", 256) > 128:
            record = infrastructure(request, FailureKind.MAMBA_BLOCKS)
            assert record.failure is not None
            return replace(record, failure=replace(record.failure, hint={"max_num_seqs": {"at_most": 200}}))
        return landscape.evaluator(0)(request)

    answer, study = run(landscape, evaluate=evaluate)
    configs = [dict(record.config) for record in study.records()]
    assert configs[:2] == [{}, {"max_num_seqs": 128}]
    assert any("repaired baseline" in note for note in answer.notes)
    assert answer.verdict in (Verdict.BETTER, Verdict.NO_GAIN)


def test_a_baseline_beyond_repair_ends_after_three_repairs() -> None:
    calls = []

    def evaluate(request: TrialRequest) -> TrialRecord:
        calls.append(dict(request.config))
        return infrastructure(request, FailureKind.OOM_START)

    answer, _ = run(small_landscape(), evaluate=evaluate)
    assert answer.verdict is Verdict.NOTHING_FEASIBLE
    assert answer.argv is None
    assert 2 <= len(calls) <= 4
    assert "the baseline fails" in answer.reason


def test_limits_that_nothing_keeps_say_what_came_nearest() -> None:
    landscape = small_landscape()
    goal = built_in_goal("throughput", limits=(parse_limit("tokens_per_s>=20000"),), guard=False)
    answer, _ = run(landscape, goal=goal)
    assert answer.verdict is Verdict.NOTHING_FEASIBLE
    assert answer.argv is None
    assert any("highest tokens_per_s seen" in note for note in answer.notes)
    assert any("least violating" in note for note in answer.notes)


def test_without_rounds_the_answer_is_unconfirmed() -> None:
    answer, study = run(small_landscape(), budget=Budget(trials=16, rounds=0, time_s=None, soak_s=0))
    assert answer.verdict is Verdict.UNCONFIRMED
    assert answer.winner_config is not None
    assert not any(record.stage is Stage.CONFIRMATION for record in study.records())


def test_a_winner_that_fails_its_soak_is_not_recommended() -> None:
    landscape = small_landscape()

    def evaluate(request: TrialRequest) -> TrialRecord:
        if request.stage is Stage.SOAK:
            return infrastructure(request, FailureKind.ENGINE_DIED)
        return landscape.evaluator(0)(request)

    answer, _ = run(landscape, evaluate=evaluate)
    assert answer.verdict is Verdict.NO_GAIN
    assert "soak" in answer.reason


def test_a_finalist_that_fails_in_confirmation_gives_way_to_the_next() -> None:
    landscape = small_landscape()
    failed: list[EngineConfig] = []

    def evaluate(request: TrialRequest) -> TrialRecord:
        if request.label == "confirm-1-finalist":
            failed.append(request.config)
            return infrastructure(request, FailureKind.ENGINE_DIED)
        return landscape.evaluator(0)(request)

    answer, study = run(landscape, evaluate=evaluate)
    assert answer.winner_config not in failed
    assert any(record.label.startswith("confirm-1-finalist-2") for record in study.records())
    assert any(row.config in failed for row in answer.rejected)


def test_an_artefact_of_dummy_weights_cannot_win() -> None:
    landscape = small_landscape(broken=1.0)

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        return replace(record, flags=("artefact_acceptance",)) if "speculative_config" in request.config else record

    answer, _ = run(landscape, evaluate=evaluate)
    assert answer.winner_config is None or "speculative_config" not in answer.winner_config
    assert any(row.kind == "artefact_acceptance" for row in answer.rejected)


def test_a_confirmation_that_the_client_bounded_is_in_the_notes() -> None:
    landscape = small_landscape()

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        return replace(record, flags=("client_limited",)) if request.label == "confirm-2-baseline" else record

    answer, _ = run(landscape, evaluate=evaluate)
    assert any("client, not the engine, was the limit in confirm-2-baseline" in note for note in answer.notes), answer.notes
    assert not any("client" in note for note in run(landscape)[0].notes)


@pytest.mark.parametrize("served", [True, False])
def test_a_confirmation_whose_requests_were_outside_the_engine_is_in_the_notes(served: bool) -> None:
    landscape = small_landscape()

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        if request.label != "confirm-2-baseline":
            return record
        assert record.metrics is not None
        metrics = replace(record.metrics, values={**record.metrics.values, "front_end_share": 0.42})
        return replace(record, flags=("front_end_limited",), metrics=metrics, served=served)

    answer, _ = run(landscape, evaluate=evaluate)
    found = [note for note in answer.notes if "in confirm-2-baseline, 42% to 42%" in note]
    assert len(found) == 1
    assert ("--api-server-count 2" in found[0]) is served
    assert not any("in flight were" in note for note in run(landscape)[0].notes)


def test_confirmation_alternates_its_order_over_fresh_starts() -> None:
    _, study = run(small_landscape())
    labels = [record.label for record in study.records() if record.stage is Stage.CONFIRMATION]
    rounds = [[label.split("-")[2] for label in labels if label.startswith(f"confirm-{n}-")] for n in (1, 2, 3)]
    assert rounds[0][0] == "baseline"
    assert rounds[1] == rounds[0][::-1]
    assert rounds[2] == rounds[0]
    assert len(labels) == len(set(labels))


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


def test_a_drifting_machine_is_named_and_widens_the_interval() -> None:
    landscape = small_landscape(noise=0.001)

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        slower = request.stage is Stage.CONFIRMATION
        metrics = record.metrics
        if slower and metrics is not None:
            metrics = replace(metrics, values={**metrics.values, "tokens_per_s": metrics["tokens_per_s"] * 0.93})
        return replace(record, metrics=metrics, environment={"clock_mhz": 1200 if slower else 1980})

    answer, _ = run(landscape, evaluate=evaluate)
    note = next(note for note in answer.notes if "drifted" in note)
    assert "clock_mhz: 1980 -> 1200" in note
    assert answer.gain is not None
    assert answer.gain.low is not None
    assert answer.gain.low < answer.gain.ratio / 1.06


@pytest.mark.parametrize(
    ("trials", "labels"), [(6, []), (16, ["drift"]), pytest.param(32, ["drift-midway", "drift"], marks=pytest.mark.slow)]
)
def test_the_baseline_is_measured_again_where_the_confirmation_is_another_thing(trials: int, labels: list[str]) -> None:
    landscape = small_landscape(noise=0.001)

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = landscape.evaluator(0)(request)
        late = request.stage is Stage.DRIFT
        metrics = record.metrics
        if late and metrics is not None:
            metrics = replace(metrics, values={**metrics.values, "tokens_per_s": metrics["tokens_per_s"] * 0.9})
        facts = {"gpu0_sm_clock_mhz": 1200 if late else 1980, "gpu0_power_w": 700.5 if late else 690.0, "load_plan": late}
        return replace(record, metrics=metrics, served=request.stage is Stage.CONFIRMATION, environment=facts)

    budget = Budget(trials=trials, rounds=2, time_s=None, soak_s=0, patience=99)
    answer, study = run(landscape, evaluate=evaluate, drift_check=True, budget=budget)
    assert [record.label for record in study.records() if record.stage is Stage.DRIFT] == labels
    stages = [record.stage for record in study.records()]
    notes = [note for note in answer.notes if "drifted" in note]
    if not labels:
        assert notes == []
        return
    assert "gpu0_sm_clock_mhz: 1980 -> 1200)" in notes[0], "what moved within its noise is not named"
    assert answer.gain is not None
    assert answer.gain.low is not None
    assert answer.gain.low < answer.gain.ratio / 1.1
    assert stages.index(Stage.DRIFT) < stages.index(Stage.CONFIRMATION)
    if len(labels) == 2:
        assert Stage.SEARCH in stages[stages.index(Stage.DRIFT) :], "the search goes on after the middle"


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
