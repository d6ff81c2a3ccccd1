"""Which configurations the recorded table has, in which order: the most informative first. Deterministic, pure.

Order: the defaults, then every value of every argument alone (the extreme ones first), configurations that cannot start,
then combinations, each as far as possible from all before it. So a table that breaks off is still a table: the effects of
single arguments first, interactions after them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

ROWS = 72
"""Distinct configurations: some above 60, because a few will turn out not to start."""

LEVELS = (16, 64, 256)
"""Requests in flight of the three loads on each start."""

SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 1.75,
}
"""Dummy weights accept drafts as no text would, so how many are kept is stated: 1.75 tokens a step."""

SPACE: Mapping[str, tuple[Any, ...]] = {
    "max_num_seqs": (None, 32, 128, 64, 512),
    "max_num_batched_tokens": (None, 1024, 32768, 2048, 4096, 16384),
    "enable_prefix_caching": (None, False),
    "max_cudagraph_capture_size": (None, 32, 1024, 128, 256),
    "speculative_config": (None, SPECULATION),
    "async_scheduling": (None, False),
    "kv_cache_dtype": (None, "fp8"),
    "performance_mode": (None, "throughput", "interactivity"),
    "gpu_memory_utilization": (None, 0.2, 0.5),
}
"""Values by argument; ``None`` is vLLM's default, the rest from the most to the least telling."""

BROKEN: tuple[Mapping[str, Any], ...] = (
    {"kv_cache_memory_bytes": 1 << 24},
    {"max_num_batched_tokens": 128, "max_num_seqs": 512},
    {"gpu_memory_utilization": 0.012},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
)
"""Too little memory, fewer tokens than sequences, less memory than the weights, a prompt that never fits: they must fail."""


def rows(count: int = ROWS) -> tuple[dict[str, Any], ...]:
    """The first ``count`` configurations."""
    return tuple(dict(config) for config in itertools.islice(_ordered(), count))


def _ordered() -> Iterator[Mapping[str, Any]]:
    yield {}
    made: list[tuple[Any, ...]] = [(None,) * len(SPACE)]
    most = max(map(len, SPACE.values()))
    for rank in range(1, most):
        for position, values in enumerate(SPACE.values()):
            if rank < len(values):
                point = tuple(values[rank] if place == position else None for place in range(len(SPACE)))
                made.append(point)
                yield _config(point)
    yield from BROKEN
    while True:
        made.append(_farthest(made))
        yield _config(made[-1])


def _config(point: tuple[Any, ...]) -> dict[str, Any]:
    return {name: value for name, value in zip(SPACE, point, strict=True) if value is not None}


def _farthest(made: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Two to four arguments changed together, as a search changes them: of 100 random points one whose nearest neighbour
    differs in the most arguments; of those, the one whose values are the rarest so far."""
    generator = random.Random(f"table {len(made)}")
    found: list[tuple[int, int, int, tuple[Any, ...]]] = []
    for number in range(100):
        changed = set(generator.sample(range(len(SPACE)), 2 + len(made) % 3))
        point = tuple(generator.choice(v[1:]) if place in changed else None for place, v in enumerate(SPACE.values()))
        if not _possible(point) or point in made:
            continue
        nearest = min(sum(a != b for a, b in zip(point, other, strict=True)) for other in made)
        common = sum(sum(other[place] == point[place] for other in made) for place in changed)
        found.append((nearest, -common, -number, point))
    return max(found, key=lambda entry: entry[:3])[3]


def _possible(point: tuple[Any, ...]) -> bool:
    """Combinations that vLLM refuses teach nothing again: the tokens of a step cannot be fewer than its sequences."""
    values = dict(zip(SPACE, point, strict=True))
    tokens = values["max_num_batched_tokens"]
    sequences = values["max_num_seqs"] or (2048 if values["performance_mode"] == "throughput" else 1024)
    return tokens is None or tokens >= sequences


def starts(count: int = ROWS, repeats_of: int = 3) -> tuple[tuple[int, int], ...]:
    """(row, start) in the order in which they are measured: after every ``repeats_of`` rows a second fresh start of the
    first of them, then the second starts of all others, so that the noise of a restart is known early."""
    first: list[tuple[int, int]] = []
    for row in range(count):
        first.append((row, 0))
        if row % repeats_of == repeats_of - 1:
            first.append((row - repeats_of + 1, 1))
    return (*first, *((row, 1) for row in range(count) if (row, 1) not in first))
