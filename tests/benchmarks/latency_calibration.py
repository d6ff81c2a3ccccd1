"""Does a latency verdict keep its promises? Whole studies, each start a load of simulated requests at one rate.

    python tests/benchmarks/latency_calibration.py [--studies 300] [--gains 0 0.1] [--rounds 3] [--only CELL] [--json]

Each start has the same arrivals and lengths, as in a study; its requests become the real figures (`compute_metrics`) and its
window the real look at an overload; what decides is the real confirmation and verdict. About 480 requests a start, lengths like
those of a chat, 1 % noise of speed from start to start, 5 % from request to request. Cells: plain; 0.1 % and 1 % of requests
fail; a host that becomes 10 % slower from the first start to the last; one whose speed hops within 10 % from start to start;
heavy-tailed TTFT (lognormal, sigma 1.5, one in a hundred twenty times as long). Printed: the share of "better" with no gain,
with a true loss of 2 % and with true gains of 3 and 10 %, and the median of the smallest visible gain.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from calibration import FINALIST, normal, study

from vopt.objectives.goals import Goal, built_in_goal
from vopt.objectives.metrics import compute_metrics
from vopt.objectives.records import LoadResult, LoadStatus, LoadWindow, RequestFailure, RequestFailureKind, RequestRecord
from vopt.objectives.steadiness import overloaded
from vopt.optimizer.history import TrialRecord
from vopt.optimizer.recommend import Recommendation, Verdict

RATE, WINDOW = 12.0, LoadWindow(10.0, 50.0)
GOAL = built_in_goal("latency")
SEARCHED: Goal = replace(GOAL, limits=())
STARTS = 11
"""Of a study of three rounds with three arms, the two of its search included: over them the steady drift goes."""


@dataclass(frozen=True, slots=True)
class Host:
    """What befalls the requests of a cell, beside the noise that all have."""

    failing: float = 0.0
    drift: float = 0.0
    hops: float = 0.0
    heavy: bool = False


HOSTS = {
    "plain": Host(),
    "0.1 % fail": Host(failing=0.001),
    "1 % fail": Host(failing=0.01),
    "drift 10 %": Host(drift=0.1),
    "hops 10 %": Host(hops=0.1),
    "heavy TTFT": Host(heavy=True),
}
GAINS = (0.0, -0.02, 0.03, 0.1)


@dataclass(slots=True)
class Requests:
    """The arrivals and lengths of one study, and what each start makes of them."""

    host: Host
    gain: float
    seed: int
    made: int = 0
    at_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, 7])
        n = round(1.1 * RATE * WINDOW.closed_s)
        self.at_s = np.cumsum(rng.exponential(1 / RATE, n)).tolist()
        self.tokens = np.clip(rng.lognormal(math.log(200), 0.9, n), 2, 2000).astype(int).tolist()

    def start(self, record: TrialRecord, rng: np.random.Generator) -> TrialRecord:
        """The record of one start with the figures of its load."""
        host, n = self.host, len(self.at_s)
        slow = math.exp(rng.normal(0, 0.01)) * (1 + host.drift * self.made / STARTS) * (1 + host.hops * rng.uniform(-0.5, 0.5))
        slow /= 1 + self.gain * (record.config == FINALIST or record.config.get("max_num_seqs") == 512)
        self.made += 1
        ttft = 0.15 * rng.lognormal(0, 1.5 if host.heavy else 0.4, n)
        ttft[rng.random(n) < 0.01 * host.heavy] *= 20
        tpot = 0.015 * rng.lognormal(0, 0.05, n)
        fails = rng.random(n) < host.failing
        made = zip(self.at_s, self.tokens, (slow * ttft).tolist(), (slow * tpot).tolist(), fails.tolist(), strict=True)
        records = tuple(_request(i, at, tokens, ttft, tpot, failed) for i, (at, tokens, ttft, tpot, failed) in enumerate(made))
        status = LoadStatus.OVERLOADED if overloaded(records, WINDOW)[0] else LoadStatus.COMPLETE
        load = LoadResult(records, WINDOW, status, rate=RATE)
        return replace(record, status=status, metrics=compute_metrics(load, resamples=2))


def _request(index: int, at_s: float, tokens: int, ttft_s: float, tpot_s: float, failed: bool) -> RequestRecord:
    first, end = at_s + ttft_s, at_s + ttft_s + (tokens - 1) * tpot_s
    failure = RequestFailure(RequestFailureKind.CONNECTION, "reset") if failed else None
    done = RequestRecord(index, at_s, at_s, end, 300, tokens, tokens, (first, end), (1, tokens - 1), first, "stop")
    return replace(done, failure=failure, finish_reason=None) if failed else done


def answered(host: Host, gain: float, seed: int, rounds: int = 3) -> Recommendation:
    """The answer of one study in which the finalist is ``1 + gain`` times as fast."""
    requests = Requests(host, gain, seed)
    rng = np.random.default_rng([seed, 11])
    return study(normal(0.0), 0.0, rng, rounds, goal=GOAL, change=requests.start, searched_by=SEARCHED)[0]


@dataclass(frozen=True, slots=True)
class Cell:
    """``better``: the share of studies that said so; ``visible``: the median smallest visible gain."""

    host: str
    gain: float
    studies: int
    better: float
    visible: float | None
    verdicts: dict[str, int]


def cell(name: str, gain: float, studies: int, rounds: int) -> Cell:
    answers = [answered(HOSTS[name], gain, seed, rounds) for seed in range(studies)]
    visible = [one.gain.smallest_visible - 1 for one in answers if one.gain is not None and one.gain.smallest_visible]
    verdicts = {str(verdict): sum(one.verdict is verdict for one in answers) for verdict in Verdict}
    better = verdicts[str(Verdict.BETTER)] / studies
    return Cell(name, gain, studies, better, median(visible) if visible else None, verdicts)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=300)
    parser.add_argument("--gains", type=float, nargs="+", default=GAINS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=HOSTS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    cells = []
    for name in options.only or HOSTS:
        for gain in options.gains:
            found = cell(name, gain, options.studies, options.rounds)
            cells.append(found)
            if not options.json:
                visible = "-" if found.visible is None else f"{found.visible:.1%}"
                other = {verdict: count for verdict, count in found.verdicts.items() if count}
                print(f"{name:<12}{gain:>7.0%}{found.better:>9.1%}{visible:>8}  {other}", flush=True)
    if options.json:
        print(json.dumps({"format_version": 1, "cells": [asdict(one) for one in cells]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
