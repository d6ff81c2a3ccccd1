"""Where the time went: sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.sample_study import study

from vopt.optimizer.history import TrialRecord
from vopt.optimizer.report.spent import spent
from vopt.optimizer.trial import Phase


def trial(began_at: str, start_s: float, load_s: float, window_s: int, compile_s: float = 0.0) -> TrialRecord:
    some = study().trials[0]
    return replace(
        some,
        began_at=began_at,
        phase_s={Phase.START: start_s, Phase.LOAD: load_s, Phase.STOP: 2.0},
        start_parts_s={"compile": compile_s} if compile_s else {},
        token_curve=tuple(float(second) for second in range(window_s)),
    )


def test_every_second_is_in_one_place() -> None:
    trials = (
        trial("2026-11-30T10:00:00+00:00", 60.0, 80.0, 60, compile_s=30.0),
        trial("2026-11-30T10:02:30+00:00", 20.0, 70.0, 60),  # 8 s after the one before
        trial("2026-11-30T18:00:00+00:00", 20.0, 0.0, 0),  # resumed in the evening
    )
    found = spent(trials)
    assert (found.start_s, found.compile_s, found.load_s, found.measure_s, found.stop_s) == (100.0, 30.0, 30.0, 120.0, 6.0)
    assert found.waiting_s == pytest.approx(8.0)
    assert found.text == (
        "4 min 24 s in 3 starts: start 1 min 40 s (compile 30 s of it), warm up 30 s, measure 2 min 00 s, stop 6 s, waiting 8 s"
    )


def test_a_simulation_waits_for_nobody() -> None:
    found = spent([trial("2026-11-30T10:00:00+00:00", 60.0, 80.0, 60)], simulated=True)
    assert found.waiting_s is None
    assert "waiting" not in found.text
    assert "1 start:" in found.text
