from __future__ import annotations

from dataclasses import replace

import pytest
import sample_study

from vopt.optimizer.history import Arm, Stage, TrialRecord
from vopt.optimizer.recommend import Gain, Recommendation, Verdict
from vopt.optimizer.report.blocks import plain_text
from vopt.optimizer.report.comparison import Spread, compare
from vopt.optimizer.report.notes import study_note
from vopt.optimizer.report.show import study_blocks
from vopt.optimizer.report.view import StudyView


@pytest.fixture
def view() -> StudyView:
    return StudyView.of(sample_study.study())


def test_an_infeasible_start_is_not_feasible_however_fast(view: StudyView) -> None:
    fastest = max(view.searched, key=lambda trial: view.value(trial) or 0.0)
    assert fastest.label == "4"
    assert not view.feasible(fastest)
    assert view.why_not(fastest) == ("limit:success_rate", view.answer.rejected[0].reason) if view.answer else False


def test_the_winner_is_compared_by_its_own_arm_alone(view: StudyView) -> None:
    assert [trial.label for trial in view.arm(winner=True)] == ["confirm-1-lite", "confirm-2-lite", "confirm-3-lite"]
    assert [trial.arm for trial in view.arm(winner=False)] == [Arm.BASELINE] * 3


def test_finalist_and_lite_of_one_configuration_are_not_pooled() -> None:
    made = sample_study.study()
    trials = tuple(replace(trial, config=sample_study.LITE) if trial.arm is Arm.FINALIST else trial for trial in made.trials)
    arms = {trial.arm for trial in StudyView.of(replace(made, trials=trials)).arm(winner=True)}
    assert len(arms) == 1


def test_a_comparison_holds_mean_and_range_over_starts(view: StudyView) -> None:
    row = next(row for row in view.compared() if row.metric == "tokens_per_s")
    assert row.winner is not None
    assert row.winner.starts == 3
    assert row.winner.low < row.winner.mean < row.winner.high
    assert row.change == pytest.approx(1.1387, abs=1e-3)
    assert row.better is True


def test_a_slower_first_token_is_worse_and_a_fuller_cache_is_neither(view: StudyView) -> None:
    rows = {row.metric: row for row in view.compared()}
    assert rows["p95_ttft_s"].better is False
    assert rows["kv_peak"].better is None
    assert next(row.metric for row in view.costs()) == "p95_ttft_s"
    assert "kv_peak" not in [row.metric for row in view.costs()]


def test_gauges_have_no_better_and_no_worse(view: StudyView) -> None:
    """More waiting, a fuller budget, a higher acceptance rate: they say how a gain came about, not that there is one."""
    names = ("queued_share", "full_budget_share", "peak_running", "acceptance_rate", "some_later_counter", "kv_peak")
    for name in names:
        assert compare(name, Spread(0.5, 0.4, 0.6, 3), Spread(0.9, 0.8, 1.0, 3)).better is None, name


def test_one_start_each_claims_no_direction_for_less_than_starts_differ_by() -> None:
    one = [compare("mean_e2e_s", Spread(1.0, 1.0, 1.0, 1), Spread(value, value, value, 1)) for value in (1.005, 0.995, 1.2)]
    assert [row.too_little for row in one] == [True, True, False]
    assert not compare("mean_e2e_s", Spread(1.0, 0.999, 1.001, 3), Spread(1.005, 1.004, 1.006, 3)).too_little


def test_a_clear_loss_of_a_kind_that_is_not_named_otherwise_is_a_cost() -> None:
    made = sample_study.study()

    def slower(trial: TrialRecord) -> TrialRecord:
        if trial.metrics is None or trial.arm is None:
            return trial
        factor = 1.0 if trial.arm is Arm.BASELINE else 1.3
        times = {"p50_ttft_s": 0.1 * factor, "p90_ttft_s": 0.2 * factor**0.5, "p95_ttft_s": 0.3}
        others = {name: value for name, value in trial.metrics.values.items() if "ttft" not in name}
        return replace(trial, metrics=replace(trial.metrics, values={**others, **times}))

    view = StudyView.of(replace(made, trials=tuple(slower(trial) for trial in made.trials)))
    assert [row.metric for row in view.costs() if "ttft" in row.metric] == ["p50_ttft_s"]


