"""How long each phase of a trial may take before it counts as a hang: from the plan, then from what this study has seen. Pure.

A first start of a model took up to 170 s on an H200 and a later one 25 to 70 s (vLLM 0.22.1), so one constant is either
too short for the first or leaves every later hang standing for a quarter of an hour.
"""

from __future__ import annotations

from collections.abc import Sequence

from vopt.optimizer.history import TrialRecord
from vopt.optimizer.setup import Timing
from vopt.optimizer.trial import Deadlines, Phase, StartClass

FIRST_START_S = 900.0
"""Least deadline of a study's starts until one succeeded: weights may come from a slow disk, and every cache is empty."""
FLOORS_S = {StartClass.FIRST: 300.0, StartClass.NEW_KEY: 300.0, StartClass.KNOWN_KEY: 180.0}
PLAN_FACTOR = 4.0
SEEN_FACTOR = 2.0
LOST_CACHE_FACTOR = 1.5
"""Over the longest start seen: the caches may be gone (removed, another host's), and then a known key costs what the first did."""
SERVED_EXTRA_S = 60.0
"""``vllm serve`` imports its HTTP front end as well and compiles nothing in advance."""
LEAST_STOP_S, MOST_STOP_S = 20.0, 60.0


def deadlines(timing: Timing, records: Sequence[TrialRecord], *, known_key: bool, served: bool, load_s: float) -> Deadlines:
    """The deadlines of the next trial. ``timing`` is the plan, ``records`` what the study holds, ``load_s`` the deadline that
    the load itself keeps. ``known_key``: a start with the same compile key succeeded before."""
    return Deadlines(_start_s(timing, records, known_key) + (SERVED_EXTRA_S if served else 0.0), load_s, _stop_s(records))


def _start_s(timing: Timing, records: Sequence[TrialRecord], known_key: bool) -> float:
    seen: dict[StartClass, float] = {}
    for record in records:
        if record.start_class is not None and record.failure is None and Phase.START in record.phase_s:
            seen[record.start_class] = record.phase_s[Phase.START]
    if not seen:
        return max(FIRST_START_S, PLAN_FACTOR * timing.first_start_s)
    expected = StartClass.KNOWN_KEY if known_key else StartClass.NEW_KEY
    last = seen.get(expected, max(seen.values()))  # of a class that was not seen yet, only that it costs no more than others
    return max(FLOORS_S[expected], SEEN_FACTOR * last, LOST_CACHE_FACTOR * max(seen.values()))


def _stop_s(records: Sequence[TrialRecord]) -> float:
    stops = [record.phase_s[Phase.STOP] for record in records if record.failure is None and Phase.STOP in record.phase_s]
    return min(MOST_STOP_S, max(LEAST_STOP_S, SEEN_FACTOR * max(stops))) if stops else MOST_STOP_S
