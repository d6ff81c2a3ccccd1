"""Storage for the dashboard: consistent copies of a storage, and a read-only view of one that optuna-dashboard understands."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.report.redaction import clean

LEGACY_CONSTRAINTS = "constraints"
_CONSTRAINT = "constraints:"
_RECORDS = frozenset({"record", "request", "setup", "recommendation"})
_STARTS = "start:"


class ServedStorage(RDBStorage):
    """Optuna's storage on a file that nobody may write to, with the answers that optuna-dashboard 0.21.0 needs: every trial's
    constraints under the key it reads, and the best *feasible* trial as the best one."""

    def __init__(self, path: Path, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        super().__init__(
            f"sqlite:///file:{quote(str(path))}?mode=ro&uri=true",
            engine_kwargs={"connect_args": {"timeout": 30, "check_same_thread": False}},
            skip_compatibility_check=True,
            skip_table_creation=True,
        )

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return self._served(super().get_trial(trial_id))

    def get_all_studies(self) -> list[FrozenStudy]:
        studies = super().get_all_studies()
        for study in studies:
            study.user_attrs = shown_attributes(study.user_attrs, self._secrets)
        return studies

    def _served(self, trial: FrozenTrial) -> FrozenTrial:
        trial._user_attrs = shown_attributes(trial.user_attrs, self._secrets)
        return with_constraints(trial)

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        trials = [self._served(trial) for trial in super().get_all_trials(study_id, deepcopy=deepcopy, states=states)]
        return at_the_worst(trials, self.get_study_directions(study_id))

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """The best feasible trial. Without one, whatever Optuna calls the best: optuna-dashboard asks before it looks at
        constraints, and the guard takes it out of the answer."""
        direction, *others = self.get_study_directions(study_id)
        if others:
            return super().get_best_trial(study_id)  # of several goals there is no best: Optuna says so
        complete = [
            trial
            for trial in self.get_all_trials(study_id, deepcopy=False, states=(TrialState.COMPLETE,))
            if trial.value is not None and feasible(trial.system_attrs[LEGACY_CONSTRAINTS])
        ]
        if not complete:
            return super().get_best_trial(study_id)
        sign = 1 if direction is StudyDirection.MAXIMIZE else -1
        return max(complete, key=lambda trial: sign * (trial.value or 0.0))


def with_constraints(trial: FrozenTrial) -> FrozenTrial:
    """The same trial with its constraints also in the old list."""
    attributes = trial.system_attrs
    values = [value for key, value in sorted(attributes.items()) if key.startswith(_CONSTRAINT)]
    trial._system_attrs = {**attributes, LEGACY_CONSTRAINTS: values or list(attributes.get(LEGACY_CONSTRAINTS, ()))}
    return trial


def at_the_worst(trials: list[FrozenTrial], directions: Sequence[StudyDirection]) -> list[FrozenTrial]:
    """Infeasible trials where the worst feasible one is. They are told that already, but those that came before any feasible
    trial were told 0 or the load's deadline, and a plot that reaches so far shows nothing else."""
    good = [trial.values for trial in trials if trial.values and feasible(trial.system_attrs[LEGACY_CONSTRAINTS])]
    if not good:
        return trials
    worst = [
        min(values) if direction is StudyDirection.MAXIMIZE else max(values)
        for direction, values in zip(directions, zip(*good, strict=True), strict=True)
    ]
    for trial in trials:
        if trial.values and not feasible(trial.system_attrs[LEGACY_CONSTRAINTS]):
            trial.values = list(worst)
    return trials


def shown_attributes(attributes: Mapping[str, Any], secrets: Sequence[str] = ()) -> dict[str, Any]:
    """User attributes without the records that only programs read, and without secrets."""
    kept = {key: value for key, value in attributes.items() if key not in _RECORDS and not key.startswith(_STARTS)}
    return {key: clean(value, secrets, key) for key, value in kept.items()}


def feasible(constraints: Sequence[float]) -> bool:
    """Optuna's rule: no constraint above zero."""
    return all(value <= 0 for value in constraints)


def source_path(url: str) -> Path | None:
    """The file of an SQLite URL."""
    try:
        parsed = make_url(url)
    except SQLAlchemyError as error:
        raise EnvironmentLacks(f"{url} is no storage URL", hint="--storage sqlite:///studies.db") from error
    if not parsed.drivername.startswith("sqlite"):
        return None
    return Path(parsed.database or "")


def stamp(url: str) -> tuple[Any, ...]:
    """Changes whenever the source does; for a database server, every time."""
    path = source_path(url)
    if path is None:
        return (time.monotonic(),)
    files = [path, *(path.with_name(path.name + ending) for ending in ("-wal", "-journal"))]
    return tuple((stat.st_mtime_ns, stat.st_size) if (stat := _stat(file)) else None for file in files)


def _stat(path: Path) -> Any:
    try:
        return path.stat()
    except OSError:
        return None


def copy_storage(url: str, target: Path) -> None:
    """A consistent copy of a storage in a new SQLite file; the source is only read. Raises ``EnvironmentLacks``."""
    path = source_path(url)
    try:
        if path is None:
            _copy_studies(url, target)
            return
        if not path.is_file():
            raise EnvironmentLacks(f"{path} does not exist", hint="vopt search makes it; or give another --storage")
        source = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=10)
        copied = sqlite3.connect(target)
        try:
            source.backup(copied)
        finally:
            source.close()
            copied.close()
        target.chmod(0o600)
    except (sqlite3.Error, SQLAlchemyError, OSError) as error:
        raise EnvironmentLacks(f"{url} cannot be read: {error}", hint="vopt doctor") from error


def _copy_studies(url: str, target: Path) -> None:
    source, copied = RDBStorage(url, skip_table_creation=True), RDBStorage(f"sqlite:///{target}")
    try:
        for study in source.get_all_studies():
            optuna.copy_study(from_study_name=study.study_name, from_storage=source, to_storage=copied)
    finally:
        for storage in (source, copied):
            storage.remove_session()
            storage.engine.dispose()
