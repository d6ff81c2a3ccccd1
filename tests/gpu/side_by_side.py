"""What an engine on a second GPU of the host does to a measurement on the first: may trials run side by side?

    python tests/gpu/side_by_side.py --models MODELS --gpus 0,1 [--model qwen3-0.6b] [--rounds 3] [--concurrency 256]

Each round is one fresh start on the first GPU, on which three loads are measured: alone, while an engine starts on the second
GPU, its successor's imports beside it as in a search (what the CPUs notice most), and while that engine is under the same load.
The load alone comes first or last by turns. Run it again until it says that nothing remains (exit code 10). Prints beside /
alone for each figure, with a 95 % interval of the mean of the logarithms over the rounds (Student's t), and what it says.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pairs
import starts

from vopt.objectives.records import LoadResult
from vopt.optimizer.errors import VoptError
from vopt.optimizer.first_load import NumberedLoads
from vopt.optimizer.load.plan import LoadPlan
from vopt.optimizer.trial import EngineFailure, Phase

ALONE, START, LOAD = "alone", "beside_start", "beside_load"
ORDERS = ((ALONE, START, LOAD), (START, LOAD, ALONE))

TOLD_BY = ("tokens_per_s", "mean_tpot_s")
"""Figures that repeat well enough (0.2 to 1 % from start to start) to tell a disturbance from noise within a few rounds."""

HARMLESS = 0.02
"""A disturbance below this changes no decision: differences of 2 % are ties without repeats anyway."""

SETTLED_TICKS = 5
"""Progress reports, one a second, after which the other engine's load is taken to be at its full concurrency."""

