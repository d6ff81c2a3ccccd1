"""Starts that were recorded on a real GPU, as a landscape: only recorded configurations can be measured.

Qwen3-0.6B on one NVIDIA H200 (``tests/assets/h200/README.md``), the in-process starts of its search alone: its served starts
carry a fault. Three configurations are no benchmark of a search; they show that real figures go through it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from landscapes import THROUGHPUT, Landscape, Truth, parameter, space

from vopt.search_spaces.space import Point

ASSET = Path(__file__).resolve().parent.parent / "assets" / "h200" / "qwen3-0.6b-throughput.json"
_DEFAULTS: dict[str, Any] = {"performance_mode": "balanced", "max_num_batched_tokens": 8192}


@cache
def recorded_landscape() -> Landscape:
    """Tokens per second of each recorded configuration; one that broke a limit there fails every request here."""
    starts = json.loads(ASSET.read_text(encoding="utf-8"))["starts"]
    seen: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for start in starts:
        if start["stage"] == "search":
            seen.setdefault(_key({**_DEFAULTS, **start["engine_config"]}), []).append(start)
    made = space(
        *(parameter(n, sorted({key[i] for key in seen}), default) for i, (n, default) in enumerate(_DEFAULTS.items())),
        rule=lambda point: _key(point) in seen,
    )

    def truth(point: Point) -> Truth:
        found = seen[_key(point)]
        return Truth(fmean(start["value"] for start in found), float(all(start["feasible"] for start in found)))

    return Landscape("h200-0.6b", made, truth, THROUGHPUT, {"performance_mode": "throughput"})


def _key(config: Point) -> tuple[Any, ...]:
    return tuple(config[name] for name in _DEFAULTS)
