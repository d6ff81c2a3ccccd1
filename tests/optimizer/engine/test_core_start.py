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

from vopt.optimizer.engine import core_imports, core_start, kernel_tuning
from vopt.optimizer.engine.core_start import difference
from vopt.optimizer.engine.package import trial_package

STUB = Path(__file__).parents[2] / "support" / "stub_vllm"
MAIN = """
import faulthandler, gc, json, multiprocessing, os, resource, signal, sys, threading, time, warnings
from vopt.optimizer.engine import core_start

def state():
    "What a process has from where it came."
    lines = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return {
        "signals": {name: lines[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt")},
        "handlers": [str(signal.getsignal(number)).partition(" at ")[0] for number in sorted(signal.valid_signals())],
        "wakeup": signal.set_wakeup_fd(-1), "umask": lines["Umask"], "groups": lines["Groups"], "nice": os.nice(0),
        "cores": sorted(os.sched_getaffinity(0)), "policy": os.sched_getscheduler(0),
        "oom": open("/proc/self/oom_score_adj").read(), "session": os.getsid(0), "group": os.getpgid(0), "cwd": os.getcwd(),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "argv": sys.argv[:2], "path": sys.path, "flags": str(sys.flags), "options": sys._xoptions, "executable": sys.executable,
        "streams": [os.readlink(f"/proc/self/fd/{fd}").partition("[")[0] for fd in range(3)],
        "stdin": os.readlink(f"/proc/self/fd/{sys.stdin.fileno()}"),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()], "faults": faulthandler.is_enabled(),
        "filters": [str(entry) for entry in warnings.filters], "threads": threading.active_count(),
        "recursion": sys.getrecursionlimit(), "switch": sys.getswitchinterval(),
        "daemon": multiprocessing.current_process().daemon, "parent": multiprocessing.parent_process().pid == PARENT,
        "key": bytes(multiprocessing.current_process().authkey).hex() == KEY,
    }

def core(queue, said, parent=0, key=""):
    globals().update(PARENT=parent, KEY=key)
    import vopt.optimizer.engine.core_start as again
    queue.put({
        "said": said, "vllm": "vllm.v1.engine.async_llm" in sys.modules, "environment": dict(os.environ),
        "method": multiprocessing.get_start_method(), "parent": os.getppid(), "title": multiprocessing.current_process().name,
        "main": sys.modules["__main__"].__name__ if "__mp_main__" not in sys.modules else "__mp_main__",
        "spawns": multiprocessing.get_context("spawn").Process._Popen.__qualname__, "state": state(),
        "threads": getattr(sys.modules.get("torch"), "threads", None),
    })
    sys.exit(7)

class Own(multiprocessing.get_context("spawn").Process):
    def run(self):
        os._exit(5)

def native(queue, go):
    signal.alarm(60)
    child = multiprocessing.get_context("spawn").Process(target=core, args=(queue,), kwargs={"said": "worker"})
    child.start()
    child.join(60)
    os.read(go, 1)
    os._exit(child.exitcode)

def forked_as_vllm_prefers():
    queue, (read, write) = multiprocessing.get_context("spawn").Queue(), os.pipe()
    child = multiprocessing.get_context("fork").Process(target=native, args=(queue, read))
    child.start()
    worker = queue.get(timeout=60)
    core_start.end_server()
    alive = child.is_alive()  # not only then did that return
    os.write(write, b".")
    child.join(60)
    print(json.dumps({"alive": alive, "code": child.exitcode, "server": core_start._ended() is None,
                      "worker": worker["said"], "left": os.listdir(core_start.note().parent)}))

def kill_server():
    os.kill(core_start._server, signal.SIGKILL)
    while core_start._ended() is None:
        time.sleep(0.01)

def main(words):
    began = "server" in words and core_start.begin_server()
    import vllm.v1.engine.async_llm
    ready = began and core_start.server_is_ready()
    core_start.prepare(dict(os.environ) if ready else None)
    if "native" in words:
        return forked_as_vllm_prefers()
    if "killed" in words:
        kill_server()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.pop("VLLM_GONE", None)
    if "other" in words:
        os.environ["OMP_NUM_THREADS"] = "3"
    if "vllms" in words:
        os.environ["VLLM_OMP_NUM_THREADS_SET_BY_VLLM"] = "1"
    if "executable" in words:
        multiprocessing.set_executable(sys.argv[1])
    before = core_start.served()
    child = context.Process(target=core, args=(queue,), name="EngineCore", kwargs={
        "said": "hello", "parent": os.getpid(), "key": bytes(multiprocessing.current_process().authkey).hex()})
    child.start()
    report = queue.get(timeout=60)
    child.join(60)
    core_start.end_server()
    lost = [core_start._ended() is None, core_start.lost()]
    if lost[0]:
        kill_server()
    lost.append(core_start.lost())
    own = Own()
    own.start()
    own.join(60)
    print(json.dumps(report | {"ready": ready, "me": os.getpid(), "code": child.exitcode, "own": own.exitcode, "lost": lost,
                               "served": [before, core_start.served()]}))

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


def vllm_with(tmp_path: Path, initially: str = "", **modules: str) -> str:
    """The stand-in with more at its first import, and with these modules (``__`` for a dot): the path that finds it."""
    extra = tmp_path / "extra"
    (extra / "vllm").mkdir(parents=True)
    (extra / "vllm" / "__init__.py").write_text(f"__path__.append({str(STUB / 'vllm')!r})\nimport os, sys\n{initially}\n")
    for name, source in modules.items():
        file = extra.joinpath(*name.split("__")).with_suffix(".py")
        file.parent.mkdir(exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(source)
    return os.pathsep.join((str(trial_package()), str(extra), str(STUB)))


IN_SERVER = "if '-c' in open('/proc/self/cmdline').read().split(chr(0)):"


def test_a_core_is_forked_from_a_server_that_imported_and_is_otherwise_the_spawned_one(tmp_path: Path) -> None:
    spawned, _ = run(tmp_path, "spawns")
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
        assert report["served"] == [False, report is forked]
    for name in ("said", "environment", "method", "title", "main", "spawns", "code", "own"):
        assert forked[name] == spawned[name], name
    assert (forked["code"], forked["own"]) == (7, 5)
    for name, value in spawned["state"].items():
        assert forked["state"][name] == value, name
    for report in (spawned, forked):
        assert report["state"]["parent"]
        assert report["state"]["key"]


@pytest.mark.parametrize(("word", "name"), [("other", "OMP_NUM_THREADS"), ("executable", "")])
def test_what_libraries_read_when_they_are_loaded_needs_a_process_of_its_own(tmp_path: Path, word: str, name: str) -> None:
    report, said = run(tmp_path, "server", word)
    assert report["ready"]
    assert report["parent"] == report["me"]
    assert not report["vllm"]
    assert not report["lost"][0], "a server that nothing came from does not stay"
    assert (f"since {name} changed" in said) == bool(name)


def test_threads_that_vllm_sets_for_a_core_are_torchs_setting_in_a_forked_one(tmp_path: Path) -> None:
    """0.32 and later do so around the start of a core; a user's own number is there before, and changes nothing."""
    torch = "import sys, types\ntorch = types.ModuleType('torch')\ntorch.threads = 8\n"
    torch += "torch.set_num_threads = lambda number: setattr(torch, 'threads', number)\nsys.modules['torch'] = torch"
    path = vllm_with(tmp_path, "", vllm__compilation__backends=torch)
    report, said = run(tmp_path, "server", "other", "vllms", PYTHONPATH=path)
    assert "vopt: EngineCore is forked" in said
    assert report["environment"]["OMP_NUM_THREADS"] == "3"
    assert report["threads"] == 3
    own, said = run(tmp_path, "server", PYTHONPATH=path, OMP_NUM_THREADS="5")
    assert "vopt: EngineCore is forked" in said
    assert (own["environment"]["OMP_NUM_THREADS"], own["threads"]) == ("5", 8)


