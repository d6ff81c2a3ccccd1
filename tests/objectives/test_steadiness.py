"""Tokens of an interval, halves, overload, KV plateau."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from counted import halves_agree, tokens_in
from hypothesis import given, settings
from hypothesis import strategies as st
from made_loads import closed_loop, failed, open_loop, record
from scipy import stats
from support.imports import foreign_imports

from vopt.objectives.records import CounterSample, LoadWindow, RequestFailureKind, RequestRecord
from vopt.objectives.steadiness import (
    T_975,
    kv_levelled,
    overloaded,
    sub_window_edges,
    tokens_between,
)


def test_tokens_in_counts_output_by_chunk_and_the_prompt_where_prefill_ended() -> None:
    one = record(0, sent_s=9.0, ttft_s=1.0, tpot_s=1.0, output_tokens=5, prompt_tokens=100)  # chunks at 10, 11, 12, 13, 14
    assert tokens_in([one], 10.0, 12.0) == 100 + 2
    assert tokens_in([one], 11.0, 20.0) == 4
    assert tokens_in([one], 0.0, 10.0) == 0


def test_tokens_in_credits_censored_requests_and_no_failed_ones() -> None:
    censored = replace(record(0), censored=True, finish_reason=None)
    broken = replace(record(1), failure=failed(1, 1, RequestFailureKind.STREAM_ERROR).failure)
    assert tokens_in([censored], 0, 9) == 111
    assert tokens_in([broken], 0, 9) == 0


def test_chunks_without_token_counts_are_scaled_to_the_usage_count() -> None:
    silent = replace(record(0, prompt_tokens=0, output_tokens=10), chunk_tokens=(), output_tokens=30)
    assert tokens_in([silent], 0, 9) == pytest.approx(30)
    one_counted_each = replace(silent, chunk_tokens=(1,) * 10)
    assert tokens_in([one_counted_each], 0, 9) == pytest.approx(30)
    half = (silent.chunk_times_s[4] + silent.chunk_times_s[5]) / 2
    assert tokens_in([silent], 0, half) == pytest.approx(15)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0, 80), min_size=2, max_size=12, unique=True).map(sorted), st.integers(0, 5))
def test_parts_add_up_to_the_whole(edges: list[float], seed: int) -> None:
    records = closed_loop(seed, concurrency=6, window_s=20).records
    assert sum(tokens_between(records, edges)) == pytest.approx(tokens_in(records, edges[0], edges[-1]))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 20), st.integers(-64, 64))
def test_shifting_all_times_changes_nothing(seed: int, quarters: int) -> None:
    shift = quarters / 4
    load = closed_loop(seed, concurrency=8, window_s=20)
    assert load.window is not None
    moved = [shifted(each, shift) for each in load.records]
    window = LoadWindow(load.window.opened_s + shift, load.window.closed_s + shift)
    before = tokens_in(load.records, load.window.opened_s, load.window.closed_s)
    assert tokens_in(moved, window.opened_s, window.closed_s) == pytest.approx(before, abs=3)
    assert overloaded(moved, window)[0] == overloaded(load.records, load.window)[0]


def shifted(each: RequestRecord, by: float) -> RequestRecord:
    return replace(
        each,
        scheduled_s=each.scheduled_s + by,
        sent_s=each.sent_s + by,
        ended_s=each.ended_s + by,
        chunk_times_s=tuple(time + by for time in each.chunk_times_s),
    )


def test_halves_agree_on_steady_loads_and_not_on_a_step() -> None:
    steady = [closed_loop(seed, 48, output_tokens=50) for seed in range(8)]
    stepped = [closed_loop(seed, 48, output_tokens=50, slower_half=0.4) for seed in range(8)]
    flagged_steady = sum(not halves_agree(load.records, window(load.window))[0] for load in steady)
    flagged_stepped = sum(not halves_agree(load.records, window(load.window))[0] for load in stepped)
    assert flagged_steady <= 1
    assert flagged_stepped >= 7


def window(of: LoadWindow | None) -> LoadWindow:
    assert of is not None
    return of


def test_a_step_does_not_widen_its_own_tolerance() -> None:
    """Ten even sub-windows whose second half has a tenth less: the standard error about each half's mean is 0."""
    times = [
        (10.0 * part + 10 * (i + 0.5) / n, part) for part in range(10) for n in (100 if part < 5 else 90,) for i in range(n)
    ]
    records = [record(i, sent_s=time, ttft_s=0, output_tokens=1, prompt_tokens=0) for i, (time, _) in enumerate(times)]
    agrees, detail = halves_agree(records, LoadWindow(0, 100))
    assert not agrees
    assert detail == "the halves differ: the second has -10.5% tokens, 3.0% is allowed"


def stepped_tokens(rates: Sequence[float]) -> list[RequestRecord]:
    """One request whose chunks bring tokens at these rates in successive tenths of a window of 100 s."""
    tokens = tuple(round(1000 * rate) for rate in rates)
    times = tuple(10.0 * part + 5 for part in range(len(rates)))
    made = record(0, prompt_tokens=0)
    return [replace(made, output_tokens=sum(tokens), chunk_times_s=times, chunk_tokens=tokens, ended_s=99.0)]


