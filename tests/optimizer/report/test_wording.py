from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.objectives.metrics import METRICS
from vopt.optimizer.recommend import Gain
from vopt.optimizer.report import wording
from vopt.optimizer.trial import FailureKind


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("tokens_per_s", 24120.4, "24,120 tokens/s"),
        ("tokens_per_s", 3.14159, "3.14 tokens/s"),
        ("p95_ttft_s", 0.5, "500 ms"),
        ("mean_tpot_s", 0.0279, "27.9 ms"),
        ("success_rate", 0.516, "51.6 %"),
        ("success_rate", 1.0, "100 %"),
        ("success_rate", 0.9956, "99.56 %"),
        ("preemptions", 0.0, "0"),
        ("requests_per_s", 18.284, "18.3 requests/s"),
        ("p99_ttft_s", None, "–"),
    ],
)
def test_a_metric_is_said_in_its_unit(metric: str, value: float | None, text: str) -> None:
    assert wording.metric_text(metric, value) == text


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_has_a_label_of_its_own(name: str) -> None:
    assert "_" not in wording.metric_label(name)


def test_a_success_rate_below_one_is_never_rounded_up_to_all() -> None:
    assert wording.metric_text("success_rate", 0.99994) != "100 %"


def test_a_gain_in_latency_reads_as_the_change_of_the_latency() -> None:
    gain = Gain(1.25, 1.2, 1.3)
    assert wording.gain_text(gain) == "+25.0 % (interval +20.0 % to +30.0 %)"
    assert wording.gain_text(gain, maximize=False) == "−20.0 % (interval −23.1 % to −16.7 %)"
    assert wording.gain_text(Gain(1.1)) == "+10.0 % (no interval)"


@given(st.floats(0.2, 5))
def test_the_sign_of_a_change_is_that_of_its_ratio(ratio: float) -> None:
    text = wording.change_text(ratio)
    assert text.startswith("+") <= (ratio > 1)
    assert text.startswith("−") <= (ratio < 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0.4 s"), (42, "42 s"), (185, "3 min 05 s"), (4320, "1 h 12 min"), (None, "–"), (0, "0 s"), (3599.6, "1 h 00 min")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert wording.duration(seconds) == text


def test_every_failure_kind_has_words_of_its_own() -> None:
    said = [wording.kind_text(kind) for kind in FailureKind]
    assert len({*said}) == len(said)
    assert not [text for text in said if "_" in text]


@given(st.text(), st.integers(1, 40))
def test_one_line_is_one_printable_line_of_that_width(text: str, width: int) -> None:
    line = wording.one_line(text, width)
    assert len(line) <= width
    assert line.isprintable() or line == ""
