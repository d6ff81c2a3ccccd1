"""The sample study as Optuna stores it: told trials with constraints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState
from sqlalchemy import event

from vopt.optimizer.history import Stage, StudyRecord, TrialRecord
from vopt.optimizer.report.view import StudyView

_SPACE: dict[str, BaseDistribution] = {
    "max_num_seqs": IntDistribution(16, 2048, log=True),
    "max_num_batched_tokens": IntDistribution(512, 65536, log=True),
    "performance_mode": CategoricalDistribution(["balanced", "throughput"]),
}


def store(made: StudyRecord, path: Path, *, raw_values: bool = False) -> str:
    """Write a study into an SQLite file; the storage URL. ``raw_values``: infeasible trials are told what they showed, as a
    tool without care would."""
    url = f"sqlite:///{path}"
    storage = optuna.storages.RDBStorage(url)
    event.listen(storage.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
    storage.engine.dispose()  # connections made before the listener
    storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], made.name)
    study = optuna.load_study(study_name=made.name, storage=storage)
    study.set_user_attr("format_version", 1)
    study.set_user_attr("setup", dict(made.setup))
    view = StudyView(made)
    for trial in made.trials:
        if trial.stage in (Stage.SEARCH, Stage.SCREENING):
            _tell(study, view, trial, raw_values)
    storage.remove_session()
    storage.engine.dispose()
    return url


def _tell(study: optuna.Study, view: StudyView, trial: TrialRecord, raw_values: bool) -> None:
    params: dict[str, Any] = {name: value for name, value in trial.config.items() if name in _SPACE}
    study.enqueue_trial(params, user_attrs={"label": trial.label, "stage": str(trial.stage), "record": trial.to_json()})
    asked = study.ask({name: _SPACE[name] for name in params})
    success = trial.metrics.get("success_rate") if trial.metrics else None
    asked.set_constraint("boots", 1.0 if trial.failure else -1.0)
    asked.set_constraint("success_rate>=0.99", 0.99 if success is None else 0.99 - success)
    asked.set_constraint("rejected", 1.0 if view.why_not(trial) else -1.0)
    value = view.value(trial)
    told = value if value is not None and (raw_values or view.feasible(trial)) else 20_790.0
    study.tell(asked, told, state=TrialState.COMPLETE)
