"""The host around a search: room and neighbours before it, the GPUs' locks and health while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vopt.optimizer import caches, clean, gpus, room
from vopt.optimizer.environment import hub_cache, missing_bytes
from vopt.optimizer.history import FailureSummary, TrialRecord
from vopt.optimizer.locks import GPU_LOCKS, lock_gpus
from vopt.optimizer.setup import Budget
from vopt.optimizer.storage import study_directory
from vopt.optimizer.subject import Subject
from vopt.optimizer.trial import FailureKind, Phase
from vopt.search_spaces.space import SearchSpace


def check_room(subject: Subject, space: SearchSpace, budget: Budget, results: Path) -> None:
    """Disk for weights, caches and records, and memory for what is offloaded. ``results`` is where the study's files go.

    Raises:
        EnvironmentLacks: a file system is too full.
        UsageError: the command or the space offloads beyond half of the free memory.
    """
    starts = budget.trials + 3 * budget.rounds + 2
    eager = (subject.fixed | subject.baseline).get("enforce_eager") is True
    wanted = room.need(
        weights_bytes=missing_bytes(subject.model), starts=starts, compile_keys=0 if eager else min(starts, budget.trials)
    )
    room.check_disk(wanted, hub=hub_cache(), cache=caches.cache_root(), results=results)
    available = room.available_memory_bytes()
    room.check_offload(subject.fixed | subject.baseline, available)
    for parameter in space.parameters:
        for value in parameter.values:
            room.check_offload({parameter.name: value}, available)


def results_place(storage: str, data_dir: Path | None) -> Path:
    """The folder below which a study of this storage keeps its records."""
    return study_directory(storage, "new", data_dir).parent


def shared_with(subject: Subject) -> tuple[str, ...]:
    """Words for each other GPU of this host that computes for somebody now: it shares CPUs, memory and power with us."""
    if subject.machine.simulated:
        return ()
    return tuple(
        f"GPU {gpu.index} ({', '.join(holder.name or f'process {holder.pid}' for holder in gpu.holders)})"
        for gpu in gpus.busy(subject.machine.uuids)
    )


def shared_note(others: tuple[str, ...]) -> tuple[str, ...]:
    """What the answer says of a shared host; nothing for one of our own."""
    if not others:
        return ()
    return (f"measured on a shared host, while others computed on {'; '.join(others)}: expect less noise without them",)


@contextmanager
def reserved(subject: Subject, purpose: str, folder: Path = GPU_LOCKS) -> Iterator[None]:
    """The subject's GPUs for us alone, among all searches of this host. Raises ``Locked`` when one is taken."""
    locks = lock_gpus(subject.machine.uuids, purpose, folder=folder)
    try:
        yield
    finally:
        for lock in locks:
            lock.release()


class Watch:
    """The health of the GPUs of a search, from its beginning on: one that is lost ends it, whatever the trial looked like."""

    def __init__(self, uuids: tuple[str, ...]) -> None:
        self._before = gpus.select(uuids)
        self._errors = gpus.CriticalErrors(uuids)

    def checked(self, record: TrialRecord) -> TrialRecord:
        """The record itself, or, after a fault of a GPU, as a failure of that GPU that is charged to no configuration."""
        lost = gpus.lost(self._before) if self._before else None
        lost = lost or self._errors.seen()
        if lost is None:
            return record
        phase = record.failure.phase if record.failure is not None else Phase.LOAD
        tail = record.failure.log_tail if record.failure is not None else ()
        return replace(record, failure=FailureSummary(phase, FailureKind.GPU_LOST, lost, tail))

    def close(self) -> None:
        self._errors.close()


def shrink(subject: Subject, study: Path, budget_bytes: int, say: Callable[[str], None]) -> None:
    """Remove engine caches, least recently used first, until they and the study's own files fit into the disk budget. The
    cache that this search uses stays: without it every start would compile again."""
    root = caches.cache_root()
    gpu = subject.machine.gpu.name if subject.machine.gpu is not None else "cpu"
    own = caches.engine_cache(root, gpu, subject.schema.version)
    left = max(0, budget_bytes - caches.size_bytes(study))
    for path, size in clean.over_budget(root, left):
        if path != own:
            caches.remove(path)
            say(f"removed the compile cache {path.name} ({size / 2**30:.1f} GiB): --disk-budget")


def conditions_of(subject: Subject) -> Callable[[], Mapping[str, Any]]:
    """What is stored of the machine beside each trial, taken under load: enough to explain a drift later. One flat name for
    each condition; absent where NVML does not tell."""

    def conditions() -> Mapping[str, Any]:
        if subject.machine.simulated:
            return {}
        found: dict[str, Any] = {}
        for gpu in gpus.select(subject.machine.uuids):
            named = {
                "sm_clock_mhz": gpu.sm_clock_mhz,
                "temperature_c": gpu.temperature_c,
                "power_w": gpu.power_w,
                "processes": len(gpu.holders),
            }
            found |= {f"gpu{gpu.index}_{name}": value for name, value in named.items() if value is not None}
        if subject.machine.uuids:
            found["gpu_uuids"] = " ".join(subject.machine.uuids)
        found["other_gpus_busy"] = len(gpus.busy(subject.machine.uuids))
        found["load_average"] = room.load_average()
        return found

    return conditions
