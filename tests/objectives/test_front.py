"""The front of several objectives and its knee."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.objectives.front import front, knee_order
from vopt.objectives.goals import GoalError, Limit, balance, joint_goal

POINTS = st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=12)


@given(POINTS)
def test_every_point_is_beaten_by_a_member_or_is_one(points: list[tuple[float, float]]) -> None:
    members = front(points)
    assert members
    for i, (x, y) in enumerate(points):
        beaten = any(points[m][0] >= x and points[m][1] >= y and points[m] != (x, y) for m in members)
        assert beaten is not (i in members)


@given(POINTS)
def test_the_knee_is_a_member_of_the_front(points: list[tuple[float, float]]) -> None:
    order = knee_order(points)
    assert sorted(order) == list(range(len(points)))
    assert points[order[0]] in [points[i] for i in front(points)]


def test_the_knee_bulges_out_of_the_line_between_the_ends() -> None:
    # Ends 0 and 3; 1 is far above the chord, 2 hardly; 4 is beaten by 1.
    assert knee_order([(1.0, 0.0), (0.8, 0.8), (0.45, 0.85), (0.0, 1.0), (0.7, 0.7)])[0] == 1


def test_scales_do_not_choose_the_knee() -> None:
    wide = [(10.0, 0.0), (8.0, 0.08), (0.0, 0.1)]
    assert knee_order(wide)[0] == 1


def test_of_two_ends_the_larger_product_of_gains_is_the_knee() -> None:
    assert knee_order([(0.3, -0.1), (0.0, 0.1)])[0] == 0
    assert knee_order([(0.1, -0.1), (0.0, 0.05)])[0] == 1


def test_one_point_and_none() -> None:
    assert knee_order([]) == []
    assert knee_order([(0.1, 0.2)]) == [0]


def test_two_goals_are_one_whose_figure_is_the_geometric_mean() -> None:
    goal = joint_goal(["latency", "throughput"], limits=[Limit("p95_ttft_s", "<=", 0.5)])
    assert goal.name == "throughput-latency"
    assert [limit.metric for limit in goal.limits] == ["success_rate", "p95_ttft_s"]
    values = {"tokens_per_s": 900.0, "mean_e2e_s": 4.0}
    assert balance(goal, values) == pytest.approx(15.0)
    better = {"tokens_per_s": 900.0 * 1.21, "mean_e2e_s": 4.0}
    assert (balance(goal, better) or 0) / 15.0 == pytest.approx(1.1)
    assert balance(goal, {"tokens_per_s": 900.0}) is None


def test_goals_survive_storage() -> None:
    goal = joint_goal(["throughput", "latency"])
    assert type(goal).from_json(goal.to_json()) == goal


@pytest.mark.parametrize("names", [["throughput", "throughput"], ["throughput", "latency", "goodput"]])
def test_only_two_different_goals_are_weighed(names: list[str]) -> None:
    with pytest.raises(GoalError, match="two different goals"):
        joint_goal(names, limits=[Limit("ttft_s", "<=", 0.5)])


def test_an_unknown_goal_names_the_nearest() -> None:
    with pytest.raises(GoalError) as error:
        joint_goal(["throughput", "latncy"])
    assert "latency" in error.value.hint
