"""Signals: every one that asks a command to end ends it as Ctrl-C does; a search under nohup outlives its terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vopt.optimizer.errors import Interrupted
from vopt.optimizer.interruption import SIGNALS, Interruption, listen


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_ends_a_search_at_its_next_allowed_place(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    with Interruption("study-1") as interruption:
        os.kill(os.getpid(), number)  # not inside an evaluation: what runs is finished
        with pytest.raises(Interrupted, match="study-1 is kept"), interruption.allowed():
            pass
    assert signal.getsignal(number) is signal.SIG_DFL


def test_under_nohup_a_lost_terminal_ends_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    listen()
    with Interruption("study-1") as interruption:
        os.kill(os.getpid(), signal.SIGHUP)
        with interruption.allowed():
            pass
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


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


def test_a_command_that_waits_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"  # nobody writes: the command waits for the file
    os.mkfifo(fifo)
    words = ["-m", "vopt.optimizer", "space", "--simulate", "h200", "--model", "Qwen/Qwen3-0.6B", "--from", str(fifo)]
    waiting = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    writing = opened_when_read(fifo)
    waiting.send_signal(signal.SIGTERM)
    out, err = waiting.communicate(timeout=60)
    os.close(writing)
    assert (waiting.returncode, out) == (130, "")
    assert "Traceback" not in err
