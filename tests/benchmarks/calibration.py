"""Does the verdict keep its promises? Simulated starts through the real confirmation and verdict, many studies per cell.

    python tests/benchmarks/calibration.py [--studies 400] [--rounds 3 [4 5]] [--json]

Cells: restart noise of 0.3, 1 and 2.5 % and a bimodal family (15 % of starts 6 % slow at 1 % noise), each without any gain
over the baseline and with a true gain of 5 %. Printed: the share of "better", the bias of the printed gain over all studies,
the median smallest visible gain, and the rounds taken. Several numbers of rounds: the study is resumed with more after each
answer that is not "better", as somebody would who wants a gain.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from landscapes import Landscape, PlainSpace, Truth, parameter, record, space

from vopt.objectives.goals import Goal, built_in_goal
from vopt.optimizer.answer import recommend
from vopt.optimizer.history import Arm, Stage, TrialRecord, TrialRequest
from vopt.optimizer.judge import Judged, judge
from vopt.optimizer.progress import Progress
from vopt.optimizer.propose import Finish, Run, Sample, next_step
from vopt.optimizer.recommend import Recommendation, Verdict
from vopt.optimizer.setup import Budget, EarlierBudget, SearchSetup
from vopt.optimizer.trial import EngineConfig

Noise = Callable[[np.random.Generator], float]
Change = Callable[[TrialRecord, np.random.Generator], TrialRecord]


def normal(sd: float) -> Noise:
    return lambda rng: float(rng.normal(0, sd))


def bimodal(rng: np.random.Generator) -> float:
    return float(rng.normal(0, 0.01)) + (math.log(0.94) if rng.random() < 0.15 else 0.0)


NOISES: dict[str, Noise] = {"0.3 %": normal(0.003), "1 %": normal(0.01), "2.5 %": normal(0.025), "bimodal": bimodal}


BASELINE = EngineConfig()
FINALIST = EngineConfig({"max_num_seqs": 512, "max_num_batched_tokens": 8192})
"""The second override resolves to the default, so the confirmation has its third arm."""


FREE = replace(built_in_goal("throughput", guard=False), limits=())
"""What the search's own starts are judged by: they have no figures but the throughput."""


def space_of_two() -> PlainSpace:
    """Two knobs; the second value of the first is what the finalist changes."""
    return space(
        parameter("max_num_seqs", (128, 256, 512, 1024), 256),
        parameter("max_num_batched_tokens", (4096, 8192, 16384), 8192),
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """``better`` is the share of studies that said so; ``bias`` the mean of log(printed gain) minus the true gain over all
    studies, whatever their verdict; ``rounds`` the mean number of confirmation rounds."""

    noise: str
    gain: float
    studies: int
    better: float
    bias: float | None
    visible: float | None
    rounds: float


def study(
    noise: Noise,
    gain: float,
    rng: np.random.Generator,
    rounds: int | Sequence[int],
    *,
    goal: Goal | None = None,
    change: Change | None = None,
    soak_s: float = 0.0,
    searched_by: Goal = FREE,
) -> tuple[Recommendation, int]:
    """The confirmation of one finalist through the real steps and the real verdict: the answer and how many rounds it took.
    Several numbers of ``rounds``: the study is given one after the other, as long as it does not say "better".

    ``change`` makes of each start after the search what it is to show: other figures, failed requests, another end; of those of
    the search too where they are judged by another goal than ``FREE``.

    Baseline and finalist have one start each before it, as after a search: the data that chose the finalist decide nothing,
    so how it was chosen needs no simulation.
    """
    landscape = Landscape("two", space_of_two(), lambda point: Truth(10_000 * (1 + gain * (point["max_num_seqs"] == 512))))
    plans = [rounds] if isinstance(rounds, int) else rounds
    budget = Budget(trials=3, rounds=plans[0], time_s=None, soak_s=soak_s)
    setup = SearchSetup(goal=goal or landscape.goal, space=landscape.space, budget=budget, early_end=False)

    def start(run: Run, label: str) -> Judged:
        point = landscape.space.default_point() | dict(run.config)
        shown = TrialRequest(label, EngineConfig(landscape.space.config(point)), run.stage, run.arm)
        made = record(landscape, shown, rng, noise(rng))
        made = replace(made, config=run.config)
        searched = run.stage is Stage.SEARCH
        shown_as = made if change is None or (searched and searched_by is FREE) else change(made, rng)
        return judge(shown_as, searched_by if searched else setup.goal, None)

    first = [start(Run(config, Stage.SEARCH, ""), str(n)) for n, config in enumerate((BASELINE, FINALIST))]
    # The finalist's first start stands for the one that made it a finalist: never so low that it would not be confirmed.
    lifted = max(first[1].merit or 0.0, first[0].merit or 0.0)
    progress = Progress(setup, (first[0], replace(first[1], merit=lifted)), exhausted=True)
    left = list(plans[1:])
    while True:
        match next_step(progress):
            case Run() as run:
                progress = Progress(progress.setup, (*progress.history, start(run, run.label)), exhausted=True)
            case Finish() as finish:
                answer = recommend(progress, finish)
                if not left or answer.verdict is Verdict.BETTER:
                    return answer, sum(judged.record.arm is Arm.BASELINE for judged in progress.history)
                progress = Progress(_resumed(progress, left.pop(0)), progress.history, exhausted=True)
            case Sample():
                raise AssertionError("the search is over before its confirmation")


def _resumed(progress: Progress, rounds: int) -> SearchSetup:
    budget = progress.setup.budget
    labels = frozenset(judged.record.label for judged in progress.history)
    earlier = (*progress.setup.earlier, EarlierBudget(budget.trials, budget.rounds, labels))
    return replace(progress.setup, budget=replace(budget, rounds=rounds), earlier=earlier)


def cell(name: str, gain: float, studies: int, *, rounds: int | Sequence[int] = 3) -> Cell:
    """One cell of the table; ``gain`` is a share (0.05: the finalist is 5 % faster)."""
    won, biases, visible, taken = 0, [], [], []
    for seed in range(studies):
        answer, used = study(NOISES[name], gain, np.random.default_rng([seed, round(1000 * gain), len(name)]), rounds)
        won += answer.verdict is Verdict.BETTER
        taken.append(used)
        if answer.gain is not None:
            biases.append(math.log(answer.gain.ratio) - math.log1p(gain))
            if answer.gain.smallest_visible is not None:
                visible.append(answer.gain.smallest_visible - 1)
    bias = fmean(biases) if biases else None
    return Cell(name, gain, studies, won / studies, bias, median(visible) if visible else None, fmean(taken))


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=400)
    parser.add_argument("--rounds", type=int, nargs="+", default=[3])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    cells = [cell(name, gain, options.studies, rounds=options.rounds) for name in NOISES for gain in (0.0, 0.05)]
    if options.json:
        print(json.dumps({"format_version": 1, "cells": [asdict(c) for c in cells]}))
        return 0
    print(f"{'noise':<9}{'true gain':>10}{'studies':>9}{'better':>9}{'bias':>8}{'visible':>9}{'rounds':>8}")
    for c in cells:
        bias = "-" if c.bias is None else f"{c.bias:+.2%}"
        visible = "-" if c.visible is None else f"{c.visible:.1%}"
        print(f"{c.noise:<9}{c.gain:>10.0%}{c.studies:>9}{c.better:>9.1%}{bias:>8}{visible:>9}{c.rounds:>8.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
