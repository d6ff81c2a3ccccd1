"""Metrics x Goal -> Score: the only place where a number becomes "better"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vopt.objectives.goals import Goal, Limit
from vopt.objectives.metrics import METRICS, Metrics
from vopt.objectives.records import LoadStatus

STATUS_KEY = "status"
"""Key of the violation that a load's end itself is (a dead engine, an overload); first on every score."""

_SUCCESS_RESOLUTION = 1e-3
_INFEASIBLE = {
    LoadStatus.ENGINE_DIED: "the engine died under load",
    LoadStatus.REPEATED_ERRORS: "the load ended on repeated errors",
    LoadStatus.OVERLOADED: "the engine was overloaded: its queue grew through the window",
    LoadStatus.DEADLINE: "the load did not end within its deadline",
}


@dataclass(frozen=True, slots=True)
class Score:
    """What a trial is worth under a goal.

    ``value`` is the objective as measured (``None``: it was not); ``violations`` has the same keys in the same order for every
    trial of a goal, each about -1 (far inside) to 1 (far outside), above 0 when violated. ``reasons`` say in words why it is
    not feasible, ``notes`` what could not be judged.
    """

    value: float | None
    violations: Mapping[str, float]
    feasible: bool
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def violation_keys(goal: Goal) -> tuple[str, ...]:
    """Keys of every score's ``violations``, in order."""
    return (STATUS_KEY, *(limit.text for limit in goal.limits))


def score(metrics: Metrics | None, goal: Goal, baseline: Metrics | None, *, status: LoadStatus | None = None) -> Score:
    """Score ``metrics`` under ``goal``; relative limits compare with ``baseline``.

    ``metrics`` ``None``: the trial failed before it was measured; everything is violated. ``baseline`` ``None``: these are the
    metrics of the baseline itself. An absent metric violates its limit, except where the baseline lacks it (TPOT of one-token
    outputs): a multiple of nothing limits nothing, and a note says so. A load that ended by a dead engine, repeated errors,
    an overload or its deadline is infeasible whatever its figures, and an overload has no value.
    """
    if metrics is None:
        return Score(None, dict.fromkeys(violation_keys(goal), 1.0), False, ("it was not measured",))
    ended_badly = _INFEASIBLE.get(status) if status is not None else None
    violations = {STATUS_KEY: 1.0 if ended_badly else -1.0}
    reasons = [ended_badly] if ended_badly else []
    notes: list[str] = []
    for limit in goal.limits:
        bound = _bound(limit, metrics if baseline is None else baseline)
        actual = metrics.get(limit.metric)
        if bound is None and actual is None:
            violations[limit.text] = 0.0
            notes.append(f"{limit.text} limits nothing: neither this nor the baseline has {limit.metric}")
        elif bound is None:
            violations[limit.text] = 0.0
            notes.append(f"{limit.text} limits nothing: the baseline has no {limit.metric}")
        elif actual is None:
            violations[limit.text] = 1.0
            reasons.append(f"{limit.metric} was not measured; its limit is {_shown(limit.metric, bound)}")
        else:
            violations[limit.text] = _violation(limit, actual, bound)
            if violations[limit.text] > 0:
                reasons.append(_reason(limit, actual, bound))
    value = None if status is LoadStatus.OVERLOADED else metrics.get(goal.metric)
    if value is None and not ended_badly:
        violations[STATUS_KEY] = 1.0
        reasons.append(f"{goal.metric} was not measured")
    return Score(value, violations, all(v <= 0 for v in violations.values()), tuple(reasons), tuple(notes))


def _bound(limit: Limit, baseline: Metrics) -> float | None:
    if not limit.relative_to_baseline:
        return limit.value
    reference = baseline.get(limit.metric)
    return None if reference is None else limit.value * reference


def _violation(limit: Limit, actual: float, bound: float) -> float:
    """Signed distance outside ``bound``, about -1 to 1.

    The success rate is measured in units of the failures that are allowed, because 98 % is twice as bad as 99 %; everything
    else in units of the bound. Rounding of the last digit violates nothing.
    """
    over = actual - bound if limit.op == "<=" else bound - actual
    in_failures = limit.metric == "success_rate"
    unit = max(1 - bound, _SUCCESS_RESOLUTION) if in_failures else abs(bound) or max(abs(actual), 1e-12)
    relative = over / unit
    return 0.0 if abs(relative) < 1e-9 else max(-1.0, min(1.0, relative))


def _reason(limit: Limit, actual: float, bound: float) -> str:
    """Value and limit in words, with as many digits as tell them apart (98.9996 % must not read as 99 %)."""
    side = "above" if limit.op == "<=" else "below"
    of = f" ({limit.value:g} x baseline)" if limit.relative_to_baseline else ""
    digits = next(n for n in (3, 4, 6, 9, 17) if _shown(limit.metric, actual, n) != _shown(limit.metric, bound, n) or n == 17)
    return (
        f"{limit.metric} {_shown(limit.metric, actual, digits)} is {side} the limit {_shown(limit.metric, bound, digits)}{of}"
    )


def _shown(metric: str, value: float, digits: int = 3) -> str:
    """A value with its unit as people read it: percent for ratios, milliseconds below a second, no exponents."""
    match METRICS[metric].unit:
        case "ratio":
            return f"{_plain(value * 100, digits)} %"
        case "s" if abs(value) < 1:
            return f"{_plain(value * 1000, digits)} ms"
        case "count":
            return _plain(value, digits)
        case unit:
            return f"{_plain(value, digits)} {unit}"


def _plain(value: float, digits: int) -> str:
    """``digits`` significant digits, all of those before the point, no idle zeros."""
    rounded = float(f"{value:.{digits}g}") if abs(value) < 10**digits else round(value)
    return f"{rounded:,.{digits}f}".rstrip("0").rstrip(".")
