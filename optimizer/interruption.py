"""Ctrl-C, SIGTERM and a terminal that goes away: once, the search stops where nothing is lost; twice, it stops now."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def listen() -> None:
    """Outside a search too, SIGTERM and SIGHUP end a command as Ctrl-C does: with its clean-up and its exit code."""
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def close_ears() -> None:
    """From here on there is nothing left to end: the exit code is decided, and a late signal would only replace it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def was_interrupted(error: BaseException) -> bool:
    """Whether ``error`` is an interruption, or came of one: code that a signal cuts off in its middle (a commit, a clean-up)
    may end with an exception of its own."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, KeyboardInterrupt):
            return True
        link = link.__cause__ or link.__context__
    return False


class Interruption:
    """While it is entered, a signal is remembered, and ends the search with ``KeyboardInterrupt`` where it may end.

    These places are: between two trials (``checkpoint``); in the start and in the load of an engine (``waiting``), which leave
    nothing half done; and from the second signal on in an engine's stop (``stopping``): the trial is then killed, not asked.
    Everywhere else, above all where the study is read and written, what runs is finished: a commit that an exception cuts off
    breaks the session it belongs to. It is ``KeyboardInterrupt``, and no exception of our own, since an event loop and every
    ``except Exception`` on the way let that one through.
    """

    def __init__(self) -> None:
        self._requested = 0
        self._cuts_from: int | None = None  # the signal from which on one raises here; None: none does
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

    def checkpoint(self) -> None:
        """Ends the search here if a signal has asked for it."""
        if self._requested:
            raise KeyboardInterrupt

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a signal ends the search at once; one that came before does so on entering."""
        with self._cut_from(1):
            self.checkpoint()
            yield

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Inside, a signal cuts off what runs only if it is the second or a later one."""
        with self._cut_from(2):
            yield

    @contextmanager
    def _cut_from(self, count: int) -> Iterator[None]:
        self._cuts_from = count
        try:
            yield
        finally:
            self._cuts_from = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested += 1
        if self._cuts_from is not None and self._requested >= self._cuts_from:
            self._cuts_from = None  # once: what is done about it is not cut off in its turn
            raise KeyboardInterrupt
