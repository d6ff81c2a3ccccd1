"""The stored study: an Optuna adapter by ask and tell, with results on disk before the database hears of them.

Engine starts of search and screening are Optuna trials. All others (confirmation, soak, drift, explain) are study
attributes ``start:<label>``, because they repeat configurations that the sampler must not learn from twice under other
conditions. Everything a start leaves is written to ``<directory>/<label>/result.json`` and synced first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from vopt.objectives.metrics import Direction
from vopt.optimizer import samplers
from vopt.optimizer.environment import space_digest
from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.history import FORMAT_VERSION, SAMPLED_STAGES, Pending, StudyRecord, TrialRecord, TrialRequest
from vopt.optimizer.locks import lock_study
from vopt.optimizer.recommend import Recommendation
from vopt.optimizer.results import fitted, read_result, request_json, request_of, shown, where_it_lies, write_result
from vopt.optimizer.storage import (
    innermost,
    made_directory,
    make_data_dir,
    readable,
    sqlite_file,
    storage_for,
    study_directory,
    waiting_is_useless,
)
from vopt.optimizer.study_name import next_name, unknown_study
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.space import Point, SearchSpace

_T = TypeVar("_T")


class Study:
    """One open study that this process alone searches. Use ``create`` or ``reopen``; ``close`` releases it."""

    def __init__(self, study: optuna.Study, directory: Path, space: SearchSpace, retry_s: float) -> None:
        self._study, self.directory, self._space, self._retry_s = study, directory, space.whole, retry_s
        self._fixed = samplers.distributions(self._space)
        self._lock = lock_study(directory, study.study_name)
        self._file = sqlite_file(study)

    @classmethod
    def create(
        cls,
        url: str,
        setup: Mapping[str, Any],
        space: SearchSpace,
        *,
        name: str | None = None,
        directions: Sequence[Direction] = (Direction.MAXIMIZE,),
        data_dir: Path | None = None,
        retry_s: float = 180.0,
        timeout_s: float = 60.0,
    ) -> Study:
        """A new study. ``setup`` must hold ``model`` and ``goal`` (its name or its JSON); without ``name`` it is called
        ``<model>-<goal>-<n>``. The database is made here, if need be."""
        previous = os.umask(0o077)
        try:
            make_data_dir(data_dir)
            storage = storage_for(url, create=True, timeout_s=timeout_s, durable=not setup.get("simulated"))
            while True:
                called = name or next_name({study.study_name for study in storage.get_all_studies()}, setup)
                directory = study_directory(url, called, data_dir)
                made_directory(directory)
                try:
                    study = optuna.create_study(
                        storage=storage, study_name=called, directions=[direction.value for direction in directions]
                    )
                    break
                except optuna.exceptions.DuplicatedStudyError:
                    if name is not None:
                        raise UsageError(
                            f"a study called {called!r} exists already", hint=f"vopt resume {called}, or another --study"
                        ) from None  # else another search has just taken that number
            opened = cls(study, directory, space, retry_s)
            opened._patiently(lambda: study.set_user_attr("setup", {**setup, "format_version": FORMAT_VERSION}))
            opened._patiently(lambda: study.set_user_attr("format_version", FORMAT_VERSION))
            return opened
        finally:
            os.umask(previous)

    @classmethod
    def reopen(
        cls,
        url: str,
        name: str | None,
        space: SearchSpace,
        *,
        data_dir: Path | None = None,
        retry_s: float = 180.0,
        timeout_s: float = 60.0,
    ) -> Study:
        """An existing study, to go on with it. The space must be the one it was made with."""
        storage = storage_for(url, create=False, timeout_s=timeout_s)
        study = load(storage, name)
        stored = space_digest(study.user_attrs.get("setup", {}))
        if stored is not None and stored != space.digest:
            raise UsageError(
                f"the search space of {study.study_name} was {stored}, it is now {space.digest}: results would not compare",
                hint=f"start a new study with --seed-from {study.study_name}, or use the options of the old one",
            )
        return cls(study, study_directory(url, study.study_name, data_dir), space, retry_s)

    @property
    def name(self) -> str:
        return self._study.study_name

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def records(self) -> tuple[TrialRecord, ...]:
        """Every finished engine start, in order."""
        return tuple(where_it_lies(record, self.directory) for _, record in _finished(self._study))

    def next_label(self) -> str:
        """The label of the next search or screening start: the number of its Optuna trial."""
        return str(len(self._trials()))

    def begin(self, request: TrialRequest, point: Point | None) -> None:
        """Record that a start begins. ``point`` is where the sampler sees it (search and screening only)."""
        attributes = {"request": request_json(request), "order": self._next_order()}
        if request.stage not in SAMPLED_STAGES:
            self._patiently(lambda: self._study.set_user_attr(f"start:{request.label}", {"state": "running", **attributes}))
            return
        shown = {"label": request.label, "stage": str(request.stage), "engine_config": request.config.to_json()}
        trial = create_trial(
            state=TrialState.RUNNING,
            params=samplers.params(self._space, point) if point is not None else {},
            distributions=self._fixed if point is not None else {},
            user_attrs={**attributes, **shown},
        )
        self._patiently(lambda: self._study.add_trial(trial))

    def finish(self, record: TrialRecord, values: Sequence[float], violations: Mapping[str, float], *, charged: bool) -> None:
        """Keep a result: to disk first, then to Optuna. ``charged`` ``False``: told as FAIL, which no sampler learns from."""
        write_result(self.directory / record.label, record)
        self.tell(record, values, violations, charged=charged)

    def tell(self, record: TrialRecord, values: Sequence[float], violations: Mapping[str, float], *, charged: bool) -> None:
        """Tell a result that is on disk already; telling twice does nothing."""
        if record.stage not in SAMPLED_STAGES:
            key = f"start:{record.label}"
            begun = self._study.user_attrs.get(key, {})
            value = {**begun, "state": "done", "record": fitted(record)}
            self._patiently(lambda: self._study.set_user_attr(key, value))
            return
        frozen = next(trial for trial in self._trials() if trial.user_attrs.get("label") == record.label)
        if frozen.state.is_finished():
            return
        trial = Trial(self._study, frozen._trial_id)
        attributes: dict[str, Any] = {"record": fitted(record), **shown(record)}
        for key, value in attributes.items():
            self._patiently(partial(trial.set_user_attr, key, value))
        if not charged:
            self._patiently(lambda: self._tell(frozen.number, None, TrialState.FAIL))
            return
        told = trial.constraints  # the first write wins in Optuna
        for key, violation in violations.items():
            if key not in told:
                self._patiently(partial(trial.set_constraint, key, violation))
        self._patiently(lambda: self._tell(frozen.number, list(values), None))

    def pending(self) -> tuple[Pending, ...]:
        """Starts that a killed search left: with their result where it reached the disk."""
        found: list[tuple[Any, int | None]] = [
            (trial.user_attrs["request"], trial.number) for trial in self._trials() if trial.state is TrialState.RUNNING
        ]
        found += [(start["request"], None) for start in _side_starts(self._study) if start["state"] == "running"]
        return tuple(
            Pending(request, read_result(self.directory / request.label), number)
            for data, number in found
            for request in [request_of(data)]
        )

    def abandon(self, pending: Pending, why: str) -> None:
        """Close a start that will not be told: FAIL, with the reason; it counts as a death of its configuration."""
        if pending.number is None:
            key = f"start:{pending.request.label}"
            value = {**self._study.user_attrs.get(key, {}), "state": "abandoned", "why": why}
            earlier = [start for start in self._study.user_attrs.get("deaths", ()) if start != value]
            self._patiently(lambda: self._study.set_user_attr("deaths", [*earlier, value]))  # the label will be used again
            self._patiently(lambda: self._study.set_user_attr(key, value))
            return
        number = pending.number
        frozen = next(trial for trial in self._trials() if trial.number == number)
        self._patiently(lambda: Trial(self._study, frozen._trial_id).set_user_attr("abandoned", why))
        self._patiently(lambda: self._tell(number, None, TrialState.FAIL))

    def deaths(self) -> list[EngineConfig]:
        """The configurations of abandoned starts that the search died with, one entry for each death since the configuration
        last came to a good end: one that was measured in between has killed nobody, a second accident has."""
        trials = [trial.user_attrs for trial in self._trials() if trial.user_attrs.get("abandoned") == "died"]
        sides = [start for start in self._study.user_attrs.get("deaths", ()) if start["why"] == "died"]
        good = {record.config: order for order, record in _finished(self._study) if record.failure is None}
        died = [(int(start.get("order", 0)), request_of(start["request"]).config) for start in (*trials, *sides)]
        return [config for order, config in died if order > good.get(config, -1)]

    def suggest(
        self,
        sampler: str,
        told: Sequence[tuple[Point, float, Mapping[str, float]]],
        allowed: Callable[[Point], bool],
        seed: int,
    ) -> Point | None:
        """A point from one of Optuna's samplers, asked beside the stored study so that repeats leave no trials. It lies in
        the whole domain, dormant parameters included."""
        home = self._space.default_point()
        told = [({**home, **where}, value, constraints) for where, value, constraints in told]
        directions = self._study.directions  # of several goals, what is told here is their balance
        maximize = len(directions) > 1 or directions[0] is optuna.study.StudyDirection.MAXIMIZE
        return samplers.suggest(sampler, self._space, told, allowed, maximize=maximize, seed=seed)

    def keep_changes(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Keep what evidence and failures have changed of the space so far."""
        self._patiently(lambda: self._study.set_user_attr("space_changes", list(changes)))

    def keep_setup(self, setup: Mapping[str, Any]) -> None:
        """Keep what fixes the study from now on, its budget among it."""
        self._patiently(lambda: self._study.set_user_attr("setup", dict(setup)))

    def conclude(self, recommendation: Recommendation) -> None:
        """Keep the answer."""
        self._patiently(lambda: self._study.set_user_attr("recommendation", recommendation.to_json()))

    def _tell(self, number: int, values: list[float] | None, state: TrialState | None) -> None:
        # A lock that broke the first try may have come after the write: a finished trial has been told.
        if not self._study.get_trials(deepcopy=False)[number].state.is_finished():
            self._study.tell(number, values=values, state=state)

    def _trials(self) -> list[FrozenTrial]:
        return self._patiently(lambda: self._study.get_trials(deepcopy=False))

    def _next_order(self) -> int:
        return len(self._trials()) + len(_side_starts(self._study))

    def _patiently(self, action: Callable[[], _T]) -> _T:
        """Try again while the database is locked, with growing pauses, for at most ``retry_s``."""
        began, pause = time.monotonic(), 0.1
        while True:
            try:
                return action()
            except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
                if self._file is not None and sqlite_file(self._study) != self._file:
                    raise EnvironmentLacks(
                        f"the study's database {self._file[0]} was deleted or replaced during the search",
                        hint=f"the results are under {self.directory}; put the database back, then: vopt resume {self.name}",
                    ) from error
                reason = innermost(error)
                if time.monotonic() - began > self._retry_s or waiting_is_useless(reason):
                    what = "make room (vopt clean)" if "disk is full" in reason else "make it writable"
                    raise EnvironmentLacks(
                        f"the study's database could not be written: {reason}",
                        hint=f"results are safe under {self.directory}; {what}, then: vopt resume {self.name}",
                    ) from error
                time.sleep(pause)
                pause = min(2 * pause, 5.0)


