"""What a search says and does at its end: the command that is told, the path that was measured, the gain that vanished."""

from __future__ import annotations

import json
import math
import shlex
import stat
import sys
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
from landscapes import MemoryStudy, small_landscape
from typer.testing import CliRunner

from vopt.optimizer.cli import app
from vopt.optimizer.errors import UsageError
from vopt.optimizer.events import Event, Listener, TrialEnded
from vopt.optimizer.history import Arm, Stage, TrialRecord, TrialRequest
from vopt.optimizer.notify import notification, notify, notify_words
from vopt.optimizer.recommend import Recommendation, Verdict
from vopt.optimizer.report.live import Progress
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, SearchSetup

SEARCH = [
    *("search", "--goal", "throughput", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--trials", "2"),
    *("--rounds", "0", "--soak", "0", "--concurrency", "8", "--window", "5", "--requests", "60", "--quiet"),
]


@pytest.fixture
def teller(tmp_path: Path) -> Path:
    """A program that writes down how it was called."""
    path = tmp_path / "tell me.py"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "said = {name: value for name, value in os.environ.items() if name.startswith('VOPT_')}\n"
        f"json.dump([sys.argv[1:], said], open({str(tmp_path / 'told.json')!r}, 'w'))\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def told(folder: Path) -> tuple[list[str], dict[str, str]]:
    words, said = json.loads((folder / "told.json").read_text())
    return words, said


def test_the_command_hears_study_verdict_and_command(tmp_path: Path, teller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*SEARCH, "--notify", f"'{teller}' 'two words' $HOME;true"])
    assert done.exit_code == 0, done.stderr
    words, said = told(tmp_path)
    assert words == ["two words", "$HOME;true"], "no shell read them"
    assert said["VOPT_STUDY"] == "qwen3-8b-throughput-1"
    assert said["VOPT_VERDICT"] in {Verdict.NO_GAIN, Verdict.UNCONFIRMED}
    assert said["VOPT_COMMAND"] == done.stdout.strip()


@pytest.mark.parametrize("command", ['echo "$VOPT_STUDY" > f', "mail ${VOPT_VERDICT}", "a | b", "a && b", "tell 2>&1"])
def test_what_only_a_shell_would_do_is_refused_with_the_line_to_type(command: str) -> None:
    with pytest.raises(UsageError, match="no shell runs it") as caught:
        notify_words(command)
    typed = shlex.split(caught.value.hint)
    assert typed[0] == "--notify"
    assert notify_words(typed[1]) == ["sh", "-c", command]


def test_the_command_hears_of_a_failure(tmp_path: Path, teller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*SEARCH, "--workload", "nothing-like-it", "--notify", f"'{teller}'"])
    assert done.exit_code == 2
    assert told(tmp_path) == ([], {"VOPT_STUDY": "", "VOPT_VERDICT": "failed", "VOPT_COMMAND": ""})


