"""Goals, limits and their notation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vopt.objectives.goals import (
    Goal,
    GoalError,
    Limit,
    built_in_goal,
    check_limits,
    guarded_as,
    is_guard,
    parse_limit,
    too_few_for_p99,
)
from vopt.objectives.metrics import METRICS, Direction


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("p95_ttft_s<=0.5", Limit("p95_ttft_s", "<=", 0.5)),
        ("p95_ttft_s<=500ms", Limit("p95_ttft_s", "<=", 0.5)),
        ("p95_ttft_s <= 700 ms", Limit("p95_ttft_s", "<=", 0.7)),
        ("mean_e2e_s<=12s", Limit("mean_e2e_s", "<=", 12.0)),
        ("mean_e2e_s<=1.05*baseline", Limit("mean_e2e_s", "<=", 1.05, relative_to_baseline=True)),
        ("tokens_per_s>=baseline", Limit("tokens_per_s", ">=", 1.0, relative_to_baseline=True)),
        ("success_rate>=99%", Limit("success_rate", ">=", 0.99)),
        ("success_rate>=99.5%", Limit("success_rate", ">=", 0.995)),
        ("tokens_per_s>=1e4", Limit("tokens_per_s", ">=", 10000.0)),
        ("preemptions<=0", Limit("preemptions", "<=", 0.0)),
        ("ttft_s<=500ms", Limit("ttft_s", "<=", 0.5)),
    ],
)
def test_what_a_limit_may_be(text: str, limit: Limit) -> None:
    assert parse_limit(text) == limit


@pytest.mark.parametrize(
    ("text", "rule", "hint"),
    [
        ("p95_ttft<=0.5", "no such metric", "did you mean p95_ttft_s?"),
        ("zzz<=1", "no such metric", "metrics: mean_ttft_s"),
        ("p95_ttft_s<0.5", "a limit compares with <= or >=, not <", "write p95_ttft_s<=0.5"),
        ("p95_ttft_s=0.5", "a limit compares with <= or >=, not =", "write p95_ttft_s<= or >=0.5"),
        ("p95_ttft_s", "a limit is NAME<=VALUE or NAME>=VALUE", "for example p95_ttft_s<=500ms"),
        ("", "a limit is NAME<=VALUE or NAME>=VALUE", "for example"),
        ("p95_ttft_s<=fast", "not a number with ms, s, % or *baseline", "p95_ttft_s<=500ms"),
        ("p95_ttft_s<=nan", "not a number with ms, s, % or *baseline", "p95_ttft_s<=500ms"),
        ("p95_ttft_s<=1e999", "the value must be a finite number, not negative", "p95_ttft_s<=500ms"),
        ("p95_ttft_s<=-1", "the value must be a finite number, not negative", "p95_ttft_s<=500ms"),
        ("p95_ttft_s<=50%", "p95_ttft_s is in s, not in %", "p95_ttft_s<=500ms"),
        ("tokens_per_s>=5ms", "tokens_per_s is in tok/s, not in ms", "tokens_per_s>=100"),
        ("success_rate>=99", "a ratio lies between 0 and 1", "write success_rate>=99%"),
        ("success_rate>=1.5", "a ratio lies between 0 and 1", "a ratio is at most 1"),
        ("success_rate>=101%", "a ratio lies between 0 and 1", "a ratio is at most 1"),
        ("mean_e2e_s<=0*baseline", "a multiple of the baseline must be above zero", "1.05*baseline"),
        ("mean_e2e_s<=2*default", "not a number with ms, s, % or *baseline", "mean_e2e_s<=500ms"),
        ("ttft_s>=0.5", "a bound on every request is an upper bound", "write ttft_s<=0.5"),
        ("ttft_s<=1.1*baseline", "a bound on every request is a time, not a multiple of the baseline", "ttft_s<=0.5s"),
    ],
)
def test_what_a_limit_may_not_be(text: str, rule: str, hint: str) -> None:
    with pytest.raises(GoalError) as error:
        parse_limit(text)
    assert error.value.rule == rule
    assert hint in error.value.hint
    assert rule in str(error.value)


limits = st.builds(
    Limit,
    st.sampled_from(sorted(METRICS)),
    st.sampled_from(["<=", ">="]),
    st.floats(0.001, 1).map(lambda value: float(f"{value:.9g}")),
    st.booleans(),
)


@given(limits)
def test_the_text_of_a_limit_reads_back(limit: Limit) -> None:
    assert parse_limit(limit.text) == limit


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=30))
def test_any_text_is_a_limit_or_a_clear_error(text: str) -> None:
    error = None
    try:
        parse_limit(text)
    except GoalError as caught:
        error = caught
    assert error is None or error.hint


@pytest.mark.parametrize(
    ("texts", "rule"),
    [
        (["mean_e2e_s<=1", "mean_e2e_s>=2"], "no figure can keep both limits"),
        (["p95_ttft_s<=0.1", "p50_ttft_s>=200ms"], "no figure can keep both limits"),
        (["tokens_per_s<=0.9*baseline", "tokens_per_s>=1.1*baseline"], "no figure can keep both limits"),
        (["mean_e2e_s<=1", "mean_e2e_s<=2"], "limits mean_e2e_s twice"),
    ],
)
def test_limits_that_contradict_each_other(texts: list[str], rule: str) -> None:
    with pytest.raises(GoalError) as error:
        check_limits([parse_limit(text) for text in texts])
    assert error.value.rule == rule
    assert all(parse_limit(text).text in str(error.value) for text in texts)


def test_limits_that_look_contradictory_and_are_not() -> None:
    check_limits([parse_limit("p50_ttft_s<=0.1"), parse_limit("p95_ttft_s>=0.2")])
    check_limits([parse_limit("mean_e2e_s<=1"), parse_limit("mean_e2e_s>=1")])
    check_limits([parse_limit("mean_e2e_s<=1"), parse_limit("mean_e2e_s<=1.1*baseline")])


def texts(goal: Goal) -> list[str]:
    return [limit.text for limit in goal.limits]


def test_the_built_in_goals() -> None:
    throughput = built_in_goal("throughput")
    assert (throughput.metric, throughput.direction) == ("tokens_per_s", Direction.MAXIMIZE)
    assert texts(throughput) == ["success_rate>=0.99", "p95_ttft_s<=1.5*baseline", "p95_tpot_s<=1.25*baseline"]
    latency = built_in_goal("latency")
    assert (latency.metric, latency.direction) == ("mean_e2e_s", Direction.MINIMIZE)
    assert texts(latency) == ["success_rate>=0.99", "requests_per_s>=0.98*baseline"]
    goodput = built_in_goal("goodput", limits=[parse_limit("ttft_s<=500ms")])
    assert (goodput.metric, dict(goodput.slos)) == ("goodput_per_s", {"ttft_s": 0.5})
    assert texts(goodput) == ["success_rate>=0.99"]
    assert built_in_goal("latency", metric="p95_ttft_s").direction is Direction.MINIMIZE


def test_a_users_limit_replaces_the_guard_and_no_guard_drops_all() -> None:
    own = [parse_limit("p95_ttft_s<=0.5")]
    goal = built_in_goal("throughput", limits=own, min_success=0.95)
    assert texts(goal) == ["success_rate>=0.95", "p95_ttft_s<=0.5", "p95_tpot_s<=1.25*baseline"]
    assert texts(built_in_goal("throughput", limits=own, guard=False)) == ["success_rate>=0.99", "p95_ttft_s<=0.5"]
    assert texts(built_in_goal("throughput", limits=[parse_limit("success_rate>=90%")], guard=False)) == ["success_rate>=0.9"]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"name": "speed"}, "no such goal"),
        ({"name": "latency", "metric": "p95_tft_s"}, "no such metric"),
        ({"name": "goodput"}, "goodput needs a bound that every request must keep"),
        ({"name": "goodput", "slos": {"itl_s": 0.1}}, "no such SLO"),
        ({"name": "goodput", "slos": {"ttft_s": 0.0}}, "an SLO is a time above zero"),
        ({"name": "latency", "min_success": 99.0}, "the least success rate is above 0 and at most 1"),
        ({"name": "latency", "min_success": float("nan")}, "the least success rate is above 0 and at most 1"),
        (
            {"name": "latency", "min_success": 0.9, "limits": (Limit("success_rate", ">=", 0.95),)},
            "gives the success rate twice",
        ),
        ({"name": "latency", "limits": (Limit("success_rate", "<=", 0.5),)}, "no figure can keep both limits"),
    ],
)
def test_goals_that_cannot_be_meant(arguments: dict[str, object], rule: str) -> None:
    with pytest.raises(GoalError) as error:
        built_in_goal(**arguments)  # type: ignore[arg-type]  # a table of keyword arguments
    assert error.value.rule == rule
    assert error.value.hint


def test_a_goal_comes_back_from_its_json() -> None:
    goal = built_in_goal("goodput", limits=[parse_limit("ttft_s<=1"), parse_limit("mean_e2e_s<=2*baseline")])
    assert Goal.from_json(json.loads(json.dumps(goal.to_json()))) == goal


def test_p99_needs_a_thousand_requests() -> None:
    assert too_few_for_p99("p99_e2e_s", 999)
    assert not too_few_for_p99("p99_e2e_s", 1000)
    assert not too_few_for_p99("p95_e2e_s", 10)


def test_a_study_goes_on_with_the_guards_that_its_starts_were_judged_by() -> None:
    today = built_in_goal("latency", limits=[parse_limit("p95_ttft_s<=1")])
    before = replace(today, limits=(*today.limits[:-1], Limit("tokens_per_s", ">=", 0.98, True)))
    assert all(is_guard(goal, goal.limits[-1]) and not is_guard(goal, goal.limits[0]) for goal in (today, before))
    assert guarded_as(today, before) == before
    assert guarded_as(today, today) == today
    others = (replace(before, limits=before.limits[1:]), replace(before, metric="p95_e2e_s"), replace(before, name="goodput"))
    for other in others:
        assert guarded_as(today, other) == today, "what differs besides is no matter of guards"
