"""Loads whose requests are due at times of their own: open loops, recordings, sessions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from driven import CLOSED, POISSON, SHORT, assert_accounted, kinds, load
from queue_engine import QueueEngine

from vopt.objectives.records import LoadStatus, RequestRecord
from vopt.optimizer.load.plan import Arrivals
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.window import WindowWatch

# Open loop


def test_poisson_arrivals_are_sent_at_their_times_and_are_the_same_for_every_engine() -> None:
    slow, fast = load(QueueEngine(slots=8), POISSON), load(QueueEngine(slots=64, step_s=0.001), POISSON)
    assert slow.status is fast.status is LoadStatus.COMPLETE
    times = {record.index: record.scheduled_s for record in slow.records}
    assert all(times.get(record.index, record.scheduled_s) == record.scheduled_s for record in fast.records)
    assert all(record.sent_s == pytest.approx(record.scheduled_s) for record in slow.records)
    assert slow.client.requested_rate == pytest.approx(4, rel=0.2)
    assert slow.client.achieved_rate == pytest.approx(slow.client.requested_rate)
    assert not slow.client.limited
    assert load(QueueEngine(), replace(POISSON, seed=1)).records[0].scheduled_s != slow.records[0].scheduled_s


def test_what_was_due_in_the_window_is_measured_to_its_end() -> None:
    """Censoring at the close would leave out the longest answers and flatter the mean."""
    result = load(QueueEngine(slots=64, step_s=0.5), replace(POISSON, window_s=20))
    assert result.window is not None
    due = [record for record in result.records if result.window.opened_s <= record.scheduled_s < result.window.closed_s]
    assert due
    assert all(record.succeeded for record in due)
    assert any(record.scheduled_s > result.window.closed_s for record in result.records), "the load was kept up meanwhile"


def test_long_answers_of_a_short_window_are_followed_too() -> None:
    """The first load of all knows no stall limit: a window shorter than the longest answers must not leave them out."""
    plan = replace(POISSON, window_s=4, max_doublings=0, min_requests=0)
    result = load(QueueEngine(slots=64, step_s=0.5), plan, replace(SHORT, lengths=((50, 20), (50, 400))))
    assert result.window is not None
    due = [record for record in result.records if result.window.opened_s <= record.scheduled_s < result.window.closed_s]
    assert max(record.e2e_s for record in due) > 30
    assert all(record.succeeded for record in due)


@pytest.mark.parametrize("step_s", [0.013, 0.1, 0.37])
def test_the_same_requests_are_due_in_the_window_of_every_start(step_s: float) -> None:
    """Whatever moments its engine answers at."""
    result = load(QueueEngine(slots=64, step_s=step_s), replace(POISSON, warmup_s=5.3, window_s=20))
    assert result.window is not None
    assert (result.window.opened_s, result.window.closed_s) == pytest.approx((5.3, 25.3))


def took(sent_s: float, *, spell: bool) -> float:
    """Seconds of a request: a spell of a few seconds holds them up, or more and more of them from then on."""
    late = sent_s - 18
    return 2.0 if late < 0 else max(2.0, 12 - 2 * late) if spell else 2 + 2 * late


@pytest.mark.parametrize(("spell", "status"), [(True, LoadStatus.COMPLETE), (False, LoadStatus.OVERLOADED)])
def test_what_may_be_an_overload_is_looked_at_for_twice_as_long(spell: bool, status: LoadStatus) -> None:
    """A queue that grows goes on growing; a busy spell at the end of a window only looks so."""
    watch = WindowWatch(replace(POISSON, window_s=20, rate=20, min_requests=0))
    watch.open(5.0)

    def close(at_s: float) -> None:
        sent = [n / 20 for n in range(int(20 * at_s))]
        times = [(s, min(at_s, s + took(s, spell=spell))) for s in sent]
        ended = [
            RequestRecord(n, s, s, end, 10, 2, 2, (s + 0.1, end), (1, 1), censored=end == at_s)
            for n, (s, end) in enumerate(times)
        ]
        watch.close(ended, latest_s=600.0)

    close(25.0)
    assert (watch.settled, watch.closes_s) == (False, 45.0)
    close(45.0)
    assert watch.settled
    assert watch.outcome[0] is status


def test_a_rate_above_what_the_engine_can_do_is_overloaded() -> None:
    engine = QueueEngine(slots=8)
    result = load(engine, replace(POISSON, rate=12))
    assert result.status is LoadStatus.OVERLOADED
    assert "rise" in result.detail
    assert_accounted(engine, result)


def test_constant_arrivals_are_even() -> None:
    result = load(QueueEngine(slots=64), replace(POISSON, arrivals=Arrivals.CONSTANT, rate=5, max_requests=50))
    assert sorted(record.scheduled_s for record in result.records) == pytest.approx([number / 5 for number in range(50)])
    assert kinds(result) == {"ok": 50}


def test_a_replay_sends_at_the_recorded_times_and_ends_with_the_recording() -> None:
    times = tuple(0.5 * number for number in range(40))
    source = replace(SHORT, scheduled_s=times)
    result = load(QueueEngine(slots=64), replace(POISSON, arrivals=Arrivals.REPLAY, rate=None, warmup_s=2), source)
    assert sorted(record.scheduled_s for record in result.records) == pytest.approx(list(times))
    assert kinds(result) == {"ok": 40}
    assert result.window is not None
    assert result.window.closed_s == pytest.approx(19.5, abs=0.1)


def test_a_death_in_an_open_loop_counts_what_was_due_until_the_windows_end() -> None:
    engine = QueueEngine(slots=64, dies_at=50)
    plan = replace(POISSON, arrivals=Arrivals.CONSTANT, rate=4)
    result = load(engine, plan)
    assert result.status is LoadStatus.ENGINE_DIED
    assert len(result.records) + result.not_sent == pytest.approx(4 * 65, abs=5)


# Sessions


def test_the_turns_of_a_session_follow_each_other_after_a_think_time() -> None:
    source = RequestSource(lengths=((50, 20), (120, 20), (190, 20)), turns=(3,), think_s=(2.0,))
    engine = QueueEngine(slots=8)
    result = load(engine, replace(CLOSED, concurrency=4, max_requests=60), source)
    by_session: dict[str, list[RequestRecord]] = {}
    for record in sorted(result.records, key=lambda record: record.index):
        by_session.setdefault(record.session or "", []).append(record)
    assert len(by_session) >= 20
    for turns in by_session.values():
        for earlier, later in pairwise(turns):
            assert later.sent_s == pytest.approx(earlier.ended_s + 2.0)
            assert later.scheduled_s == pytest.approx(earlier.ended_s + 2.0)


def test_a_session_ends_when_a_turn_fails() -> None:
    source = RequestSource(lengths=((50, 20), (120, 20), (190, 20)), turns=(3,))
    result = load(QueueEngine(errors={0: "no"}), replace(CLOSED, concurrency=1, max_requests=10), source)
    assert [record.session for record in result.records].count("s0") == 1
