"""What the model behind the proposals believes before it has seen much: of memory, of defaults, of drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from landscapes import parameter, space

from vopt.optimizer.moves import Model, Observation, positions, propose
from vopt.optimizer.surrogate import families

SPACE = space(
    parameter("max_num_seqs", (64, 128, 256, 512, 1024), 256),
    parameter("max_num_batched_tokens", (2048, 4096, 8192, 16384), 8192),
    parameter("speculation", ("off", "ngram:2", "mtp:1", "mtp:2", "mtp:4"), "off", ordered=False),
    parameter("enable_prefix_caching", (False, True), True, ordered=False),
)
HOME = Observation(SPACE.default_point(), 9.0, 1.0)


def at(**changes: Any) -> Any:
    return positions(SPACE, {**SPACE.default_point(), **changes})[None]


def seen(merit: float | None, feasibility: float = 1.0, **changes: Any) -> Observation:
    return Observation({**SPACE.default_point(), **changes}, merit, feasibility)


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
