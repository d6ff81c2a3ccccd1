"""Ctrl-C where something is half done: at steps of the database, in the stop of an engine, again and again in one trial."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from landscapes import small_landscape
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session
from typer.testing import CliRunner, Result

from vopt.optimizer.cli import app
from vopt.optimizer.engine.simulated import SimulatedSession
from vopt.optimizer.history import TrialRecord, TrialRequest
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.optimizer.study import Study, read_study

STEPS = ((Engine, "before_cursor_execute"), (Engine, "commit"), (Session, "after_commit"), (Session, "after_rollback"))
"""Where SQLAlchemy calls out: the last two while a session is committed or rolled back and not yet closed."""

SEARCH = (
    *("search", "--goal", "throughput", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--trials", "2", "--rounds", "0"),
    *("--concurrency", "16", "--window", "1s", "--soak", "0", "--quiet"),
)


pytestmark = pytest.mark.usefixtures("signal_handlers")


@contextmanager
def at_each_step(step: Callable[[int], None]) -> Iterator[list[int]]:
    """Calls ``step`` with 1, 2, 3, ... as the database is used; yields the count of steps."""
    count = [0]

    def called(*_: object, **__: object) -> None:
        count[0] += 1
        step(count[0])

    for target, name in STEPS:
        event.listen(target, name, called)
    try:
        yield count
    finally:
        for target, name in STEPS:
            event.remove(target, name, called)


def vopt(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def interrupt_at(number: int) -> Callable[[int], None]:
    def step(count: int) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGINT)

    return step


@pytest.mark.slow
@pytest.mark.fault("interrupted at any use of the database")
def test_a_search_ends_between_its_trials_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with at_each_step(lambda count: None) as count:
        assert vopt(*SEARCH).exit_code == 0
    steps = count[0]
    assert steps > 100
    codes = []
    for number in range(1, steps + 1, 23):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        with at_each_step(interrupt_at(number)):
            ended = vopt(*SEARCH)
        codes.append(ended.exit_code)
        assert ended.exit_code in (0, 130), (number, ended.output)  # 0: after the last trial
        assert "a fault of vopt" not in ended.stderr
        if ended.exit_code == 130:
            assert "vopt resume qwen3-8b-throughput-1" in ended.stderr
            assert vopt("resume", "--quiet").exit_code == 0
        labels = [record.label for record in read_study("sqlite:///studies.db").trials]
        assert len(labels) == len(set(labels)) == 2
        assert all(record.failure is None for record in read_study("sqlite:///studies.db").trials)
    assert codes[0] == 130, "before the first trial"
    assert codes.count(130) > len(codes) // 2


def test_a_command_that_reads_ends_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert vopt(*SEARCH).exit_code == 0
    with at_each_step(lambda count: None) as count:
        assert vopt("show").exit_code == 0
    for number in range(1, count[0] + 1, 5):
        with at_each_step(interrupt_at(number)):
            ended = vopt("show")
        assert (ended.exit_code, ended.stdout) == (130, ""), (number, ended.output)
        assert "interrupted" in ended.stderr


@pytest.mark.parametrize("signals", [1, 2, 3])
@pytest.mark.fault("interrupted while an engine stops")
def test_what_was_measured_before_the_stop_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: int) -> None:
    monkeypatch.chdir(tmp_path)
    close, closed = SimulatedSession.close, []

    def interrupted(session: SimulatedSession) -> tuple[str, ...]:
        closed.append(session)
        if len(closed) == 1:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)
        return close(session)

    monkeypatch.setattr(SimulatedSession, "close", interrupted)
    ended = vopt(*SEARCH)
    assert ended.exit_code == 130, ended.output
    assert "1 engine start is kept; best so far: trial 0" in ended.stderr
    assert len(closed) == min(signals, 2), "the second signal cuts the first stop off, and the next one is final"
    (kept,) = read_study("sqlite:///studies.db").trials
    assert kept.metrics is not None
    assert vopt("resume", "--quiet").exit_code == 0


@pytest.mark.fault("interrupted again and again in the same trial")
def test_who_interrupts_accuses_no_configuration(tmp_path: Path) -> None:
    landscape, url = small_landscape(), f"sqlite:///{tmp_path}/studies.db"
    setup = SearchSetup(landscape.goal, landscape.space, Budget(trials=3, rounds=0, soak_s=0))
    Study.create(url, {"model": "m", "goal": "throughput"}, landscape.space).close()

    def interrupted(request: TrialRequest) -> TrialRecord:
        raise KeyboardInterrupt

    for _ in range(3):
        with Study.reopen(url, None, landscape.space) as study:
            with pytest.raises(KeyboardInterrupt):
                search(setup, study, interrupted, lambda event: None)
            assert study.deaths() == []
            assert study.pending() == ()
    with Study.reopen(url, None, landscape.space) as study:
        search(setup, study, landscape.evaluator(0), lambda event: None)
    first, *_ = read_study(url).trials
    assert first.metrics is not None