def load(storage: BaseStorage, name: str | None) -> optuna.Study:
    """The study of this name or unique prefix; the latest without a name."""
    names = [study.study_name for study in sorted(storage.get_all_studies(), key=lambda study: study._study_id)]
    if not names:
        raise UsageError("there is no study here yet", hint="vopt search makes one")
    matching = (
        _latest(storage, names) if name is None else [name] if name in names else [n for n in names if n.startswith(name)]
    )
    if len(matching) != 1:
        raise unknown_study(str(name), matching, names)
    study = optuna.load_study(storage=storage, study_name=matching[0])
    version = study.user_attrs.get("format_version")
    if version is None:
        raise UsageError(f"{matching[0]} was not made by vopt", hint="give another --storage or --study")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise UsageError(
            f"{matching[0]} has format {version}, this vopt reads up to {FORMAT_VERSION}",
            hint="install the vopt that made it, or a newer one",
        )
    return study


def _latest(storage: BaseStorage, names: list[str]) -> list[str]:
    """The last one of vopt: a start that was killed before it had written anything leaves a study that is nobody's."""
    ours = (n for n in reversed(names) if "format_version" in storage.get_study_user_attrs(storage.get_study_id_from_name(n)))
    return [next(ours, names[-1])]


def read_study(url: str, name: str | None = None, *, data_dir: Path | None = None, timeout_s: float = 60.0) -> StudyRecord:
    """One study as a value: by name, unique prefix, or the latest. Changes nothing."""
    with readable(url):
        study = load(storage_for(url, create=False, timeout_s=timeout_s), name)
        return _record(study, study_directory(url, study.study_name, data_dir))


