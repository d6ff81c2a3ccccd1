"""A supervised command and everything below it: ended, drained, bounded and cleaned up, whoever dies first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vopt.optimizer.engine.kin import Identity, alive, identity
from vopt.optimizer.engine.supervised import SupervisedProcess


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SupervisedProcess]]:
    running: list[SupervisedProcess] = []

    def begin(script: str, **options: object) -> SupervisedProcess:
        path = tmp_path / f"script-{len(running)}.py"
        path.write_text(textwrap.dedent(script))
        environment = {**os.environ, "WHERE": str(tmp_path)}
        environment.update(options.pop("environment", {}))  # type: ignore[call-overload]  # a test's own mapping
        process = SupervisedProcess(
            [sys.executable, "-S", str(path)],
            environment=environment,
            log=tmp_path / f"log-{len(running)}.txt",
            **options,  # type: ignore[arg-type]  # a test's own options
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.stop(0.1)


def wait_for(condition: Callable[[], object], patience_s: float = 60.0) -> None:
    until = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def read_identity(path: Path) -> Identity:
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
    found = identity(int(path.read_text()))
    assert found is not None
    return found


SPREADS = """
    import os, signal, subprocess, sys, time
    where = os.environ["WHERE"]
    child = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid();" \\
            "open(sys.argv[1], 'w').write(f'{os.getpid()}\\\\n'); time.sleep(600)"
    middle = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1], sys.argv[2]])"
    subprocess.run([sys.executable, "-S", "-c", middle, child, where + "/stubborn"])   # an orphan at once
    open(where + "/leader", "w").write(f"{os.getpid()}\\n")
    time.sleep(600)
