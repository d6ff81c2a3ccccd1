"""Progress as small values: the search says what happened, a listener decides how it looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vopt.optimizer.history import TrialRecord, TrialRequest
from vopt.optimizer.load.plan import Tick
from vopt.optimizer.trial import Phase


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the user; ``important`` ones are shown even when quiet."""

    text: str
    important: bool = False


@dataclass(frozen=True, slots=True)
class StageBegan:
    """A stage of the search: ``trials`` engine starts are planned in it, ``expected_s`` seconds in all."""

    stage: str
    trials: int
    expected_s: float | None = None


@dataclass(frozen=True, slots=True)
class TrialBegan:
    request: TrialRequest
    reason: str
    expected_s: float | None = None


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    label: str
    phase: Phase
    detail: str = ""
    expected_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadTicked:
    label: str
    tick: Tick


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """``value`` is the goal's metric; ``reason`` says why the trial cannot win, if it cannot.

    ``best`` and ``baseline`` are those of the search. ``against`` is the first value of the baseline that was measured as this
    start was, in-process or served: the two may differ by more than any configuration does.
    """

    record: TrialRecord
    value: float | None
    best: float | None
    baseline: float | None
    reason: str = ""
    against: float | None = None


Event = Note | StageBegan | TrialBegan | PhaseBegan | LoadTicked | TrialEnded
Listener = Callable[[Event], None]
