"""What may vary: parameters over finite ordered domains, the rules between them, and points in their product.

A *point* maps every parameter's name to one of its values. A value that equals the parameter's ``default`` is what vLLM
resolves by itself, so it never enters the engine config: the default point is the config ``{}``.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vopt.search_spaces.arguments import release_of
from vopt.search_spaces.compile_key import compile_key
from vopt.search_spaces.learned import Learned
from vopt.search_spaces.parameter import Bound, Inactive, Parameter, Point, Seed, Violation, same
from vopt.search_spaces.points import config_of, environment_of, point_of
from vopt.search_spaces.rules import forbidden_violations, rule_violations
from vopt.search_spaces.speculation import collapse

__all__ = ["Bound", "Check", "Inactive", "Parameter", "Point", "SearchSpace", "Seed", "Violation"]

Check = Callable[[Mapping[str, Any]], Violation | None]
"""Sees the complete engine config (``--set`` included) and says what is wrong with it."""

MOST_REPAIRS = 8
MOST_SEARCHED = 2000


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The domain of one study. Immutable; equal spaces have equal digests.

    ``facts`` is JSON: ``version``, ``model``, ``gpu``, ``gpus``, ``resolved`` (vLLM's own values), ``set`` (in every trial),
    ``ranks`` (sizes of the command in use that no parameter covers, where there are any), ``forbidden`` and
    ``acceptance_length``. ``dormant`` parameters are complete but not searched until evidence reopens them; their reasons are
    in ``inactive``. ``checks`` (memory arithmetic) are not stored: ``with_checks`` after ``from_json``.
    """

    parameters: tuple[Parameter, ...]
    seeds: tuple[Seed, ...] = ()
    inactive: tuple[Inactive, ...] = ()
    mode: str = "balanced"
    facts: Mapping[str, Any] = field(default_factory=dict)
    dormant: tuple[Parameter, ...] = ()
    learned: Learned = field(default_factory=Learned)
    checks: tuple[Check, ...] = field(default=(), compare=False, repr=False)

    def __getitem__(self, name: str) -> Parameter:
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(parameter.name == name for parameter in self.parameters)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def size(self) -> int:
        """Number of points before the rules."""
        size = 1
        for parameter in self.parameters:
            size *= len(parameter.values)
        return size

    @property
    def whole(self) -> SearchSpace:
        """The space with every dormant parameter in it, by name: the fixed domain of a study, whatever is open of it."""
        parameters = tuple(sorted((*self.parameters, *self.dormant), key=lambda parameter: parameter.name))
        asleep = {p.name: p.default for p in self.dormant}
        seeds = tuple(replace(seed, point={**seed.point, **asleep}) for seed in self.seeds)
        return replace(self, parameters=parameters, seeds=seeds, dormant=())

    @property
    def digest(self) -> str:
        """Twelve hex digits over the domain (names, values, defaults), dormant parameters included, so that reopening one
        changes nothing: what must agree for a study to be resumed."""
        body = [(p.name, list(p.values), p.default, p.ordered) for p in self.whole.parameters]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]

    def default_point(self) -> dict[str, Any]:
        return {parameter.name: parameter.default for parameter in self.parameters}

    # points and configurations

    def config(self, point: Point) -> dict[str, Any]:
        """The engine config of a point: overrides only, ``speculation`` expanded, dotted names nested, no environment."""
        return config_of(self.parameters, point, self.facts.get("acceptance_length"))

    def environment(self, point: Point) -> dict[str, str]:
        """Environment variables of a point, as the strings that an environment holds."""
        return environment_of(self.parameters, point)

    def full_config(self, point: Point) -> dict[str, Any]:
        """``config`` with the environment beside it as ``env:NAME`` entries: what identifies a trial."""
        return {**self.config(point), **{f"env:{name}": value for name, value in self.environment(point).items()}}

    def point_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The point whose ``full_config`` is ``config``; ``ValueError`` names the entry that lies outside the space."""
        return point_of(self.parameters, config)

    def carried(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a user's configuration that no dimension covers: they belong in every trial."""
        covered = {"speculative_config" if name == "speculation" else name.partition(".")[0] for name in self.names}
        return {name: value for name, value in config.items() if name not in covered}

    # rules

    def violations(self, point: Point) -> tuple[Violation, ...]:
        """Every reason not to start this point; empty for one that may be tried."""
        config = {**self.facts.get("set", {}), **self.facts.get("ranks", {}), **self.full_config(point)}
        found = [*rule_violations(config, self.facts), *forbidden_violations(point, self.facts.get("forbidden", ()))]
        found += self.learned.violations(point, self.default_point())
        found += [violation for check in self.checks if (violation := check(config)) is not None]
        return tuple(found)

    def repair(self, point: Point) -> tuple[dict[str, Any], tuple[str, ...]]:
        """(the nearest point that breaks nothing, what was changed and why).

        Follows the repairs that the rules name, then looks in ever wider circles of neighbours. When nothing near is
        possible the last point is returned as it is: ask ``violations``.
        """
        current: dict[str, Any] = dict(point)
        notes: list[str] = []
        for _ in range(MOST_REPAIRS):
            broken = self.violations(current)
            if not broken:
                return current, tuple(notes)
            change = next((step for v in broken if (step := self._step(current, v))), None)
            if change is None:
                break
            violation, moved = change
            notes += [f"{name}: {current[name]!r} -> {value!r} ({violation.detail})" for name, value in moved.items()]
            current |= moved
        return self._search_around(current, notes)

    def _step(self, point: Mapping[str, Any], violation: Violation) -> tuple[Violation, dict[str, Any]] | None:
        moved = {}
        for name, value in (violation.repair or {}).items():
            own = "speculation" if name == "speculative_config" else name
            if own not in self:
                return None
            target = collapse(value) if own == "speculation" and not isinstance(value, str) else value
            nearest = self[own].default if target is None else self[own].nearest(target)
            if not same(nearest, point[own]):
                moved[own] = nearest
        return (violation, moved) if moved else None

    def _search_around(self, point: dict[str, Any], notes: list[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
        seen, frontier, first = {_key(point)}, deque([point]), self.violations(point)
        while frontier and len(seen) < MOST_SEARCHED:
            here = frontier.popleft()
            for near in self._adjacent(here):
                if _key(near) in seen:
                    continue
                seen.add(_key(near))
                if not self.violations(near):
                    changed = [name for name in self.names if not same(near[name], point[name])]
                    why = first[0].detail if first else ""
                    return near, (*notes, *(f"{name}: {point[name]!r} -> {near[name]!r} ({why})" for name in changed))
                frontier.append(near)
        return point, tuple(notes)

    def neighbours(self, point: Point) -> tuple[dict[str, Any], ...]:
        """Points that differ in one parameter (by one step when it is ordered) and break no rule."""
        return tuple(near for near in self._adjacent(point) if not self.violations(near))

    def _adjacent(self, point: Point) -> Iterator[dict[str, Any]]:
        for parameter in self.parameters:
            at = parameter.index(point[parameter.name])
            steps = [at - 1, at + 1] if parameter.ordered else [i for i in range(len(parameter.values)) if i != at]
            for i in steps:
                if 0 <= i < len(parameter.values):
                    yield {**point, parameter.name: parameter.values[i]}

    def compile_key(self, point: Point, version: str | None = None) -> str:
        """Equal for points that share vLLM's compiled code: such an engine starts from a warm cache."""
        release = release_of(version or self.facts.get("version", "0.33.0"))
        config = {**self.facts.get("set", {}), **self.config(point)}
        apart = {p.name for p in self.parameters if not p.in_compile_key}
        kept = {name: value for name, value in config.items() if name not in apart}
        return compile_key(kept, release, hybrid=bool(self.facts.get("model", {}).get("hybrid")))

    # other spaces

    def narrow(self, name: str, keep: Callable[[Any], bool] | Iterable[Any], bound: Bound) -> SearchSpace:
        """The space without the values that ``keep`` refuses. The default always stays; a parameter that has nothing else
        left becomes inactive with the bound as its reason. Unknown names change nothing."""
        if name not in self:
            return self
        parameter = self[name]
        members = () if callable(keep) else tuple(keep)
        values = tuple(
            v
            for v in parameter.values
            if same(v, parameter.default) or (keep(v) if callable(keep) else any(same(v, member) for member in members))
        )
        if values == parameter.values:
            return self
        if len(values) == 1:
            return self.without(name, bound.text)
        narrowed = replace(parameter, values=values, bounds=(*parameter.bounds, bound))
        return self._with(tuple(narrowed if p.name == name else p for p in self.parameters))

    def without(self, name: str, reason: str, reopens_on: str | None = None) -> SearchSpace:
        """The space in which this parameter stays at its default."""
        gone = [p for p in self.parameters if p.name == name]
        rest = self._with(tuple(p for p in self.parameters if p.name != name))
        dormant = (*self.dormant, *gone) if reopens_on else self.dormant
        return replace(rest, inactive=(*self.inactive, Inactive(name, reason, reopens_on)), dormant=dormant)

    def reopen(self, name: str, reason: str) -> SearchSpace:
        """The space with a dormant parameter back; unknown names change nothing."""
        found = next((p for p in self.dormant if p.name == name), None)
        if found is None:
            return self
        woken = replace(found, bounds=(*found.bounds, Bound(f"reopened: {reason}", "counters")))
        seeds = tuple(replace(seed, point={**seed.point, name: found.default}) for seed in self.seeds)
        return replace(
            self,
            parameters=(*self.parameters, woken),
            seeds=seeds,
            dormant=tuple(p for p in self.dormant if p.name != name),
            inactive=tuple(entry for entry in self.inactive if entry.name != name),
        )

    def with_learned(self, learned: Learned) -> SearchSpace:
        """The space that avoids what failed: values that always fail are cut, their parameter leaves with the last one."""
        space = replace(self, learned=learned)
        for name, value, reason in learned.dead_values(self.default_point()):
            if name in space and not same(value, space[name].default):
                members = [v for v in space[name].values if not same(v, value)]
                space = space.narrow(name, members, Bound(reason, "engine failures"))
        return space

    def with_checks(self, *checks: Check) -> SearchSpace:
        return replace(self, checks=checks)

    def _with(self, parameters: tuple[Parameter, ...]) -> SearchSpace:
        """These parameters, and the seeds that still lie in them."""
        kept = []
        for seed in self.seeds:
            point = {p.name: seed.point[p.name] for p in parameters}
            lost = any(not same(seed.point[p.name], p.default) for p in self.parameters if p.name not in point)
            inside = all(any(same(v, point[p.name]) for v in p.values) for p in parameters)
            if inside and not lost:
                kept.append(replace(seed, point=point))
        return replace(self, parameters=parameters, seeds=tuple(kept))

    # storage

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": [asdict(p) for p in self.parameters],
            "seeds": [{"point": dict(seed.point), "reason": seed.reason} for seed in self.seeds],
            "inactive": [asdict(entry) for entry in self.inactive],
            "mode": self.mode,
            "facts": dict(self.facts),
            "dormant": [asdict(p) for p in self.dormant],
            "learned": self.learned.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SearchSpace:
        return cls(
            parameters=tuple(_parameter(row) for row in data["parameters"]),
            seeds=tuple(Seed(row["point"], row["reason"]) for row in data["seeds"]),
            inactive=tuple(Inactive(**row) for row in data["inactive"]),
            mode=data["mode"],
            facts=data["facts"],
            dormant=tuple(_parameter(row) for row in data.get("dormant", ())),
            learned=Learned.from_json(data.get("learned", {})),
        )


def _parameter(row: Mapping[str, Any]) -> Parameter:
    return Parameter(**{**row, "values": tuple(row["values"]), "bounds": tuple(Bound(**bound) for bound in row["bounds"])})


def _key(point: Mapping[str, Any]) -> str:
    return json.dumps(point, sort_keys=True)
