"""Trials that something outside breaks into: a killed supervisor, a stopped process, no place to write, a clock set back."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.children import children
from support.segments import SegmentWatch
from support.sessions import eventually, leader_of, plan, source, spec

from vopt.objectives.records import LoadStatus
from vopt.optimizer.engine import server
from vopt.optimizer.engine.failures import disturbed
from vopt.optimizer.engine.kin import Identity, alive, descendants, identity
from vopt.optimizer.engine.leftovers import Manifest, begin, sweep
from vopt.optimizer.engine.process import ProcessSession
from vopt.optimizer.engine.server import ServerSession
from vopt.optimizer.engine.supervised import SupervisedProcess
from vopt.optimizer.interruption import Interruption
from vopt.optimizer.load import health
from vopt.optimizer.trial import Blame, Deadlines, EngineFailure, Failed, FailureKind, Phase

STUB = Path(__file__).parents[2] / "support" / "stub_vllm"

DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:   # of no session, parent or name that was written down
        how = sys.argv[2]
        if how == "closes":
            for fd in (0, 1, 2):
                os.close(fd)
        code = "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()}\\\\n'); time.sleep(600)"
        environment = dict(os.environ) if how == "closes" else {}
        os.execve(sys.executable, [sys.executable, "-S", "-c", code, sys.argv[1]], environment)
    os._exit(0)
os.wait()
"""


def no_phase(phase: Phase, words: str) -> None: ...


def pid_in(path: Path) -> Identity:
    eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    found = identity(int(path.read_text()))
    assert found is not None
    return found


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Callable[..., ProcessSession]]:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S -s "$@"\n')
    bare.chmod(0o755)
    sessions: list[ProcessSession] = []

    def make(**environment: str) -> ProcessSession:
        wanted = spec(tmp_path / "0", "some/model", str(bare), tmp_path / "cache")
        wanted = replace(
            wanted,
            environment={"PYTHONPATH": str(STUB), **environment},
            deadlines=Deadlines(start_s=30.0, load_s=60.0, stop_s=5.0),
        )
        sessions.append(ProcessSession(wanted))
        return sessions[-1]

    before = children()
    with SegmentWatch() as watch:
        yield make
        assert [session.close() for session in sessions] == [()] * len(sessions)
        assert watch.left() == []
    assert children() <= before


def supervisor_of(session: ProcessSession) -> int:
    assert session._hosted is not None
    return session._hosted.process._identity.pid


def failure_of(action: Callable[[], object]) -> Failed:
    with pytest.raises(EngineFailure) as caught:
        action()
    return caught.value.failed


@pytest.mark.parametrize("how", ["closes", "forgets"])
@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.fault("supervisor killed, a daemon of the trial in a session of its own")
def test_a_daemon_that_nobody_noted_ends_with_its_trial(tmp_path: Path, how: str, noted: bool) -> None:
    """It has left session and parent since the last note, and (``forgets``) its environment or (``closes``) its output."""
    (tmp_path / "daemon.py").write_text(DAEMON)
    script = (
        "import subprocess, sys, time\n"
        f"subprocess.run([sys.executable, '-S', {str(tmp_path / 'daemon.py')!r}, {str(tmp_path / 'pid')!r}, {how!r}])\n"
        "time.sleep(600)\n"
    )
    process = SupervisedProcess([sys.executable, "-S", "-c", script], environment=dict(os.environ), log=tmp_path / "log")
    daemon, leader = pid_in(tmp_path / "pid"), identity(leader_of(process))
    assert leader is not None
    supervisor = process._identity
    manifest = process._manifest()
    if not noted:
        manifest.path.unlink()  # a disk that was full when it should have been written
    os.kill(supervisor.pid, signal.SIGKILL)
    assert process.poll(20.0) == -9
    assert process.stop() == ()
    assert not alive(daemon)
    assert not alive(leader)
    assert manifest.private_directory is not None
    assert not os.path.exists(manifest.private_directory)


