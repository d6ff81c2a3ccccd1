"""Ctrl-C, SIGTERM and a terminal that goes away: once, the search stops where nothing is lost; twice, it stops now."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from vopt.optimizer.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def listen() -> None:
    """Outside a search too, SIGTERM and SIGHUP end a command as Ctrl-C does: with its clean-up and its exit code."""
    for number in SIGNALS[1:]:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


class Interruption:
    """While it is entered, a signal ends the search with ``Interrupted`` at the next allowed place.

    Allowed is only an evaluation (``allowed``): what was measured is then told and stored before the search ends. A second
    signal cuts the stopping of the engine short: the trial is killed, not asked, and the search ends when it is gone. Further
    signals change nothing.
    """

    def __init__(self, study: str) -> None:
        self.study = study
        self._requested = 0
        self._allowed = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        for number in SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: it is to outlive its terminal
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, a signal interrupts at once; one that came before does so on entering."""
        if self._requested:
            raise self._interrupted()
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested += 1
        if self._allowed and self._requested <= 2:
            raise self._interrupted()

    def _interrupted(self) -> Interrupted:
        return Interrupted(f"interrupted; the study {self.study} is kept", hint=f"vopt resume {self.study}")
