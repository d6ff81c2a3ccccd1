"""What a command says at its end, however it is broken off, can be typed as it stands; doctor has a line for each leftover."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.killing import begin
from typer.testing import CliRunner

from vopt.optimizer import caches, doctor
from vopt.optimizer.cli import app
from vopt.optimizer.doctor import State, leftover_rows, study_rows, temporary_row
from vopt.optimizer.engine.simulated import SimulatedSession
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.locks import lock_study
from vopt.optimizer.study import list_studies, read_study
from vopt.optimizer.way_on import with_storage

pytestmark = pytest.mark.usefixtures("signal_handlers")

SEARCH = (
    *("search", "--goal", "throughput", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--trials", "2", "--rounds", "0"),
    *("--concurrency", "16", "--window", "1s", "--soak", "0"),
)
ELSEWHERE = "sqlite:///elsewhere.db"

BROKEN_OFF = """
import os, signal, sys
from vopt.optimizer import cli
from vopt.optimizer.{module} import {owner}
def again(call):
    def interrupted(*arguments, **named):
        os.kill(os.getpid(), signal.{name})
        return call(*arguments, **named)
    return interrupted
{owner}.{function} = again({owner}.{function})   # the first signal
cli.clean_text = again(cli.clean_text)           # a second and a third, while the first one's words are made
sys.argv = ["vopt", *{words!r}]
cli.main()
"""


def as_command(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("when", "module", "owner", "function"),
    [
        ("search", "engine.simulated", "SimulatedSession", "load"),
        ("answer", "report", "show", "answer_blocks"),
    ],
)
@pytest.mark.fault("interrupted, and again while that is said")
def test_a_second_signal_changes_neither_the_words_nor_the_code(
    tmp_path: Path, number: signal.Signals, when: str, module: str, owner: str, function: str
) -> None:
    words = [*SEARCH, "--quiet"]
    ended = as_command(
        tmp_path, BROKEN_OFF.format(module=module, owner=owner, function=function, name=number.name, words=words)
    )
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "vopt: interrupted; the study qwen3-8b-throughput-1" in ended.stderr
    assert f"try: vopt {'show' if when == 'answer' else 'resume'} qwen3-8b-throughput-1" in ended.stderr


PREFLIGHT = """
import os, signal, sys
from vopt.optimizer import cli, launch
def prepare(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
launch.prepare = prepare
said = cli.clean_text
def clean_text(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return said(*arguments)
cli.clean_text = clean_text
sys.argv = ["vopt", *{words!r}]
cli.main()
"""


@pytest.mark.fault("interrupted in the preflight of search and resume")
def test_an_interrupted_preflight_ends_with_what_there_is(tmp_path: Path) -> None:
    fresh = as_command(tmp_path, PREFLIGHT.format(words=[*SEARCH, "--quiet"]))
    assert (fresh.returncode, fresh.stderr) == (130, "vopt: interrupted\n")
    assert list(tmp_path.iterdir()) == []
    assert vopt_in(tmp_path, *SEARCH, "--quiet").returncode == 0
    again = as_command(tmp_path, PREFLIGHT.format(words=["resume", "--trials", "3", "--quiet"]))
    assert again.returncode == 130
    assert "try: vopt resume qwen3-8b-throughput-1" in again.stderr


def vopt_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; from vopt.optimizer.cli import main; sys.argv = ['vopt', *{list(words)!r}]; main()"
    return as_command(folder, code)


@pytest.mark.fault("interrupted, with the study in a storage of its own")
def test_the_line_to_type_finds_a_study_that_lies_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(SimulatedSession, "load", _interrupted)
        stopped = CliRunner().invoke(app, [*SEARCH, "--quiet", "--storage", ELSEWHERE])
    assert stopped.exit_code == 130, stopped.stderr
    line = re.search(r"try: vopt (.*)", stopped.stderr)
    assert line is not None
    assert CliRunner().invoke(app, [*shlex.split(line[1]), "--quiet"]).exit_code == 0
    (study,) = list_studies(ELSEWHERE)
    assert len(study.trials) == 2
    assert not (tmp_path / "studies.db").exists()
    ended = CliRunner().invoke(app, ["resume", study.name, "--storage", ELSEWHERE])
    for verb in ("report", "export"):
        assert f"vopt {verb} {study.name} --storage {ELSEWHERE}" in " ".join(ended.stderr.split())


def _interrupted(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_only_lines_that_name_a_study_are_given_its_storage() -> None:
    assert with_storage(line := f"vopt resume m-1 --trials 3 --storage {ELSEWHERE}", ELSEWHERE) == line, "it says so already"
    for same in ("vopt resume", "vopt resume --trials 3", "vopt clean", "vopt search … --seed-from m-1", "see vopt doctor"):
        assert with_storage(same, ELSEWHERE) == same
    assert with_storage("vopt resume m-1", "sqlite:///studies.db") == "vopt resume m-1"
    assert (
        with_storage("mend it, then: vopt resume m-1.", ELSEWHERE) == f"mend it, then: vopt resume m-1 --storage {ELSEWHERE}."
    )
    assert with_storage("vopt resume m-1 --trials 8, or", "sqlite:///a b.db") == (
        "vopt resume m-1 --storage 'sqlite:///a b.db' --trials 8, or"
    )


@pytest.mark.slow
@pytest.mark.fault("four searches begin a database at once")
def test_searches_that_begin_together_have_a_study_each(tmp_path: Path) -> None:
    running = [begin(tmp_path, SEARCH, {}) for _ in range(4)]
    codes = [search.wait(200) for search in running]
    assert codes == [0] * 4, (tmp_path / "said.txt").read_text()
    studies = list_studies(f"sqlite:///{tmp_path}/studies.db")
    assert {study.name for study in studies} == {f"qwen3-8b-throughput-{number}" for number in (1, 2, 3, 4)}
    assert all(len(study.trials) == 2 for study in studies)


@pytest.mark.slow
@pytest.mark.fault("two resumes at once")
def test_of_two_resumes_one_goes_on_and_the_other_is_told(tmp_path: Path) -> None:
    assert vopt_in(tmp_path, *SEARCH, "--quiet").returncode == 0
    lock = lock_study(tmp_path / "studies" / "qwen3-8b-throughput-1", "qwen3-8b-throughput-1")
    refused = vopt_in(tmp_path, "resume", "--trials", "3", "--quiet")
    lock.release()
    assert refused.returncode == 3
    assert f"is in use by a search of qwen3-8b-throughput-1 (process {os.getpid()}" in refused.stderr
    assert read_study(f"sqlite:///{tmp_path}/studies.db").setup["options"]["trials"] == 2, "the refused one changed nothing"
    both = [begin(tmp_path, ("resume", "--trials", "4"), {}) for _ in range(2)]
    codes = sorted(search.wait(200) for search in both)
    assert codes in ([0, 0], [0, 3]), (tmp_path / "said.txt").read_text()
    labels = [record.label for record in read_study(f"sqlite:///{tmp_path}/studies.db").trials]
    assert len(labels) == len(set(labels)) == 4


def test_doctor_names_studies_in_use_and_those_of_dead_searches(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    assert study_rows(url) == []
    with lock_study(tmp_path / "studies" / "a-1", "a-1"):
        (row,) = study_rows(url)
        assert (row.state, f"process {os.getpid()}" in row.text) == (State.NOTE, True)
    assert study_rows(url) == [], "released"
    code = (
        "import os; from pathlib import Path; from vopt.optimizer.locks import lock_study; "
        f"lock_study(Path({str(tmp_path)!r}) / 'studies' / 'a-1', 'a-1'); os.kill(os.getpid(), 9)"
    )
    as_command(tmp_path, code)
    (row,) = study_rows(url)
    assert "died" in row.text
    assert row.fix == f"vopt resume a-1 --storage {url}"
    assert study_rows("postgresql://host/db") == []


@pytest.mark.fault("nowhere to write, for doctor and clean")
def test_doctor_and_clean_say_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / f"vopt-{os.getuid()}").write_text("in the way")
    (row,) = leftover_rows()
    assert (row.state, row.fix) == (State.FAULT, f"ls -ld {tmp_path}")
    cleaned = CliRunner().invoke(app, ["clean"])
    assert (cleaned.exit_code, f"vopt-{os.getuid()}" in cleaned.stderr) == (3, True)
    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", _refused)
    assert (temporary_row().state, "TMPDIR=" in temporary_row().fix) == (State.FAULT, True)


def _refused(**named: str) -> None:
    raise FileNotFoundError(2, "No usable temporary directory found")


@pytest.mark.fault("no home directory")
def test_a_user_without_a_home_is_told_where_caches_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S -s "$@"\n')
    bare.chmod(0o755)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(EnvironmentLacks, match="no home directory") as caught:
        caches.cache_root()
    assert caught.value.hint.startswith("export XDG_CACHE_HOME=")
    found = CliRunner().invoke(app, ["doctor", "--python", str(bare)])
    assert found.exit_code == 3
    assert "export XDG_CACHE_HOME=" in found.stdout