def list_studies(url: str, *, data_dir: Path | None = None, timeout_s: float = 60.0) -> tuple[StudyRecord, ...]:
    """Every study of vopt in a storage, oldest first."""
    with readable(url):
        storage = storage_for(url, create=False, timeout_s=timeout_s)
        ids = sorted(storage.get_all_studies(), key=lambda study: study._study_id)
        studies = [optuna.load_study(storage=storage, study_name=study.study_name) for study in ids]
        ours = [study for study in studies if "format_version" in study.user_attrs]
        return tuple(_record(study, study_directory(url, study.study_name, data_dir)) for study in ours)


def _record(study: optuna.Study, directory: Path) -> StudyRecord:
    answer = study.user_attrs.get("recommendation")
    records = tuple(where_it_lies(record, directory) for _, record in _finished(study))
    return StudyRecord(
        name=study.study_name,
        created_at=min((record.began_at for record in records), default=""),
        setup=study.user_attrs.get("setup", {}),
        trials=records,
        recommendation=Recommendation.from_json(answer) if answer else None,
        directory=str(directory),
    )


def _finished(study: optuna.Study) -> list[tuple[int, TrialRecord]]:
    """Finished starts with their order, in order."""
    trials = [t.user_attrs for t in study.get_trials(deepcopy=False) if t.state.is_finished() and "record" in t.user_attrs]
    sides = [start for start in _side_starts(study) if start["state"] == "done"]
    found = [(int(data.get("order", 0)), TrialRecord.from_json(data["record"])) for data in (*trials, *sides)]
    return sorted(found, key=lambda pair: pair[0])


def _side_starts(study: optuna.Study) -> list[dict[str, Any]]:
    return [value for key, value in study.user_attrs.items() if key.startswith("start:")]
