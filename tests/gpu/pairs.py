"""Two sides of one comparison: fresh starts in pairs whose order alternates, and the ratios of figures with an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import starts
from scipy import stats

from vopt.optimizer.load.plan import LoadPlan

SHOWN = ("tokens_per_s", "output_tokens_per_s", "mean_ttft_s", "p95_ttft_s", "mean_tpot_s", "p95_tpot_s", "mean_e2e_s")
FIRST_START_S = 250.0
"""What the first start of a run is taken to need: nothing may be compiled yet."""

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Side:
    """One side: its name in words, engine arguments, and whether it is measured over HTTP."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    served: bool = False


def measure(
    stand: starts.Stand,
    journal: starts.Journal,
    patience: starts.Patience,
    sides: tuple[Side, Side],
    side_of: Callable[[Entry], str],
    *,
    pairs: int,
    plans: Sequence[LoadPlan],
) -> int:
    """The missing starts, as far as the budget reaches; how many remain. ``side_of`` names the side of a journal's line."""
    wanted = [(pair, side) for pair in range(pairs) for side in (sides if pair % 2 == 0 else sides[::-1])]
    done = {(entry["pair"], side_of(entry)) for entry in journal.entries}
    left = [(pair, side) for pair, side in wanted if (pair, side.name) not in done]
    took = [entry["wall_s"] for entry in journal.entries]
    need_s = max(took or [FIRST_START_S + sum(2 * plan.window_s for plan in plans)])
    while left and patience.covers(need_s):
        pair, side = left[0]
        label = f"{pair + 1}-{side.name}"
        entry = starts.measured_start(stand, side.config, plans, label=label, served=side.served, must=True)
        journal.add({"pair": pair, **entry})
        left.pop(0)
        need_s = max(entry["wall_s"] for entry in journal.entries)
        print(f"{starts.row_words(entry)} ({entry['wall_s']:.0f} s)", flush=True)
    return len(left)


def compared_words(
    entries: Sequence[Entry], levels: Sequence[int], over: str, under: str, side_of: Callable[[Entry], str]
) -> str:
    """``over`` / ``under`` by level and figure, over the pairs of which both sides are there."""
    by_pair: dict[int, dict[str, Entry]] = {}
    for entry in entries:
        by_pair.setdefault(entry["pair"], {})[side_of(entry)] = entry
    pairs = [sides for sides in by_pair.values() if len(sides) == 2]
    lines = [f"{over} / {under} over {len(pairs)} pairs"]
    for place, level in enumerate(levels):
        both = [(p[over]["loads"][place]["metrics"], p[under]["loads"][place]["metrics"]) for p in pairs]
        lines += ratio_lines(f"{level:>4} in flight", both)
    return "\n".join(lines)


def ratio_lines(head: str, both: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> list[str]:
    """One line for each figure that both sides have."""
    found = {name: logs for name in SHOWN if (logs := log_ratios(name, both))}
    return [f"  {head}  {name:<20} {ratio_words(logs)}" for name, logs in found.items()]


def log_ratios(name: str, both: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> list[float]:
    figures = [(over.get(name), under.get(name)) for over, under in both]
    return [math.log(over / under) for over, under in figures if over and under]


def ratio_words(logs: Sequence[float]) -> str:
    mean = math.exp(fmean(logs))
    if len(logs) < 2:
        return f"{mean:.3f} (one pair)"
    low, high = interval(logs)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def interval(logs: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the ratio: of the mean of the logarithms, by Student's t. Two logarithms or more."""
    mean, half = fmean(logs), float(stats.t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean + half)
