"""Which Optuna sampler proposes, and the shadow study in which it is asked.

The stored study holds only real engine starts. A sampler is asked in a study in memory that is rebuilt from them, so that
a proposal that was already measured or breaks a rule costs nothing there: it is told what is known of it and the sampler
asked again. Seeded by the number of starts, so a resumed search proposes what an uninterrupted one would have.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.search_spaces.space import Parameter, Point, SearchSpace

KINDS = ("auto", "gp", "tpe", "random")
_STARTUP = 5  # measured configurations before a model is trusted: as many as are seeded
_TRIES = 12


def distribution(parameter: Parameter) -> BaseDistribution:
    """The fixed distribution of one dimension: positions where the domain is ordered, names where it is not."""
    if parameter.ordered:
        return IntDistribution(0, len(parameter.values) - 1)
    return CategoricalDistribution([str(position) for position in range(len(parameter.values))])


def distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    """The distributions of one study: the same on every trial, for samplers model only what never changes."""
    return {parameter.name: distribution(parameter) for parameter in space.parameters if len(parameter.values) > 1}


def params(space: SearchSpace, point: Point) -> dict[str, Any]:
    """A point as Optuna's parameters; a dimension that it lacks stands at its default."""
    found = {p.name: p.index(point.get(p.name, p.default)) for p in space.parameters if len(p.values) > 1}
    return {name: index if space[name].ordered else str(index) for name, index in found.items()}


def point(space: SearchSpace, values: Mapping[str, Any]) -> dict[str, Any]:
    """Optuna's parameters as a point."""
    return {p.name: p.values[int(values[p.name])] if p.name in values else p.values[0] for p in space.parameters}


def make(kind: str, seed: int) -> BaseSampler:
    """A fresh sampler of this kind; ``EnvironmentLacks`` when ``gp`` is asked for without torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match kind:
            case "gp":
                if importlib.util.find_spec("torch") is None:
                    raise EnvironmentLacks(
                        "the gp sampler needs torch, which is not installed",
                        hint="install vopt[gp], or leave --sampler at auto",
                    )
                return GPSampler(seed=seed, n_startup_trials=_STARTUP, deterministic_objective=False)
            case "tpe":
                return TPESampler(seed=seed, n_startup_trials=_STARTUP)
            case "random":
                return RandomSampler(seed=seed)
            case _:
                raise UsageError(f"no sampler is called {kind!r}", hint=f"one of {', '.join(KINDS)}")


def suggest(
    kind: str,
    space: SearchSpace,
    told: Sequence[tuple[Point, float, Mapping[str, float]]],
    allowed: Callable[[Point], bool],
    *,
    maximize: bool,
    seed: int,
) -> dict[str, Any] | None:
    """A point that ``allowed`` lets pass, proposed from ``(point, value, constraints)`` of what was measured; ``None`` when
    the sampler keeps proposing what is known."""
    fixed = distributions(space)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(direction="maximize" if maximize else "minimize", sampler=make(kind, seed))
        for where, value, constraints in told:
            study.add_trial(_finished(space, fixed, where, value, constraints))
        for _ in range(_TRIES):
            trial = study.ask(fixed)
            found = point(space, trial.params)
            if allowed(found):
                return found
            _tell_known(study, trial, space, found, told, maximize=maximize)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return None


def _finished(
    space: SearchSpace, fixed: dict[str, BaseDistribution], where: Point, value: float, constraints: Mapping[str, float]
) -> FrozenTrial:
    return create_trial(
        state=TrialState.COMPLETE,
        value=value,
        params=params(space, where),
        distributions=fixed,
        constraints=dict(constraints),
    )


def _tell_known(
    study: optuna.Study,
    trial: optuna.Trial,
    space: SearchSpace,
    found: Point,
    told: Sequence[tuple[Point, float, Mapping[str, float]]],
    *,
    maximize: bool,
) -> None:
    """Tell what is known of a proposal: what it measured before, or that it breaks a rule."""
    known = [(value, constraints) for where, value, constraints in told if dict(where) == dict(found)]
    keys = list(told[0][2]) if told else ["rule"]
    worst = (min if maximize else max)((value for _, value, _ in told), default=0.0)
    value, constraints = known[-1] if known else (worst, dict.fromkeys(keys, 1.0))
    for key in keys:
        trial.set_constraint(key, constraints[key])
    study.tell(trial, value)