UNFIT = {
    "touched": (
        "",
        "import vopt.optimizer.engine.core_imports as imports\nimports.initialised_cuda = lambda: True",
        "touched the GPU",
    ),
    "thread": (
        f"import threading, time\n{IN_SERVER} threading.Timer(60, print).start()",
        "",
        "left threads: Thread-1",
    ),
    "raises": (f"{IN_SERVER} raise RuntimeError('no\\nsuch device')", "", "RuntimeError: no such device"),
    "lacks": ("", f"{IN_SERVER} import what_nobody_has", "No module named 'what_nobody_has'"),
    "ends": (f"{IN_SERVER} os._exit(3)", "", "it ended"),
}


@pytest.mark.parametrize("how", UNFIT)
def test_a_server_whose_imports_went_another_way_is_not_used(tmp_path: Path, how: str) -> None:
    """It touched the GPU, as a module that asks CUDA for the device does; what it has is not all; it is gone."""
    initially, backends, why = UNFIT[how]
    path = vllm_with(tmp_path, initially, vllm__compilation__backends=backends)
    report, said = run(tmp_path, "server", PYTHONPATH=path)
    assert not report["ready"]
    assert report["parent"] == report["me"]
    assert (report["said"], report["code"]) == ("hello", 7)
    assert next(line for line in said.splitlines() if line.startswith("vopt: the fork server is not used: ")).endswith(why)
    assert not report["lost"][0], "it does not stay"


