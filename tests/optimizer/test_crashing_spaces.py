"""Spaces in which 60 % of the configurations crash: the search learns to stay out of them, on seeds that nobody tuned with."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from crashing import CRASHING, STARTS, Crashes, crash_share, crashing_landscape, searched, table
from landscapes import parameter, space

from vopt.optimizer.memory_edge import MemoryEdge
from vopt.optimizer.moves import Observation, positions, propose
from vopt.search_spaces.space import SearchSpace

FRESH = range(1000, 1020)
"""Named before any of them was run; seeds below 1000 are those that the search was tuned with."""


@pytest.mark.parametrize("seed", [*FRESH][:3])
def test_the_spaces_are_what_they_say(seed: int) -> None:
    landscape = crashing_landscape(seed)
    assert abs(crash_share(landscape, seed) - CRASHING) < 0.03
    assert landscape.truth(landscape.space.default_point()).crash is None


def test_no_configuration_fails_twice() -> None:
    run = searched(FRESH[0])
    assert len(run.crashed) == STARTS
    assert not run.repeated
    assert sum(run.crashed) < STARTS * CRASHING / 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_crashes_die_out_on_fresh_seeds() -> None:
    """Pooled over the seeds, the last third of 30 starts crashes less than a quarter as often as the first."""
    runs: list[Crashes] = [searched(seed) for seed in FRESH]
    first, _, last = (sum(run.thirds[i] for run in runs) for i in range(3))
    assert last < first / 4, table(runs)
    assert not any(run.repeated for run in runs)
    assert np.mean([run.gain for run in runs]) > 0.15, "what is careful must still find something"


def memory_space() -> SearchSpace:
    return space(
        parameter("max_num_seqs", (64, 128, 256, 512, 1024), 128),
        parameter("max_num_batched_tokens", (2048, 4096, 8192, 16384, 32768), 4096),
        parameter("moe_backend", ("auto", "triton", "cutlass"), "auto", ordered=False),
    )


def edge(body: SearchSpace, limit: float, tried: list[tuple[int, int]]) -> tuple[MemoryEdge, dict[tuple[int, int], float]]:
    """An edge fitted to starts at these positions of a memory that ends at ``limit``, and its chance at every position."""

    def point(i: int, j: int) -> dict[str, Any]:
        return body.default_point() | {
            "max_num_seqs": body.parameters[0].values[i],
            "max_num_batched_tokens": body.parameters[1].values[j],
        }

    rows = np.array([positions(body, point(*where)) for where in tried])
    fitted = MemoryEdge(body, rows, [i + j <= limit for i, j in tried])
    every = list(product(range(5), range(5)))
    chances = fitted.chance(np.array([positions(body, point(*where)) for where in every]))
    return fitted, dict(zip(every, map(float, chances), strict=True))


def test_more_of_a_size_is_never_safer() -> None:
    _, chances = edge(memory_space(), 5, [(1, 1), (4, 4), (2, 2), (4, 1), (1, 4)])
    for i, j in chances:
        if i < 4:
            assert chances[i + 1, j] <= chances[i, j]
        if j < 4:
            assert chances[i, j + 1] <= chances[i, j]


def test_what_ran_is_likely_and_what_ran_out_is_not() -> None:
    tried = [(1, 1), (4, 4), (2, 2), (4, 1), (3, 3)]
    _, chances = edge(memory_space(), 5, tried)
    for where in tried:
        assert chances[where] > 0.8 if sum(where) <= 5 else chances[where] < 0.2
    assert chances[0, 0] > 0.95
    assert chances[2, 1] > 0.9, "below what ran"
    assert chances[4, 3] < 0.2, "above what ran out"


def test_one_failure_of_another_cause_does_not_move_the_edge() -> None:
    _, before = edge(memory_space(), 6, [(1, 1), (4, 4), (3, 2), (2, 3), (4, 2)])
    body = memory_space()
    tried = [(1, 1), (4, 4), (3, 2), (2, 3), (4, 2), (1, 2)]
    rows = np.array([[i, j, 0] for i, j in tried])
    wrong = MemoryEdge(body, rows, [i + j <= 6 and (i, j) != (1, 2) for i, j in tried])
    assert float(wrong.chance(np.array([[3, 2, 0]]))[0]) > 0.5
    assert before[3, 2] > 0.8


def test_a_space_without_sizes_has_no_edge_to_learn() -> None:
    body: SearchSpace = space(parameter("moe_backend", ("auto", "triton"), "auto", ordered=False))
    assert MemoryEdge(body, np.array([[0], [1]]), [True, False]).chance(np.array([[0], [1]])).shape == (2,)


@pytest.mark.parametrize("careful", [False, True])
def test_near_the_end_choices_that_no_engine_ran_with_come_last(careful: bool) -> None:
    body = memory_space()
    home = body.default_point()
    seen = [
        Observation(home, 0.0, 1.0, starved=False),
        Observation(home | {"moe_backend": "triton"}, 0.2, 1.0, starved=False),
        Observation(home | {"moe_backend": "triton", "max_num_seqs": 256}, 0.25, 1.0, starved=False),
    ]
    known = [observation.point for observation in seen]
    found = propose(body, seen, lambda point: dict(point) not in known, seed=0, careful=careful)
    assert found is not None
    if careful:
        assert found["moe_backend"] in ("auto", "triton")
    else:
        cutlass = propose(body, seen, lambda p: p["moe_backend"] == "cutlass" and dict(p) not in known, seed=0)
        assert cutlass is not None, "it may be tried while it can still teach"
