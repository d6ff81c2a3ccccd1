"""Records -> Metrics: definitions against numpy, what counts, what is absent, and nothing NaN."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from counted import tokens_in
from hypothesis import given, settings
from hypothesis import strategies as st
from made_loads import closed_loop, counters, failed, open_loop, record

from vopt.objectives import intervals
from vopt.objectives.intervals import mean_interval, percentile_interval, rate_interval, share_interval
from vopt.objectives.metrics import METRICS, Direction, Metrics, compute_metrics, token_curve
from vopt.objectives.records import (
    CounterSample,
    LoadResult,
    LoadStatus,
    LoadWindow,
    RequestFailureKind,
    RequestRecord,
)


def load_of(*records: RequestRecord, closed_s: float = 100.0, **changes: object) -> LoadResult:
    load = LoadResult(records, LoadWindow(0.0, closed_s), LoadStatus.COMPLETE, concurrency=4)
    return replace(load, **changes)  # type: ignore[arg-type]  # a test's free hand


def test_names_are_those_of_the_command_line() -> None:
    statistics, latencies = ("mean", "p50", "p90", "p95", "p99"), ("ttft", "tpot", "e2e")
    expected = {f"{statistic}_{latency}_s" for statistic in statistics for latency in latencies}
    expected |= {"success_rate", "tokens_per_s", "output_tokens_per_s", "requests_per_s", "goodput_per_s", "kv_peak"}
    expected |= {"preemptions", "acceptance_length", "prefix_hit_rate"}
    assert expected <= set(METRICS)
    assert all(name == info.name for name, info in METRICS.items())
    assert METRICS["p50_e2e_s"].bench_serve == "median_e2el_ms"
    assert METRICS["tokens_per_s"].bench_serve == "total_token_throughput"
    assert METRICS["goodput_per_s"].direction is Direction.MAXIMIZE


@pytest.mark.parametrize("percent", [50, 90, 95, 99])
def test_percentiles_are_numpys_over_succeeded_requests_that_ended_in_the_window(percent: int) -> None:
    load = closed_loop(3)
    assert load.window is not None
    inside = [r for r in load.records if r.succeeded and load.window.opened_s <= r.ended_s <= load.window.closed_s]
    metrics = compute_metrics(load)
    for name, values in {
        "ttft": [r.ttft_s for r in inside],
        "tpot": [r.tpot_s for r in inside],
        "e2e": [r.e2e_s for r in inside],
    }.items():
        values = [value for value in values if value is not None]
        assert metrics[f"p{percent}_{name}_s"] == pytest.approx(float(np.percentile(values, percent)))
        assert metrics[f"mean_{name}_s"] == pytest.approx(float(np.mean(values)))
    assert metrics.succeeded == len(inside)


def test_throughput_is_the_tokens_of_the_window() -> None:
    load = closed_loop(1)
    assert load.window is not None
    metrics = compute_metrics(load)
    tokens = tokens_in(load.records, load.window.opened_s, load.window.closed_s)
    assert metrics["tokens_per_s"] == pytest.approx(tokens / load.window.length_s)
    assert metrics["requests_per_s"] == pytest.approx(metrics.succeeded / load.window.length_s)
    for name, (low, high) in metrics.intervals.items():
        assert low <= metrics[name] <= high, name


def test_token_curve_is_cumulative_and_ends_with_the_window() -> None:
    load = closed_loop(1, window_s=20)
    assert load.window is not None
    curve = token_curve(load)
    assert len(curve) == 20
    assert list(curve) == sorted(curve)
    assert curve[4] == pytest.approx(tokens_in(load.records, load.window.opened_s, load.window.opened_s + 5))
    assert curve[-1] == pytest.approx(tokens_in(load.records, load.window.opened_s, load.window.closed_s))
    assert token_curve(replace(load, window=None)) == ()


def test_success_rate_counts_failures_and_stalls_and_neither_censored_nor_not_sent() -> None:
    load = load_of(
        record(0),
        record(1),
        failed(2, 50, RequestFailureKind.STREAM_ERROR, "CUDA error"),
        failed(3, 40, RequestFailureKind.STREAM_ERROR, "first"),
        failed(4, 100.2, RequestFailureKind.STALLED, "no token for 90 s"),
        replace(record(5), censored=True, finish_reason=None),
        failed(6, 0, RequestFailureKind.NOT_SENT),
        not_sent=1,
    )
    metrics = compute_metrics(load)
    assert metrics["success_rate"] == pytest.approx(2 / 5)
    assert (metrics.succeeded, metrics.failed, metrics.censored, metrics.not_sent) == (2, 3, 1, 1)
    assert {kind: (f.n, f.first_message) for kind, f in metrics.failures.items()} == {
        "stream_error": (2, "first"),
        "stalled": (1, "no token for 90 s"),
    }
    died = compute_metrics(replace(load, status=LoadStatus.ENGINE_DIED))
    assert died["success_rate"] == pytest.approx(2 / 6)


def test_warm_up_enters_no_figure_and_its_failures_are_noted() -> None:
    window = LoadWindow(10.0, 100.0)
    load = load_of(record(0, 0, ttft_s=5), record(1, 20), failed(2, 5, RequestFailureKind.CONNECTION), window=window)
    metrics = compute_metrics(load)
    assert metrics["p99_ttft_s"] == pytest.approx(0.1)
    assert metrics["success_rate"] == 1.0
    assert "1 requests failed before the window opened and are in no figure" in metrics.notes


def test_without_a_window_only_the_success_rate_is_known() -> None:
    metrics = compute_metrics(load_of(record(0), failed(1, 3, RequestFailureKind.ENGINE_DIED), window=None))
    assert dict(metrics.values) == {"success_rate": 0.5}
    assert compute_metrics(load_of(window=None)).values == {}


def test_one_token_outputs_have_no_tpot_and_meet_any_tpot_slo() -> None:
    metrics = compute_metrics(load_of(record(0, output_tokens=1), record(1, output_tokens=1)), slos={"tpot_s": 0.001})
    assert "mean_tpot_s" not in metrics.values
    assert metrics["goodput_per_s"] == pytest.approx(2 / 100)


def test_goodput_needs_every_slo() -> None:
    records = [record(0, ttft_s=0.1, tpot_s=0.02), record(1, ttft_s=0.6, tpot_s=0.02), record(2, ttft_s=0.1, tpot_s=0.2)]
    metrics = compute_metrics(load_of(*records), slos={"ttft_s": 0.5, "tpot_s": 0.05})
    assert metrics["goodput_per_s"] == pytest.approx(1 / 100)
    assert "goodput_per_s" not in compute_metrics(load_of(*records)).values
    with pytest.raises(ValueError, match="unknown SLO 'p95_ttft_s'"):
        compute_metrics(load_of(*records), slos={"p95_ttft_s": 1})


def test_an_open_loop_counts_from_the_scheduled_send() -> None:
    late = record(0, sent_s=2.0, ttft_s=0.1, scheduled_s=0.5)
    metrics = compute_metrics(load_of(late, concurrency=None, rate=1.0), slos={"ttft_s": 0.5})
    assert metrics["mean_ttft_s"] == pytest.approx(1.6)
    assert metrics["mean_sent_ttft_s"] == pytest.approx(0.1)
    assert metrics["mean_e2e_s"] == pytest.approx(late.scheduled_e2e_s)
    assert metrics["goodput_per_s"] == 0.0
    assert metrics["mean_tpot_s"] == pytest.approx(0.02)
    assert "mean_sent_ttft_s" not in compute_metrics(load_of(late)).values


def test_counters_of_the_window() -> None:
    metrics = compute_metrics(load_of(record(0), samples=counters(100)))
    assert metrics["prefix_hit_rate"] == pytest.approx(0.03)
    assert metrics["acceptance_length"] == pytest.approx(1.7)
    assert metrics["acceptance_rate"] == pytest.approx(0.35)
    assert metrics["kv_peak"] == 0.6
    assert metrics["preemptions"] == 10


def in_engine(*moments: tuple[float, int | None, int | None]) -> tuple[CounterSample, ...]:
    return tuple(CounterSample(at_s, running=running, waiting=waiting) for at_s, running, waiting in moments)


@pytest.mark.parametrize(
    ("samples", "share"),
    [
        (in_engine((1.0, 4, 0)), 0.0),
        (in_engine((1.0, 1, 1)), 0.5),
        (in_engine((1.0, 4, 0), (5.0, 0, 0)), 0.5),
        (in_engine((1.0, 4, 0), (2.0, None, None), (3.0, 2, None)), 0.0),
        (in_engine((1.0, 2, 0), (99.0, 0, 0)), 0.5),  # nothing was in flight at 99 s
        (in_engine((1.0, 4, 0), (5.0, 4, 0), (6.0, 5, 0)), None),  # the engine has somebody else's request too
        (in_engine((99.0, 0, 0)), None),
        (in_engine((1.0, None, 4)), None),
        ((), None),
    ],
)
def test_requests_in_flight_that_are_not_in_the_engine(samples: tuple[CounterSample, ...], share: float | None) -> None:
    four = [record(i, sent_s=0.5, output_tokens=500) for i in range(4)]  # in flight until 10.6 s
    assert compute_metrics(load_of(*four, samples=samples)).values.get("front_end_share") == (
        None if share is None else pytest.approx(share)
    )


def test_counters_that_are_missing_or_run_backwards_give_no_figure() -> None:
    samples = (CounterSample(0.0, preemptions=5, drafts=0, accepted_tokens=0), CounterSample(100.0, preemptions=2, drafts=0))
    metrics = compute_metrics(load_of(record(0), samples=samples))
    assert {"preemptions", "acceptance_length", "prefix_hit_rate", "kv_peak"}.isdisjoint(metrics.values)
    assert any("counter of preemptions ran backwards" in note for note in metrics.notes)


def test_the_hit_rate_falls_back_on_what_responses_said() -> None:
    told = [record(0, cached_prompt_tokens=50), record(1, cached_prompt_tokens=0), record(2)]
    assert compute_metrics(load_of(*told))["prefix_hit_rate"] == pytest.approx(0.25)


def test_p99_below_a_thousand_requests_is_warned_of() -> None:
    few = compute_metrics(load_of(*(record(i) for i in range(999))))
    assert "p99 rests on 999 succeeded requests; below 1000 it is mostly chance" in few.notes
    assert "p99_ttft_s" in few.intervals
    assert not compute_metrics(load_of(*(record(i) for i in range(1000)))).notes


def test_whole_run_has_the_names_and_units_of_bench_serve() -> None:
    load = load_of(record(0, 0.0), record(1, 1.0, ttft_s=0.3), failed(2, 9, RequestFailureKind.TIMEOUT_TOTAL))
    figures = compute_metrics(load, slos={"ttft_s": 0.2}).whole_run
    assert figures["duration"] == pytest.approx(9.0)
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (200, 22)
    assert figures["request_throughput"] == pytest.approx(2 / 9)
    assert figures["request_goodput"] == pytest.approx(1 / 9)
    assert figures["total_token_throughput"] == pytest.approx(222 / 9)
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["std_ttft_ms"] == pytest.approx(100)
    assert figures["median_tpot_ms"] == pytest.approx(20)
    assert figures["p99_itl_ms"] == pytest.approx(20)
    assert figures["mean_e2el_ms"] == pytest.approx(400)


def test_times_between_chunks_of_several_tokens_are_not_called_itl() -> None:
    pairs = replace(record(0, output_tokens=4), chunk_tokens=(1, 3), chunk_times_s=(0.1, 0.2))
    figures = compute_metrics(load_of(pairs, record(1))).whole_run
    assert "mean_itl_ms" not in figures
    assert figures["mean_icl_ms"] == pytest.approx((100 + 10 * 20) / 11)


def test_records_that_contradict_themselves_are_marked() -> None:
    metrics = compute_metrics(load_of(record(0), record(7, output_tokens=12), replace(record(8), ended_s=0.1)))
    assert metrics.contradictory == 1
    assert metrics.notes[-1] == "1 records contradict themselves; request 8: ended before the last chunk"


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 50), st.integers(-40, 40))
def test_a_later_start_of_the_clock_changes_nothing(seed: int, shift: int) -> None:
    load = closed_loop(seed, concurrency=6, window_s=20)
    assert load.window is not None

    def moved(r: RequestRecord) -> RequestRecord:
        times = tuple(time + shift for time in r.chunk_times_s)
        return replace(
            r, scheduled_s=r.scheduled_s + shift, sent_s=r.sent_s + shift, ended_s=r.ended_s + shift, chunk_times_s=times
        )

    later = replace(
        load,
        records=tuple(map(moved, load.records)),
        window=LoadWindow(load.window.opened_s + shift, load.window.closed_s + shift),
        samples=tuple(replace(sample, at_s=sample.at_s + shift) for sample in load.samples),
    )
    before, after = compute_metrics(load, resamples=50), compute_metrics(later, resamples=50)
    assert set(before.values) == set(after.values)
    for name, value in before.values.items():
        assert after[name] == pytest.approx(value, rel=1e-3), name


outcomes = st.lists(
    st.tuples(st.floats(0, 30), st.floats(0.001, 5), st.integers(0, 40), st.sampled_from(["ok", "failed", "censored"])),
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(outcomes, st.sampled_from(LoadStatus), st.booleans(), st.integers(0, 3))
def test_nothing_is_ever_nan_and_the_json_comes_back(
    rows: list[tuple[float, float, int, str]], status: LoadStatus, closed: bool, not_sent: int
) -> None:
    records = []
    for i, (sent, ttft, tokens, outcome) in enumerate(rows):
        made = record(i, sent, ttft, output_tokens=tokens)
        if outcome == "failed":
            made = failed(i, made.ended_s, RequestFailureKind.STREAM_ERROR)
        records.append(replace(made, censored=outcome == "censored"))
    load = load_of(*records, closed_s=20.0, status=status, concurrency=4 if closed else None, not_sent=not_sent)
    metrics = compute_metrics(load, slos={"e2e_s": 3.0}, resamples=20)
    numbers = [*metrics.values.values(), *metrics.whole_run.values(), *(x for pair in metrics.intervals.values() for x in pair)]
    assert all(math.isfinite(number) for number in numbers)
    assert set(metrics.intervals) <= set(metrics.values) <= set(METRICS)
    assert Metrics.from_json(json.loads(json.dumps(metrics.to_json()))) == metrics


def test_equal_seeds_give_equal_intervals() -> None:
    load = closed_loop(5, concurrency=8, window_s=20)
    assert compute_metrics(load, seed=1) == compute_metrics(load, seed=1)
    assert compute_metrics(load, seed=1).intervals != compute_metrics(load, seed=2).intervals


@pytest.mark.parametrize("percent", [50, 95])
def test_the_exact_bootstrap_of_a_percentile_is_the_limit_of_resampling(percent: int) -> None:
    rng = np.random.default_rng(0)
    ordered = np.sort(rng.lognormal(0, 0.6, 400))
    resampled = np.percentile(rng.choice(ordered, (20_000, 400)), percent, axis=1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    interval = percentile_interval(ordered, percent)
    assert interval == pytest.approx((low, high), rel=0.03)


def test_intervals_cover_the_truth() -> None:
    rng = np.random.default_rng(0)
    means, medians = 0, 0
    for _ in range(300):
        sample = np.sort(rng.lognormal(0, 0.6, 150))
        low, high = mean_interval(sample, rng, 300) or (0, 0)
        means += low <= math.exp(0.18) <= high
        low, high = percentile_interval(sample, 50) or (0, 0)
        medians += low <= 1.0 <= high
    assert 0.90 <= means / 300 <= 0.98
    assert 0.91 <= medians / 300 <= 0.985


def test_intervals_of_too_little_are_none() -> None:
    rng = np.random.default_rng(0)
    assert percentile_interval(np.array([1.0]), 50) is None
    assert mean_interval(np.array([1.0]), rng, 10) is None
    assert rate_interval(np.zeros(20), 1.0, rng, 10) is None
    low, high = share_interval(400, 400)
    assert (round(low, 4), high) == (0.9908, 1.0)


def test_an_overloaded_queue_shows_in_the_open_loop_figures() -> None:
    records, window = open_loop(0, 10.0, 30, 5.0)
    metrics = compute_metrics(LoadResult(records, window, LoadStatus.OVERLOADED, rate=10.0))
    assert metrics["p95_ttft_s"] > metrics["p50_ttft_s"] > 1


def test_the_interval_of_many_is_that_of_the_bootstrap_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        sample = rng.lognormal(0, 0.9, intervals.MANY)
        quick = mean_interval(sample, rng, 1)
        with monkeypatch.context() as patched:
            patched.setattr(intervals, "MANY", math.inf)
            resampled = mean_interval(sample, rng, 4_000)
        assert quick is not None
        assert resampled is not None
        assert quick == pytest.approx(resampled, abs=0.1 * (resampled[1] - resampled[0]))