"""
"""Leaves an orphan grandchild that ignores SIGTERM and has a session of its own."""


@pytest.mark.fault("grandchild ignores SIGTERM in a session of its own")
def test_an_orphan_that_ignores_sigterm_and_left_the_session_is_ended(
    start: Callable[..., SupervisedProcess], tmp_path: Path
) -> None:
    process = start(SPREADS)
    stubborn, leader = read_identity(tmp_path / "stubborn"), read_identity(tmp_path / "leader")
    assert process.stop(grace_s=0.3) == ()
    assert not alive(stubborn)
    assert not alive(leader)
    assert process.exit_code == -signal.SIGTERM
    assert process.stop() == ()


@pytest.mark.fault("bystander called vllm")
def test_a_bystander_with_the_same_name_survives(start: Callable[..., SupervisedProcess], tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.symlink_to("/bin/sleep")
    bystander = subprocess.Popen([program, "600"])
    try:
        process = start(f"import subprocess; subprocess.run([{str(program)!r}, '600'])")
        process.poll(0.5)
        process.stop(0.3)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.fault("leader exits, grandchild left")
def test_when_the_leader_ends_what_it_left_behind_ends_too(start: Callable[..., SupervisedProcess], tmp_path: Path) -> None:
    process = start(
        SPREADS.rpartition("time.sleep")[0] + "while not os.path.exists(where + '/go'): time.sleep(0.01)\n    sys.exit(7)"
    )
    stubborn = read_identity(tmp_path / "stubborn")  # before the leader ends: after that it lives for an instant only
    (tmp_path / "go").touch()
    assert process.poll(60.0) == 7
    began = time.monotonic()
    assert process.stop(100.0) == ()
    assert time.monotonic() - began < 50.0, "the grace is the leader's: an order does not give it to what it left behind"
    assert not alive(stubborn)


@pytest.mark.fault("stop interrupted by a second Ctrl-C")
def test_an_interrupted_stop_can_be_cut_short(start: Callable[..., SupervisedProcess], tmp_path: Path) -> None:
    process = start(SPREADS)
    stubborn = read_identity(tmp_path / "stubborn")

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            process.stop(200.0)  # the grandchild ignores SIGTERM: all of the grace would pass
    finally:
        signal.signal(signal.SIGALRM, previous)
    began = time.monotonic()
    assert process.stop(0.2) == ()
    assert time.monotonic() - began < 100.0, "the first grace was cut short"
    assert not alive(stubborn)


@pytest.mark.fault("search killed")
def test_sigkill_of_the_search_ends_the_whole_trial(tmp_path: Path) -> None:
    search = tmp_path / "search.py"
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SPREADS))
    search.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from vopt.optimizer.engine.supervised import SupervisedProcess\n"
        f"process = SupervisedProcess([sys.executable, '-S', {str(script)!r}], environment=dict(os.environ),"
        f" log=Path({str(tmp_path / 'log.txt')!r}))\n"
        f"Path({str(tmp_path / 'supervisor')!r}).write_text(f'{{process._identity.pid}}\\n')\n"
        "time.sleep(600)\n"
    )
    running = subprocess.Popen([sys.executable, search], env={**os.environ, "WHERE": str(tmp_path)})
    everyone = [read_identity(tmp_path / name) for name in ("stubborn", "leader", "supervisor")]
    running.kill()
    running.wait()
    wait_for(lambda: not any(alive(who) for who in everyone))


@pytest.mark.slow
@pytest.mark.fault("supervisor killed")
def test_sigkill_of_the_supervisor_loses_nothing(start: Callable[..., SupervisedProcess], tmp_path: Path) -> None:
    process = start(SPREADS)
    stubborn, leader = read_identity(tmp_path / "stubborn"), read_identity(tmp_path / "leader")
    time.sleep(2.5)  # longer than the supervisor waits between two notes of who belongs to the trial
    os.kill(process._identity.pid, signal.SIGKILL)
    assert process.poll(20.0) == -9
    assert process.stop() == ()
    assert not alive(stubborn)
    assert not alive(leader)


@pytest.mark.fault("100 MB of output")
def test_a_flood_of_output_neither_blocks_nor_fills_the_disk(start: Callable[..., SupervisedProcess]) -> None:
    process = start(
        """
        import os
        print("first line", flush=True)
        block = b"x" * 99 + b"\\n"
        for _ in range(100):
            os.write(1, block * 10_000)
        print("last line", flush=True)
        """,
        log_cap_bytes=1 << 20,
    )
    assert process.poll(60.0) == 0
    process.stop()
    assert process.log.stat().st_size <= (1 << 20) + (1 << 16)
    text = process.log.read_text()
    assert text.startswith("first line")
    assert text.endswith("last line\n")
    assert "left out" in text


@pytest.mark.fault("secrets in the output")
def test_secrets_never_reach_the_log(start: Callable[..., SupervisedProcess]) -> None:
    process = start(
        """
        import os
        print("token is", os.environ["MY_TOKEN"], "and api_key='abcdef123456', hf_abcdefghijklmnopqrstuv", flush=True)
        print("tokens per second: 12.5, api_key=None", flush=True)
        """,
        environment={"MY_TOKEN": "correct-horse-battery"},
    )
    assert process.poll(20.0) == 0
    process.stop()
    text = process.log.read_text()
    for secret in ("correct-horse-battery", "abcdef123456", "hf_abcdefgh"):
        assert secret not in text
    assert "tokens per second: 12.5, api_key=None" in text


@pytest.mark.fault("shared memory and sockets left")
def test_shared_memory_sockets_and_the_private_directory_are_removed(
    start: Callable[..., SupervisedProcess], tmp_path: Path
) -> None:
    process = start(
        """
        import os, socket, tempfile, time
        from multiprocessing import shared_memory, resource_tracker
        segment = shared_memory.SharedMemory(create=True, size=4096)
        resource_tracker.unregister(segment._name, "shared_memory")   # nobody else would remove it
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.environ["WHERE"] + "/named.sock")
        listener.listen()
        open(os.environ["WHERE"] + "/names", "w").write(f"/dev/shm/{segment.name} {tempfile.gettempdir()}\\n")
        time.sleep(600)
        """
    )
    names = tmp_path / "names"
    wait_for(lambda: names.exists() and names.read_text().endswith("\n"))
    segment, private = map(Path, names.read_text().split())
    assert segment.exists()
    assert len(str(private)) <= 70
    assert private.stat().st_mode & 0o077 == 0
    assert process.stop(0.2) == ()
    assert not segment.exists()
    assert not (tmp_path / "named.sock").exists()
    assert not private.exists()


@pytest.mark.slow
@pytest.mark.fault("shared memory of others")
def test_what_others_made_is_not_unlinked(start: Callable[..., SupervisedProcess], tmp_path: Path) -> None:
    foreign = Path(f"/dev/shm/psm_bystander_{os.getpid()}")
    foreign.write_bytes(b"\0" * 4096)
    os.utime(foreign)
    time.sleep(1.2)  # made clearly before the trial
    try:
        process = start(f"import os, time; held = open({str(foreign)!r}); open('{tmp_path}/up', 'w').close(); time.sleep(600)")
        wait_for((tmp_path / "up").exists)
        assert process.stop(0.2) == ()
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_trials_dump_no_core_and_are_the_first_that_memory_pressure_takes(start: Callable[..., SupervisedProcess]) -> None:
    process = start(
        """
        import resource, time
        time.sleep(0.3)
        print(resource.getrlimit(resource.RLIMIT_CORE), open("/proc/self/oom_score_adj").read(), flush=True)
        """
    )
    assert process.poll(20.0) == 0
    process.stop()
    assert process.log.read_text().split("\n")[0] == "(0, 0) 500"


@pytest.mark.fault("program does not exist")
def test_a_program_that_does_not_exist_is_an_ending_not_an_exception(tmp_path: Path) -> None:
    process = SupervisedProcess(["/no/such/program"], environment={}, log=tmp_path / "log.txt")
    assert process.poll(20.0) == 127
    assert "No such file" in (process.spawn_error or "")
    assert process.stop() == ()


def test_a_log_named_from_here_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor works in the root directory; a name relative to ours would be unknown there, and nothing would start."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-S", "-c", "print('here')"]
    process = SupervisedProcess(command, environment=dict(os.environ), log=Path("own.log"))
    wait_for(lambda: process.poll() is not None)
    process.stop(0.1)
    assert process.exit_code == 0
    assert (tmp_path / "own.log").read_text() == "here\n"
