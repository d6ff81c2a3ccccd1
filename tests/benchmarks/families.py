"""The families of landscapes that the regret benchmark runs on, by name; each makes the landscape of one seed."""

from __future__ import annotations

from collections.abc import Callable

from landscapes import Landscape, random_landscape, small_landscape
from published import published_landscape

FAMILIES: dict[str, Callable[[int], Landscape]] = {
    "random": random_landscape,
    "small": lambda seed: small_landscape(noise=0.01),
    "9b-throughput": lambda seed: published_landscape("9b-throughput"),
    "9b-latency": lambda seed: published_landscape("9b-latency"),
    "35b-throughput": lambda seed: published_landscape("35b-throughput"),
    "35b-latency": lambda seed: published_landscape("35b-latency"),
}
DEFAULT = tuple(FAMILIES)
