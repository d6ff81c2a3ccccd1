"""Where the time of a search went. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from vopt.optimizer.history import TrialRecord
from vopt.optimizer.report import wording
from vopt.optimizer.trial import Phase

LONGEST_WAIT_S = 300.0
"""More between two engine starts is an interruption and the resume after it, not the search."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of some engine starts. ``compile_s`` is part of ``start_s``; ``load_s`` is loading outside the measured windows:
    probes, warm-up, the end of requests; ``waiting_s`` lies between the starts (``None``: a simulation waits for nobody)."""

    starts: int
    start_s: float
    compile_s: float
    load_s: float
    measure_s: float
    stop_s: float
    waiting_s: float | None

    @property
    def total_s(self) -> float:
        return self.start_s + self.load_s + self.measure_s + self.stop_s + (self.waiting_s or 0.0)

    @property
    def text(self) -> str:
        """``3 min 20 s in 4 starts: start 2 min 00 s (compile 30 s of it), warm up 20 s, measure 50 s, stop 6 s``, waiting."""
        compiled = f" (compile {wording.duration(self.compile_s)} of it)" if self.compile_s >= 1 else ""
        parts = [f"start {wording.duration(self.start_s)}{compiled}"]
        rest = {"warm up": self.load_s, "measure": self.measure_s, "stop": self.stop_s, "waiting": self.waiting_s}
        parts += [f"{name} {wording.duration(seconds)}" for name, seconds in rest.items() if seconds is not None]
        many = "1 start" if self.starts == 1 else f"{self.starts} starts"
        return f"{wording.duration(self.total_s)} in {many}: {', '.join(parts)}"


def spent(trials: Sequence[TrialRecord], *, simulated: bool = False) -> Spent:
    """The sum over ``trials``, in the order in which they were run."""
    loading_s = sum(trial.phase_s.get(phase, 0.0) for trial in trials for phase in (Phase.WARMUP, Phase.LOAD))
    measured_s = min(loading_s, float(sum(len(trial.token_curve) for trial in trials)))  # a point for each second of a window
    return Spent(
        starts=len(trials),
        start_s=sum(trial.phase_s.get(phase, 0.0) for trial in trials for phase in (Phase.PREFLIGHT, Phase.START)),
        compile_s=sum(trial.start_parts_s.get("compile", 0.0) for trial in trials),
        load_s=loading_s - measured_s,
        measure_s=measured_s,
        stop_s=sum(trial.phase_s.get(Phase.STOP, 0.0) for trial in trials),
        waiting_s=None if simulated else _waiting_s(trials),
    )


def _waiting_s(trials: Sequence[TrialRecord]) -> float:
    """``began_at`` has whole seconds, so one gap may come out wrong by a second either way, their sum hardly."""
    timed = [(datetime.fromisoformat(trial.began_at), sum(trial.phase_s.values())) for trial in trials if trial.began_at]
    gaps = ((after - before).total_seconds() - took_s for (before, took_s), (after, _) in pairwise(timed))
    return max(0.0, sum(gap for gap in gaps if gap <= LONGEST_WAIT_S))
