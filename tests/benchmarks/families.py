"""The families of landscapes that the regret benchmark runs on, by name; each makes the landscape of one seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from landscapes import small_landscape
from published import published_landscape
from random_family import random_landscape
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
