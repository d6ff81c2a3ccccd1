"""Goals: a metric, a direction and the limits that an answer must keep; and how limits are written.

A limit is ``NAME<=VALUE`` or ``NAME>=VALUE``; VALUE is a number with an optional unit (``ms`` or ``s`` for times, ``%`` for
ratios) or a multiple of the baseline's figure (``1.05*baseline``).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vopt.objectives.metrics import FEW_FOR_P99, METRICS, SLO_NAMES, Direction

DEFAULT_MIN_SUCCESS = 0.99
GOALS = ("throughput", "latency", "goodput")
BALANCE = "balance"
"""The geometric mean of several goals' figures, each turned so that larger is better; only ratios of it mean anything."""

_UNITS = {"ms": ("s", 1e-3), "s": ("s", 1.0), "%": ("ratio", 1e-2)}
_LIMIT = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*(?P<op><=|>=|==|=|<|>)\s*(?P<value>\S.*?)\s*")
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_VALUE = re.compile(rf"(?P<number>{_NUMBER})\s*(?P<unit>ms|s|%)?")
_RELATIVE = re.compile(rf"(?:(?P<number>{_NUMBER})\s*\*\s*)?baseline")


class GoalError(ValueError):
    """A goal or limit that cannot be meant: the ``rule``, the ``value`` that broke it and a ``hint`` of what to write."""

    def __init__(self, rule: str, value: object, hint: str = "") -> None:
        super().__init__(f"{value}: {rule}")
        self.rule, self.value, self.hint = rule, value, hint


@dataclass(frozen=True, slots=True)
class Limit:
    """A guard rail on a metric. ``value`` is in the metric's own unit (seconds, ratio 0-1), or a multiple of the baseline."""

    metric: str
    op: str
    value: float
    relative_to_baseline: bool = False

    @property
    def text(self) -> str:
        """As ``parse_limit`` reads it; also the limit's key wherever violations are stored."""
        return f"{self.metric}{self.op}{self.value:.12g}{'*baseline' if self.relative_to_baseline else ''}"

    @property
    def slo(self) -> bool:
        """Whether this bounds every request (``ttft_s<=0.5``) instead of a figure of the whole window."""
        return self.metric in SLO_NAMES

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Objective:
    """One of several goals that are weighed against each other."""

    name: str
    metric: str
    direction: Direction

    def merit(self, value: float | None) -> float | None:
        """Log of a positive figure, turned so that larger is better; ``None`` for what has no logarithm."""
        if value is None or not value > 0 or not math.isfinite(value):
            return None
        return math.log(value) if self.direction is Direction.MAXIMIZE else -math.log(value)


@dataclass(frozen=True, slots=True)
class Goal:
    """What is better. ``slos``: most seconds per request, by ``SLO_NAMES``; they define goodput. ``objectives``: empty for one
    goal; for two, what they are, and ``metric`` is then the balance of both."""

    name: str
    metric: str
    direction: Direction
    limits: tuple[Limit, ...] = ()
    slos: Mapping[str, float] = field(default_factory=dict)
    objectives: tuple[Objective, ...] = ()

    def merits(self, values: Mapping[str, float]) -> tuple[float, ...] | None:
        """Each objective's merit, in order; ``None`` when one was not measured."""
        found = [objective.merit(values.get(objective.metric)) for objective in self.objectives]
        known = [merit for merit in found if merit is not None]
        return tuple(known) if len(known) == len(found) else None

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        if not self.objectives:
            del data["objectives"]  # studies of one goal stay as they were stored before there were several
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Goal:
        return cls(
            name=data["name"],
            metric=data["metric"],
            direction=Direction(data["direction"]),
            limits=tuple(Limit(**limit) for limit in data["limits"]),
            slos=dict(data["slos"]),
            objectives=tuple(
                Objective(one["name"], one["metric"], Direction(one["direction"])) for one in data.get("objectives", ())
            ),
        )


def parse_limit(text: str) -> Limit:
    """Read ``NAME<=VALUE[ms|s|%|*baseline]`` or ``>=``; raises ``GoalError``."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise GoalError("a limit is NAME<=VALUE or NAME>=VALUE", repr(text), "for example p95_ttft_s<=500ms")
    name, op, written = match["name"], match["op"], match["value"]
    if op not in ("<=", ">="):
        other = {"<": "<=", ">": ">="}.get(op, "<= or >=")
        raise GoalError(f"a limit compares with <= or >=, not {op}", repr(text), f"write {name}{other}{written}")
    unit = "s" if name in SLO_NAMES else metric_unit(name)
    if relative := _RELATIVE.fullmatch(written):
        if name in SLO_NAMES:
            raise GoalError(
                "a bound on every request is a time, not a multiple of the baseline", repr(text), f"write {name}{op}0.5s"
            )
        return _checked(Limit(name, op, float(relative["number"] or 1), relative_to_baseline=True), text)
    value = _VALUE.fullmatch(written)
    if value is None:
        raise GoalError("not a number with ms, s, % or *baseline", repr(text), f"for example {name}{op}{_example(unit)}")
    number = float(value["number"])
    if value["unit"]:
        of, factor = _UNITS[value["unit"]]
        if of != unit:
            raise GoalError(
                f"{name} is in {unit}, not in {value['unit']}", repr(text), f"for example {name}{op}{_example(unit)}"
            )
        number = _exact(number, factor)
    return _checked(Limit(name, op, number), text)


def metric_unit(name: str) -> str:
    """The unit of a known metric; raises ``GoalError`` with the nearest name for an unknown one."""
    if name in METRICS:
        return METRICS[name].unit
    near = difflib.get_close_matches(name, (*METRICS, *SLO_NAMES), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"metrics: {', '.join(METRICS)}"
    raise GoalError("no such metric", repr(name), hint)


def _exact(number: float, factor: float) -> float:
    """``number * factor`` without the last digit's noise, so that 99% is 0.99 and 700ms is 0.7."""
    return float(f"{number * factor:.12g}")


