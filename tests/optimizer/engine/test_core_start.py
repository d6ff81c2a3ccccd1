"""What vLLM spawns in a trial: the same process as ever, with its imports done. On a bare interpreter, with vLLM's stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vopt.optimizer.engine import core_imports, core_start
from vopt.optimizer.engine.core_start import difference
from vopt.optimizer.engine.package import trial_package

STUB = Path(__file__).parents[2] / "support" / "stub_vllm"
MAIN = """
import json, multiprocessing, os, sys
from vopt.optimizer.engine import core_start

def core(queue, said):
    import vopt.optimizer.engine.core_start as again
    queue.put({
        "said": said, "vllm": "vllm.v1.engine.async_llm" in sys.modules, "environment": dict(os.environ),
        "method": multiprocessing.get_start_method(), "parent": os.getppid(), "title": multiprocessing.current_process().name,
        "main": sys.modules["__main__"].__name__ if "__mp_main__" not in sys.modules else "__mp_main__",
        "spawns": multiprocessing.get_context("spawn").Process._Popen.__qualname__,
    })
    sys.exit(7)

class Own(multiprocessing.get_context("spawn").Process):
    def run(self):
        os._exit(5)

def main(words):
    if "server" in words:
        core_start.begin_server()
    import vllm.v1.engine.async_llm
    ready = "server" in words and core_start.server_is_ready()
    core_start.prepare(dict(os.environ) if ready else None)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.pop("VLLM_GONE", None)
    if "other" in words:
        os.environ["OMP_NUM_THREADS"] = "3"
    if "executable" in words:
        multiprocessing.set_executable(sys.argv[1])
    before = core_start.spawned()
    child = context.Process(target=core, args=(queue,), kwargs={"said": "hello"}, name="EngineCore")
    child.start()
    report = queue.get(timeout=60)
    child.join(60)
    own = Own()
    own.start()
    own.join(60)
    print(json.dumps(report | {"ready": ready, "me": os.getpid(), "code": child.exitcode, "own": own.exitcode,
                               "spawned": [before, core_start.spawned()]}))

if __name__ == "__main__":
    main(sys.argv[2:])
