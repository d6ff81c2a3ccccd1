"""Engine cores that vLLM would spawn, forked from a server that imported it: the real vLLM for the CPU, which always spawns.

There it sets variables that libraries read when they are loaded, so a core of its own is spawned. Here they are set before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.segments import SegmentWatch
from support.sessions import eventually, leader_of, named, plan, source, spec

from vopt.objectives.records import LoadStatus
from vopt.optimizer.engine import spare
from vopt.optimizer.engine.kin import descendants
from vopt.optimizer.engine.process import ProcessSession
from vopt.optimizer.engine.spare import Hosted, Spares
from vopt.optimizer.trial import EngineFailure, Failed, FailureKind, Phase

pytestmark = pytest.mark.vllm

TUNED_KERNEL = Path(__file__).parents[1] / "support" / "tuned_kernel.py"
Opened = Callable[..., ProcessSession]


class Serving(Spares):
    """Spares as on a GPU host with many cores."""

    def spawn(self, python: str, environment: Mapping[str, str], log: Path, *, cpu_build: bool = False) -> Hosted:
        return spare.spawn(python, environment, log, server=True)


def set_before() -> dict[str, str]:
    """What ``platforms/cpu.py`` sets once vLLM is imported, and leaves as it is when it finds it."""
    site = Path(str(importlib.util.find_spec("vllm").origin)).parents[1]  # type: ignore[union-attr]  # vllm_python skips without it
    libraries = [
        next(iter(sorted(site.glob(pattern))), None) for pattern in ("vllm/libs/libtcmalloc*.so*", "torch*/**/libgomp*.so*")
    ]
    return {
        "NUMEXPR_MAX_THREADS": str(len(os.sched_getaffinity(0))),
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
        "LOCAL_WORLD_SIZE": "1",
        "LD_PRELOAD": ":".join(map(str, filter(None, libraries))),
    }


@pytest.fixture
def opened(tmp_path: Path, vllm_python: str, tiny_models: tuple[Path, Path]) -> Iterator[Opened]:
    sessions: list[ProcessSession] = []

    def make(environment: Mapping[str, str], **arguments: Any) -> ProcessSession:
        wanted = spec(tmp_path / str(len(sessions)), tiny_models[0], vllm_python, tmp_path / "cache", **arguments)
        sessions.append(ProcessSession(dataclasses.replace(wanted, environment=environment), Serving()))
        return sessions[-1]

    with SegmentWatch() as watch:
        yield make
        assert all(session.close() == () for session in sessions)
        assert descendants(os.getpid()) == ()
        assert watch.left() == []


def no_phase(phase: Phase, words: str) -> None: ...


def said(session: ProcessSession) -> list[str]:
    return [line for line in session.log.read_text().splitlines() if line.startswith("vopt:")]


def test_a_forked_core_is_the_engine_that_a_spawned_one_is(opened: Opened) -> None:
    forked, spawned = opened(set_before(), max_num_seqs=8), opened({}, max_num_seqs=8)
    started = forked.start(no_phase)
    assert said(forked) == [
        "vopt: the model's class was inspected in a forked process",
        "vopt: EngineCore is forked, its imports are done",
    ]
    (core,) = named("VLLM::EngineC")
    assert core.parent != leader_of(forked._up.process)
    result = forked.load(source(), plan(window_s=2.0), lambda tick: True)
    assert result.status in (LoadStatus.COMPLETE, LoadStatus.UNSTEADY)
    assert all(record.succeeded or record.censored for record in result.records)
    assert forked.close() == ()
    other = spawned.start(no_phase)
    assert len(said(spawned)) == 1
    assert "is spawned and imports again, since" in said(spawned)[0]
    assert "LD_PRELOAD" in said(spawned)[0]
    measured = {"num_gpu_blocks", "kv_cache_tokens"}  # by what this host's memory holds at that moment
    assert {name: value for name, value in started.resolved.items() if name not in measured} == {
        name: value for name, value in other.resolved.items() if name not in measured
    }
    assert started.kv_cache_tokens == pytest.approx(other.kv_cache_tokens, rel=0.02)


@pytest.mark.fault("forked engine core killed under load")
def test_the_death_of_a_forked_core_is_noticed(opened: Opened) -> None:
    session = opened(set_before())
    session.start(no_phase)
    (core,) = named("VLLM::EngineC")

    def kill(tick: Any) -> bool:
        if tick.at_s > 1.0:
            os.kill(core.identity.pid, signal.SIGKILL)
        return True

    with pytest.raises(EngineFailure) as caught:
        session.load(source(), plan(window_s=30.0), kill)
    assert caught.value.failed.kind is FailureKind.ENGINE_DIED
    assert caught.value.failed.phase is Phase.LOAD
    eventually(lambda: named("VLLM") == ())


def fork_server(session: ProcessSession) -> int:
    """The pid of the server that the core came from."""
    leader_of(session._up.process)
    (core,) = named("VLLM::EngineC")
    assert b"multiprocessing.forkserver" in Path(f"/proc/{core.parent}/cmdline").read_bytes()
    return core.parent


def check_nothing_is_left(session: ProcessSession) -> None:
    eventually(lambda: named("VLLM") == ())
    assert session._up.process._directory is not None
    assert not Path(session._up.process._directory).exists(), "the server's socket is in there"


def killed_under_load(session: ProcessSession, pid: int) -> Failed:
    """How a load ends in which this process is killed."""

    def kill(tick: Any) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    with pytest.raises(EngineFailure) as caught:
        session.load(source(), plan(window_s=30.0), kill)
    return caught.value.failed


@pytest.mark.fault("fork server of an engine core killed under load")
def test_the_death_of_the_server_is_no_fault_of_the_configuration(opened: Opened) -> None:
    """To vLLM the core ends with it."""
    session = opened(set_before())
    session.start(no_phase)
    failed = killed_under_load(session, fork_server(session))
    assert failed.kind is FailureKind.DISTURBED
    assert failed.detail == "the fork server that EngineCore came from was killed by signal 9"
    assert failed.load is not None
    check_nothing_is_left(session)


@pytest.mark.fault("fork server of an engine core killed while that starts")
def test_nor_is_it_while_the_core_starts(opened: Opened) -> None:
    session = opened(set_before())

    def kill() -> None:
        eventually(lambda: named("VLLM::EngineC"), 240.0)
        os.kill(fork_server(session), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(EngineFailure) as caught:
        session.start(no_phase)
    thread.join()
    assert caught.value.failed.kind is FailureKind.DISTURBED
    assert caught.value.failed.phase is Phase.START
    check_nothing_is_left(session)


@pytest.mark.fault("trial process of a forked engine core killed under load")
def test_the_death_of_the_trial_process_takes_server_and_core_along(opened: Opened) -> None:
    session = opened(set_before())
    session.start(no_phase)
    assert killed_under_load(session, leader_of(session._up.process)).kind is FailureKind.ENGINE_DIED
    check_nothing_is_left(session)


def tune(python: str, cache: Path, how: str) -> tuple[dict[str, Any], str]:
    source = Path(spare.__file__).parents[2]
    names = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(source.parent))))
    done = subprocess.run(
        [python, str(TUNED_KERNEL), str(cache), how],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": names},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document, done.stderr


def test_kernels_are_tuned_with_their_candidates_compiled_side_by_side(tmp_path: Path, vllm_python: str) -> None:
    """Triton's own tuning and compiling; which candidate wins is its own affair, and so is what a broken mode leaves."""
    plain, _ = tune(vllm_python, tmp_path / "plain", "plain")
    together, _ = tune(vllm_python, tmp_path / "together", "side-by-side")
    broken, words = tune(vllm_python, tmp_path / "broken", "broken")
    assert [timed["known_before"] for timed in plain["timed"]] == [0, 1, 2, 3, 4, 5]
    assert [timed["known_before"] for timed in together["timed"]] == [6] * 6, "all were compiled before the first was timed"
    assert plain["threads"] == ["MainThread"]
    assert "MainThread" not in together["threads"]
    assert plain["best"] == together["best"] == broken["best"] == [64, 4]
    assert plain["launched"] == together["launched"] == 4
    assert plain["names"] is together["names"] is None
    assert broken["timed"] == plain["timed"]
    assert "vopt: kernels are compiled one by one: TypeError" in words
    again, _ = tune(vllm_python, tmp_path / "together", "side-by-side")
    assert again["timed"] == [], "the winner is on disk"
    assert again["best"] == [64, 4]
