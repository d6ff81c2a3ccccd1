"""Deadlines: generous until a start was seen, then about twice what this study saw of the same class."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.optimizer.deadlines import deadlines
from vopt.optimizer.history import FailureSummary, Stage, TrialRecord
from vopt.optimizer.setup import Timing
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase, StartClass


def start(start_class: StartClass, start_s: float, stop_s: float = 4.0) -> TrialRecord:
    return TrialRecord(
        label="0",
        config=EngineConfig(),
        stage=Stage.SEARCH,
        arm=None,
        attempt=1,
        status=None,
        metrics=None,
        failure=None,
        argv=(),
        resolved={},
        kv_cache_tokens=None,
        start_class=start_class,
        phase_s={Phase.START: start_s, Phase.STOP: stop_s},
        start_parts_s={},
        began_at="",
        directory="",
    )


def start_s(*records: TrialRecord, known_key: bool = False, served: bool = False, timing: Timing | None = None) -> float:
    return deadlines(timing or Timing(), records, known_key=known_key, served=served, load_s=100.0).start_s


def test_the_first_start_has_the_plans_deadline() -> None:
    assert start_s() == 960.0
    assert start_s(timing=Timing(first_start_s=1000.0)) == 4000.0
    assert start_s(timing=Timing(first_start_s=60.0)) == 900.0, "weights may come from a slow disk"


@pytest.mark.parametrize(
    ("known_key", "expected"),
    [(True, 375.0), (False, 500.0)],
)
def test_later_starts_have_twice_the_last_of_their_class(known_key: bool, expected: float) -> None:
    seen = (start(StartClass.FIRST, 210.0), start(StartClass.NEW_KEY, 250.0), start(StartClass.KNOWN_KEY, 170.0))
    assert start_s(*seen, known_key=known_key) == expected
    assert start_s(*seen, known_key=known_key, served=True) == expected + 60.0


def test_quick_starts_keep_the_floors_and_a_lost_cache_is_no_hang() -> None:
    quick = (start(StartClass.FIRST, 20.0), start(StartClass.KNOWN_KEY, 10.0))
    assert start_s(*quick) == 300.0
    assert start_s(*quick, known_key=True) == 180.0
    slow = (start(StartClass.FIRST, 500.0), start(StartClass.KNOWN_KEY, 30.0))
    assert start_s(*slow, known_key=True) == 750.0


SECONDS = st.floats(1.0, 2000.0)


@given(st.lists(st.tuples(st.sampled_from(list(StartClass)), SECONDS), min_size=1), st.booleans(), st.booleans())
def test_a_start_with_lost_caches_has_room_to_be_slower_than_the_longest_seen(
    seen: list[tuple[StartClass, float]], known_key: bool, served: bool
) -> None:
    latest = dict(seen)  # of each class, the last one tells what it costs here
    assert start_s(*(start(*one) for one in seen), known_key=known_key, served=served) >= 1.5 * max(latest.values())


def test_a_failed_start_teaches_nothing() -> None:
    failed = replace(start(StartClass.FIRST, 900.0), failure=FailureSummary(Phase.START, FailureKind.HANG, "hung"))
    assert start_s(failed) == start_s()


def test_stopping_has_twice_the_longest_stop_within_bounds() -> None:
    def stop_s(*stops: float) -> float:
        records = [start(StartClass.FIRST, 20.0, stop) for stop in stops]
        return deadlines(Timing(), records, known_key=True, served=False, load_s=100.0).stop_s

    assert (stop_s(), stop_s(3.0), stop_s(12.0, 3.0), stop_s(50.0)) == (60.0, 20.0, 24.0, 60.0)
