"""What the model behind the proposals believes before it has seen much: of memory, of defaults, of drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from landscapes import Landscape, Truth, parameter, space

from vopt.objectives.goals import Goal, Limit
from vopt.objectives.metrics import Direction, Metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer.history import FailureSummary, Stage, TrialRequest
from vopt.optimizer.judge import FAR, judge, margins
from vopt.optimizer.moves import Model, Observation, positions, propose
from vopt.optimizer.surrogate import families
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase

SPACE = space(
    parameter("max_num_seqs", (64, 128, 256, 512, 1024), 256),
    parameter("max_num_batched_tokens", (2048, 4096, 8192, 16384), 8192),
    parameter("speculation", ("off", "ngram:2", "mtp:1", "mtp:2", "mtp:4"), "off", ordered=False),
    parameter("enable_prefix_caching", (False, True), True, ordered=False),
)
HOME = Observation(SPACE.default_point(), 9.0, 1.0)


def at(**changes: Any) -> Any:
    return positions(SPACE, {**SPACE.default_point(), **changes})[None]


def seen(merit: float | None, feasibility: float = 1.0, margin: float | None = None, **changes: Any) -> Observation:
    kept = () if margin is None else (margin,)
    return Observation({**SPACE.default_point(), **changes}, merit, feasibility, margins=kept)


def test_a_good_draft_speaks_for_the_next_number_and_not_for_another_method() -> None:
    model = Model(SPACE, [HOME, seen(9.2, speculation="mtp:1")])
    (two, four, other), _ = model.expected(np.concatenate([at(speculation=s) for s in ("mtp:2", "mtp:4", "ngram:2")]))
    assert two > four > other
    assert two - other > 0.03


def test_less_of_what_takes_memory_makes_room_for_what_did_not_fit() -> None:
    model = Model(SPACE, [HOME, seen(None, -1.0, speculation="mtp:1")])
    here, less, more = (float(model.chance(at(speculation="mtp:1", max_num_seqs=seqs))[0]) for seqs in (256, 64, 1024))
    assert less > 10 * here
    assert less > 3 * more


def test_a_default_is_believed_until_figures_say_otherwise() -> None:
    before = Model(SPACE, [HOME])
    near, far = (before.expected(at(max_num_seqs=seqs))[0][0] for seqs in (512, 1024))
    assert 9.0 > near > far
    after = Model(SPACE, [HOME, seen(9.1, max_num_seqs=512)])
    assert after.expected(at(max_num_seqs=1024))[0][0] > 9.0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 4), st.floats(-0.2, 0.2)), max_size=6))
def test_differences_agree_with_expectations_and_no_deviation_is_lost(rows: list[tuple[int, int, int, float]]) -> None:
    points = [
        {
            **SPACE.default_point(),
            "max_num_seqs": SPACE["max_num_seqs"].values[i],
            "max_num_batched_tokens": SPACE["max_num_batched_tokens"].values[j],
            "speculation": SPACE["speculation"].values[k],
        }
        for i, j, k, _ in rows
    ]
    model = Model(SPACE, [HOME, *(Observation(p, 9.0 + row[3], 1.0) for p, row in zip(points, rows, strict=True))])
    first, second = at(max_num_seqs=1024, speculation="mtp:2"), at(max_num_batched_tokens=2048)
    mean, deviation = model.expected(np.concatenate([first, second]))
    gap, spread = model.difference(first[0], second[0])
    assert gap == pytest.approx(mean[0] - mean[1], abs=1e-6)
    assert (deviation > 0).all()
    assert spread <= deviation.sum() + 1e-6


def test_every_family_is_a_correlation() -> None:
    table = families(["off", "mtp", "mtp", "ngram"], [0, 1, 4, 2])
    assert np.allclose(np.diag(table), 1.0)
    assert np.allclose(table, table.T)
    assert np.linalg.eigvalsh(table).min() > -1e-9
    assert table[1, 2] > 0.5
    assert table[0, 3] == 0.0


def test_what_may_not_be_measured_is_not_proposed() -> None:
    allowed = {(1024, "off"), (512, "mtp:1")}
    found = propose(SPACE, [HOME], lambda p: (p["max_num_seqs"], p["speculation"]) in allowed, seed=1)
    assert found is not None
    assert (found["max_num_seqs"], found["speculation"]) in allowed
    assert propose(SPACE, [HOME], lambda point: False, seed=1) is None


def with_limit(point: Any, noise: float = 0.0) -> Observation:
    """What a start shows where two drafted tokens break the limit, but only with prefix caching."""
    gains = {"mtp:1": 0.15, "mtp:2": 0.2, "mtp:4": 0.1, "ngram:2": 0.02, "off": 0.0}
    gain = gains[point["speculation"]] + 0.05 * (point["max_num_batched_tokens"] == 16384)
    broken = point["speculation"] in ("mtp:2", "mtp:4") and point["enable_prefix_caching"]
    # What waits for room is also slower: its value says little of what its arguments do elsewhere.
    return Observation(
        point, 9.0 + (0.12 if broken else gain) + noise, 1.0, 49.0 if broken else 1.0, False, (-0.6 if broken else 0.4,)
    )


TRIED: tuple[dict[str, Any], ...] = (
    {},
    {"speculation": "mtp:1"},
    {"max_num_batched_tokens": 16384},
    {"enable_prefix_caching": False},
    {"speculation": "mtp:1", "max_num_batched_tokens": 16384},
    {"speculation": "mtp:2", "max_num_batched_tokens": 16384},
    {"speculation": "mtp:2"},
)


def test_a_limit_broken_with_one_setting_does_not_bury_a_value_without_it() -> None:
    model = Model(SPACE, [with_limit({**SPACE.default_point(), **changes}) for changes in TRIED])
    near, without = (at(speculation="mtp:2", max_num_seqs=512, enable_prefix_caching=on) for on in (True, False))
    assert model.kept(without)[0] > 1.5 * model.kept(near)[0]
    assert model.kept(without)[0] > 0.25
    assert model.kept(at(max_num_seqs=512))[0] > 0.6
    assert model.chance(at(speculation="mtp:2"))[0] > 0.9, "what broke a limit did not crash"


@pytest.mark.parametrize("seed", range(3))
def test_proposals_come_to_the_pair_that_keeps_the_limit(seed: int) -> None:
    """With a model that takes a broken limit for a crash it took 20 and more proposals."""
    noise = np.random.default_rng(seed)
    found = [with_limit({**SPACE.default_point(), **changes}, noise.normal(0, 0.01)) for changes in TRIED]
    while not any(o.point["speculation"] == "mtp:2" and o.feasible for o in found):
        assert len(found) < len(TRIED) + 16, "it gave up on two drafted tokens"
        point = propose(SPACE, found, lambda p: all(p != o.point for o in found), seed=len(found))
        assert point is not None
        found.append(with_limit(point, noise.normal(0, 0.01)))


def test_what_nothing_broke_yet_is_expected_to_be_kept() -> None:
    model = Model(SPACE, [seen(9.0, margin=0.4), seen(9.1, margin=0.01, max_num_seqs=512)])
    assert model.kept(at(max_num_seqs=1024))[0] == 1.0


LIMITED = Goal(
    "throughput",
    "tokens_per_s",
    Direction.MAXIMIZE,
    (
        Limit("success_rate", ">=", 0.99),
        Limit("p95_ttft_s", "<=", 1.5, relative_to_baseline=True),
        Limit("requests_per_s", ">=", 2.0),
    ),
)


@pytest.mark.parametrize(
    ("ttft", "rate", "expected"),
    [
        (0.3, 2.0, (0.0, 0.0)),
        (0.2, 3.0, (np.log(1.5), np.log(1.5))),
        (0.45, 1.5, (-np.log(1.5), np.log(0.75))),
        (90.0, 0.1, (-FAR, -FAR)),
    ],
)
def test_margins_are_logarithms_of_how_far_inside_a_limit_is(ttft: float, rate: float, expected: tuple[float, float]) -> None:
    landscape = Landscape("limits", SPACE, lambda point: Truth(10_000.0), LIMITED, noise=0.0)
    plain = landscape.evaluator(0)(TrialRequest("1", EngineConfig({"max_num_seqs": 512}), Stage.SEARCH))
    figures = {"tokens_per_s": 9_000.0, "success_rate": 1.0, "p95_ttft_s": ttft, "requests_per_s": rate}
    record = replace(plain, metrics=Metrics(figures, succeeded=500, failed=0), status=LoadStatus.COMPLETE)
    baseline = Metrics({**figures, "p95_ttft_s": 0.2}, succeeded=500, failed=0)
    found = margins(judge(record, LIMITED, baseline), LIMITED)
    assert tuple(found) == ("p95_ttft_s<=1.5*baseline", "requests_per_s>=2")
    assert tuple(found.values()) == pytest.approx(expected)
    died = replace(record, failure=FailureSummary(Phase.LOAD, FailureKind.ENGINE_DIED, "died"))
    assert set(margins(judge(died, LIMITED, baseline), LIMITED).values()) == {None}