JOIN_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    starts.add_options(parser, out="gpu-results/side-by-side.jsonl")
    parser.set_defaults(window=10.0, gpus="0,1")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=256)
    typed = parser.parse_args(arguments)
    try:
        stand = starts.stand_of(typed, typed.model)
        if stand.subject.machine.count != 2:
            raise ValueError(f"--gpus {typed.gpus}: one GPU is measured beside another: --gpus 0,1")
        out = typed.out.with_name(f"{typed.out.stem}-{Path(typed.model).name}{typed.out.suffix}")
        facts = {"concurrency": typed.concurrency, "window_s": typed.window}
        journal = starts.Journal(out, stand.header("side-by-side", **facts))
        with starts.reserved(stand, "side by side"):
            remaining = measure(stand, journal, starts.Patience(typed.budget), typed)
    except (EngineFailure, NotBeside) as failure:
        print(f"the machine failed: {failure}", file=sys.stderr)
        return 3
    except (VoptError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(disturbance_words(journal.entries))
    print(f"{remaining} rounds remain")
    return starts.WORK_REMAINS if remaining else 0


def measure(stand: starts.Stand, journal: starts.Journal, patience: starts.Patience, typed: argparse.Namespace) -> int:
    """The missing rounds, as far as the budget reaches; how many remain."""
    took = [entry["wall_s"] for entry in journal.entries] or [pairs.FIRST_START_S + 8 * typed.window]
    plan = starts.closed(typed.concurrency, typed.window, typed.seed)
    own, other = starts.on_one_gpu(stand, 0), starts.on_one_gpu(stand, 1, ahead=True)
    while (number := len(journal.entries)) < typed.rounds and patience.covers(max(took)):
        entry = measured_round(own, other, plan, number)
        journal.add(entry)
        took.append(entry["wall_s"])
        rates = ", ".join(f"{name} {load['metrics'].get('tokens_per_s', 0):,.0f}" for name, load in entry["loads"].items())
        print(f"round {number + 1}: tokens/s {rates} ({entry['wall_s']:.0f} s)", flush=True)
    return max(0, int(typed.rounds) - len(journal.entries))


def measured_round(own: starts.Stand, other: starts.Stand, plan: LoadPlan, number: int) -> dict[str, Any]:
    """One start on the first GPU and its three loads, with one start on the second: a journal's line."""
    order, began_s, began_at = ORDERS[number % 2], time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    session = starts.session_of(own, {}, label=f"{number + 1}-measured")
    neighbour = Neighbour(other, plan, label=f"{number + 1}-neighbour")
    loads: dict[str, dict[str, Any]] = {}
    try:
        started = session.start(starts.told(f"{number + 1}-measured"))
        once = NumberedLoads(own.source, lambda tick: True).on(session.load)
        once(starts.closed(plan.concurrency or 1, plan.window_s / 2, plan.seed))  # the first load on an engine reads low
        for name in order:
            starts.say(f"round {number + 1}: {name}")
            loads[name] = starts.load_row(neighbour.beside(name, lambda: once(plan)))
            if name == LOAD:
                neighbour.close()
    finally:
        neighbour.close()
        left = (*session.close(), *neighbour.left_behind)
    return {
        "round": number,
        "order": list(order),
        "began_at": began_at,
        "started": starts.started_row(started),
        "neighbour_start_s": neighbour.start_s and starts.rounded(neighbour.start_s),
        "wall_s": starts.rounded(time.monotonic() - began_s),
        "loads": loads,
        "left_behind": list(left),
    }


class NotBeside(Exception):
    """A measurement that was not made under the condition that it is for."""


class Neighbour:
    """An engine on another GPU that starts, and then is under load, on a thread of its own."""

    def __init__(self, stand: starts.Stand, plan: LoadPlan, *, label: str) -> None:
        self._session = starts.session_of(stand, {}, label=label)
        self._stand, self._label = stand, label
        self._endless = starts.closed(plan.concurrency or 1, 3600.0, plan.seed + 1)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._begun, self._settled, self._enough = threading.Event(), threading.Event(), threading.Event()
        self._ticks = 0
        self.start_s: float | None = None
        self.left_behind: tuple[str, ...] = ()

    def beside(self, name: str, measure: Callable[[], LoadResult]) -> LoadResult:
        """One load of the measured engine while this one starts, is under load, or is not there. Raises what went wrong with
        this one: what was measured beside it then means nothing."""
        if name == START:
            self._run(self._start, self._begun)
        elif name == LOAD:
            self._run(self._load, self._settled)
        result = measure()
        if name == LOAD and not self._alive():
            self._joined()
            raise NotBeside("the load on the other GPU ended before the measurement beside it did")
        self._enough.set()
        self._joined()
        self._enough.clear()
        return result

    def _start(self) -> None:
        began_s = time.monotonic()
        self._session.start(self._on_phase)
        self.start_s = time.monotonic() - began_s

    def _on_phase(self, phase: Phase, words: str) -> None:
        starts.told(self._label)(phase, words)
        if "starting" in words:  # its imports are behind it: its GPU and all CPUs get to work
            self._begun.set()

    def _load(self) -> None:
        self._session.load(self._stand.source, self._endless, self._on_tick)

    def _on_tick(self, tick: object) -> bool:
        self._ticks += 1
        if self._ticks >= SETTLED_TICKS:
            self._settled.set()
        return not self._enough.is_set()

    def _run(self, step: Callable[[], None], far_enough: threading.Event) -> None:
        """One step on a thread of its own; returns when it is far enough to be measured beside, or over."""

        def caught() -> None:
            try:
                step()
            except BaseException as failure:  # noqa: BLE001 - raised again in the thread that measures
                self._failure = failure

        self._thread = threading.Thread(target=caught, daemon=True)
        self._thread.start()
        while not far_enough.wait(0.2) and self._alive():
            pass

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _joined(self) -> None:
        """Waits for the step under way: a start to its end, a load that was told to end."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Idempotent."""
        self._enough.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            self._thread = None
        self.left_behind = self._session.close()


def disturbance_words(entries: Sequence[Mapping[str, Any]]) -> str:
    """Beside / alone by condition and figure, and in words what they say."""
    lines = [f"beside / alone over {len(entries)} rounds"]
    said = []
    for name, words in ((START, "while another engine starts"), (LOAD, "while another engine is under load")):
        both = [(entry["loads"][name]["metrics"], entry["loads"][ALONE]["metrics"]) for entry in entries]
        lines += pairs.ratio_lines(f"{name:<12}", both)
        said.append(f"{words}: {verdict([pairs.log_ratios(figure, both) for figure in TOLD_BY])}")
    return "\n".join([*lines, *said])


def verdict(figures: Sequence[Sequence[float]]) -> str:
    """What the logarithms of the ratios of some figures say about measuring so."""
    if any(len(logs) < 2 for logs in figures):
        return "too few rounds to say"
    bounds = [pairs.interval(logs) for logs in figures]
    if all(low >= 1 - HARMLESS and high <= 1 + HARMLESS for low, high in bounds):
        return f"no disturbance beyond {HARMLESS:.0%}: trials may run side by side"
    if any(low > 1 + HARMLESS or high < 1 - HARMLESS for low, high in bounds):
        return f"disturbed by more than {HARMLESS:.0%}: trials side by side do not compare with trials alone"
    return f"not known: these rounds cannot tell whether it is more than {HARMLESS:.0%}"


if __name__ == "__main__":
    raise SystemExit(main())
