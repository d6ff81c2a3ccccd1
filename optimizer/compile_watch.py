"""Kernels that are compiled while a load is measured: seen in the engine's log, flagged, and measured again once.

A window in which the engine compiled measures the compiler too: on an H200 the first requests of a cold start waited 0.4 to
3.7 s for Triton kernels (vLLM 0.22.1). Warm-up is there to keep that out; this notices when it did not. Known messages are
those of vLLM 0.20 to 0.33 (``utils/jit_monitor.py``, before 0.26 ``triton_utils/jit_monitor.py``; ``compilation/backends.py``
and ``monitor.py``), Triton 3.6 (``runtime/autotuner.py``) and torch 2.11 (``_dynamo``, ``_inductor/select_algorithm.py``).
vLLM 0.20 has no such monitor, and later ones name each kernel once in a process: silence is no proof.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from vopt.objectives.records import LoadResult, LoadStatus, LoadWindow
from vopt.optimizer.engine.base import OnTick
from vopt.optimizer.load.plan import LoadPlan, Tick
from vopt.optimizer.load.source import RequestSource

COMPILED = "compiled_in_window"
"""Flag of a load: kernels were compiled in its window, also when it was measured again."""
REMEASURED = "measured_again"
"""Flag of a load that stands in for one with ``COMPILED``."""
NUMBERS_APART = 500_000
"""Request numbers from a load to its repetition: half way to the next load of the same engine."""
LOG_LAG_S = 0.5
"""An engine's output reaches its log within a fifth of a second; a line without a time of its own may be that much older."""
MOST_BYTES = 4 << 20
"""Read of a log at once; a load that logs more than that between two ticks is skipped over."""

_COMPILING = (
    re.compile(r"(?P<what>\w+ (?:kernel )?(?:JIT compilation|autotuning)) during inference: (?P<name>[^\s(]+?)(?:\. | \()"),
    re.compile(r"(?P<what>Triton autotuning) for function (?P<name>[^\s,]+)"),
    re.compile(r"(?P<what>Compiling a graph for [^,(]+?)(?P<name> \([^)]*\))? takes"),
    re.compile(r"(?P<what>Dynamo bytecode transform) time"),
    re.compile(r"(?P<what>Recompiling function) (?P<name>\S+)"),
    re.compile(r"(?P<what>torch\._dynamo hit config\.\w*(?:recompile|cache_size)\w*)"),
    re.compile(r"(?:^|\) )(?P<what>AUTOTUNE) (?P<name>\w+)\("),
    re.compile(r"(?P<what>AUTOTUNE benchmarking) takes"),
)
_STAMPS = (
    re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b"),  # vLLM's log lines
    re.compile(r"\b[VDIWEC](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.\d+ \d+ "),  # torch's
)


def compile_message(line: str) -> str | None:
    """What ``line`` of an engine's log says was compiled or tuned, in a few words; ``None`` when it says no such thing."""
    for pattern in _COMPILING:
        if (found := pattern.search(line)) is not None:
            name = (found.groupdict().get("name") or "").strip()
            return f"{found['what']}: {name}" if name else found["what"]
    return None


def stamp_of(line: str, now: float) -> float | None:
    """When ``line`` says that it was written, as seconds since the epoch, cut to whole ones. Log lines carry local time and
    no year: it is the year of ``now``, or the one before when that would be in the future."""
    for pattern in _STAMPS:
        if (found := pattern.search(line)) is not None:
            month, day, hour, minute, second = map(int, found.groups())
            year = datetime.fromtimestamp(now).astimezone().year
            for candidate in (year, year - 1):
                try:
                    at = datetime(candidate, month, day, hour, minute, second).timestamp()  # noqa: DTZ001 - local, as logged
                except ValueError:
                    continue  # 29 February of another year
                if at < now + 86_400:
                    return at
    return None


