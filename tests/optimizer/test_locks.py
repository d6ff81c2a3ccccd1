"""Locks between searches: exclusive, released by any death, never stuck on a dead owner."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from vopt.optimizer import locks
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.locks import Lock, Locked, Owner, held_gpu_locks, lock_gpus, lock_study, owner_of

HOLD = """
    import os, sys, time
    from pathlib import Path
    from vopt.optimizer.locks import Lock
    lock = Lock(Path(sys.argv[1]), "study x").acquire("a search of x")
    if len(sys.argv) > 2 and os.fork() == 0:   # a child that inherits the lock and outlives its parent
        os.write(1, f"{os.getpid()}\\n".encode())
        time.sleep(600)
    os.write(1, b"held\\n")
    time.sleep(600)
"""


@contextmanager
def holder(path: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Another process that holds the lock, and the lines that it said."""
    argv = [sys.executable, "-c", textwrap.dedent(HOLD), str(path), *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(1 + len(words))]
        try:
            yield process, lines
        finally:
            process.kill()
            for line in lines:
                if line.isdigit():
                    os.kill(int(line), 9)


def test_where_folders_cannot_be_locked_the_owner_is_named_and_a_dead_one_put_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS: an exclusive lock takes a file that is open for writing, which no folder is."""
    real = fcntl.flock

    def of_files_only(fd: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", of_files_only)
    path = tmp_path / "lock"
    with holder(path, "and a child") as (process, _):
        with pytest.raises(Locked, match=f"process {process.pid}"):
            Lock(path, "study x").acquire("a second search")
        process.kill()
        process.wait()
        Lock(path, "study x").acquire("a search of x").release()


@pytest.mark.fault("two searches on one study")
def test_the_second_search_is_told_who_holds_the_study(tmp_path: Path) -> None:
    with lock_study(tmp_path / "qwen-throughput-1", "qwen-throughput-1"):
        with pytest.raises(Locked) as caught:
            lock_study(tmp_path / "qwen-throughput-1", "qwen-throughput-1")
        assert f"process {os.getpid()}" in caught.value.message
        assert "vopt resume qwen-throughput-1" in caught.value.hint
        assert isinstance(caught.value, EnvironmentLacks)
    lock_study(tmp_path / "qwen-throughput-1", "qwen-throughput-1").release()


@pytest.mark.fault("owner of a lock killed")
def test_sigkill_of_the_owner_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as (process, lines):
        assert lines == ["held"]
        with pytest.raises(Locked):
            Lock(path, "study x").acquire("mine")
        process.kill()
        process.wait()
        Lock(path, "study x").acquire("mine").release()


@pytest.mark.fault("lock held by a child of a dead owner")
def test_a_child_of_a_dead_owner_does_not_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path, "fork") as (process, lines):
        assert "held" in lines
        process.kill()
        process.wait()
        lock = Lock(path, "study x").acquire("mine")
        with pytest.raises(Locked):
            Lock(path, "study x").acquire("another's")
        lock.release()


@pytest.mark.fault("several take the lock of a dead owner at once")
def test_only_one_takes_the_lock_of_a_dead_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "lock", locks.owner_of

    def slowly(where: Path) -> Owner | None:
        found = seen(where)
        time.sleep(0.1)  # long enough for all others to see the same dead owner
        return found

    def take(_: int) -> Lock | None:
        try:
            return Lock(path, "study x").acquire("mine")
        except Locked:
            return None

    with holder(path, "fork") as (process, lines):
        assert "held" in lines
        process.kill()
        process.wait()
        monkeypatch.setattr(locks, "owner_of", slowly)
        with ThreadPoolExecutor(6) as several:
            taken = [lock for lock in several.map(take, range(6)) if lock is not None]
        assert len(taken) == 1
        taken[0].release()


def test_an_owner_on_another_host_is_believed(tmp_path: Path) -> None:
    with Lock(tmp_path / "lock", "study x").acquire("mine"):
        owner = owner_of(tmp_path / "lock")
        assert owner is not None
        assert not owner.dead
        assert replace(owner, pid=2**22 - 1).dead
        assert replace(owner, boot="another").dead
        assert replace(owner, start_ticks=owner.start_ticks - 1).dead, "its pid was used again"
        assert not replace(owner, host="elsewhere", pid=2**22 - 1).dead
        assert "elsewhere" in replace(owner, host="elsewhere").words()


@pytest.mark.fault("GPU in use by another search")
def test_gpus_are_locked_all_or_none(tmp_path: Path) -> None:
    (other,) = lock_gpus(["GPU-b"], "search one", folder=tmp_path)
    with pytest.raises(Locked, match="GPU-b is in use by search one"):
        lock_gpus(["GPU-c", "GPU-a", "GPU-b"], "search two", folder=tmp_path)
    assert [uuid for uuid, _ in held_gpu_locks(tmp_path)] == ["GPU-b"]
    other.release()
    for lock in lock_gpus(["GPU-a", "GPU-b"], "search two", folder=tmp_path):
        lock.release()
    assert held_gpu_locks(tmp_path) == ()


@pytest.mark.fault("corrupt lock file")
def test_a_corrupt_lock_file_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for text in ("", "{", json.dumps({"pid": 1}), "[]"):
        path.write_text(text)
        with Lock(path, "study x").acquire("mine"):
            owner = owner_of(path)
            assert owner is not None
            assert asdict(owner)["purpose"] == "mine"
