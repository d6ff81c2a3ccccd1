"""Confirmations: which configurations one compares, and how its engine starts are called. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import dataclass

from vopt.optimizer.history import Arm, TrialRecord
from vopt.optimizer.trial import EngineConfig

MOST_ROUNDS = 5
"""What ``--rounds`` takes."""

_LABEL = re.compile(r"confirm-(?P<round>\d+)-(?P<arm>[a-z]+)(?:-(?P<attempt>\d+))?(?:-s(?P<series>\d+))?")


@dataclass(frozen=True, slots=True)
class Arms:
    """The arms of one confirmation. ``lite`` is ``None`` where it would equal the finalist or the baseline.

    ``attempt`` 2: the first finalist failed. ``series`` 2 and more: another finalist was confirmed before the search was given
    more trials; a series shares no start with another one.
    """

    finalist: EngineConfig
    lite: EngineConfig | None
    attempt: int
    series: int = 1

    def label(self, round_: int, arm: Arm) -> str:
        again = f"-{self.attempt}" if self.attempt > 1 and arm is not Arm.BASELINE else ""
        return f"confirm-{round_}-{arm}{again}{series_suffix(self.series)}"

    def labels(self, round_: int) -> list[str]:
        return [self.label(round_, arm) for arm in Arm]

    def measured(self, starts: Set[str], lost: Set[str]) -> int:
        """How many rounds were measured to their end, of the labels of what was started. ``lost`` are those that failed: an arm
        that did has no start in later rounds, and these end without it."""
        gone: set[Arm] = {Arm.LITE} if self.lite is None else set()
        for round_ in range(1, MOST_ROUNDS + 1):
            labels = {arm: self.label(round_, arm) for arm in Arm}
            if gone.issuperset(Arm) or any(arm not in gone and label not in starts for arm, label in labels.items()):
                return round_ - 1
            gone.update(arm for arm, label in labels.items() if label in lost and arm is not Arm.BASELINE)
        return MOST_ROUNDS


def series_suffix(series: int) -> str:
    """What the labels of a series end in; nothing for the first."""
    return f"-s{series}" if series > 1 else ""


def series_of(label: str) -> int:
    """The series that a start of this label belongs to; 0 for one that is no start of a confirmation."""
    match = _LABEL.fullmatch(label)
    return int(match["series"] or 1) if match else 0


def round_of(label: str) -> int:
    """The confirmation round of a start of this label; 0 for one that is no start of a confirmation."""
    match = _LABEL.fullmatch(label)
    return int(match["round"]) if match else 0


def arms_of(starts: Iterable[TrialRecord]) -> tuple[Arms, ...]:
    """The confirmations that these starts were made for, in order."""
    finalists: dict[tuple[int, int], EngineConfig] = {}
    lites: dict[tuple[int, int], EngineConfig] = {}
    for start in starts:
        match = _LABEL.fullmatch(start.label)
        if match and start.arm in (Arm.FINALIST, Arm.LITE):
            known = finalists if start.arm is Arm.FINALIST else lites
            known.setdefault((int(match["series"] or 1), int(match["attempt"] or 1)), start.config)
    return tuple(
        Arms(finalist, lites.get((series, attempt)), attempt, series) for (series, attempt), finalist in finalists.items()
    )