def test_without_a_place_for_a_server_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "t" / "core-imports").mkdir(parents=True)
    report, said = run(tmp_path, "server")
    assert not report["ready"]
    assert report["parent"] == report["me"]
    assert report["code"] == 7
    assert "vopt: there is no fork server: [Errno 21]" in said


def test_what_only_a_new_program_heeds_needs_one(tmp_path: Path) -> None:
    """What the imports set is the same in the server, which had begun by then."""
    path = vllm_with(tmp_path, "os.environ['MALLOC_ARENA_MAX'] = '1'\nos.environ['LD_LIBRARY_PATH'] = '/opencv'")
    report, said = run(tmp_path, "server", PYTHONPATH=path)
    assert report["ready"]
    assert report["parent"] == report["me"]
    assert report["environment"]["MALLOC_ARENA_MAX"] == "1"
    assert "since MALLOC_ARENA_MAX changed" in said


@pytest.mark.parametrize(("value", "ready"), [("1", False), (" True", False), ("0", True)])
def test_cudas_compatibility_libraries_are_found_by_new_programs_only(tmp_path: Path, value: str, ready: bool) -> None:
    report, _ = run(tmp_path, "server", VLLM_ENABLE_CUDA_COMPATIBILITY=value)
    assert report["ready"] is ready
    assert (report["parent"] == report["me"]) is not ready
    assert report["code"] == 7


def test_a_server_that_is_gone_when_the_core_begins_is_not_missed(tmp_path: Path) -> None:
    report, said = run(tmp_path, "server", "killed")
    assert report["ready"]
    assert report["parent"] == report["me"]
    assert (report["said"], report["code"]) == ("hello", 7)
    assert "is forked" not in said
    assert report["lost"] == [False, None, None], "nothing depended on it"


def test_a_fork_that_fails_is_a_spawn(tmp_path: Path) -> None:
    """The server ends in the midst of what it was asked for, as it does when there is no memory for a fork."""
    fork = f"def fork(): raise OSError(12, 'Cannot allocate memory')\n{IN_SERVER} os.fork = fork"
    report, said = run(tmp_path, "server", PYTHONPATH=vllm_with(tmp_path, fork))
    assert report["ready"]
    assert report["parent"] == report["me"]
    assert (report["said"], report["code"]) == ("hello", 7)
    assert "vopt: EngineCore is spawned after all: EOFError" in said
    assert report["lost"] == [False, None, None]


def test_the_end_of_a_server_is_told_as_long_as_something_came_from_it(tmp_path: Path) -> None:
    report, _ = run(tmp_path, "server")
    assert report["lost"] == [True, None, "the fork server that EngineCore came from was killed by signal 9"]


def test_a_core_that_vllm_forks_itself_keeps_no_server_alive(tmp_path: Path) -> None:
    """Nor does it use it for what it spawns: the server is no child of its."""
    report, said = run(tmp_path, "server", "native")
    assert report == {"alive": True, "code": 7, "server": False, "worker": "worker", "left": report["left"]}
    assert not [name for path in (tmp_path / "t").rglob("*") if (name := path.name).startswith("listener-")]
    assert "is forked" not in said


def test_a_process_that_lost_its_server_before_it_began_does_not_begin() -> None:
    """Another was spawned in its place, perhaps: the server ended before it told of the fork."""
    began: list[int] = []
    with pytest.raises(SystemExit):
        core_start.begin({}, os.getpid(), began.append, 1)
    assert began == []


@pytest.mark.parametrize(("answer", "initialised"), [(3, False), (0, True), (100, True)])
def test_the_driver_says_whether_it_is_initialised(monkeypatch: pytest.MonkeyPatch, answer: int, initialised: bool) -> None:
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: answer)
    monkeypatch.setattr(core_imports.ctypes, "CDLL", lambda name: driver)
    assert core_imports.initialised_cuda() is initialised


