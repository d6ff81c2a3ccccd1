"""Where a number becomes "better"."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_loads import failed, record

from vopt.objectives.goals import Goal, Limit, built_in_goal, parse_limit
from vopt.objectives.metrics import Direction, Metrics, compute_metrics
from vopt.objectives.records import LoadResult, LoadStatus, LoadWindow, RequestFailureKind
from vopt.objectives.score import (
    STATUS_KEY,
    score,
    violation_keys,
)

THROUGHPUT = built_in_goal("throughput")
BASELINE = Metrics({"tokens_per_s": 100.0, "success_rate": 1.0, "p95_ttft_s": 0.4, "p95_tpot_s": 0.02, "mean_e2e_s": 4.0})


def metrics(**changes: float | None) -> Metrics:
    values = {**BASELINE.values, **changes}
    return Metrics({name: value for name, value in values.items() if value is not None})


def test_fast_and_broken_loses_to_slow_and_sound() -> None:
    """130 tokens/s at 51.5 % success against 100 at 100 %: through the real metrics of made records."""

    def load(good: int, bad: int, output_tokens: int) -> LoadResult:
        records = [record(i, i * 0.1, output_tokens=output_tokens, prompt_tokens=1, tpot_s=0.001) for i in range(good)]
        records += [failed(good + i, 5 + i * 0.01, RequestFailureKind.STREAM_ERROR) for i in range(bad)]
        return LoadResult(tuple(records), LoadWindow(0, 100), LoadStatus.COMPLETE, concurrency=8)

    broken = compute_metrics(load(515, 485, 252))
    sound = compute_metrics(load(1000, 0, 99))
    assert broken["tokens_per_s"] > 1.29 * sound["tokens_per_s"]
    goal = built_in_goal("throughput", guard=False)
    scores = score(broken, goal, sound), score(sound, goal, None)
    assert not scores[0].feasible
    assert scores[0].reasons == ("success_rate 51.5 % is below the limit 99 %",)
    assert scores[1].feasible


def test_relative_limits_compare_with_the_baseline() -> None:
    slow = score(metrics(tokens_per_s=150.0, p95_ttft_s=0.7), THROUGHPUT, BASELINE)
    assert not slow.feasible
    assert slow.reasons == ("p95_ttft_s 700 ms is above the limit 600 ms (1.5 x baseline)",)
    assert slow.violations["p95_ttft_s<=1.5*baseline"] == pytest.approx(1 / 6)
    assert score(metrics(p95_ttft_s=0.6), THROUGHPUT, BASELINE).feasible
    assert score(BASELINE, THROUGHPUT, None).feasible


def test_the_success_rate_is_measured_in_allowed_failures() -> None:
    key = "success_rate>=0.99"
    assert score(metrics(success_rate=0.985), THROUGHPUT, BASELINE).violations[key] == pytest.approx(0.5)
    assert score(metrics(success_rate=0.5), THROUGHPUT, BASELINE).violations[key] == 1.0
    assert score(metrics(success_rate=0.99), THROUGHPUT, BASELINE).violations[key] == 0.0
    assert score(metrics(success_rate=1.0), THROUGHPUT, BASELINE).violations[key] == pytest.approx(-1.0)
    perfect = built_in_goal("throughput", min_success=1.0)
    assert not score(metrics(success_rate=0.9999), perfect, BASELINE).feasible
    assert score(metrics(success_rate=1.0), perfect, BASELINE).feasible


@pytest.mark.parametrize(
    ("name", "actual", "limit", "words"),
    [
        ("success_rate", 0.989999, "success_rate>=0.99", "success_rate 98.9999 % is below the limit 99 %"),
        ("success_rate", 0.0, "success_rate>=0.99", "success_rate 0 % is below the limit 99 %"),
        ("mean_e2e_s", 12.5, "mean_e2e_s<=10", "mean_e2e_s 12.5 s is above the limit 10 s"),
        ("mean_e2e_s", 1.2, "mean_e2e_s<=900ms", "mean_e2e_s 1.2 s is above the limit 900 ms"),
        ("tokens_per_s", 12345.6, "tokens_per_s>=20000", "tokens_per_s 12,346 tok/s is below the limit 20,000 tok/s"),
        ("preemptions", 3.0, "preemptions<=0", "preemptions 3 is above the limit 0"),
    ],
)
def test_reasons_name_value_and_limit(name: str, actual: float, limit: str, words: str) -> None:
    goal = Goal("throughput", "tokens_per_s", Direction.MAXIMIZE, (parse_limit(limit),))
    assert score(metrics(**{name: actual}), goal, BASELINE).reasons == (words,)


def test_a_missing_metric_violates_its_limit() -> None:
    missing = score(metrics(p95_ttft_s=None), THROUGHPUT, BASELINE)
    assert missing.violations["p95_ttft_s<=1.5*baseline"] == 1.0
    assert missing.reasons == ("p95_ttft_s was not measured; its limit is 600 ms",)


def test_a_multiple_of_what_the_baseline_lacks_limits_nothing_and_says_so() -> None:
    """One-token outputs have no TPOT; the guard on it must not make every configuration infeasible."""
    result = score(metrics(p95_tpot_s=None), THROUGHPUT, replace(BASELINE, values=metrics(p95_tpot_s=None).values))
    assert result.feasible
    assert result.notes == ("p95_tpot_s<=1.25*baseline limits nothing: neither this nor the baseline has p95_tpot_s",)


@pytest.mark.parametrize(
    "status", [LoadStatus.ENGINE_DIED, LoadStatus.REPEATED_ERRORS, LoadStatus.OVERLOADED, LoadStatus.DEADLINE]
)
def test_a_load_that_ended_badly_is_never_feasible(status: LoadStatus) -> None:
    result = score(metrics(tokens_per_s=1e6), THROUGHPUT, BASELINE, status=status)
    assert not result.feasible
    assert result.violations[STATUS_KEY] == 1.0
    assert len(result.reasons) == 1
    assert (result.value is None) == (status is LoadStatus.OVERLOADED)


@pytest.mark.parametrize("status", [None, LoadStatus.COMPLETE, LoadStatus.UNSTEADY, LoadStatus.STOPPED_EARLY])
def test_other_ends_leave_the_limits_to_decide(status: LoadStatus | None) -> None:
    assert score(BASELINE, THROUGHPUT, BASELINE, status=status).feasible


def test_what_was_not_measured_is_infeasible_in_every_way() -> None:
    nothing = score(None, THROUGHPUT, BASELINE)
    assert nothing.value is None
    assert set(nothing.violations.values()) == {1.0}
    without_value = score(metrics(tokens_per_s=None), THROUGHPUT, BASELINE)
    assert not without_value.feasible
    assert without_value.reasons == ("tokens_per_s was not measured",)


@given(
    st.dictionaries(st.sampled_from(sorted(BASELINE.values)), st.floats(0, 1e9)),
    st.sampled_from([None, *LoadStatus]),
    st.sampled_from([BASELINE, Metrics({}), None]),
)
def test_keys_are_always_the_same_and_figures_finite(
    values: dict[str, float], status: LoadStatus | None, baseline: Metrics | None
) -> None:
    goal = built_in_goal("throughput", limits=[Limit("mean_e2e_s", "<=", 0.0)])
    result = score(Metrics(values), goal, baseline, status=status)
    assert tuple(result.violations) == violation_keys(goal)
    assert all(-1 <= violation <= 1 for violation in result.violations.values())
    assert result.feasible == (not result.reasons)
    assert result.feasible == all(violation <= 0 for violation in result.violations.values())
    assert result.value is None or math.isfinite(result.value)