def test_the_command_hears_of_an_interruption(tmp_path: Path, teller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> TrialRecord:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vopt.optimizer.evaluate.Evaluator.__call__", interrupted)
    done = CliRunner().invoke(app, [*SEARCH, "--notify", f"'{teller}'"])
    assert done.exit_code == 130
    assert told(tmp_path)[1] == {
        "VOPT_STUDY": "qwen3-8b-throughput-1",
        "VOPT_VERDICT": "interrupted",
        "VOPT_COMMAND": "",
    }


def test_a_notification_that_fails_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*SEARCH, "--notify", "no-such-program-here"])
    assert done.exit_code == 0
    assert done.stdout.startswith("vllm serve")
    assert "--notify: no-such-program-here could not be run: No such file" in done.stderr


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import time; time.sleep(60)", "did not end within 0.5 s and was stopped"),
        ("import sys; sys.exit('no route with key abcdef123')", "ended with exit code 1: no route with key [removed]"),
        ("print('fine')", ""),
    ],
)
def test_how_a_notification_ends(program: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    ended = notification("s", "better", "vllm serve m")
    found = notify([sys.executable, "-c", program], ended, timeout_s=0.5 if "sleep" in program else 30, secrets=("abcdef123",))
    assert found.endswith(said)
    assert bool(found) is bool(said)
    assert capfd.readouterr().out == "", "standard output is the answer's"


@pytest.mark.parametrize("command", ["", "  ", "say 'hello"])
def test_a_notification_that_cannot_be_meant(command: str) -> None:
    with pytest.raises(UsageError, match="--notify"):
        notify_words(command)


@cache
def answered(
    *,
    served: bool,
    behind_the_server: float,
    no_serve: bool = False,
    path: float = 1.0,
    machines: int = 1,
    listener: Listener = lambda event: None,
) -> Recommendation:
    """A landscape with a gain, whose served engines give ``behind_the_server`` times what the defaults' do, and ``path`` times
    what the same engine does in-process; confirmed on ``machines`` machines in turn."""
    turns = cycle(range(machines))
    landscape = small_landscape()
    inner = landscape.evaluator(1)

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = inner(request)
        if request.stage is not Stage.CONFIRMATION:
            return record
        record = replace(record, served=served, environment={"gpu_uuids": f"GPU-{next(turns)}"})
        if record.metrics is not None:
            values = {**record.metrics.values, "tokens_per_s": path * record.metrics.values["tokens_per_s"]}
            record = replace(record, metrics=replace(record.metrics, values=values))
        if record.config and record.metrics is not None:
            noise = record.metrics.values["tokens_per_s"] / base[record.config]
            values = {**record.metrics.values, "tokens_per_s": 10_000 * behind_the_server * noise}
            record = replace(record, metrics=replace(record.metrics, values=values))
        return record

    class Truths(dict[object, float]):
        def __missing__(self, config: object) -> float:
            return math.exp(landscape.merit(landscape.space.point_of(config)))  # type: ignore[arg-type]  # a configuration

    base = Truths()
    setup = SearchSetup(
        goal=landscape.goal, space=landscape.space, budget=Budget(trials=10, time_s=None, soak_s=60), no_serve=no_serve
    )
    return search(setup, MemoryStudy(), evaluate, listener)


def test_a_gain_that_vanishes_behind_the_server_is_said_to_vanish() -> None:
    answer = answered(served=True, behind_the_server=1.0)
    assert answer.verdict is Verdict.NO_GAIN
    note = next(note for note in answer.notes if "vanishes behind the API server" in note)
    assert "in-process, the finalist had tokens_per_s +" in note


def test_nothing_vanishes_when_the_served_gain_is_there_or_nothing_was_served() -> None:
    for answer in (
        answered(served=True, behind_the_server=1.2),
        answered(served=False, behind_the_server=1.0, no_serve=True),
    ):
        assert not any("vanishes" in note for note in answer.notes)


@pytest.mark.parametrize(("path", "said"), [(1.0, None), (1.03, None), (1.28, "+2"), (0.7, "-3")])
def test_an_answer_says_that_served_engines_are_others_than_the_search_ranked_by(path: float, said: str | None) -> None:
    notes = [note for note in answered(served=True, behind_the_server=1.2, path=path).notes if "ranked by" in note]
    assert len(notes) == (said is not None)
    assert all(f"the baseline's tokens_per_s is {said}" in note and "--engine server" in note for note in notes)
    assert not any("ranked by" in note for note in answered(served=False, behind_the_server=1.2, path=path).notes)


def test_a_served_start_is_told_against_the_served_baseline() -> None:
    heard: list[Event] = []
    answered(served=True, behind_the_server=1.2, path=1.5, listener=heard.append)
    ended = [event for event in heard if isinstance(event, TrialEnded)]
    searched = [event for event in ended if event.record.stage is Stage.SEARCH]
    served = [event for event in ended if event.record.served]
    baselines = [event for event in served if event.record.arm is Arm.BASELINE]
    assert {event.against for event in searched} == {searched[0].value}
    assert {event.against for event in served} == {baselines[0].value}
    progress = Progress("tokens_per_s")
    lines = [progress.plain_line(event, 0.0) or "" for event in baselines]
    assert len(lines) >= 3
    assert ", 0.0 %" in lines[0]
    assert not any("+5" in line for line in lines), "what the server alone changes is no gain"


@pytest.mark.parametrize("machines", [1, 2])
def test_an_answer_says_that_it_was_confirmed_on_several_machines(machines: int) -> None:
    said = [note for note in answered(served=True, behind_the_server=1.2, machines=machines).notes if "sets of GPUs" in note]
    assert len(said) == machines - 1


def test_without_the_server_the_answer_says_so() -> None:
    said = "confirmed in-process (--no-serve): what the API server costs is not in these figures"
    assert said in answered(served=False, behind_the_server=1.0, no_serve=True).notes
    assert said not in answered(served=True, behind_the_server=1.2).notes
