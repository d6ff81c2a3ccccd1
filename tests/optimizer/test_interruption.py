"""Signals: each that asks a command to end ends it as Ctrl-C does, and never where something is half done."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.faults import ending
from vopt.optimizer.interruption import SIGNALS, Interruption, listen

pytestmark = pytest.mark.usefixtures("signal_handlers")


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_ends_a_search_at_its_next_checkpoint(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    with Interruption() as interruption:
        interruption.checkpoint()
        os.kill(os.getpid(), number)  # what runs is finished
        with pytest.raises(KeyboardInterrupt):
            interruption.checkpoint()
        with pytest.raises(KeyboardInterrupt), interruption.waiting():
            raise AssertionError("nothing begins any more")
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("number", SIGNALS)
def test_a_start_and_a_load_end_at_once_even_inside_an_event_loop(number: signal.Signals) -> None:
    """An event loop keeps every other exception of a callback to itself: the search would go on as if nothing had come."""
    signal.signal(number, signal.SIG_DFL)

    async def load() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
        with contextlib.suppress(Exception):
            await asyncio.sleep(60)

    with Interruption() as interruption, pytest.raises(KeyboardInterrupt), interruption.waiting():
        asyncio.run(load())


def test_a_stop_is_cut_off_by_the_second_signal_and_by_no_other() -> None:
    cut_off, cleaned = [], []
    with Interruption() as interruption:
        with interruption.stopping():
            os.kill(os.getpid(), signal.SIGINT)
        try:
            with interruption.stopping():
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                    cut_off.append("not")
                finally:
                    os.kill(os.getpid(), signal.SIGINT)  # what is done about a signal is not cut off in its turn
                    cleaned.append("yes")
        except KeyboardInterrupt:
            cut_off.append("yes")
        os.kill(os.getpid(), signal.SIGINT)
    assert (cut_off, cleaned) == (["yes"], ["yes"])


def test_under_nohup_a_lost_terminal_ends_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    listen()
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGHUP)
        interruption.checkpoint()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def torn(error: type[Exception]) -> Exception:
    """What a clean-up raises that an interruption has cut off in its middle."""
    try:
        try:
            raise KeyboardInterrupt
        finally:
            raise error("half done")
    except error as found:
        return found


@pytest.mark.parametrize("error", [RuntimeError, OSError, EnvironmentLacks])
def test_an_error_that_an_interruption_has_caused_is_one(error: type[Exception]) -> None:
    assert ending(torn(error)).exit_code == 130
    assert ending(error("of its own")).exit_code != 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_outside_a_search_too(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    listen()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def opened_when_read(fifo: Path) -> int:
    """A descriptor for writing, as soon as somebody reads."""
    for _ in range(1200):
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            time.sleep(0.05)
    raise AssertionError("nobody read")


def ended_by(process: subprocess.Popen[str], number: signal.Signals) -> tuple[str, str]:
    """What it wrote. The signal is repeated: one that comes between two system calls is seen after the second, which waits."""
    for _ in range(120):
        process.send_signal(number)
        try:
            return process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"{number.name} did not end it")


def test_a_command_that_waits_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"  # nobody writes: the command waits for the file
    os.mkfifo(fifo)
    words = ["-m", "vopt.optimizer", "space", "--simulate", "h200", "--model", "Qwen/Qwen3-0.6B", "--from", str(fifo)]
    with subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as waiting:
        try:
            writing = opened_when_read(fifo)
            out, err = ended_by(waiting, signal.SIGTERM)
            os.close(writing)
        finally:
            waiting.kill()
    assert (waiting.returncode, out) == (130, "")
    assert "Traceback" not in err


LATE = """
import atexit, os, signal, sys
atexit.register(os.kill, os.getpid(), signal.{name})
from vopt.optimizer.cli import main
sys.argv = ["vopt", *{words!r}]
main()
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["show", "--storage", "sqlite:///none.db"], 3)])
def test_a_signal_after_the_last_word_changes_no_exit_code(
    tmp_path: Path, number: signal.Signals, words: list[str], code: int
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    ended = subprocess.run(
        [sys.executable, "-c", LATE.format(name=number.name, words=words)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
