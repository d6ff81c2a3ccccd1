"""The stored study: what is written when, what survives a crash between any two writes, and what is refused."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from landscapes import Landscape, small_landscape

from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.events import Event
from vopt.optimizer.history import Arm, Stage, TrialRecord, TrialRequest
from vopt.optimizer.recommend import Recommendation
from vopt.optimizer.results import MOST_RECORD_BYTES, fitted
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.optimizer.study import Study, list_studies, read_study
from vopt.optimizer.trial import EngineConfig

SETUP = {"model": "Org/Tiny-1B", "goal": "throughput"}


def silent(event: Event) -> None:
    pass


def setup_for(landscape: Landscape, **changes: Any) -> SearchSetup:
    values: dict[str, Any] = {"budget": Budget(trials=8, rounds=1, time_s=None, soak_s=60)}
    return SearchSetup(goal=landscape.goal, space=landscape.space, **(values | changes))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/studies.db"


def create(url: str, landscape: Landscape, **more: Any) -> Study:
    return Study.create(url, {**SETUP, "space_digest": landscape.space.digest}, landscape.space, **more)


def test_the_whole_search_is_read_back_as_it_happened(url: str, tmp_path: Path) -> None:
    landscape = small_landscape()
    with create(url, landscape) as study:
        setup = setup_for(landscape, budget=Budget(trials=12, rounds=2, time_s=None, soak_s=60))
        answer = search(setup, study, landscape.evaluator(1), silent)
    read = read_study(url)
    assert read.name == "tiny-1b-throughput-1"
    assert read.recommendation == answer
    stages = [record.stage for record in read.trials]
    assert stages == sorted(stages, key=list(Stage).index)
    assert {Stage.SEARCH, Stage.SCREENING, Stage.CONFIRMATION, Stage.SOAK} <= set(stages)
    assert len({record.label for record in read.trials}) == len(read.trials)
    for record in read.trials:
        kept = tmp_path / "studies" / read.name / record.label / "result.json"
        assert kept.is_file()
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "studies.db").stat().st_mode) == 0o600


def test_optuna_sees_every_limit_on_every_trial_and_no_infeasible_best(url: str) -> None:
    landscape = small_landscape()
    with create(url, landscape) as study:
        search(setup_for(landscape), study, landscape.evaluator(1), silent)
    stored = optuna.load_study(storage=url, study_name="tiny-1b-throughput-1")
    keys = [list(trial.constraints) for trial in stored.trials]
    assert keys
    assert all(each == keys[0] for each in keys)
    broken = [trial for trial in stored.trials if any(value > 0 for value in trial.constraints.values())]
    metrics = [TrialRecord.from_json(trial.user_attrs["record"]).metrics for trial in broken]
    assert any(one is not None and one["tokens_per_s"] > 14_000 for one in metrics), "the failing configuration was measured"
    best_feasible = max(trial.value for trial in stored.trials if trial not in broken and trial.value is not None)
    assert all(trial.value is not None and trial.value < best_feasible for trial in broken)


class Killed(BaseException):
    """The search died here."""


class Mortal:
    """A study that dies before or after its n-th write to the database or the disk."""

    def __init__(self, study: Study, at: int) -> None:
        self._study, self._left = study, at

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._study, name)
        if name not in ("begin", "finish", "tell", "abandon", "conclude"):
            return value

        def dying(*args: Any, **kwargs: Any) -> Any:
            self._count()
            result = value(*args, **kwargs)
            self._count()
            return result

        return dying

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Killed


def run_until_answered(
    url: str, landscape: Landscape, deaths: Sequence[int], evaluate: Callable[[TrialRequest], TrialRecord]
) -> Recommendation:
    name: str | None = None
    for at in (*deaths, 10_000):
        study = create(url, landscape) if name is None else Study.reopen(url, name, landscape.space)
        name = study.name
        try:
            return search(setup_for(landscape), Mortal(study, at), evaluate, silent)
        except Killed:
            pass
        finally:
            study.close()
    raise AssertionError("unreachable")


def summary(url: str) -> list[tuple[str, Any, Mapping[str, float] | None]]:
    return [(str(r.stage), r.config, r.metrics.values if r.metrics else None) for r in read_study(url).trials]


def by_config(landscape: Landscape, seed: int) -> Callable[[TrialRequest], TrialRecord]:
    """Results that do not depend on the label, so that an interrupted and a whole search may be compared."""
    evaluate = landscape.evaluator(seed)

    def evaluated(request: TrialRequest) -> TrialRecord:
        return replace(evaluate(replace(request, label=f"{request.stage}-{request.arm}", attempt=1)), label=request.label)

    return evaluated


@pytest.mark.fault("killed at any write of a study")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_crash_at_any_write_leaves_exactly_the_right_trials(tmp_path: Path, every: bool) -> None:
    landscape = small_landscape()
    whole = f"sqlite:///{tmp_path}/whole.db"
    answer = run_until_answered(whole, landscape, (), by_config(landscape, 3))
    expected = summary(whole)
    writes = 4 * len(expected) + 2
    for at in (0, 1, 2, 3, 4, 6, 9, writes // 3, writes // 2, writes - 3, writes - 1) if every else (3, writes // 2):
        (tmp_path / str(at)).mkdir()
        url = f"sqlite:///{tmp_path}/{at}/studies.db"
        again = run_until_answered(url, landscape, (at,), by_config(landscape, 3))
        assert summary(url) == expected, f"killed at write {at}"
        assert again.verdict == answer.verdict
        assert again.winner_config == answer.winner_config


@pytest.mark.fault("killed between the result file and the database")
def test_a_result_on_disk_is_told_and_not_measured_again(url: str) -> None:
    landscape = small_landscape()
    calls: list[str] = []

    def evaluate(request: TrialRequest) -> TrialRecord:
        calls.append(request.label)
        return landscape.evaluator(0)(request)

    study = create(url, landscape)

    class DiesBetweenDiskAndDatabase(Mortal):
        def _count(self) -> None:
            pass

    dying = DiesBetweenDiskAndDatabase(study, 0)
    original = study.tell

    def tell(*args: Any, **kwargs: Any) -> None:
        raise Killed

    study.tell = tell  # type: ignore[method-assign]  # dies after the result is on disk, before Optuna hears of it
    with pytest.raises(Killed):
        search(setup_for(landscape), dying, evaluate, silent)
    study.tell = original  # type: ignore[method-assign]
    study.close()
    with Study.reopen(url, None, landscape.space) as resumed:
        search(setup_for(landscape), resumed, evaluate, silent)
    assert len(calls) == len(set(calls)) == len(read_study(url).trials)


@pytest.mark.fault("configuration kills the search twice")
def test_a_configuration_that_killed_the_search_twice_is_marked(url: str) -> None:
    landscape = small_landscape()
    killer = {"max_num_seqs": 512}

    def evaluate(request: TrialRequest) -> TrialRecord:
        if dict(request.config) == killer and request.stage is Stage.SEARCH:
            raise Killed
        return landscape.evaluator(0)(request)

    study = create(url, landscape)
    for _ in range(2):
        with pytest.raises(Killed):
            search(setup_for(landscape), study, evaluate, silent)
        study.close()
        study = Study.reopen(url, None, landscape.space)
    answer = search(setup_for(landscape), study, evaluate, silent)
    study.close()
    marked = [row for row in answer.rejected if dict(row.config) == killer]
    assert len(marked) == 1
    assert "died twice" in marked[0].reason
    assert sum(dict(record.config) == killer for record in read_study(url).trials) == 1


@pytest.mark.fault("search killed twice, with a good end between")
def test_a_configuration_that_came_to_a_good_end_in_between_is_innocent(url: str) -> None:
    landscape = small_landscape()
    baseline_starts: list[str] = []

    def evaluate(request: TrialRequest) -> TrialRecord:
        if not dict(request.config):
            baseline_starts.append(request.label)
            if len(baseline_starts) in (1, 3):  # 1: its first start; 2: measured; 3: its next start, in the confirmation
                raise Killed
        return landscape.evaluator(0)(request)

    study = create(url, landscape)
    for _ in range(2):
        with pytest.raises(Killed):
            search(setup_for(landscape), study, evaluate, silent)
        study.close()
        study = Study.reopen(url, None, landscape.space)
    search(setup_for(landscape), study, evaluate, silent)
    study.close()
    assert not [record for record in read_study(url).trials if record.failure is not None and not dict(record.config)]


@pytest.mark.fault("confirmation kills the search twice")
def test_a_confirmation_start_that_killed_the_search_twice_is_marked(url: str) -> None:
    landscape = small_landscape()

    def evaluate(request: TrialRequest) -> TrialRecord:
        if request.arm is Arm.FINALIST:
            raise Killed
        return landscape.evaluator(0)(request)

    study = create(url, landscape)
    for _ in range(2):
        with pytest.raises(Killed):
            search(setup_for(landscape), study, evaluate, silent)
        study.close()
        study = Study.reopen(url, None, landscape.space)
    with pytest.raises(Killed):  # the next best is tried now
        search(setup_for(landscape), study, evaluate, silent)
    study.close()
    (marked,) = [record for record in read_study(url).trials if record.arm is Arm.FINALIST]
    assert marked.failure is not None
    assert "died twice" in marked.failure.detail


@pytest.mark.fault("second search on a study")
def test_two_searches_on_one_study_are_refused(url: str) -> None:
    landscape = small_landscape()
    with create(url, landscape) as study, pytest.raises(EnvironmentLacks, match=f"process {os.getpid()}"):
        Study.reopen(url, study.name, landscape.space)
    Study.reopen(url, None, landscape.space).close()


@pytest.mark.slow
@pytest.mark.fault("database locked by another program")
def test_a_locked_database_loses_nothing(tmp_path: Path) -> None:
    landscape = small_landscape()
    url = f"sqlite:///{tmp_path}/studies.db"
    study = create(url, landscape, timeout_s=0.05, retry_s=20)
    blocker = sqlite3.connect(tmp_path / "studies.db", check_same_thread=False, isolation_level=None)
    released = threading.Event()

    def evaluate(request: TrialRequest) -> TrialRecord:
        if request.label == "2":
            blocker.execute("BEGIN EXCLUSIVE")
            timer = threading.Timer(1.0, lambda: (blocker.execute("ROLLBACK"), released.set()))
            timer.start()
        return landscape.evaluator(0)(request)

    with study:
        search(setup_for(landscape), study, evaluate, silent)
    blocker.close()
    assert released.is_set()
    assert "2" in {record.label for record in read_study(url).trials}


@pytest.mark.slow
@pytest.mark.fault("database locked for good")
def test_a_database_locked_for_too_long_ends_with_a_resume_line(tmp_path: Path) -> None:
    landscape = small_landscape()
    url = f"sqlite:///{tmp_path}/studies.db"
    study = create(url, landscape, timeout_s=0.01, retry_s=0.2)
    blocker = sqlite3.connect(tmp_path / "studies.db", isolation_level=None)

    def evaluate(request: TrialRequest) -> TrialRecord:
        if request.label == "1":
            blocker.execute("BEGIN EXCLUSIVE")
        return landscape.evaluator(0)(request)

    with study, pytest.raises(EnvironmentLacks, match="could not be written") as caught:
        search(setup_for(landscape), study, evaluate, silent)
    assert "vopt resume tiny-1b-throughput-1" in caught.value.hint
    blocker.execute("ROLLBACK")
    blocker.close()
    with Study.reopen(url, None, landscape.space) as resumed:
        search(setup_for(landscape), resumed, landscape.evaluator(0), silent)
    labels = [record.label for record in read_study(url).trials]
    assert labels.count("1") == 1


def test_names_count_up_and_prefixes_find_them(url: str) -> None:
    landscape = small_landscape()
    create(url, landscape).close()
    create(url, landscape).close()
    assert [study.name for study in list_studies(url)] == ["tiny-1b-throughput-1", "tiny-1b-throughput-2"]
    assert read_study(url).name == "tiny-1b-throughput-2"
    assert read_study(url, "tiny-1b-throughput-1").name == "tiny-1b-throughput-1"
    with pytest.raises(UsageError, match="could be"):
        read_study(url, "tiny")
    with pytest.raises(UsageError, match="names no study"):
        read_study(url, "huge")
    with pytest.raises(UsageError, match="exists already"):
        create(url, landscape, name="tiny-1b-throughput-1")


def test_another_space_is_refused(url: str) -> None:
    landscape = small_landscape()
    create(url, landscape).close()
    from landscapes import parameter, space

    with pytest.raises(UsageError, match="search space") as caught:
        Study.reopen(url, None, space(parameter("max_num_seqs", (1, 2), 1)))
    assert "--seed-from tiny-1b-throughput-1" in caught.value.hint


def test_bad_storages_are_refused_and_nothing_is_made(tmp_path: Path) -> None:
    landscape = small_landscape()
    (tmp_path / "text.db").write_text("this is no database, it is text")
    for url, words in (
        ("nonsense", "no storage URL"),
        (f"sqlite:///{tmp_path}/absent/studies.db", "no directory"),
        (f"sqlite:///{tmp_path}/text.db", "not an SQLite database"),
        (f"sqlite:///{tmp_path}", "is a directory"),
        ("sqlite://", "names no file"),
    ):
        with pytest.raises((UsageError, EnvironmentLacks), match=words):
            create(url, landscape)
    with pytest.raises(EnvironmentLacks, match="no database"):
        read_study(f"sqlite:///{tmp_path}/none.db")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.db"]


def test_a_newer_format_is_refused(url: str) -> None:
    landscape = small_landscape()
    create(url, landscape).close()
    optuna.load_study(storage=url, study_name="tiny-1b-throughput-1").set_user_attr("format_version", 99)
    with pytest.raises(UsageError, match="format 99"):
        read_study(url)


def test_records_stay_within_what_every_database_holds() -> None:
    landscape = small_landscape()
    record = landscape.evaluator(0)(TrialRequest("0", EngineConfig(), Stage.SEARCH))
    huge = replace(record, token_curve=tuple(float(i) for i in range(20_000)), resolved={str(i): "x" * 100 for i in range(900)})
    assert len(json.dumps(fitted(huge))) <= MOST_RECORD_BYTES
    assert TrialRecord.from_json(fitted(huge)).metrics == record.metrics
