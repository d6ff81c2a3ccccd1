"""Seconds by phase of one engine start."""

from __future__ import annotations

import time

from vopt.optimizer.events import Listener, PhaseBegan
from vopt.optimizer.trial import Phase


class PhaseClock:
    """Seconds by phase of one trial, told to the listener as they begin."""

    def __init__(self, label: str, listener: Listener) -> None:
        self.label, self.listener = label, listener
        self.phase_s: dict[Phase, float] = {}
        self._phase: Phase | None = None
        self._began_s = 0.0

    def begin(self, phase: Phase, detail: str = "") -> None:
        self.end()
        self._phase, self._began_s = phase, time.monotonic()
        self.listener(PhaseBegan(self.label, phase, detail))

    def end(self) -> None:
        if self._phase is not None:
            self.phase_s[self._phase] = self.phase_s.get(self._phase, 0.0) + time.monotonic() - self._began_s
        self._phase = None
