"""Shared memory of a trial is gone when the trial is, however its makers died; that of others stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.segments import SegmentWatch
from support.sessions import eventually

from vopt.optimizer.engine.drain import Drain
from vopt.optimizer.engine.held import Held, files_held, files_there, unlink_held
from vopt.optimizer.engine.kin import Identity, TrackersLast, alive, descendants, identity, is_resource_tracker, send_signal
from vopt.optimizer.engine.leftovers import Manifest, begin, run_directory
from vopt.optimizer.engine.supervised import SupervisedProcess
from vopt.optimizer.engine.supervisor import Supervisor
from vopt.optimizer.engine.wire import Channel

STAGES = ("opened", "mapped", "registered", "dropped", "died")
"""A segment's maker has it open but neither mapped nor registered; mapped, its descriptor closed, not registered; as
``SharedMemory`` leaves it; registered, map and descriptor closed, not unlinked; or was killed right after it made it."""

MAKERS = """
import _posixshmem, mmap, os, signal, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

where, prefix, stages = os.environ["WHERE"], os.environ["PREFIX"], os.environ["STAGES"].split()

def make(stage, name):
    if stage in ("opened", "mapped"):
        fd = _posixshmem.shm_open("/" + name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        if stage == "opened":
            return fd
        os.ftruncate(fd, 4096)
        kept = mmap.mmap(fd, 4096)   # has a descriptor of its own, which would hold the segment as well
        return kept
    segment = SharedMemory(name, create=True, size=4096)
    if stage == "dropped":
        segment.close()
    if stage == "died":
        os.kill(os.getpid(), signal.SIGKILL)
    return segment

def maker(stage, name):
    kept = make(stage, name)
    if stage == "mapped":
        for fd in os.listdir("/proc/self/fd"):
            try:
                if name in os.readlink("/proc/self/fd/" + fd):
                    os.close(int(fd))
            except OSError:
                pass
    with open(f"{where}/{name}", "w") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600)

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
resource_tracker.ensure_running()   # one for all, as in a tree of processes that multiprocessing spawned
for stage in stages:
    if os.fork() == 0:
        maker(stage, f"{prefix}{stage}_child")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            maker(stage, f"{prefix}{stage}_orphan")   # of a session of its own
        os._exit(0)
time.sleep(600)
"""


def spots(prefix: str, stages: tuple[str, ...]) -> list[Path]:
    return [Path(f"/dev/shm/{prefix}{stage}_{kind}") for stage in stages for kind in ("child", "orphan")]


class Made:
    """A supervised process below which segments are made, each at one of ``stages`` for good."""

    def __init__(self, folder: Path, stages: tuple[str, ...]) -> None:
        prefix = f"psm_test{os.getpid()}_{time.monotonic_ns()}_"
        (folder / "makers.py").write_text(MAKERS)
        self.folder, self.segments = folder, spots(prefix, stages)
        self.process = SupervisedProcess(
            [sys.executable, "-S", str(folder / "makers.py")],
            environment={**os.environ, "WHERE": str(folder), "PREFIX": prefix, "STAGES": " ".join(stages)},
            log=folder / "log.txt",
        )
        eventually(lambda: all(segment.exists() and self.ready(segment) for segment in self.segments))

    def ready(self, segment: Path) -> bool:
        """Whether its maker has come to its stage; whoever dies before it could say so is there when its segment is."""
        said = self.folder / segment.name
        return "_died_" in segment.name or (said.exists() and said.read_text().endswith("\n"))

    def maker(self, segment: Path) -> Identity:
        found = identity(int((self.folder / segment.name).read_text()))
        assert found is not None
        return found

    @property
    def manifest(self) -> Path:
        who = self.process._identity
        return run_directory() / "trials" / f"{who.pid}-{who.start_ticks}.json"

    def left(self) -> list[str]:
        found = [segment.name for segment in self.segments if segment.exists()]
        for name in found:
            os.unlink(f"/dev/shm/{name}")
        return found


@pytest.fixture
def watch() -> Iterator[SegmentWatch]:
    with SegmentWatch() as watch:
        yield watch


@pytest.mark.fault("SIGKILL of all at once, shared memory in every state")
def test_a_trial_that_must_be_killed_leaves_no_segment(tmp_path: Path, watch: SegmentWatch) -> None:
    made = Made(tmp_path, STAGES)
    eventually(lambda: watch.made >= 6)  # the watch of the tests on real engines sees what somebody holds
    assert made.process.stop(grace_s=0.0) == ()
    assert made.left() == []
    assert watch.left(0.0) == []


@pytest.mark.fault("makers of shared memory killed one by one")
def test_segments_that_were_seen_outlast_their_makers_but_not_the_trial(tmp_path: Path) -> None:
    made = Made(tmp_path, ("opened", "mapped"))
    eventually(lambda: {held.path for held in Manifest.read(made.manifest).held} >= set(map(str, made.segments)))
    makers = [made.maker(segment) for segment in made.segments]
    assert all(send_signal(who, signal.SIGKILL) for who in makers)
    eventually(lambda: not any(alive(who) for who in makers))
    assert all(segment.exists() for segment in made.segments)
    assert made.process.stop(0.0) == ()
    assert made.left() == []


@pytest.mark.slow
@pytest.mark.fault("supervisor killed, shared memory in every state")
def test_a_dead_supervisors_trial_leaves_no_segment(tmp_path: Path) -> None:
    made = Made(tmp_path, STAGES)
    makers = {made.maker(segment) for segment in made.segments if "_died_" not in segment.name}
    eventually(lambda: Manifest.read(made.manifest).kin >= makers)
    os.kill(made.process._identity.pid, signal.SIGKILL)
    assert made.process.poll(20.0) == -signal.SIGKILL
    assert made.process.stop() == ()
    assert made.left() == []


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that makes ``/dev/shm/psm_holder_PID`` when it is told to, unknown to any tracker, and keeps it open."""
    script = "import os, sys, time; sys.stdin.read(1); f = open(f'/dev/shm/psm_holder_{os.getpid()}', 'x'); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-S", "-c", script], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
    segment_of(process).unlink(missing_ok=True)


