"""Recorded trials that others published, as landscapes: only recorded configurations can be measured.

Source: GPUStack's performance lab (docs.gpustack.ai, Qwen3.5-9B on H100 and Qwen3.5-35B-A3B on H200, vLLM 0.17.1, ShareGPT,
1,000 requests). Rates are tokens by wall time, because the reported ones leave out failures: a configuration that lost half
of its requests shows 1.6 times its real rate. The noise is what four equal rows of the 9B page show: 0.42 %.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from landscapes import LATENCY, THROUGHPUT, Landscape, Truth, parameter, space

from vopt.search_spaces.space import Point

ASSET = Path(__file__).resolve().parent.parent / "assets" / "published_trials.json"
RESTART_NOISE = 0.0042
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
def published_landscape(name: str) -> Landscape:
    """``9b-throughput``, ``9b-latency``, ``35b-throughput`` or ``35b-latency``."""
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
    landscape = Landscape(name, made, truth, LATENCY if latency else THROUGHPUT, mode if measured else {}, RESTART_NOISE)
    if name == "9b-throughput":  # the only page with rows that are one configuration to the engine
        return _merge_equal(landscape)
    return landscape


def _merge_equal(landscape: Landscape) -> Landscape:
    """Rows that only differ in ``max_num_seqs`` of 512 or more are one configuration at 512 requests in flight, so they
    share their mean, and their spread is noise (0.42 % over the four default rows, 1.1 % over three pairs in throughput mode).
    The classes' means carry that noise too: they are drawn together by the share of their variance that it explains
    (James and Stein) - all of it here. A row with another prefix cache or fewer sequences keeps its own value."""
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
    real = max(0.0, 1 - noise * fmean(1 / len(logs[name]) for name in alike) / spread)

    def merged(point: Point) -> Truth:
        name = key(point)
        own = classes[name][0]
        return own if name not in alike else Truth(math.exp(centre + real * (means[name] - centre)), own.success)

    return Landscape(landscape.name, landscape.space, merged, landscape.goal, landscape.mode, landscape.noise)
