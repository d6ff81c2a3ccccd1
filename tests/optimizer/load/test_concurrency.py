from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.optimizer.load.concurrency import Chosen, MeasureNext, auto_concurrency, rate_for_latency


def search(curve: Callable[[int], float]) -> tuple[Chosen, list[int]]:
    measured: dict[int, float] = {}
    while isinstance(step := auto_concurrency(measured), MeasureNext):
        assert step.concurrency not in measured
        measured[step.concurrency] = curve(step.concurrency)
    return step, list(measured)


def test_the_smallest_level_that_doubling_does_not_improve_by_more_than_5_percent() -> None:
    chosen, measured = search(lambda c: min(c, 200) * 50.0)
    assert chosen.concurrency == 256
    assert measured == [64, 128, 256, 512]


def test_an_engine_that_is_full_at_once_costs_two_measurements() -> None:
    chosen, measured = search(lambda c: 1000.0)
    assert (chosen.concurrency, measured) == (64, [64, 128])


def test_an_engine_that_is_never_full_gets_the_highest_level_and_the_answer_says_so() -> None:
    chosen, measured = search(float)
    assert chosen.concurrency == 512
    assert measured[-1] == 1024
    assert "1024 still brought +100.0% throughput" in chosen.reason


@given(st.dictionaries(st.sampled_from([64, 128, 256, 512, 1024]), st.floats(1, 1e6)))
def test_any_measurements_lead_to_a_next_step_or_an_answer(measured: dict[int, float]) -> None:
    step = auto_concurrency(measured)
    assert step.concurrency in (64, 128, 256, 512, 1024)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_throughput_that_cannot_be(value: float) -> None:
    with pytest.raises(ValueError, match="concurrency 64"):
        auto_concurrency({64: value})


def test_the_rate_for_latency() -> None:
    assert rate_for_latency(10) == pytest.approx(6)
    with pytest.raises(ValueError, match="above 0"):
        rate_for_latency(float("inf"))
