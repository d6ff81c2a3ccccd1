"""Does the verdict keep its promises? Whole studies through the real code, many per cell.

    python tests/benchmarks/calibration.py [--studies 400] [--json]

Cells: restart noise of 0.3, 1 and 2.5 % and a bimodal family (15 % of starts 6 % slow at 1 % noise), each without any gain
over the baseline and with a true gain of 5 %. Printed: the share of "better", the bias of the printed gain where a gain was
claimed or denied, and the median smallest visible gain.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from landscapes import Landscape, MemoryStudy, Truth, parameter, space

from vopt.optimizer.recommend import Verdict
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, SearchSetup

Noise = Callable[[np.random.Generator], float]


def normal(sd: float) -> Noise:
    return lambda rng: float(rng.normal(0, sd))


def bimodal(rng: np.random.Generator) -> float:
    return float(rng.normal(0, 0.01)) + (math.log(0.94) if rng.random() < 0.15 else 0.0)


NOISES: dict[str, Noise] = {"0.3 %": normal(0.003), "1 %": normal(0.01), "2.5 %": normal(0.025), "bimodal": bimodal}


def flat(gain: float) -> Landscape:
    """Three knobs of which one value of one knob gains ``gain``; nothing else changes anything."""
    made = space(
        parameter("max_num_seqs", (128, 256, 512, 1024), 256),
        parameter("max_num_batched_tokens", (4096, 8192, 16384), 8192),
        parameter("performance_mode", ("balanced", "throughput"), "balanced", ordered=False),
        seeds=({"max_num_seqs": 512}, {"performance_mode": "throughput"}),
    )
    return Landscape(f"flat {gain:.0%}", made, lambda point: Truth(10_000 * (1 + gain * (point["max_num_seqs"] == 512))))


@dataclass(frozen=True, slots=True)
class Cell:
    """``better`` is the share of studies that said so; ``bias`` the mean of log(printed gain) minus the truth of the arm."""

    noise: str
    gain: float
    studies: int
    better: float
    bias: float | None
    visible: float | None


def cell(name: str, gain: float, studies: int, *, trials: int = 8, rounds: int = 3) -> Cell:
    landscape = flat(gain)
    won, biases, visible = 0, [], []
    for seed in range(studies):
        budget = Budget(trials=trials, rounds=rounds, time_s=None, soak_s=0)
        setup = SearchSetup(goal=landscape.goal, space=landscape.space, budget=budget, seed=seed, early_end=False)
        answer = search(setup, MemoryStudy(), landscape.evaluator(seed, NOISES[name]), lambda event: None)
        won += answer.verdict is Verdict.BETTER
        if answer.gain is not None:
            if answer.gain.smallest_visible is not None:
                visible.append(answer.gain.smallest_visible - 1)
            if answer.winner_config is not None:
                point = landscape.space.point_of(answer.winner_config)
                biases.append(math.log(answer.gain.ratio) - (landscape.merit(point) - math.log(10_000)))
    return Cell(name, gain, studies, won / studies, fmean(biases) if biases else None, median(visible) if visible else None)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    cells = [cell(name, gain, options.studies) for name in NOISES for gain in (0.0, 0.05)]
    if options.json:
        print(json.dumps({"format_version": 1, "cells": [asdict(c) for c in cells]}))
        return 0
    print(f"{'noise':<9}{'true gain':>10}{'studies':>9}{'better':>9}{'bias':>8}{'visible':>9}")
    for c in cells:
        bias = "-" if c.bias is None else f"{c.bias:+.2%}"
        visible = "-" if c.visible is None else f"{c.visible:.1%}"
        print(f"{c.noise:<9}{c.gain:>10.0%}{c.studies:>9}{c.better:>9.1%}{bias:>8}{visible:>9}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
