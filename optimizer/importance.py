"""Which parameters mattered, by Optuna's PED-ANOVA over the feasible starts of a search."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.storages import InMemoryStorage
from optuna.trial import create_trial

from vopt.optimizer.history import StudyRecord, TrialRecord
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.report.wording import TOGETHER

FEWEST_STARTS = 6
"""Below this many feasible starts a share would be noise with a percent sign."""
BETTER_SHARE = 0.5
"""The better half is compared with all. Optuna's tenth is one or two starts of a search: whatever those had in common takes
all the credit."""
DEFAULT = "default"


Column = tuple[BaseDistribution, list[Any]]
"""A parameter's distribution and its value in every start."""


def importance(record: StudyRecord) -> dict[str, float]:
    """Share of the goal's spread by parameter, summing to 1; empty when there is too little to tell.

    Optuna's own call would count the values that infeasible starts were told, so only feasible ones go in. A parameter that a
    start left alone has the engine's resolved value where that is known, else the category ``default``. Parameters that took
    their values in the same starts share one row, their names joined by ``TOGETHER``.
    """
    view = StudyView(record)
    rows = [trial for trial in view.searched if view.feasible(trial)]
    names = sorted({name for trial in rows for name in trial.config})
    columns = _told_apart({name: column for name in names if (column := _column(rows, name)) is not None})
    if len(rows) < FEWEST_STARTS or not columns:
        return {}
    with _silence():
        study = optuna.create_study(storage=InMemoryStorage(), direction="maximize" if view.maximize else "minimize")
    for place, trial in enumerate(rows):
        params = {name: values[place] for name, (_, values) in columns.items()}
        spaces = {name: space for name, (space, _) in columns.items()}
        study.add_trial(create_trial(value=view.value(trial), params=params, distributions=spaces))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few starts to a regime: FEWEST_STARTS is our answer to that
        found = optuna.importance.get_param_importances(
            study, evaluator=PedAnovaImportanceEvaluator(target_quantile=BETTER_SHARE)
        )
    return {name: float(share) for name, share in found.items()}


@contextmanager
def _silence() -> Iterator[None]:
    """Optuna announces every study in its log; this one is nobody's study."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _told_apart(columns: Mapping[str, Column]) -> dict[str, Column]:
    """One column for all that divide the starts in the same way: of collinear ones the analysis would credit any at will."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, (_, values) in columns.items():
        said = [str(value) for value in values]
        groups.setdefault(tuple(said.index(value) for value in said), []).append(name)
    return {TOGETHER.join(names): columns[names[0]] for names in groups.values()}


def _column(rows: Sequence[TrialRecord], name: str) -> Column | None:
    """A parameter's distribution and its value in every start; ``None`` when it never differed."""
    values = [_value(trial, name) for trial in rows]
    if len({str(value) for value in values}) < 2:
        return None
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return IntDistribution(min(values), max(values), log=min(values) > 0), values
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return FloatDistribution(min(values), max(values)), [float(value) for value in values]
    said = [str(value) for value in values]
    return CategoricalDistribution(sorted(set(said))), said


def _value(trial: TrialRecord, name: str) -> Any:
    if name in trial.config:
        return trial.config[name]
    resolved: Mapping[str, Any] = trial.resolved
    return resolved[name] if resolved.get(name) is not None else DEFAULT
