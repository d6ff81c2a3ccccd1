"""When a search must not go on: the workload is at fault, or the machine, and every further start would be wasted."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.judge import Judged
from vopt.optimizer.trial import Blame, EngineConfig, FailureKind

INFRASTRUCTURE_IN_A_ROW = 4
_FATAL = (FailureKind.GPU_LOST, FailureKind.DISK_FULL, FailureKind.DRIVER, FailureKind.STORAGE, FailureKind.DOWNLOAD)


def end_if_hopeless(history: Sequence[Judged], given_up: Collection[EngineConfig], *, has_baseline: bool, study: str) -> None:
    """Judge by the latest start. ``given_up``: configurations that failed too often for no fault of theirs.

    Raises ``UsageError`` for a workload that cannot be served, ``EnvironmentLacks`` for a machine that fails its trials.
    """
    failure = history[-1].record.failure
    if failure is None:
        return
    if failure.kind.blame is Blame.WORKLOAD:
        raise UsageError(
            f"the workload cannot be served: {failure.detail}",
            hint="shorten the workload's requests or raise max_model_len",
        )
    if failure.kind in _FATAL:
        raise EnvironmentLacks(
            f"{failure.kind} during {failure.phase}: {failure.detail}", hint=f"mend it, then: vopt resume {study}"
        )
    if history[-1].record.config in given_up and not has_baseline:
        raise EnvironmentLacks(
            f"the baseline could not be measured: {failure.kind}: {failure.detail}",
            hint=f"see vopt doctor, then: vopt resume {study}",
        )
    last = history[-INFRASTRUCTURE_IN_A_ROW:]
    if len(last) == INFRASTRUCTURE_IN_A_ROW and not any(judged.charged for judged in last):
        raise EnvironmentLacks(
            f"{INFRASTRUCTURE_IN_A_ROW} engine starts in a row failed for no fault of theirs: {failure.kind}: {failure.detail}",
            hint=f"see vopt doctor, then: vopt resume {study}",
        )
