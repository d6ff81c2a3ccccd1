"""What can happen to a study between its files and its database: deleted, full, damaged, from another time or version."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
from landscapes import small_landscape
from sqlalchemy import event
from typer.testing import CliRunner, Result

from vopt.optimizer.cli import app
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.history import Stage, TrialRecord, TrialRequest
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.optimizer.study import Study, list_studies, read_study

ASSETS = Path(__file__).parents[1] / "assets"
SEARCH = (
    *("search", "--goal", "throughput", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--trials", "2", "--rounds", "0"),
    *("--concurrency", "16", "--window", "1s", "--soak", "0", "--quiet"),
)


def vopt(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def setup() -> SearchSetup:
    landscape = small_landscape()
    return SearchSetup(landscape.goal, landscape.space, Budget(trials=6, rounds=0, soak_s=0))


def made(folder: Path) -> tuple[str, Study]:
    url = f"sqlite:///{folder}/studies.db"
    return url, Study.create(url, {"model": "m", "goal": "throughput"}, small_landscape().space, retry_s=5)


@pytest.mark.fault("database deleted")
def test_a_deleted_database_ends_the_search_and_names_what_is_kept(tmp_path: Path) -> None:
    _, study = made(tmp_path)

    def evaluate(request: TrialRequest) -> TrialRecord:
        if request.label == "2":
            (tmp_path / "studies.db").unlink()
        return small_landscape().evaluator(0)(request)

    with study, pytest.raises(EnvironmentLacks, match="deleted or replaced") as caught:
        search(setup(), study, evaluate, lambda event: None)
    assert str(study.directory) in caught.value.hint
    assert len(list(study.directory.glob("*/result.json"))) == 3, "the result of the last trial too"


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 400 KB: what a full disk looks like to a program, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def grow(study: Study) -> None:
    """Write a megabyte into its database."""
    for number in range(20):
        study._patiently(partial(study._study.set_user_attr, f"ballast {number}", "x" * 50_000))


@pytest.mark.fault("no room for the database to grow")
def test_a_database_that_cannot_grow_ends_the_search(tmp_path: Path, small_files: None) -> None:
    _, study = made(tmp_path)
    study._retry_s = 0.3

    with study, pytest.raises(EnvironmentLacks, match="could not be written") as caught:
        grow(study)
    assert "vopt resume m-throughput-1" in caught.value.hint
    assert len(read_study(f"sqlite:///{tmp_path}/studies.db").trials) == 0, "it can still be read"


@pytest.mark.fault("disk full when a result is written")
def test_a_full_disk_stops_the_search_and_a_resume_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vopt.optimizer import study as storing

    write = storing.write_result

    def full(directory: Path, record: TrialRecord) -> None:
        if record.label == "1":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(directory, record)

    monkeypatch.setattr(storing, "write_result", full)
    monkeypatch.chdir(tmp_path)
    stopped = vopt(*SEARCH)
    assert stopped.exit_code == 3, stopped.output
    assert "No space left" in stopped.stderr
    assert "vopt resume qwen3-8b-throughput-1" in stopped.stderr
    monkeypatch.setattr(storing, "write_result", write)
    assert vopt("resume", "--quiet").exit_code == 0
    labels = [record.label for record in read_study("sqlite:///studies.db").trials]
    assert len(labels) == len(set(labels)) == 2


@pytest.mark.parametrize(
    "damage", ['{"label": "1"', *(pytest.param(text, marks=pytest.mark.slow) for text in ("", "null", "[]", '{"label": 1}'))]
)
@pytest.mark.fault("corrupt result file")
def test_a_damaged_result_is_measured_again(tmp_path: Path, damage: str) -> None:
    url, study = made(tmp_path)
    tell, calls = study.tell, []

    def dies(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    def evaluate(request: TrialRequest) -> TrialRecord:
        calls.append(dict(request.config))
        if request.label == "1":
            study.tell = dies  # type: ignore[method-assign]  # killed between the file and the database
        return small_landscape().evaluator(0)(request)

    with study, pytest.raises(KeyboardInterrupt):
        search(setup(), study, evaluate, lambda event: None)
    study.tell = tell  # type: ignore[method-assign]
    (study.directory / "1" / "result.json").write_text(damage)
    with Study.reopen(url, None, small_landscape().space) as resumed:
        search(setup(), resumed, small_landscape().evaluator(0), lambda event: None)
    trials = read_study(url).trials
    searched = [dict(record.config) for record in trials if record.stage is Stage.SEARCH]
    assert searched.count(calls[1]) == 1
    assert all(record.metrics is not None or record.failure is not None for record in trials)


@pytest.mark.fault("clock jump")
def test_a_jumping_clock_changes_no_duration_and_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, jumps = time.time, iter(range(10_000))
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(jumps) * 86_400.0)
    monkeypatch.chdir(tmp_path)
    done = vopt(*SEARCH)
    assert done.exit_code == 0, done.output
    trials = read_study("sqlite:///studies.db").trials
    assert [record.label for record in trials] == ["0", "1"]
    assert all(0 <= seconds < 3600 for record in trials for seconds in record.phase_s.values())


@pytest.mark.fault("database of an older format")
def test_a_database_of_format_1_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ASSETS / "studies-format-1.db", tmp_path / "studies.db")
    monkeypatch.chdir(tmp_path)
    (study,) = list_studies("sqlite:///studies.db")
    assert study.recommendation is not None
    assert len(study.trials) >= 4
    for words in (("show",), ("show", "--all"), ("show", "--json"), ("export",), ("report", "--output", "page.html")):
        done = vopt(*words)
        assert done.exit_code == 0, done.output


@pytest.mark.fault("database of a newer format")
def test_a_newer_format_is_refused_with_the_way_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ASSETS / "studies-format-1.db", tmp_path / "studies.db")
    monkeypatch.chdir(tmp_path)
    (name,) = optuna.get_all_study_names("sqlite:///studies.db")
    optuna.load_study(storage="sqlite:///studies.db", study_name=name).set_user_attr("format_version", 2)
    for words in (("show",), ("resume",), ("export",)):
        refused = vopt(*words)
        assert refused.exit_code == 2
        assert "has format 2, this vopt reads up to 1" in refused.stderr
        assert "install the vopt that made it, or a newer one" in refused.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    done = vopt(*SEARCH, "--storage", f"sqlite:///{folder}/studies.db")
    assert done.exit_code == 0, done.output
    return folder


def test_more_trials_may_be_asked_for(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    url = f"sqlite:///{tmp_path}/copy/studies.db"
    done = vopt("resume", "--storage", url, "--trials", "3", "--quiet", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["format_version"] == 1
    assert len(read_study(url).trials) == 3
    assert read_study(url).setup["options"]["trials"] == 3


def test_a_directory_that_cannot_be_made_leaves_no_study_behind(tmp_path: Path) -> None:
    made(tmp_path)[1].close()
    (tmp_path / "file").write_text("in the way")
    url = f"sqlite:///{tmp_path}/studies.db"
    space = small_landscape().space
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "studies").write_text("in the way")
    for data_dir, words in ((tmp_path / "file", "--data-dir"), (tmp_path / "data", "cannot be made")):
        with pytest.raises(EnvironmentLacks, match=words) as caught:
            Study.create(url, {"model": "m", "goal": "throughput"}, space, data_dir=data_dir)
        assert "that you may write" in caught.value.hint
    assert [study.name for study in list_studies(url)] == ["m-throughput-1"]


def test_the_latest_study_is_the_latest_of_ours(tmp_path: Path) -> None:
    url, study = made(tmp_path)
    study.close()
    optuna.create_study(study_name="somebody-elses", storage=url)
    assert read_study(url).name == "m-throughput-1"


@pytest.mark.fault("disk full when the database is written")
def test_a_full_disk_under_the_database_is_said_at_once_in_its_own_words(tmp_path: Path) -> None:
    """A lock is waited for; a full disk is not, or the search would stand still for minutes and then not say why."""
    _, study = made(tmp_path)
    study._retry_s = 600.0
    engine = study._study._storage._backend.engine  # type: ignore[attr-defined]  # Optuna's cache around its RDB storage
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA max_page_count = 1"))
    engine.dispose()
    with study, pytest.raises(EnvironmentLacks, match="could not be written: database or disk is full") as caught:
        grow(study)
    assert "make room (vopt clean), then: vopt resume m-throughput-1" in caught.value.hint


@pytest.mark.parametrize("verb", ["show", "export", "report", "resume", "dashboard"])
@pytest.mark.parametrize("kind", ["empty", "another program's", "damaged"])
@pytest.mark.fault("a database that holds no readable studies")
def test_a_database_without_readable_studies_is_named(
    verb: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "studies.db"
    if kind == "empty":
        path.touch()
    elif kind == "another program's":
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
        connection.commit()
        connection.close()
    else:
        made(tmp_path)[1].close()
        path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 100_000)
    refused = vopt(verb, *(["--port", "0"] if verb == "dashboard" else []))
    assert refused.exit_code == 3, refused.output
    assert "studies.db" in refused.stderr
    assert "try: " in refused.stderr
