from __future__ import annotations

from dataclasses import replace

import pytest
import sample_study

from vopt.objectives.goals import built_in_goal, parse_limit
from vopt.optimizer.history import Arm, Stage, TrialRecord
from vopt.optimizer.recommend import Gain, Recommendation, Verdict
from vopt.optimizer.report.blocks import plain_text
from vopt.optimizer.report.comparison import Spread, compare
from vopt.optimizer.report.document import answer_document, study_document
from vopt.optimizer.report.notes import study_note
from vopt.optimizer.report.shell import provenance
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


def with_times(times: dict[str, tuple[tuple[float, ...], tuple[float, ...]]], **setup: object) -> StudyView:
    """The sample study with these figures in the confirmation: by metric, those of the baseline and those of the others."""
    made = sample_study.study()
    seen: dict[Arm, int] = {}

    def changed(trial: TrialRecord) -> TrialRecord:
        if trial.metrics is None or trial.arm is None:
            return trial
        start = seen[trial.arm] = seen.get(trial.arm, -1) + 1
        figures = {name: arms[trial.arm is not Arm.BASELINE][start] for name, arms in times.items()}
        return replace(trial, metrics=replace(trial.metrics, values={**trial.metrics.values, **figures}))

    trials = tuple(changed(trial) for trial in made.trials)
    return StudyView.of(replace(made, trials=trials, setup={**made.setup, **setup}))


def test_the_worst_of_a_kind_that_the_starts_show_is_named_and_no_other() -> None:
    """As a user found it: p95 was named, whose ranges overlap, and p99 was worse by four times as much."""
    view = with_times(
        {
            "p90_ttft_s": ((0.100, 0.101, 0.102), (0.110, 0.111, 0.112)),
            "p95_ttft_s": ((0.120, 0.128, 0.135), (0.125, 0.133, 0.141)),
            "p99_ttft_s": ((0.150, 0.152, 0.154), (0.175, 0.176, 0.178)),
            "mean_ttft_s": ((0.08, 0.08, 0.08), (0.08, 0.08, 0.08)),
            "p50_ttft_s": ((0.07, 0.07, 0.07), (0.07, 0.07, 0.07)),
        }
    )
    assert [row.metric for row in view.costs() if "ttft" in row.metric] == ["p99_ttft_s"]
    worse = {row.metric for row in view.compared() if row.better is False and not row.overlaps and "ttft" in row.metric}
    assert worse == {"p90_ttft_s", "p99_ttft_s"}


def test_at_a_fixed_rate_what_was_sent_is_neither_better_nor_worse() -> None:
    rates = {
        "tokens_per_s": ((1000.0, 1001.0, 1002.0), (996.0, 997.0, 998.0)),
        "requests_per_s": ((8.0, 8.0, 8.0), (7.94, 7.94, 7.94)),
        "output_tokens_per_s": ((100.0, 100.0, 100.0), (95.0, 95.0, 95.0)),
    }
    at_a_rate = {row.metric: row for row in with_times(rates, load_plan={"rate": 8.0}).compared()}
    assert (at_a_rate["tokens_per_s"].better, at_a_rate["tokens_per_s"].as_sent) == (None, True)
    assert at_a_rate["requests_per_s"].as_sent
    assert at_a_rate["output_tokens_per_s"].better is False, "an engine that falls behind the rate is worse"
    view = with_times(rates, load_plan={"rate": 8.0})
    assert "as sent" in next(line for line in plain_text(study_blocks(view)).splitlines() if "Request rate" in line)
    closed = {row.metric: row for row in with_times(rates, load_plan={"concurrency": 64}).compared()}
    assert closed["requests_per_s"].better is False


def test_the_bounds_of_goodput_are_among_the_limits_wherever_they_are_shown() -> None:
    goal = built_in_goal("goodput", limits=[parse_limit("ttft_s<=0.2"), parse_limit("tpot_s<=0.03")]).to_json()
    made = sample_study.study(goal=goal)
    view = StudyView.of(made)
    said = "counted: requests with TTFT <= 200 ms and TPOT <= 30 ms"
    assert view.limits[-1] == said
    assert said in plain_text(study_blocks(view))
    assert said in "\n".join(provenance(view))
    assert answer_document(view)["slos"] == {"ttft_s": 0.2, "tpot_s": 0.03}


def test_both_loads_of_two_goals_are_named() -> None:
    made = sample_study.two_goals()
    plans = {"load_plan": {"concurrency": 256}, "second_load_plan": {"rate": 25.76}}
    trials = tuple(replace(trial, environment={**trial.environment, **plans}) for trial in made.trials)
    view = StudyView.of(replace(made, trials=trials))
    assert view.workload.endswith(", 256 in flight and then 25.8 requests/s")
    assert study_document(view)["second_load_plan"] == {"rate": 25.76}
    assert study_document(StudyView.of(made))["second_load_plan"] is None