@dataclass(slots=True)
class LogWatch:
    """The compile messages that reach a log during one load. Begin it right before the load."""

    log: Path
    clock: Callable[[], float] = time.time
    _read_bytes: int = 0
    _rest: bytes = b""
    _looked_at: float = 0.0
    _origin: float | None = None
    _seen: list[tuple[float, float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._looked_at = self.clock()
        self._read_bytes = _size(self.log)

    def tick(self, tick: Tick) -> None:
        """Look at what the log has grown by, at a time that the load knows too."""
        began = self.clock() - tick.at_s
        self._origin = began if self._origin is None else min(began, self._origin)  # a tick arrives late, never early
        self._look()

    def within(self, window: LoadWindow | None) -> tuple[str, ...]:
        """What was compiled in ``window``, each once; the load has ended."""
        self._look()
        if window is None or self._origin is None:
            return ()
        opened, closed = self._origin + window.opened_s, self._origin + window.closed_s
        return tuple(dict.fromkeys(words for first, last, words in self._seen if first <= closed and last >= opened))

    def _look(self) -> None:
        earliest, now = self._looked_at - LOG_LAG_S, self.clock()
        for line in self._grown():
            if (words := compile_message(line)) is not None:
                stamp = stamp_of(line, now)
                self._seen.append((earliest, now, words) if stamp is None else (stamp, stamp + 1.0, words))
        self._looked_at = now

    def _grown(self) -> list[str]:
        """The lines that were completed since the last look."""
        size = _size(self.log)
        if size < self._read_bytes:  # cut in the middle because it became too long: its end is what is new
            self._read_bytes = max(0, size - 1)
        self._read_bytes = max(self._read_bytes, size - MOST_BYTES)
        try:
            with self.log.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read(size - self._read_bytes)
        except OSError:
            return []
        self._read_bytes += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


@dataclass(slots=True)
class WatchedLoads:
    """The loads of one session, watched. ``log``: where its engine's output goes (``None``: nowhere that we can read).

    ``set_aside`` are the loads that were measured again, in order.
    """

    run: Callable[[RequestSource, LoadPlan, OnTick], LoadResult]
    log: Path | None
    say: Callable[[str], None]
    wait: Callable[[float], None] = time.sleep
    set_aside: list[LoadResult] = field(default_factory=list)

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        """``Session.load``; a second one, with other prompts, when something was compiled in the first one's window."""
        load, seen = self._once(source, plan, on_tick)
        if not seen:
            return load
        words = f"compiled while it was measured: {_listed(seen)}"
        if load.status not in _MEASURED:
            self.say(words)
            return replace(load, flags=(*load.flags, COMPILED))
        self.say(f"{words}; measured once more")
        self.set_aside.append(replace(load, flags=(*load.flags, COMPILED)))
        again = replace(source, first_number=source.first_number + NUMBERS_APART)
        load, seen = self._once(again, plan, on_tick)
        if not seen:
            return replace(load, flags=(*load.flags, REMEASURED))
        self.say(f"compiled while it was measured again: {_listed(seen)}; the figures hold that too")
        return replace(load, flags=(*load.flags, REMEASURED, COMPILED))

    def _once(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> tuple[LoadResult, tuple[str, ...]]:
        if self.log is None or not self.log.is_file():
            return self.run(source, plan, on_tick), ()
        watch = LogWatch(self.log)

        def watched(tick: Tick) -> bool:
            watch.tick(tick)
            return on_tick(tick)

        load = self.run(source, plan, watched)
        if load.window is not None:
            self.wait(LOG_LAG_S)  # the last lines are still on their way
        return load, watch.within(load.window)


_MEASURED = (LoadStatus.COMPLETE, LoadStatus.UNSTEADY, LoadStatus.OVERLOADED, LoadStatus.STOPPED_EARLY)
"""Ends of a load after which its engine can be loaded again."""


def _listed(seen: tuple[str, ...], most: int = 3) -> str:
    more = f" and {len(seen) - most} more" if len(seen) > most else ""
    return ", ".join(seen[:most]) + more


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0