def segment_of(process: subprocess.Popen[bytes]) -> Path:
    return Path(f"/dev/shm/psm_holder_{process.pid}")


def make(process: subprocess.Popen[bytes]) -> Path:
    assert process.stdin is not None
    process.stdin.write(b"x")
    process.stdin.flush()
    eventually(segment_of(process).exists)
    return segment_of(process)


def test_a_new_segment_is_written_down_before_the_next_note_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("vopt.optimizer.engine.supervisor.RECORD_S", 1e9)
    raw_fd = os.open(tmp_path / "output", os.O_CREAT | os.O_RDWR, 0o600)
    ends = os.pipe()
    drain = Drain(raw_fd, tmp_path / "log.txt", cap_bytes=1000, secrets=())
    who = identity(holder.pid)
    assert who is not None
    supervisor = Supervisor(Channel(*ends), begin(tmp_path / "log.txt"), 1.0, drain, who)
    supervisor.record(now=True)
    assert supervisor.manifest.held == set()
    segment = make(holder)
    supervisor.record()
    assert Manifest.read(supervisor.manifest.path).held == {Held(str(segment), segment.stat().st_ino)}
    drain.close()
    supervisor.channel.close()


@pytest.mark.fault("shared memory of a stranger")
def test_what_a_stranger_holds_or_made_under_an_old_name_is_not_unlinked(holder: subprocess.Popen[bytes]) -> None:
    segment = make(holder)
    (held,) = files_held([holder.pid], earlier=frozenset())
    assert files_held([holder.pid], earlier=files_there()) == frozenset(), "it was there before"
    assert unlink_held([held]) == []
    assert segment.exists(), "somebody holds it"
    holder.kill()
    holder.wait()
    assert unlink_held([Held(held.path, held.inode + 1)]) == []
    assert segment.exists(), "it is another file than the one that was seen"
    assert unlink_held([held]) == []
    assert not segment.exists()


def test_trackers_are_killed_when_nothing_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("vopt.optimizer.engine.kin.time.monotonic", lambda: now[0])
    monkeypatch.setattr("vopt.optimizer.engine.kin.is_resource_tracker", lambda pid: pid == 1)
    tracker, other = Identity(1, 1), Identity(2, 2)
    order = TrackersLast()
    assert order.choose([tracker, other]) == (other,)
    now[0] += 60.0
    assert order.choose([tracker, other]) == (other,), "what does not die is waited for"
    assert order.choose([tracker]) == ()
    now[0] += 6.0
    assert order.choose([tracker]) == (tracker,), "a tracker has its time, and no more"


def test_a_real_tracker_is_known_by_its_command_line(tmp_path: Path) -> None:
    made = Made(tmp_path, ("registered",))
    below = [entry.identity.pid for entry in descendants(made.process._identity.pid)]
    assert sum(map(is_resource_tracker, below)) == 1
    assert made.process.stop(0.0) == ()
    assert made.left() == []
