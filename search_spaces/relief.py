"""What brings up a configuration that memory keeps from starting, without taking anything from its clients. Pure.

A shorter context would start almost anything, and is what engines suggest; but it refuses requests that the service took
before. So first come the GPUs that are there anyway: tensor parallelism divides weights and cache among them. Then comes a
larger share of each GPU's memory, where the arithmetic is sure of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vopt.search_spaces.declaration import Declaration
from vopt.search_spaces.memory import Possible

Fit = Callable[[Mapping[str, Any]], Possible]
"""Sees the complete engine config (``--set`` included) and says whether its memory suffices."""

TENSOR, SHARE = "tensor_parallel_size", "gpu_memory_utilization"
REPLICAS = "data_parallel_size"
_WITHIN = ("pipeline_parallel_size", "prefill_context_parallel_size")


def ranks_within(config: Mapping[str, Any]) -> int:
    """How many ranks a config has for each one of tensor and of data parallelism."""
    return math.prod(int(config.get(name) or 1) for name in _WITHIN)


def gpus_of(config: Mapping[str, Any]) -> int:
    """How many GPUs a config takes."""
    return ranks_within(config) * math.prod(int(config.get(name) or 1) for name in (TENSOR, REPLICAS))


def more_gpus(config: Mapping[str, Any], gpus: int, sizes: Iterable[Any], fit: Fit | None) -> dict[str, Any] | None:
    """Tensor parallelism over more of the GPUs: the smallest of ``sizes`` that surely fits, else the largest; ``None`` where
    no larger one has room beside the config's other ranks."""
    ranks = ranks_within(config) * int(config.get(REPLICAS) or 1)
    now = int(config.get(TENSOR) or 1)
    larger = sorted(size for size in sizes if isinstance(size, int) and now < size and size * ranks <= gpus)
    if not larger:
        return None
    sure = (size for size in larger if fit is not None and fit({**config, TENSOR: size}) is Possible.CAN)
    return {TENSOR: next(sure, larger[-1])}


def more_memory(config: Mapping[str, Any], usual: float, shares: Iterable[Any], fit: Fit | None) -> dict[str, Any] | None:
    """The smallest share of each GPU's memory above the config's (``usual`` where it says none) with which it surely fits."""
    if fit is None or config.get("kv_cache_memory_bytes") is not None:
        return None
    now = float(config.get(SHARE) or usual)
    larger = sorted(share for share in shares if isinstance(share, float) and share > now)
    return next(({SHARE: share} for share in larger if fit({**config, SHARE: share}) is Possible.CAN), None)


def service_arguments(declarations: Iterable[Declaration]) -> frozenset[str]:
    """The arguments that change what clients may send or see: the last to be touched."""
    return frozenset(declaration.name for declaration in declarations if declaration.changes_contract)