def _example(unit: str) -> str:
    return {"s": "500ms", "ratio": "99%"}.get(unit, "100")


def _checked(limit: Limit, text: str) -> Limit:
    """Refuse a limit whose value cannot occur."""
    unit = "s" if limit.slo else METRICS[limit.metric].unit
    if not math.isfinite(limit.value) or limit.value < 0:
        raise GoalError(
            "the value must be a finite number, not negative",
            repr(text),
            f"for example {limit.metric}{limit.op}{_example(unit)}",
        )
    if limit.relative_to_baseline and limit.value == 0:
        raise GoalError(
            "a multiple of the baseline must be above zero", repr(text), f"write {limit.metric}{limit.op}1.05*baseline"
        )
    if unit == "ratio" and not limit.relative_to_baseline and limit.value > 1:
        percent = f"{limit.metric}{limit.op}{limit.value:g}%"
        hint = f"write {percent}" if 2 <= limit.value <= 100 and "%" not in text else "a ratio is at most 1 (100%)"
        raise GoalError("a ratio lies between 0 and 1", repr(text), hint)
    if limit.slo and limit.op != "<=":
        raise GoalError("a bound on every request is an upper bound", repr(text), f"write {limit.metric}<={limit.value:g}")
    return limit


def check_limits(limits: Sequence[Limit]) -> None:
    """Raise ``GoalError`` for limits that are given twice or that no figure can keep together.

    Percentiles of one latency ascend, so ``p95_ttft_s<=0.1`` and ``p50_ttft_s>=0.2`` contradict each other too.
    """
    seen: dict[tuple[str, str, bool], Limit] = {}
    for limit in limits:
        key = (limit.metric, limit.op, limit.relative_to_baseline)
        if key in seen:
            raise GoalError(f"limits {limit.metric} twice", f"{seen[key].text} and {limit.text}", "keep one of them")
        seen[key] = limit
    for upper in (limit for limit in limits if limit.op == "<="):
        for lower in (limit for limit in limits if limit.op == ">="):
            comparable = upper.relative_to_baseline == lower.relative_to_baseline
            if comparable and lower.value > upper.value and _at_most(lower, upper):
                raise GoalError(
                    "no figure can keep both limits", f"{upper.text} and {lower.text}", "drop or loosen one of them"
                )


def _at_most(lower: Limit, upper: Limit) -> bool:
    """Whether ``lower``'s metric can never exceed ``upper``'s: the same, or a lower percentile of the same latency."""
    if lower.metric == upper.metric:
        return True
    if lower.relative_to_baseline:
        return False
    split = re.compile(r"p(\d+)_(.*)")
    low, high = split.fullmatch(lower.metric), split.fullmatch(upper.metric)
    return low is not None and high is not None and low[2] == high[2] and int(low[1]) < int(high[1])


def built_in_goal(
    name: str,
    *,
    metric: str | None = None,
    limits: Iterable[Limit] = (),
    min_success: float | None = None,
    guard: bool = True,
    slos: Mapping[str, float] | None = None,
) -> Goal:
    """The goal ``throughput``, ``latency`` or ``goodput``; raises ``GoalError``.

    Limits always come in one order: the success rate (``min_success``, 0.99 by default), the user's, the guards. A user's
    limit on a guarded metric replaces its guard; ``guard=False`` leaves all guards out. Limits on ``ttft_s``, ``tpot_s`` and
    ``e2e_s`` bound every request: they become ``slos``.
    """
    if name not in GOALS:
        near = difflib.get_close_matches(name, GOALS, n=1)
        raise GoalError("no such goal", repr(name), f"did you mean {near[0]}?" if near else f"goals: {', '.join(GOALS)}")
    given = tuple(limits)
    check_limits(given)
    objective = metric or {"throughput": "tokens_per_s", "latency": "mean_e2e_s", "goodput": "goodput_per_s"}[name]
    metric_unit(objective)
    bounds = {**(slos or {}), **{limit.metric: limit.value for limit in given if limit.slo}}
    for slo, seconds in bounds.items():
        if slo not in SLO_NAMES:
            raise GoalError("no such SLO", repr(slo), f"there are {', '.join(SLO_NAMES)}")
        if not (math.isfinite(seconds) and seconds > 0):
            raise GoalError("an SLO is a time above zero", f"{slo}={seconds}", f"for example {slo}<=500ms")
    if not bounds and "goodput_per_s" in (objective, *(limit.metric for limit in given)):
        raise GoalError(
            "goodput needs a bound that every request must keep", name, "add --limit 'ttft_s<=500ms' (or tpot_s, e2e_s)"
        )
    success, others = _success(given, min_success)
    taken = {limit.metric for limit in others} | {objective}
    guards = tuple(limit for limit in _GUARDS.get(name, ()) if limit.metric not in taken) if guard else ()
    return Goal(name, objective, METRICS[objective].direction, (success, *others, *guards), bounds)


