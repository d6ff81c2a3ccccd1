"""What the counters of a study's own trials make of its space: dimensions reopened, upward halves put aside. Pure.

The study's domain stays as it was made; what changes is which part of it proposals come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vopt.optimizer.history import TrialRecord
from vopt.search_spaces.evidence import BaselineFacts, less_cache, pressures, surplus
from vopt.search_spaces.learned import Learned, Lesson
from vopt.search_spaces.parameter import same
from vopt.search_spaces.space import SearchSpace

RAISED_BY = {"max_num_seqs": ("queue",), "max_num_batched_tokens": ("token_budget", "queue")}
"""Which pressures bring back the values above the default."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of what is searched: ``what`` is ``put aside``, ``reopened`` or ``switched off``, ``trial`` the start whose
    counters or failure brought it about (empty: several)."""

    name: str
    what: str
    reason: str
    trial: str = ""

    @property
    def text(self) -> str:
        return f"{self.name} {self.what}: {self.reason}" + (f" (trial {self.trial})" if self.trial else "")

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "what": self.what, "reason": self.reason, "trial": self.trial}


@dataclass(frozen=True, slots=True)
class Opening:
    """The space with what was reopened, lessons that keep proposals out of what was put aside, and what changed, in order."""

    space: SearchSpace
    lessons: tuple[Lesson, ...] = ()
    changes: tuple[Change, ...] = ()


def facts_of(record: TrialRecord) -> BaselineFacts:
    """What a start's counters said of its load."""
    values = record.metrics.values if record.metrics is not None else {}
    running, plan = values.get("peak_running"), record.environment.get("load_plan") or {}
    return BaselineFacts(
        kv_peak=values.get("kv_peak"),
        preemptions=values.get("preemptions"),
        queued=values.get("queued_share"),
        filled=values.get("full_budget_share"),
        hit_rate=values.get("prefix_hit_rate"),
        peak_running=None if running is None else round(running),
        concurrency=plan.get("concurrency"),
    )


def opening(
    space: SearchSpace, baseline: TrialRecord | None, later: Iterable[TrialRecord], *, starved: bool = False
) -> Opening:
    """What ``baseline`` (``None``: not measured yet) and the starts after it make of the space of a study. ``starved``: an
    engine ran out of memory, which less of it for the KV cache may mend."""
    if baseline is None or baseline.metrics is None:
        return Opening(space)
    facts = facts_of(baseline)
    changes: list[Change] = []
    space = _reopened(space, facts, baseline.label, changes)
    aside = surplus(space, facts)
    changes += [Change(name, "put aside above its default", bound.text, baseline.label) for name, bound in aside.items()]
    for record in later:
        if record.metrics is None or record is baseline:
            continue
        told = _comparable(facts_of(record), record, space)
        space = _reopened(space, told, record.label, changes)
        shown, still = pressures(told, space), surplus(space, told)
        for name in [name for name in aside if name not in still]:
            raised_by = next((pressure for pressure in RAISED_BY[name] if pressure in shown), None)
            if raised_by is not None:
                del aside[name]
                changes.append(Change(name, "reopened", shown[raised_by], record.label))
    lessons = [_above_default(space, name, bound.text) for name, bound in aside.items()]
    if not starved:
        lessons += _below_share(space, baseline.config)
    return Opening(space, tuple(lessons), tuple(changes))


def _reopened(space: SearchSpace, facts: BaselineFacts, trial: str, changes: list[Change]) -> SearchSpace:
    shown = pressures(facts, space)
    for entry in space.inactive:
        if entry.reopens_on in shown and any(parameter.name == entry.name for parameter in space.dormant):
            space = space.reopen(entry.name, shown[entry.reopens_on])
            changes.append(Change(entry.name, "reopened", shown[entry.reopens_on], trial))
    return space


def _comparable(facts: BaselineFacts, record: TrialRecord, space: SearchSpace) -> BaselineFacts:
    """Without what a start brought about itself: with fewer sequences or a smaller budget than the default, requests queue
    and steps are full whatever the load."""
    if _lowered(record.config, "max_num_seqs", space):
        facts = replace(facts, queued=None, peak_running=None)
    if _lowered(record.config, "max_num_batched_tokens", space):
        facts = replace(facts, filled=None, queued=None)
    return facts


def _lowered(config: Mapping[str, Any], name: str, space: SearchSpace) -> bool:
    value = config.get(name)
    return name in space and isinstance(value, int | float) and value < space[name].default


def _above_default(space: SearchSpace, name: str, reason: str) -> Lesson:
    parameter = space[name]
    first = min(value for value in parameter.values if value > parameter.default)
    return Lesson({}, {name: first}, {}, "evidence", reason)


def _below_share(space: SearchSpace, baseline: Mapping[str, Any]) -> list[Lesson]:
    """Keeps proposals from less memory than the baseline has: what opens this dimension is a KV cache that is too small."""
    name = "gpu_memory_utilization"
    if name not in space or name in space.facts.get("asked", ()):
        return []
    parameter = space[name]
    least = min(parameter.default, baseline.get(name, parameter.default))
    below = [value for value in parameter.values if value < least]
    return [Lesson({}, {}, {name: max(below)}, "evidence", less_cache(least))] if below else []


def switched_off(space: SearchSpace, learned: Learned) -> tuple[Change, ...]:
    """Values that failed and never worked, and the dimensions that have nothing else left."""
    default = space.default_point()
    dead: dict[str, list[tuple[Any, str]]] = {}
    for name, value, reason in learned.dead_values(default):
        if name in space:
            dead.setdefault(name, []).append((value, reason))
    changes = []
    for name, values in dead.items():
        others = [value for value in space[name].values if not same(value, default[name])]
        if all(any(same(value, gone) for gone, _ in values) for value in others) or name in learned.dead_names:
            changes.append(Change(name, "switched off", values[-1][1]))
        else:
            changes += [Change(f"{name}={value}", "switched off", reason) for value, reason in values]
    return tuple(changes)
