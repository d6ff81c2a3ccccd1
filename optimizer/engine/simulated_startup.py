"""How long a simulated engine takes to start, part by part, and which of its parts the caches of earlier starts save.

Measured on an H200 with vLLM 0.22.1 and dummy weights (seconds, first start / new compile key / known key), with the Triton and
vLLM caches shared by all starts: Qwen3.5-9B 180 to 218 / 51 to 70 / 36 to 42 where vLLM spawns its engine core and tunes its
kernels by itself, 90 / 35 to 40 in trials that spare both (``core_start``, ``kernel_tuning``; the fastest of the hosts);
Qwen3-8B 78 to 84 / 29 to 48 / 16 to 25, Qwen3-0.6B 86 / 26 to 35 / 15 to 17. The ranges are of six hosts of one kind: what is
computed lies inside them, or near.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vopt.optimizer.trial import StartClass
from vopt.search_spaces.defaults import GIB, Resolved, capture_sizes, version_key
from vopt.search_spaces.shape import ModelShape

IMPORT_S = 10.0
"""7 to 16 s on four hosts."""
READ_BYTES_PER_S = 4.0 * GIB
"""Reading weights that lie in the page cache or on a local NVMe drive."""
DUMMY_BYTES_PER_S = 9.0 * GIB

OUTSIDE_KEY = frozenset(
    {
        "gpu_memory_utilization",
        "stream_interval",
        "scheduling_policy",
        "long_prefill_token_threshold",
        "prefill_schedule_interval",
        "watermark",
        "max_num_active_seqs",
        "seed",
        "mamba_backend",
        "served_model_name",
        "load_format",
        "kv_cache_memory_bytes",
    }
)
"""Arguments that the compile cache's key does not depend on (hashes compared with vLLM 0.32)."""

OUTSIDE_DENSE_KEY = frozenset({"max_model_len", "enable_prefix_caching", "enable_chunked_prefill", "language_model_only"})
"""The same for models without linear attention only."""


def compile_key(shape: ModelShape, arguments: Mapping[str, Any], resolved: Resolved, version: str) -> str:
    """What two starts must agree in to share compiled code. ``max_num_seqs`` joined the key with vLLM 0.29."""
    ignored = OUTSIDE_KEY | (frozenset() if shape.hybrid else OUTSIDE_DENSE_KEY) | {"max_num_seqs", "max_num_batched_tokens"}
    key: dict[str, Any] = {name: value for name, value in arguments.items() if name not in ignored and value is not None}
    key.pop("performance_mode", None)
    key["tokens"] = resolved.max_num_batched_tokens
    key["sizes"] = [resolved.capture_size, resolved.performance_mode == "interactivity"]
    if version_key(version) >= (0, 29):
        key["seqs"] = resolved.max_num_seqs
    return json.dumps([shape.name, version, key], sort_keys=True, default=str)


@dataclass(slots=True)
class SimulatedCaches:
    """What earlier starts of one study left on disk: models inspected and tuned, and compile keys."""

    models: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)

    def start_class(self, shape: ModelShape, key: str) -> StartClass:
        if shape.name not in self.models:
            return StartClass.FIRST
        return StartClass.KNOWN_KEY if key in self.keys else StartClass.NEW_KEY

    def fill(self, shape: ModelShape, key: str) -> None:
        self.models.add(shape.name)
        self.keys.add(key)


def start_parts(
    shape: ModelShape,
    resolved: Resolved,
    start_class: StartClass,
    *,
    weight_bytes: int,
    dummy: bool,
    eager: bool,
    unaided: bool = False,
) -> dict[str, float]:
    """Seconds by part. vLLM spawns the engine process of hybrids instead of forking it, and tunes kernels at their first start.

    ``unaided``: as vLLM does it by itself, and as trials did it up to the records of 2026-11-30."""
    first, known = start_class is StartClass.FIRST, start_class is StartClass.KNOWN_KEY
    hybrid, layers = shape.hybrid, shape.layers
    spawned = hybrid and unaided
    sizes = len(capture_sizes(resolved.capture_size, resolved.performance_mode))
    parts = {
        "import": IMPORT_S,
        "inspect": (20.0 if unaided else 10.0) if first else 0.0,
        "config": 0.7 if first else 3.7 if unaided or not hybrid else 1.0,
        "process": (15.0 if first else 11.0) if spawned else 0.5 if hybrid else 0.0,
        "worker": 5.0 if spawned else 3.0 if hybrid else 2.0,
        "weights": weight_bytes / (DUMMY_BYTES_PER_S if dummy else READ_BYTES_PER_S),
        "compile": 0.0 if eager else _compile_s(layers, hybrid, first, known, unaided),
        "profile": 1.0,
        "tuning": (90.0 if unaided else 27.0) if hybrid and first else 0.0,
        "warmup": (10.0 if hybrid else 17.0) if first else 1.0,
        "capture": _capture_s(sizes * (2 if resolved.full_graphs else 1), hybrid),
    }
    if resolved.tensor * resolved.pipeline > 1:
        parts["communicators"] = 12.0
    if resolved.speculation is not None and not known:
        parts["drafter"] = 12.0
    return parts


def _capture_s(graphs: int, hybrid: bool) -> float:
    """Measured for 51 + 51 graphs: 3 to 6 s with the dense models, 6 to 7 s and 2 s of their estimate with Qwen3.5-9B."""
    return 0.03 * graphs + (5.0 if hybrid else 1.0) if graphs else 0.0


def _compile_s(layers: int, hybrid: bool, first: bool, known: bool, unaided: bool) -> float:
    """Measured for dense models of 28 and 36 layers: 29 to 37 s first, 17 to 23 and 18 to 30 s with a new key, 4.6 to 5.2 and
    5.6 to 8.7 s with a known one; for the hybrid of 32 layers 44 to 53, 26 to 39 and 4.2 to 5.2 s, and 34 and 22 to 26 s where
    Inductor's import, 2.5 to 4 s, is done before."""
    if known:
        return 0.17 * layers
    if first:
        return (1.65 if unaided else 1.15) * layers if hybrid else 30.0
    return ((0.98 if unaided else 0.73) if hybrid else 0.65) * layers
