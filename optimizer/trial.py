"""One trial: what was asked of an engine and what came of it. Standard library only: travels into trial processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from vopt.objectives.records import LoadResult, LoadStatus


class EngineConfig(Mapping[str, Any]):
    """Overrides of vLLM's defaults, keyed by ``EngineArgs`` field name; ``EngineConfig()`` is the bare defaults.

    Values are JSON values. Immutable, hashable, and equal whatever the order of its keys.
    """

    __slots__ = ("_key", "_values")

    def __init__(self, values: Mapping[str, Any] | None = None, /) -> None:
        self._values: dict[str, Any] = dict(sorted((values or {}).items()))
        self._key = json.dumps(self._values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, EngineConfig) else NotImplemented

    def __repr__(self) -> str:
        return f"EngineConfig({self._key})"

    def __or__(self, other: Mapping[str, Any]) -> EngineConfig:
        return EngineConfig({**self._values, **other})

    def without(self, *names: str) -> EngineConfig:
        return EngineConfig({name: value for name, value in self._values.items() if name not in names})

    @property
    def digest(self) -> str:
        """Twelve hex digits that name this configuration in files and the study."""
        return hashlib.sha256(self._key.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        return dict(self._values)


class Phase(StrEnum):
    """Where in its life a trial is; stored, never removed."""

    PREFLIGHT = "preflight"
    START = "start"
    WARMUP = "warmup"
    LOAD = "load"
    STOP = "stop"


class Blame(StrEnum):
    """Who a failure is charged to: only the configuration's own failures teach the sampler."""

    CONFIGURATION = "configuration"
    WORKLOAD = "workload"
    INFRASTRUCTURE = "infrastructure"


class FailureKind(StrEnum):
    """Why a trial failed. Values are stored: never remove one, only add."""

    INVALID_CONFIG = "invalid_config"
    OOM_START = "oom_start"
    OOM_LOAD = "oom_load"
    KV_TOO_SMALL = "kv_too_small"
    MAMBA_BLOCKS = "mamba_blocks"
    GRAPH_CAPTURE = "graph_capture"
    UNSUPPORTED = "unsupported"
    ENGINE_DIED = "engine_died"
    HANG = "hang"
    LOW_SUCCESS = "low_success"
    TOO_LONG = "too_long"
    BAD_REQUEST = "bad_request"
    PORT = "port"
    MEMORY_HELD = "memory_held"
    GPU_LOST = "gpu_lost"
    DISK_FULL = "disk_full"
    STORAGE = "storage"
    DOWNLOAD = "download"
    DRIVER = "driver"
    DISTURBED = "disturbed"

    @property
    def blame(self) -> Blame:
        if self in (FailureKind.TOO_LONG, FailureKind.BAD_REQUEST):
            return Blame.WORKLOAD
        if self in _INFRASTRUCTURE:
            return Blame.INFRASTRUCTURE
        return Blame.CONFIGURATION


_INFRASTRUCTURE = frozenset(
    {
        FailureKind.PORT,
        FailureKind.MEMORY_HELD,
        FailureKind.GPU_LOST,
        FailureKind.DISK_FULL,
        FailureKind.STORAGE,
        FailureKind.DOWNLOAD,
        FailureKind.DRIVER,
        FailureKind.DISTURBED,
    }
)


class StartClass(StrEnum):
    """What an engine start costs, by what its caches hold."""

    FIRST = "first"
    NEW_KEY = "new_key"
    KNOWN_KEY = "known_key"


@dataclass(frozen=True, slots=True)
class Started:
    """What a started engine said of itself.

    ``resolved`` holds vLLM's own values after its defaults were applied (scheduler, cache, compilation, parallel), flat,
    by ``EngineArgs`` field name where one exists. ``start_parts_s`` are seconds by part (import, config, weights, compile,
    profile, capture, ...), as far as the engine tells; ``import_ahead`` and ``weights_ahead`` went on beside other work.
    """

    vllm_version: str
    resolved: Mapping[str, Any]
    kv_cache_tokens: int | None = None
    kv_cache_bytes: int | None = None
    num_gpu_blocks: int | None = None
    start_class: StartClass | None = None
    start_parts_s: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """A trial that came to its end. ``load`` is the deciding load; ``probes`` are loads before it on the same engine."""

    started: Started
    load: LoadResult
    phase_s: Mapping[Phase, float]
    probes: tuple[LoadResult, ...] = ()

    @property
    def status(self) -> LoadStatus:
        return self.load.status


@dataclass(frozen=True, slots=True)
class Failed:
    """A trial that did not: where, which kind, and the engine's own words. ``hint`` carries what the message teaches
    (for example ``{"max_num_seqs": {"at_most": 512}}``)."""

    phase: Phase
    kind: FailureKind
    detail: str
    phase_s: Mapping[Phase, float] = field(default_factory=dict)
    log_tail: tuple[str, ...] = ()
    hint: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    started: Started | None = None
    load: LoadResult | None = None


Outcome = Measured | Failed


class EngineFailure(Exception):
    """Raised inside ``engine/`` when an engine fails; ``evaluate`` turns it into the ``Failed`` value it carries."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(f"{failed.kind} during {failed.phase}: {failed.detail}")
        self.failed = failed


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Most seconds each phase may take; a phase that outlasts its deadline is a hang."""

    start_s: float = 900.0
    load_s: float = 1800.0
    stop_s: float = 60.0


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """Everything a session needs to bring one engine up.

    ``arguments`` are the complete engine arguments (``--set`` and the engine config merged, the model not included);
    ``front_end`` are ``vllm serve`` words that do not reach the engine. ``directory`` is private to this trial: log,
    records and result lie there. ``environment`` is added to the engine's environment and never holds secrets.
    ``client_processes`` load a served engine (``None``: as the plan of each load needs).
    """

    label: str
    model: str
    arguments: EngineConfig
    directory: Path
    python: str
    served_model_name: str | None = None
    front_end: tuple[str, ...] = ()
    revision: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    deadlines: Deadlines = Deadlines()
    cache_root: Path | None = None
    seed: int = 0
    client_processes: int | None = None
