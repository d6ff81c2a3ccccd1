"""The versioned codec of what is stored: one ``TrialRecord`` per engine start, as JSON.

Format history (``FORMAT_VERSION``):
1 - first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from vopt.objectives.metrics import Metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer.recommend import Recommendation
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase, StartClass

FORMAT_VERSION = 1


class Stage(StrEnum):
    """What an engine start was for."""

    SEARCH = "search"
    SCREENING = "screening"
    CONFIRMATION = "confirmation"
    SOAK = "soak"
    EXPLAIN = "explain"
    DRIFT = "drift"


class Arm(StrEnum):
    """Which of the three confirmed commands a confirmation start belongs to."""

    BASELINE = "baseline"
    FINALIST = "finalist"
    LITE = "lite"


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """One engine start that the search wants. ``label`` names its directory and its row (``7``, ``confirm-2-lite``).

    ``incumbent_curve`` is the cumulative window tokens per second of the best trial so far, for an early end; ``None``
    forbids one (baseline, screening, confirmation).
    """

    label: str
    config: EngineConfig
    stage: Stage
    arm: Arm | None = None
    attempt: int = 1
    incumbent_curve: tuple[float, ...] | None = None


SAMPLED_STAGES = (Stage.SEARCH, Stage.SCREENING)
"""Stages whose starts a sampler learns from: they are made under like conditions."""


@dataclass(frozen=True, slots=True)
class FailureSummary:
    """A failed trial as it is stored and shown."""

    phase: Phase
    kind: FailureKind
    detail: str
    log_tail: tuple[str, ...] = ()
    hint: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One engine start as it is stored: exactly one of ``metrics`` and ``failure`` decides, both may be present
    (an engine that died under load has figures that decide nothing).

    ``resolved`` is the engine's own resolved configuration; ``token_curve[i]`` the tokens counted in the window's first
    ``i + 1`` seconds. ``began_at`` is UTC, ISO 8601.
    """

    label: str
    config: EngineConfig
    stage: Stage
    arm: Arm | None
    attempt: int
    status: LoadStatus | None
    metrics: Metrics | None
    failure: FailureSummary | None
    argv: tuple[str, ...]
    resolved: Mapping[str, Any]
    kv_cache_tokens: int | None
    start_class: StartClass | None
    phase_s: Mapping[Phase, float]
    start_parts_s: Mapping[str, float]
    began_at: str
    directory: str
    token_curve: tuple[float, ...] = ()
    flags: tuple[str, ...] = ()
    served: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)
    kv_cache_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["config"] = self.config.to_json()
        data["metrics"] = self.metrics.to_json() if self.metrics else None
        data["format_version"] = FORMAT_VERSION
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrialRecord:
        known = dict(data)
        known.pop("format_version", None)
        failure = known["failure"]
        return cls(
            **{
                **known,
                "config": EngineConfig(known["config"]),
                "stage": Stage(known["stage"]),
                "arm": Arm(known["arm"]) if known["arm"] else None,
                "status": LoadStatus(known["status"]) if known["status"] else None,
                "metrics": Metrics.from_json(known["metrics"]) if known["metrics"] else None,
                "failure": FailureSummary(
                    Phase(failure["phase"]),
                    FailureKind(failure["kind"]),
                    failure["detail"],
                    tuple(failure["log_tail"]),
                    failure["hint"],
                )
                if failure
                else None,
                "argv": tuple(known["argv"]),
                "start_class": StartClass(known["start_class"]) if known["start_class"] else None,
                "phase_s": {Phase(phase): seconds for phase, seconds in known["phase_s"].items()},
                "token_curve": tuple(known["token_curve"]),
                "flags": tuple(known["flags"]),
            }
        )


@dataclass(frozen=True, slots=True)
class Pending:
    """A start that began and was not told: ``record`` is its result when that reached the disk, ``number`` its trial."""

    request: TrialRequest
    record: TrialRecord | None
    number: int | None


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """One study as it is read back: what fixed it, its engine starts in order, and its answer once there is one.

    ``setup`` holds the study attributes of the design's section 6 as JSON: ``model``, ``model_revision``, ``model_shape``,
    ``gpus``, ``vllm_version``, ``engine`` (kind), ``simulated``, ``goal``, ``workload``, ``workload_digest``, ``space``,
    ``space_digest``, ``mode``, ``load_plan``, ``options`` (what was typed), ``seed``, ``environment``, ``baseline_argv``.
    """

    name: str
    created_at: str
    setup: Mapping[str, Any]
    trials: tuple[TrialRecord, ...]
    recommendation: Recommendation | None = None
    directory: str = ""
