"""What a study recommends, as values: verdict, command, gain with its interval, costs, what was rejected and why. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from vopt.optimizer.trial import EngineConfig


class Verdict(StrEnum):
    """Stored and printed in documents: never remove one."""

    BETTER = "better"
    NO_GAIN = "no_gain"
    NOTHING_FEASIBLE = "nothing_feasible"
    UNCONFIRMED = "unconfirmed"


@dataclass(frozen=True, slots=True)
class Gain:
    """``ratio`` above 1 is better in the goal's direction (latency: baseline / winner). ``low``/``high`` are its interval over
    engine starts; ``smallest_visible`` the ratio that this study would have seen with 80 % power. ``None``: not known."""

    ratio: float
    low: float | None = None
    high: float | None = None
    smallest_visible: float | None = None


@dataclass(frozen=True, slots=True)
class Importance:
    """Which parameters moved the metric: ``shares`` by parameter, largest first, summing to 1. Where the data cannot tell they
    are empty and ``why`` says why. Parameters that left the baseline's values in the same starts share one entry."""

    shares: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A configuration that cannot be the answer. ``kind`` is a failure kind or ``limit:<metric>``."""

    label: str
    config: EngineConfig
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Override:
    """One override of the finalist: kept or dropped by the lite arm, and why; ``worth`` is a gain ratio once measured."""

    name: str
    value: Any
    kept: bool
    reason: str
    worth: Gain | None = None


@dataclass(frozen=True, slots=True)
class Repair:
    """What a baseline that did not start as given was changed by, and why it did not start."""

    changes: EngineConfig
    reason: str


@dataclass(frozen=True, slots=True)
class SuccessBound:
    """Pooled over confirmation and soak: ``failed`` of ``n`` requests, and the upper 95 % bound of the failure share."""

    failed: int
    n: int
    upper_failure_share: float


@dataclass(frozen=True, slots=True)
class FrontMember:
    """One configuration of a front: ``values`` are each goal's figure, by metric, means over its starts in the search.
    ``knee``: it was recommended, and confirmed where there is a confirmation."""

    label: str
    config: EngineConfig
    values: Mapping[str, float]
    knee: bool = False
    baseline: bool = False


@dataclass(frozen=True, slots=True)
class GoalVerdict:
    """One of several goals on its own: ``verdict`` in words, the knee against the baseline."""

    name: str
    metric: str
    verdict: str
    gain: Gain


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The answer of one study. ``argv`` is the launch command (``None`` only when nothing is feasible): the winner's when
    ``verdict`` is better or unconfirmed, the baseline's when there is no gain. ``baseline_breaks``: the limits that the
    baseline breaks beyond chance, in words; with them ``better`` may be a configuration without a gain, or a slower one.
    ``finalist_config``: the finalist of the confirmation that the answer rests on; ``None`` without one, and in older
    studies."""

    verdict: Verdict
    reason: str
    argv: tuple[str, ...] | None
    baseline_argv: tuple[str, ...]
    winner_label: str | None = None
    winner_config: EngineConfig | None = None
    gain: Gain | None = None
    baseline_metrics: Mapping[str, float] = field(default_factory=dict)
    winner_metrics: Mapping[str, float] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    trials: Mapping[str, int] = field(default_factory=dict)
    success: SuccessBound | None = None
    soak: str = ""
    notes: tuple[str, ...] = ()
    front: tuple[FrontMember, ...] = ()
    goals: tuple[GoalVerdict, ...] = ()
    repair: Repair | None = None
    baseline_breaks: str = ""
    finalist_config: EngineConfig | None = None

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["repair"] = {"changes": self.repair.changes.to_json(), "reason": self.repair.reason} if self.repair else None
        data["winner_config"] = self.winner_config.to_json() if self.winner_config is not None else None
        data["finalist_config"] = self.finalist_config.to_json() if self.finalist_config is not None else None
        for row, rejected in zip(data["rejected"], self.rejected, strict=True):
            row["config"] = rejected.config.to_json()
        for row, member in zip(data["front"], self.front, strict=True):
            row["config"] = member.config.to_json()
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Recommendation:
        def gain(value: Mapping[str, Any] | None) -> Gain | None:
            return Gain(**value) if value else None

        winner = data["winner_config"]
        return cls(
            **{
                **data,
                "verdict": Verdict(data["verdict"]),
                "argv": tuple(data["argv"]) if data["argv"] is not None else None,
                "baseline_argv": tuple(data["baseline_argv"]),
                "winner_config": EngineConfig(winner) if winner is not None else None,
                "finalist_config": EngineConfig(row) if (row := data.get("finalist_config")) is not None else None,
                "gain": gain(data["gain"]),
                "overrides": tuple(Override(**{**row, "worth": gain(row["worth"])}) for row in data["overrides"]),
                "rejected": tuple(Rejected(**{**row, "config": EngineConfig(row["config"])}) for row in data["rejected"]),
                "success": SuccessBound(**data["success"]) if data["success"] else None,
                "notes": tuple(data["notes"]),
                "front": tuple(FrontMember(**{**row, "config": EngineConfig(row["config"])}) for row in data.get("front", ())),
                "repair": Repair(EngineConfig(row["changes"]), row["reason"]) if (row := data.get("repair")) else None,
                "goals": tuple(GoalVerdict(**{**row, "gain": Gain(**row["gain"])}) for row in data.get("goals", ())),
            }
        )
