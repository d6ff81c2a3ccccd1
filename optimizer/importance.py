"""Which parameters mattered, by Optuna's PED-ANOVA over the feasible starts of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.study import StudyDirection
from optuna.trial import create_trial

from vopt.optimizer.history import StudyRecord, TrialRecord
from vopt.optimizer.report.view import StudyView

FEWEST_STARTS = 6
"""Below this many feasible starts a share would be noise with a percent sign."""
DEFAULT = "default"


def importance(record: StudyRecord) -> dict[str, float]:
    """Share of the goal's spread by parameter, summing to 1; empty when there is too little to tell.

    Optuna's own call would count the values that infeasible starts were told, so only feasible ones go in. A parameter that a
    start left alone has the engine's resolved value where that is known, else the category ``default``.
    """
    view = StudyView(record)
    rows = [trial for trial in view.searched if view.feasible(trial)]
    names = sorted({name for trial in rows for name in trial.config})
    columns = {name: column for name in names if (column := _column(rows, name)) is not None}
    if len(rows) < FEWEST_STARTS or not columns:
        return {}
    storage = optuna.storages.InMemoryStorage()  # create_study() would announce itself in the log
    storage.create_new_study([StudyDirection.MAXIMIZE if view.maximize else StudyDirection.MINIMIZE], record.name)
    study = optuna.load_study(study_name=record.name, storage=storage)
    for place, trial in enumerate(rows):
        params = {name: values[place] for name, (_, values) in columns.items()}
        spaces = {name: space for name, (space, _) in columns.items()}
        study.add_trial(create_trial(value=view.value(trial), params=params, distributions=spaces))
    found = optuna.importance.get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {name: float(share) for name, share in found.items()}


def _column(rows: Sequence[TrialRecord], name: str) -> tuple[BaseDistribution, list[Any]] | None:
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
