"""The families of landscapes that the regret benchmark runs on, by name; each makes the landscape of one seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from landscapes import small_landscape
from published import published_landscape
from random_family import random_landscape
from recorded import ASSETS
from recorded import recorded_landscape as table_landscape
from recorded_study import recorded_landscape
from simulated_families import simulated_families

FAMILIES: dict[str, Callable[[int], Any]] = {
    "random": random_landscape,
    "small": lambda seed: small_landscape(noise=0.01),
    "9b-throughput": lambda seed: published_landscape("9b-throughput"),
    "9b-latency": lambda seed: published_landscape("9b-latency"),
    "35b-throughput": lambda seed: published_landscape("35b-throughput"),
    "35b-latency": lambda seed: published_landscape("35b-latency"),
    "h200-0.6b": lambda seed: recorded_landscape(),
    **simulated_families(),
}


def of_table(path: Path) -> Callable[[int], Any]:
    """A recorded table at its highest load, whatever the seed."""
    return lambda seed: table_landscape(path)


FAMILIES |= {path.stem: of_table(path) for path in sorted(ASSETS.glob("*-table.jsonl"))}
"""And every table that `tests/gpu/record_table.py` has recorded, by its file's name."""

DEFAULT = (
    "random",
    "9b-throughput",
    "9b-latency",
    "35b-latency",
    "h200-dense-chat",
    "h100-moe-chat",
    "a100-hybrid-throughput",
    "h200-hybrid-chat",
)
"""Chosen so that they differ: what was drawn, what was recorded, and each simulated device and kind of model."""
