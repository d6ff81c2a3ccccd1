"""When a search must not go on: the workload is at fault, or the machine, or nothing is left to gain, and every further start
would be wasted."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vopt.objectives.goals import Goal
from vopt.objectives.records import LoadStatus
from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.goodput_rate import nothing_missed
from vopt.optimizer.judge import Judged
from vopt.optimizer.load.concurrency import RATE_SHARE
from vopt.optimizer.trial import Blame, EngineConfig, FailureKind

INFRASTRUCTURE_IN_A_ROW = 4
MOST_LOST_OF_ALL = 0.9
"""Below this success rate requests time out in a queue, where the rate is above what is finished."""
BEYOND = 3.0
"""No configuration is known to serve so many times what the defaults do: what drafting and more GPUs bring is below it."""
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


def nothing_to_gain(baseline: Judged, goal: Goal) -> str | None:
    """Why nothing can have a higher goodput than this baseline, which is within every bound at its rate; ``None``: it may."""
    metrics, plan = baseline.record.metrics, baseline.record.environment.get("load_plan") or {}
    at_rate = plan.get("rate") is not None  # a closed loop has none to raise
    if metrics is None or goal.metric != "goodput_per_s" or not at_rate or not baseline.feasible:
        return None
    return nothing_missed(metrics.values)


def overloaded_at(judged: Judged, rate: float | None, request_tokens: float) -> str | None:
    """What an overloaded start says of the ``rate`` that was typed, and what to type; ``None`` where it bears it.
    ``request_tokens``: prompt and output of one request, on average."""
    sustained = _sustained(judged, request_tokens)
    lost = (judged.record.metrics is not None) and (judged.record.metrics.get("success_rate") or 0.0) < MOST_LOST_OF_ALL
    if rate is None or judged.feasible or judged.record.failure is not None or sustained is None or sustained >= rate:
        return None
    if not (lost or judged.record.status is LoadStatus.OVERLOADED):
        return None
    return (
        f"at --rate {rate:g} the baseline is overloaded: it sustains about {sustained:.2g} requests/s. Lower it: --rate "
        f"{RATE_SHARE * sustained:.2g} is {RATE_SHARE:g} of that, as a search without --rate takes it"
    )


def _sustained(judged: Judged, request_tokens: float) -> float | None:
    """Requests per second, from the tokens: in a queue that grows, few of the requests that are due in a window end in it."""
    metrics = judged.record.metrics
    if metrics is None:
        return None
    finished, tokens = metrics.get("requests_per_s") or 0.0, metrics.get("tokens_per_s") or 0.0
    return max(finished, tokens / request_tokens if request_tokens else 0.0) or None


def beyond_reach(baseline: Judged, rate: float | None, request_tokens: float) -> str | None:
    """Why a typed rate is so far above what the baseline sustains that no other start is worth it; ``None``: it is not."""
    said, sustained = overloaded_at(baseline, rate, request_tokens), _sustained(baseline, request_tokens)
    if said is None or rate is None or sustained is None or rate < BEYOND * sustained:
        return None
    return f"{said}. No engine arguments make it {rate / sustained:.0f} times as fast, so nothing else was started"