"""


def run(tmp_path: Path, *words: str, **environment: str) -> tuple[dict[str, Any], str]:
    """A trial process of these words, as far as the start of its core; (what the core saw, what the log says)."""
    script = tmp_path / "trial.py"
    script.write_text(textwrap.dedent(MAIN))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S -s "$@"\n')
    python.chmod(0o755)
    temporary = tmp_path / "t"
    temporary.mkdir(exist_ok=True)
    done = subprocess.run(
        [os.path.realpath(sys.executable), "-S", "-s", str(script), str(python), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join((str(trial_package()), str(STUB))),
            "TMPDIR": str(temporary),
            "VLLM_GONE": "1",
            **environment,
        },
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report, done.stderr


def test_a_core_is_forked_from_a_server_that_imported_and_is_otherwise_the_spawned_one(tmp_path: Path) -> None:
    spawned, _ = run(tmp_path)
    forked, said = run(tmp_path, "server")
    assert spawned["parent"] == spawned["me"]
    assert not spawned["ready"]
    assert not spawned["vllm"]
    assert forked["ready"]
    assert forked["parent"] != forked["me"]
    assert forked["vllm"], "its imports were done before it began"
    assert "EngineCore is forked" in said
    for report in (spawned, forked):
        assert report["environment"]["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        assert "VLLM_GONE" not in report["environment"]
        assert report["spawned"] == [False, True]
    for name in ("said", "environment", "method", "title", "main", "spawns", "code", "own"):
        assert forked[name] == spawned[name], name
    assert (forked["code"], forked["own"]) == (7, 5)


@pytest.mark.parametrize(("word", "name"), [("other", "OMP_NUM_THREADS"), ("executable", "")])
def test_what_libraries_read_when_they_are_loaded_needs_a_process_of_its_own(tmp_path: Path, word: str, name: str) -> None:
    report, said = run(tmp_path, "server", word)
    assert report["ready"]
    assert report["parent"] == report["me"]
    assert not report["vllm"]
    assert (f"since {name} changed" in said) == bool(name)


def test_a_server_that_opened_the_gpu_is_not_used(tmp_path: Path) -> None:
    """As a module that asks CUDA for the device would leave it."""
    extra = tmp_path / "extra" / "vllm" / "compilation"
    extra.mkdir(parents=True)
    (extra.parent / "__init__.py").write_text(
        f"__path__.append({str(STUB / 'vllm')!r})\nfrom importlib.machinery import PathFinder\n__version__ = '0.32.0+stub'\n"
    )
    (extra / "__init__.py").write_text("")
    (extra / "backends.py").write_text(
        "import vopt.optimizer.engine.core_imports as imports\nimports.initialised_cuda = lambda: True\n"
    )
    path = os.pathsep.join((str(trial_package()), str(tmp_path / "extra"), str(STUB)))
    report, _ = run(tmp_path, "server", PYTHONPATH=path)
    assert not report["ready"]
    assert report["parent"] == report["me"]


@pytest.mark.parametrize(("answer", "initialised"), [(3, False), (0, True), (100, True)])
def test_the_driver_says_whether_it_is_initialised(monkeypatch: pytest.MonkeyPatch, answer: int, initialised: bool) -> None:
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: answer)
    monkeypatch.setattr(core_imports.ctypes, "CDLL", lambda name: driver)
    assert core_imports.initialised_cuda() is initialised


def test_without_a_driver_nothing_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_imports, "LIBRARY", "libcuda-that-is-not-there.so.1")
    assert not core_imports.initialised_cuda()


def test_imports_that_fail_leave_vllm_to_say_why(tmp_path: Path) -> None:
    broken = tmp_path / "extra" / "vllm"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(
        "import multiprocessing, os, sys\n"
        "if 'forkserver' in ' '.join(open('/proc/self/cmdline').read().split(chr(0))): raise RuntimeError('no such device')\n"
        f"__path__.append({str(STUB / 'vllm')!r})\n"
    )
    path = os.pathsep.join((str(trial_package()), str(tmp_path / "extra"), str(STUB)))
    report, _ = run(tmp_path, "server", PYTHONPATH=path)
    assert report["code"] == 7
    assert report["said"] == "hello"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    stand_in = SimpleNamespace(_run_in_subprocess=lambda function: f"vLLM's own {function()}")
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.registry", stand_in)  # type: ignore[arg-type]
    return stand_in


def test_a_models_class_is_inspected_in_a_fork_if_that_can_be_done(
    registry: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_start, "_in_fork", lambda environment, function: (dict(environment), function()))
    core_start.inspect_in_fork(dict(os.environ))
    assert registry._run_in_subprocess(lambda: 7) == ({}, 7)
    monkeypatch.setenv("VLLM_SOMETHING", "1")
    assert registry._run_in_subprocess(lambda: 7) == ({"VLLM_SOMETHING": "1"}, 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert registry._run_in_subprocess(lambda: 7) == "vLLM's own 7"


def test_what_fails_in_a_fork_is_inspected_as_vllm_does(
    registry: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(environment: object, function: object) -> None:
        raise EOFError("the process is gone")

    monkeypatch.setattr(core_start, "_in_fork", fails)
    core_start.inspect_in_fork(dict(os.environ))
    assert registry._run_in_subprocess(lambda: 7) == "vLLM's own 7"
    assert "vopt: the model's class is inspected again: EOFError: the process is gone" in capsys.readouterr().err


def test_another_vllm_without_that_function_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.registry", other)  # type: ignore[arg-type]
    core_start.inspect_in_fork({})
    assert vars(other) == {}


def test_environments_differ_by_name() -> None:
    assert difference({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == {"a": None, "b": "3", "c": "4"}
    assert difference({"a": "1"}, {"a": "1"}) == {}
