"""Recorded trials that others published, as landscapes: only recorded configurations can be measured.

Source: GPUStack's performance lab (docs.gpustack.ai, Qwen3.5-9B on H100 and Qwen3.5-35B-A3B on H200, vLLM 0.17.1, ShareGPT,
1,000 requests). Rates are tokens by wall time, because the reported ones leave out failures: a configuration that lost half
of its requests shows 1.6 times its real rate. The noise is what four equal rows of the 9B page show: 0.42 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from landscapes import LATENCY, THROUGHPUT, Landscape, MemoryStudy, Truth, parameter, space

from vopt.optimizer.recommend import Verdict
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, Pinned, SearchSetup
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.space import Point

ASSET = Path(__file__).resolve().parent.parent / "assets" / "published_trials.json"
RESTART_NOISE = 0.0042
POOLED_NOISE = 0.0086
"""Four equal rows with the defaults (0.42 %) and three equal pairs in throughput mode (1.1 %) together."""
_DEFAULTS: dict[str, Any] = {
    "performance_mode": "balanced",
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "speculation": "off",
    "kv_cache_dtype": "auto",
    "language_model_only": False,
    "max_cudagraph_capture_size": 0,
}


@cache
def rows() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(ASSET.read_text(encoding="utf-8")))


@cache
def published_landscape(name: str, reading: str = "classes", noise: float = RESTART_NOISE) -> Landscape:
    """``9b-throughput``, ``9b-latency``, ``35b-throughput`` or ``35b-latency``, with starts that vary by ``noise``.

    ``reading`` says what the rows of 9B throughput, the only page with several rows of one configuration, are taken for:
    ``rows`` (each is the truth of its own arguments), ``classes`` (equal ones share their mean) or ``shrunk`` (and the means
    are drawn together by the noise that is in them).
    """
    mine = [row for row in rows() if row["landscape"] == name]
    latency = name.endswith("latency")
    names = [n for n in _DEFAULTS if any(n in row["config"] for row in mine)]
    domains = {n: sorted({_DEFAULTS[n], *(row["config"].get(n, _DEFAULTS[n]) for row in mine)}, key=str) for n in names}
    for domain in domains.values():
        if all(isinstance(value, int) and not isinstance(value, bool) for value in domain):
            domain.sort()
    table: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in mine:
        table.setdefault(tuple(row["config"].get(n, _DEFAULTS[n]) for n in names), []).append(row)

    def key(point: Point) -> tuple[Any, ...]:
        return tuple(point[n] for n in names)

    def truth(point: Point) -> Truth:
        found = table[key(point)]
        values = [row["mean_e2e_s"] if latency else row["tokens"] / row["duration_s"] for row in found]
        return Truth(sum(values) / len(values), min(row["succeeded"] / row["requests"] for row in found))

    made = space(
        *(parameter(n, domains[n], _DEFAULTS[n], ordered=all(type(v) is int for v in domains[n])) for n in names),
        rule=lambda point: key(point) in table,
    )
    mode = {"performance_mode": "interactivity" if latency else "throughput"}
    measured = key({**_DEFAULTS, **mode}) in table
    landscape = Landscape(name, made, truth, LATENCY if latency else THROUGHPUT, mode if measured else {}, noise)
    return _merge_equal(landscape, shrink=reading == "shrunk") if name == "9b-throughput" and reading != "rows" else landscape


def _merge_equal(landscape: Landscape, *, shrink: bool) -> Landscape:
    """Rows that only differ in ``max_num_seqs`` of 512 or more are one configuration at 512 requests in flight, so they
    share their mean. Their spread is noise: 0.42 % over the four default rows, 1.1 % over three pairs in throughput mode.
    ``shrink``: the classes' means carry that noise too and are drawn together by the share of their variance that it explains
    (James and Stein). A row with another prefix cache or fewer sequences keeps its own value."""
    classes: dict[str, list[Truth]] = {}

    def key(point: Point) -> str:
        return json.dumps({**point, "max_num_seqs": min(int(point["max_num_seqs"]), 512)}, sort_keys=True)

    for point in landscape.points():
        if not landscape.space.violations(point):
            classes.setdefault(key(point), []).append(landscape.truth(point))
    logs = {name: [math.log(t.value) for t in truths] for name, truths in classes.items()}
    alike = [
        name
        for name, truths in classes.items()
        if truths[0].success >= 0.99
        and (point := json.loads(name))["max_num_seqs"] == 512
        and not point["enable_prefix_caching"]
    ]
    means = {name: fmean(logs[name]) for name in logs}
    freedom = sum(len(logs[name]) - 1 for name in alike)
    noise = sum((value - means[name]) ** 2 for name in alike for value in logs[name]) / freedom
    centre, spread = fmean(means[name] for name in alike), variance([means[name] for name in alike])
    real = 1.0 if not shrink else max(0.0, 1 - noise * fmean(1 / len(logs[name]) for name in alike) / spread)

    def merged(point: Point) -> Truth:
        name = key(point)
        own = classes[name][0]
        return own if name not in alike else Truth(math.exp(centre + real * (means[name] - centre)), own.success)

    return Landscape(landscape.name, landscape.space, merged, landscape.goal, landscape.mode, landscape.noise)


@dataclass(frozen=True, slots=True)
class Replay:
    """Studies of one reading at one noise: how many said "better", and the median printed gain (a ratio; ``None``: no gain
    was printed)."""

    reading: str
    noise: float
    studies: int
    better: int
    gain: float | None


def replay(name: str, reading: str, noise: float, studies: int) -> Replay:
    """Whole searches of 16 starts and three confirmation rounds over a published page."""
    landscape = published_landscape(name, reading, noise)
    pinned = (Pinned(EngineConfig(landscape.mode), "the bare mode"),) if landscape.mode else ()
    better, gains = 0, []
    for seed in range(studies):
        setup = SearchSetup(
            landscape.goal, landscape.space, Budget(16, time_s=None, soak_s=0), pinned=pinned, seed=seed, early_end=False
        )
        answer = search(setup, MemoryStudy(), landscape.evaluator(seed), lambda event: None)
        better += answer.verdict is Verdict.BETTER
        gains += [answer.gain.ratio] if answer.gain is not None else []
    return Replay(reading, noise, studies, better, median(gains) if gains else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=20)
    studies = parser.parse_args().studies
    print(f"{'9B throughput':<15}{'noise':>8}{'better':>10}{'median gain':>13}")
    for reading in ("rows", "classes", "shrunk"):
        for noise in (RESTART_NOISE, POOLED_NOISE):
            found = replay("9b-throughput", reading, noise, studies)
            gain = "-" if found.gain is None else f"{found.gain - 1:+.1%}"
            print(f"{reading:<15}{noise:>8.2%}{found.better:>6}/{studies:<3}{gain:>13}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