@pytest.mark.fault("pid of a dead leader used again, by a leader of a session")
def test_a_session_whose_number_is_a_strangers_by_now_is_not_touched(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    try:
        who = identity(stranger.pid)
        assert who is not None
        dead = Identity(stranger.pid, who.start_ticks - 100)
        manifest = Manifest(tmp_path / "1.json", Identity(2**22 - 1, 1), dead, kin={dead}, private_directory="/tmp/vopt-none")
        assert manifest.living() == ()
        assert sweep(manifest) == ()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("when", ["start", "load"])
@pytest.mark.fault("supervisor killed, of a trial")
def test_a_killed_supervisor_is_no_fault_of_the_configuration(trial: Callable[..., ProcessSession], when: str) -> None:
    session = trial(STUB_FAULT="hang_start" if when == "start" else "")
    killed = []

    def kill() -> bool:
        if not killed:
            os.kill(supervisor_of(session), signal.SIGKILL)
            killed.append(True)
        return True

    if when == "start":
        failed = failure_of(lambda: session.start(lambda phase, words: kill() if words == "starting the engine" else None))
    else:
        session.start(no_phase)
        failed = failure_of(lambda: session.load(source(), plan(window_s=30.0), lambda tick: kill()))
    assert killed
    assert (failed.kind, failed.kind.blame) == (FailureKind.DISTURBED, Blame.INFRASTRUCTURE), failed.detail
    assert "supervisor of the trial was killed by signal 9" in failed.detail


@pytest.mark.parametrize("lacks", ["a place for notes", "a place for temporary files", "a place for the log"])
@pytest.mark.fault("nowhere to write, for a trial")
def test_a_trial_without_a_place_is_no_fault_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    log = tmp_path / "log"
    if lacks == "a place for notes":
        (tmp_path / "run" / f"vopt-{os.getuid()}").write_text("in the way")
    elif lacks == "a place for temporary files":
        for name in ("TMPDIR", "TEMP", "TMP"):
            monkeypatch.setenv(name, str(tmp_path / "absent"))
        monkeypatch.setattr(server, "READY_POLL_S", 0.02)
    else:
        log = tmp_path / "absent" / "log"
    process = SupervisedProcess(["/bin/sleep", "600"], environment=dict(os.environ), log=log)
    if lacks == "a place for temporary files":  # another place is found
        assert leader_of(process)
        assert process.stop(0.1) == ()
        assert process.disturbed is None
        return
    assert process.poll(20.0) == 127
    assert process.disturbed is not None
    number, words = process.disturbed
    assert "File exists" in words or "No such file" in words
    assert process.stop() == ()
    failed = disturbed(Failed(Phase.START, FailureKind.ENGINE_DIED, "x"), (number, words))
    assert (failed.kind, failed.kind.blame, failed.detail) == (FailureKind.STORAGE, Blame.INFRASTRUCTURE, words)
    assert list((tmp_path / "run").glob("*/trials/*")) == []


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, "disk_full"), (errno.EDQUOT, "disk_full"), (errno.EACCES, "storage")]
)
def test_what_a_full_disk_is_called(number: int, kind: str) -> None:
    assert disturbed(Failed(Phase.START, FailureKind.ENGINE_DIED, "x"), (number, "words")).kind == kind


@pytest.mark.fault("clock set back, shared memory made since")
def test_shared_memory_is_removed_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400.0)  # the trial began a day later than it is now
    manifest = begin(tmp_path / "log")
    monkeypatch.setattr(time, "time", real)
    segment = Path(f"/dev/shm/psm_clock_{os.getpid()}")
    code = f"import time; held = open({str(segment)!r}, 'w'); open({str(tmp_path / 'up')!r}, 'w').close(); time.sleep(600)"
    maker = subprocess.Popen([sys.executable, "-S", "-c", code])
    try:
        eventually((tmp_path / "up").exists)
        who = identity(maker.pid)
        assert who is not None
        manifest.kin = {who}
        again = Manifest.read(_written(manifest))
        assert sweep(again) == ()
        assert not segment.exists()
    finally:
        maker.kill()
        maker.wait()
        segment.unlink(missing_ok=True)


def _written(manifest: Manifest) -> Path:
    manifest.write()
    assert json.loads(manifest.path.read_text())
    return manifest.path


@pytest.mark.slow
@pytest.mark.fault("search stopped while a load goes on")
def test_a_search_that_reads_nothing_does_not_stop_the_load(trial: Callable[..., ProcessSession]) -> None:
    """As if it were stopped by Ctrl-Z: ticks fill the pipe to it within a second."""
    session = trial()
    session.start(no_phase)
    slept = []

    def on_tick(tick: object) -> bool:
        if not slept:
            slept.append(True)
            time.sleep(6.0)
        return True

    load = session.load(source(), replace(plan(window_s=4.0), tick_s=0.002), on_tick)
    assert load.status in (LoadStatus.COMPLETE, LoadStatus.UNSTEADY)
    assert load.client.max_lag_s < 3.0