@pytest.mark.parametrize("tenth", range(1, 10))
def test_a_halving_anywhere_in_the_window_is_seen(tenth: int) -> None:
    for before, after in ((40, 20), (20, 40)):
        rates = [before] * tenth + [after] * (10 - tenth)
        assert not halves_agree(stepped_tokens(rates), LoadWindow(0, 100))[0], rates


@pytest.mark.parametrize("tenth", range(3, 8))
def test_a_loss_of_a_fifth_away_from_the_edges_is_seen(tenth: int) -> None:
    rates = [50] * tenth + [40] * (10 - tenth)
    assert not halves_agree(stepped_tokens(rates), LoadWindow(0, 100))[0], rates


@pytest.mark.parametrize(("spread", "most"), [(0.02, 0.05), (0.04, 0.07), (0.06, 0.15), (0.085, 0.3)])
def test_noise_as_it_was_measured_is_mostly_steady(spread: float, most: float) -> None:
    """``spread``: standard deviation of the halves' difference; 4 to 10 % of difference were seen at concurrency 8."""
    rng = np.random.default_rng(5)
    noise = rng.normal(0, spread * np.sqrt(5 / 2), (200, 10))
    flagged = sum(not halves_agree(stepped_tokens(40 * np.clip(1 + row, 0.1, None)), LoadWindow(0, 100))[0] for row in noise)
    assert flagged <= most * len(noise)


def test_an_empty_window_is_not_steady() -> None:
    assert halves_agree([], LoadWindow(0, 10)) == (False, "no token came in the window")


@pytest.mark.parametrize(("rate", "servers", "mean_s"), [(4.0, 20, 3.0), (10.0, 83, 5.0), (5.0, 167, 20.0)])
def test_a_load_at_six_tenths_of_capacity_is_not_overloaded(rate: float, servers: int, mean_s: float) -> None:
    """False positives, requests as long as a third of the window included."""
    flagged = sum(overloaded(*open_loop(seed, rate, servers, mean_s))[0] for seed in range(60))
    assert flagged <= 2


@pytest.mark.parametrize(("rate", "servers", "mean_s"), [(4.0, 8, 3.0), (10.0, 42, 5.0), (10.0, 10, 5.0)])
def test_an_overload_is_seen(rate: float, servers: int, mean_s: float) -> None:
    flagged = sum(overloaded(*open_loop(seed, rate, servers, mean_s))[0] for seed in range(40))
    assert flagged >= 36


def test_an_engine_that_answers_nothing_is_overloaded() -> None:
    silent = [record(i, i * 0.1, output_tokens=0, ended_s=65.0, censored=True, finish_reason=None) for i in range(650)]
    flagged, detail = overloaded(silent, LoadWindow(5, 65))
    assert flagged
    assert detail.startswith("requests in flight rise: ")


def test_a_rising_ttft_alone_is_an_overload() -> None:
    """Latency from the scheduled send: a client that falls behind shows as TTFT, though few requests are in flight."""
    rng = random.Random(1)
    records = [record(i, i * 0.1, ttft_s=0.2 + i * 0.1 * 0.05 + rng.uniform(0, 0.05), output_tokens=2) for i in range(650)]
    flagged, detail = overloaded(records, LoadWindow(5, 65))
    assert flagged
    assert "TTFT rise" in detail


def test_nothing_is_no_overload() -> None:
    assert overloaded([], LoadWindow(0, 60))[0] is False


def test_t_table() -> None:
    for freedom, quantile in enumerate(T_975, start=1):
        assert quantile == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-4)


def test_edges_end_exactly_at_the_window() -> None:
    edges = sub_window_edges(0.1, 0.7)
    assert len(edges) == 11
    assert edges[0] == 0.1
    assert edges[-1] == 0.7


def kv(*usage: float | None) -> list[CounterSample]:
    return [CounterSample(float(i), kv_usage=value) for i, value in enumerate(usage)]


def test_kv_levelled() -> None:
    assert not kv_levelled(kv(0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    assert not kv_levelled(kv(0.6, 0.6, 0.6))
    assert kv_levelled(kv(0.1, 0.3, 0.6, 0.61, 0.6, 0.62, 0.61, 0.62))
    assert kv_levelled(kv(0.9, 0.8, 0.7, 0.6, 0.6, 0.6))
    assert kv_levelled(kv(0.01, 0.012, 0.014, 0.015, 0.02, 0.02))  # far from full: two points of usage are nothing
    assert kv_levelled([CounterSample(0.0)])  # an engine without the figure


def test_what_travels_into_trial_processes_imports_the_standard_library_alone() -> None:
    assert foreign_imports(*(f"vopt.objectives.{module}" for module in ("records", "steadiness", "consistency"))) == set()