def test_what_every_start_has_is_not_called_the_defaults() -> None:
    made = sample_study.study()
    options = {"set": ["max_model_len=8192"]}
    fixed = StudyView.of(replace(made, setup={**made.setup, "options": options, "fixed": {"max_model_len": 8192}}))
    assert "vLLM's defaults with what --set fixes" in fixed.verdict_line()
    shown = [line.split() for line in plain_text(study_blocks(fixed)).splitlines()]
    assert ["In", "every", "start", "max_model_len=8192"] in shown


def test_rejected_are_grouped_by_kind_and_none_is_lost(view: StudyView) -> None:
    groups = view.rejected_by_kind()
    assert {row.label for rows in groups.values() for row in rows} >= {"3", "4", "6", "9", "10", "11", "12", "13", "14"}
    assert groups["limit:success_rate"][0].label == "4"


def test_below_defaults_names_rounds_soak_and_window() -> None:
    made = sample_study.unconfirmed()
    setup = {**made.setup, "load_plan": {"concurrency": 512, "window_s": 20.0}}
    said = StudyView.of(replace(made, setup=setup)).below_defaults()
    assert len(said) == 3
    assert "20 s" in said[2]
    assert StudyView.of(sample_study.study()).below_defaults() == ()


@pytest.mark.parametrize("name", [*sample_study.VARIANTS, "running"])
def test_every_variant_has_a_verdict_line(name: str) -> None:
    made = sample_study.VARIANTS.get(name, sample_study.running)()
    line = StudyView.of(made).verdict_line()
    assert ("SIMULATED" in line) is (name == "simulated")
    assert len(line) < 120


def test_phase_and_stage_totals_are_the_same_seconds(view: StudyView) -> None:
    assert sum(view.phase_totals().values()) == pytest.approx(sum(seconds for _, seconds in view.stage_totals().values()))
    assert view.stage_totals()[Stage.CONFIRMATION][0] == 9


def test_a_latency_goal_says_how_the_latency_changed() -> None:
    made = sample_study.study()
    goal = {"name": "latency", "metric": "mean_e2e_s", "direction": "minimize", "limits": [], "slos": {}}
    view = StudyView.of(replace(made, setup={**made.setup, "goal": goal}))
    assert "mean E2E −12.2 %" in view.verdict_line()


def test_a_winner_by_the_limits_is_called_so_and_no_figure_is_made_up() -> None:
    made = sample_study.study()
    assert made.recommendation is not None
    slower = replace(made.recommendation, gain=Gain(0.98, 0.97, 0.99), baseline_breaks="p95_ttft_s 900 ms is above 500 ms")
    line = StudyView.of(replace(made, recommendation=slower)).verdict_line()
    assert line.startswith("Better than vLLM's defaults, which break the limits: throughput −2.0 % (interval −3.0 %")
    unknown = replace(slower, gain=None)
    assert StudyView.of(replace(made, recommendation=unknown)).verdict_line() == (
        "Better than vLLM's defaults, which break the limits"
    )
    of_a_command = replace(made, recommendation=unknown, setup={**made.setup, "options": {"command": ["vllm", "serve", "m"]}})
    assert StudyView.of(of_a_command).verdict_line() == "Better than the command in use, which breaks the limits"
    assert Recommendation.from_json(slower.to_json()) == slower


def test_a_baseline_alone_has_no_empty_column() -> None:
    made = sample_study.study()
    assert made.recommendation is not None
    answer = replace(made.recommendation, verdict=Verdict.NO_GAIN, winner_label=None, winner_config=None, winner_metrics={})
    alone = replace(made, recommendation=answer, trials=tuple(t for t in made.trials if t.stage is Stage.SEARCH))
    shown = plain_text(study_blocks(StudyView.of(alone)))
    assert "Baseline against" not in shown
    assert "| Winner |" not in study_note(StudyView.of(alone))
    assert "| Winner |" in study_note(StudyView.of(made))