@pytest.mark.slow
@pytest.mark.fault("trial process stopped for a while under load")
def test_a_trial_process_that_stood_still_is_measured_again(trial: Callable[..., ProcessSession]) -> None:
    session = trial()
    session.start(no_phase)
    stopped = []

    def on_tick(tick: object) -> bool:
        if not stopped:
            assert session._hosted is not None
            pid = leader_of(session._hosted.process)
            stopped.append(_stop_for(pid, health.STOOD_STILL_S + 2.0))
        return True

    try:
        failed = failure_of(lambda: session.load(source(), plan(window_s=60.0), on_tick))
    finally:
        for helper in stopped:
            helper.wait()
    assert (failed.phase, failed.kind) == (Phase.LOAD, FailureKind.DISTURBED), failed.detail
    assert "stood still" in failed.detail


def _stop_for(pid: int, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/sh", "-c", f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"])


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ServerSession]]:
    monkeypatch.setattr(server, "READY_POLL_S", 0.02)
    sessions: list[ServerSession] = []

    def make(clients: int, manner: str = "good") -> ServerSession:
        wanted = replace(
            spec(tmp_path / "served", "m", sys.executable, tmp_path / "cache"),
            environment={"PYTHONPATH": str(STUB), "STUB_SERVE": manner},
            deadlines=Deadlines(start_s=20.0, load_s=60.0, stop_s=5.0),
        )
        sessions.append(ServerSession(wanted, ("vllm", "serve", "m"), clients=clients))
        return sessions[-1]

    before = children()
    yield make
    assert [session.close() for session in sessions] == [()] * len(sessions)
    assert children() <= before


@pytest.mark.fault("served: search stopped for a while under load")
def test_a_client_that_stood_still_accuses_no_server(
    serve: Callable[..., ServerSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STOOD_STILL_S", 1.0)
    session = serve(1)
    session.start(no_phase)
    stopped: list[subprocess.Popen[bytes]] = []

    def on_tick(tick: object) -> bool:
        if not stopped:
            stopped.append(_stop_for(os.getpid(), 2.5))
        return True

    try:
        failed = failure_of(lambda: session.load(source(20, 4), plan(window_s=30.0, concurrency=2), on_tick))
    finally:
        for helper in stopped:
            helper.wait()
    assert (failed.phase, failed.kind) == (Phase.LOAD, FailureKind.DISTURBED), failed.detail
    assert "stood still" in failed.detail


@pytest.mark.slow
@pytest.mark.fault("served: a client process killed under load")
def test_a_killed_client_process_accuses_no_server(serve: Callable[..., ServerSession]) -> None:
    session = serve(2)
    session.start(no_phase)
    assert session._process is not None
    server_side = {session._process._identity.pid, leader_of(session._process)}
    killed: list[int] = []

    def on_tick(tick: object) -> bool:
        if not killed:
            spawned = [entry.identity.pid for entry in descendants(os.getpid()) if entry.parent == os.getpid()]
            clients = [pid for pid in spawned if pid not in server_side and b"spawn_main" in _words(pid)]
            os.kill(clients[-1], signal.SIGKILL)
            killed.append(clients[-1])
        return True

    failed = failure_of(lambda: session.load(source(20, 4), plan(window_s=30.0, concurrency=4), on_tick))
    assert killed
    assert (failed.phase, failed.kind) == (Phase.LOAD, FailureKind.DISTURBED), failed.detail
    assert "client process" in failed.detail


def _words(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize(("manner", "clients"), [("silent", 1), ("good", 1), pytest.param("good", 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.fault("served: search terminated in a start or under load")
def test_a_served_engine_ends_with_its_interrupted_search(
    serve: Callable[..., ServerSession], manner: str, clients: int, signals: int
) -> None:
    session = serve(clients, manner)

    def terminated(after_s: float) -> None:
        for number in range(signals):
            threading.Timer(after_s + 0.1 * number, os.kill, (os.getpid(), signal.SIGTERM)).start()

    with Interruption() as interruption:
        try:
            with interruption.waiting():
                if manner == "silent":
                    terminated(0.5)
                session.start(no_phase)
                terminated(0.5 if clients == 1 else 3.0)  # two clients take a moment to begin
                session.load(source(20, 4), plan(window_s=60.0, concurrency=4), lambda tick: True)
            raise AssertionError("nothing cut it off")
        except KeyboardInterrupt:
            pass
        try:
            with interruption.stopping():
                assert session.close() == ()
        except KeyboardInterrupt:
            assert session.close() == ()
        time.sleep(0.3)  # the last signal has come
