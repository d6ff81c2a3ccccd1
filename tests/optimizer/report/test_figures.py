from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sample_study
from hypothesis import given
from hypothesis import strategies as st

from vopt.objectives.records import RequestRecord
from vopt.optimizer.report.chart import FigureSpec
from vopt.optimizer.report.figures import confirmation, history, pareto, search_figures, slices, tick_texts, timeline
from vopt.optimizer.report.load_figures import (
    MOST_POINTS,
    ecdf,
    in_flight,
    record_figures,
    settled,
    tokens_per_second,
    wanted_records,
)
from vopt.optimizer.report.page import plotly_figure
from vopt.optimizer.report.raw import RECORDS, read_records, records_of
from vopt.optimizer.report.view import StudyView

IMPORTANCE = {"max_num_seqs": 0.6, "max_num_batched_tokens": 0.4}


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> StudyView:
    return StudyView.of(sample_study.on_disk(sample_study.study(), tmp_path_factory.mktemp("study")))


def traces(figure: FigureSpec | None) -> dict[str, dict[str, Any]]:
    assert figure is not None
    return {str(trace["name"]): dict(trace) for trace in figure.data}


def test_plotly_accepts_every_figure_of_every_variant(tmp_path: Path) -> None:
    for make in (sample_study.study, sample_study.nothing_feasible, sample_study.unconfirmed, sample_study.running):
        made = StudyView.of(sample_study.on_disk(make(), tmp_path))
        figures = [*search_figures(made, IMPORTANCE), *record_figures(made, records_of(wanted_records(made)))]
        assert len({figure.name for figure in figures}) == len(figures)
        for figure in figures:
            plotly_figure(figure)
            assert figure.alt


def test_the_history_marks_failures_by_kind_and_the_best_only_rises(view: StudyView) -> None:
    shown = traces(history(view))
    assert {"Out of memory at start", "Limit on success rate", "Hung", "baseline", "best so far"} <= shown.keys()
    assert shown["Limit on success rate"]["x"] == [4]
    best = shown["best so far"]["y"]
    assert best == sorted(best)
    assert max(best) == 24_690, "the infeasible 27,830 is not the best"
    symbols = [trace["marker"]["symbol"] for trace in shown.values() if "marker" in trace]
    assert len({*symbols}) == len(symbols), "kinds differ in more than colour"


def test_nothing_dominates_the_front(view: StudyView) -> None:
    shown = traces(pareto(view))
    front = list(zip(shown["front"]["x"], shown["front"]["y"], strict=True))
    others = list(zip(shown["feasible"]["x"], shown["feasible"]["y"], strict=True))
    assert len(front) > 2
    for (x, y), (ox, oy) in itertools.product(front, others):
        assert not (ox < x and oy > y)
    assert 27_830 in shown["rejected"]["y"]
    assert len(shown["baseline"]["x"]) == 1


def test_slices_begin_with_what_mattered_and_treat_the_default_as_a_value(view: StudyView) -> None:
    made = slices(view, IMPORTANCE)
    assert [figure.title for figure in made][:2] == ["max_num_seqs", "max_num_batched_tokens"]
    assert made[0].layout["xaxis"]["categoryarray"] == ["default", "128", "512", "768", "896"]


def test_the_timeline_holds_every_second(view: StudyView) -> None:
    minutes = sum(sum(trace["x"]) for trace in traces(timeline(view)).values())
    assert minutes * 60 == pytest.approx(sum(view.phase_totals().values()), abs=0.5)


def test_confirmation_shows_every_start_of_each_arm(view: StudyView) -> None:
    assert {name: len(trace["x"]) for name, trace in traces(confirmation(view)).items()} == {
        "baseline": 3,
        "finalist": 3,
        "lite": 3,
    }


def test_hover_texts_hold_no_markup_of_an_engine(view: StudyView) -> None:
    texts = [text for trace in traces(history(view)).values() for text in trace.get("text", ())]
    assert any("&lt;b&gt;expert" in text for text in texts)
    assert not [text for text in texts if "<b>" in text]


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=2000))
def test_an_ecdf_rises_to_all_and_keeps_both_ends(values: list[float]) -> None:
    values.sort()
    x, y = ecdf(values)
    assert len(x) == len(y) <= MOST_POINTS
    assert x == sorted(x)
    assert y == sorted(y)
    assert (x[0], x[-1], y[-1]) == (round(values[0], 3), round(values[-1], 3), 100.0)


def record(sent: float, times: tuple[float, ...], tokens: tuple[int, ...]) -> RequestRecord:
    ended = times[-1] if times else sent + 1
    return RequestRecord(0, sent, sent, ended, 10, sum(tokens), sum(tokens), times, tokens)


def test_requests_in_flight() -> None:
    rows = [record(0.0, (3.0,), (1,)), record(1.0, (2.0,), (1,))]
    assert in_flight(rows, 4) == [1, 2, 1, 0]


@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.lists(st.tuples(st.floats(0.001, 5), st.integers(1, 9)), min_size=1, max_size=6)),
        max_size=8,
    )
)
def test_no_token_is_lost_or_counted_twice(shape: list[tuple[float, list[tuple[float, int]]]]) -> None:
    rows = []
    for sent, chunks in shape:
        times = tuple(itertools.accumulate((gap for gap, _ in chunks), initial=sent))[1:]
        rows.append(record(sent, times, tuple(tokens for _, tokens in chunks)))
    seconds = int(max((row.ended_s for row in rows), default=0)) + 1
    total = sum(sum(row.chunk_tokens) for row in rows)
    assert sum(tokens_per_second(rows, seconds)) == pytest.approx(total, abs=0.5 * seconds)


@given(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=6, unique=True))
def test_tick_labels_are_short(values: list[str]) -> None:
    assert all(len(text) <= 18 for text in tick_texts(values))


def test_tick_labels_differ_where_the_values_do() -> None:
    ticks = tick_texts(["default", *(f'{{"method":"mtp","num_speculative_tokens":{n}}}' for n in (1, 2, 3))])
    assert len(set(ticks)) == 4
    assert [tick[-2:] for tick in ticks[1:]] == ["1}", "2}", "3}"]


def test_a_cut_off_file_gives_what_is_whole(tmp_path: Path) -> None:
    made = sample_study.study()
    made = sample_study.on_disk(replace(made, trials=made.trials[:1]), tmp_path, requests=600)
    path = Path(made.trials[0].directory) / RECORDS
    whole = read_records(path.parent)
    assert len(whole) == 600
    path.write_bytes(path.read_bytes()[:-2000])
    assert 0 < len(read_records(path.parent)) < 600
    path.unlink()
    assert read_records(path.parent) == ()


def test_the_first_burst_is_no_latency_of_the_service(view: StudyView) -> None:
    trial = replace(view.trials[0], environment={"load_plan": {"concurrency": 8, "warmup_factor": 1.5}})
    rows = [record(0.0, (float(40 - place),), (1,)) for place in range(40)]
    assert [row.ended_s for row in settled(view, trial, rows)] == [float(second) for second in range(13, 41)]
    assert settled(view, trial, rows[:9]) == rows[:9]


def test_starts_of_a_simulation_follow_each_other_by_their_own_clock() -> None:
    made = sample_study.simulated()
    at_once = replace(made, trials=tuple(replace(trial, began_at=made.trials[0].began_at) for trial in made.trials))
    bars = [
        bar for trace in traces(timeline(StudyView.of(at_once))).values() for bar in zip(trace["base"], trace["x"], strict=True)
    ]
    bars.sort()
    assert all(begin + length <= after + 0.001 for (begin, length), (after, _) in itertools.pairwise(bars))