def joint_goal(
    names: Sequence[str],
    *,
    limits: Iterable[Limit] = (),
    min_success: float | None = None,
    slos: Mapping[str, float] | None = None,
) -> Goal:
    """Two different goals at once; raises ``GoalError``. Limits are the success rate and the user's; each goal guards the
    other.

    Goals always come in the order of ``GOALS``. Their joint figure is ``balance``, the geometric mean of both: what decides
    whether the answer is better, while the front is made of both.
    """
    unknown = [name for name in names if name not in GOALS]
    if unknown:
        built_in_goal(unknown[0])
    ordered = [name for name in GOALS if name in names]
    if len(ordered) != 2 or len(names) != 2:
        written = " ".join(f"--goal {name}" for name in names)
        raise GoalError("two different goals can be weighed against each other", written, "drop one, or make it a --limit")
    given = tuple(limits)
    single = [built_in_goal(name, limits=given, min_success=min_success, guard=False, slos=slos) for name in ordered]
    objectives = tuple(Objective(goal.name, goal.metric, goal.direction) for goal in single)
    return Goal("-".join(ordered), BALANCE, Direction.MAXIMIZE, single[0].limits, single[0].slos, objectives)


def balance(goal: Goal, values: Mapping[str, float]) -> float | None:
    """The geometric mean of the goals' figures; ``None`` for one goal, or when one was not measured."""
    merits = goal.merits(values) if goal.objectives else None
    return math.exp(sum(merits) / len(merits)) if merits else None


_GUARDS = {
    "throughput": (Limit("p95_ttft_s", "<=", 1.5, True), Limit("p95_tpot_s", "<=", 1.25, True)),
    "latency": (Limit("requests_per_s", ">=", 0.98, True),),
}
"""At a rate the same requests are due in every start, so those of them that succeed are what was served of it. The tokens that
come while a window is open are not: with 17 requests of 6 s in 20 s, starts of one command differed by 5 % by what its ends cut
off."""
_EARLIER_GUARDS = {"latency": (Limit("tokens_per_s", ">=", 0.98, True),)}
"""Of studies that an earlier version began: they go on with what their starts were judged by."""


def is_guard(goal: Goal, limit: Limit) -> bool:
    """Whether a limit is one that the goal has by itself, and ``guard=False`` leaves out."""
    return limit in (*_GUARDS.get(goal.name, ()), *_EARLIER_GUARDS.get(goal.name, ()))


def guarded_as(goal: Goal, stored: Goal) -> Goal:
    """``goal`` with the guards that it had in ``stored``, where nothing else of the two differs; else ``goal`` as it is."""
    bare, as_stored = (replace(one, limits=tuple(x for x in one.limits if not is_guard(one, x))) for one in (goal, stored))
    return stored if bare == as_stored else goal


def _success(given: Sequence[Limit], min_success: float | None) -> tuple[Limit, tuple[Limit, ...]]:
    """The success-rate limit, and the others that are limits of a window's figure."""
    own = [limit for limit in given if limit.metric == "success_rate" and limit.op == ">="]
    others = tuple(limit for limit in given if limit not in own and not limit.slo)
    if own and min_success is not None:
        raise GoalError("gives the success rate twice", f"{own[0].text} and --min-success {min_success:g}", "keep one of them")
    if len(own) > 1:
        raise GoalError("limits success_rate twice", f"{own[0].text} and {own[1].text}", "keep one of them")
    if own:
        return own[0], others
    least = DEFAULT_MIN_SUCCESS if min_success is None else min_success
    if not (math.isfinite(least) and 0 < least <= 1):
        hint = f"write --min-success {least / 100:g}" if 1 < least <= 100 else f"the default is {DEFAULT_MIN_SUCCESS}"
        raise GoalError("the least success rate is above 0 and at most 1", f"--min-success {least:g}", hint)
    success = Limit("success_rate", ">=", least)
    check_limits((success, *others))
    return success, others


def too_few_for_p99(metric: str, succeeded: int) -> bool:
    """Whether ``metric`` is a p99 of so few requests that it may not be an objective unless the user insists."""
    return metric.startswith("p99_") and succeeded < FEW_FOR_P99