def test_without_a_driver_nothing_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_imports, "LIBRARY", "libcuda-that-is-not-there.so.1")
    assert not core_imports.initialised_cuda()


def test_a_device_that_is_open_was_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(core_imports, "LIBRARY", "libcuda-that-is-not-there.so.1")
    monkeypatch.setattr(core_imports, "DEVICES", (f"{tmp_path}/dri/",))
    (tmp_path / "dri").mkdir()
    assert core_imports.opened_devices() == []
    with (tmp_path / "dri" / "renderD128").open("w"):
        assert core_imports.opened_devices() == [f"{tmp_path}/dri/renderD128"]
        assert core_imports.state() == core_imports.TOUCHED


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    stand_in = SimpleNamespace(_run_in_subprocess=lambda function: f"vLLM's own {function()}")
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.registry", stand_in)  # type: ignore[arg-type]  # no module
    monkeypatch.setattr(core_start, "_ended", lambda: None)
    monkeypatch.setattr(core_start, "_begun_in", dict(os.environ))
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
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(core_start, "_ended", lambda: True)
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
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.registry", other)  # type: ignore[arg-type]  # no module
    core_start.inspect_in_fork({})
    assert vars(other) == {}


INSPECTED = """
import os, sys, time, types
from vopt.optimizer.engine import core_start

def seven(): return 7
def fails(): raise ValueError("no such class")
def ends(): os._exit(3)
def hangs(): time.sleep(600)

if __name__ == "__main__":
    core_start.INSPECTION_S = 1.0
    registry = types.SimpleNamespace(_run_in_subprocess=lambda function: "own")
    sys.modules["vllm.model_executor.models.registry"] = registry
    assert core_start.begin_server() and core_start.server_is_ready()
    core_start.prepare(dict(os.environ))
    print([registry._run_in_subprocess(function) for function in (seven, fails, ends, hangs, seven)])
    core_start.end_server()
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    print([pid for pid in children if b"resource_tracker" not in open(f"/proc/{pid}/cmdline", "rb").read()])
"""


def test_whatever_becomes_of_a_forked_inspection_the_trial_goes_on(tmp_path: Path) -> None:
    path = vllm_with(tmp_path, vllm__plugins__unused="")
    (tmp_path / "extra" / "vllm" / "plugins" / "__init__.py").write_text("def load_general_plugins(): pass\n")
    (tmp_path / "extra" / "cloudpickle.py").write_text("from pickle import dumps\n")
    script = tmp_path / "inspected.py"
    script.write_text(INSPECTED)
    done = subprocess.run(
        [os.path.realpath(sys.executable), "-S", "-s", str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
    )
    assert done.stdout.splitlines() == ["[7, 'own', 'own', 'own', 7]", "[]"], done.stderr
    inspected = "vopt: the model's class was inspected in a forked process"
    again = "vopt: the model's class is inspected again: "
    assert done.stderr.splitlines() == [
        inspected,
        f"{again}RuntimeError: ValueError: no such class",
        f"{again}EOFError:",
        f"{again}TimeoutError: no answer for 1 s",
        inspected,
    ], "and nothing else: a traceback would be taken for what ended the engine"


class Tuner:
    def run(self) -> None: ...

    def check_disk_cache(self, tuning_key: object, configs: object, bench_fn: object) -> None: ...


class LaterTuner(Tuner):
    def check_disk_cache(self, tuning_key: object, configs: object, bench_fn: object, more: object = None) -> None: ...


class EarlierTuner:
    def run(self) -> None: ...


@pytest.mark.parametrize(("tuner", "changes"), [(Tuner, True), (LaterTuner, False), (EarlierTuner, False)])
def test_a_triton_that_tunes_in_another_way_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tuner: type[Any], changes: bool
) -> None:
    fresh = type("Autotuner", (), {**vars(tuner), "run": tuner.run})
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(AsyncCompileMode=None))  # type: ignore[arg-type]  # no module
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace())  # type: ignore[arg-type]  # no module
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", SimpleNamespace(Autotuner=fresh))  # type: ignore[arg-type]  # no module
    kernel_tuning.compile_side_by_side()
    assert (fresh.run is not tuner.run) is changes
    kernel_tuning.compile_side_by_side()
    assert getattr(fresh.run, "side_by_side", False) is changes


def test_environments_differ_by_name() -> None:
    assert difference({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == {"a": None, "b": "3", "c": "4"}
    assert difference({"a": "1"}, {"a": "1"}) == {}
