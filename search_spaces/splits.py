"""How a model may lie on several GPUs: the splits into tensor parallelism and replicas that are worth a start early. Pure.

A replica of a model needs no exchange within a layer, so as many replicas as fit serve the most tokens where batches are full;
every GPU more that shares one replica's layers shortens each step and adds the cache that the weights' copies no longer take
(Pope et al., "Efficiently scaling transformer inference", arXiv 2211.05102; AlpaServe, arXiv 2302.11665). Which of the two
wins depends on how much cache the load needs, so each split that uses all GPUs is measured; the widest one always first,
since it fits when anything does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vopt.search_spaces.parse import PriorSeed
from vopt.search_spaces.relief import REPLICAS, TENSOR, ranks_within
from vopt.search_spaces.space import SearchSpace

SOURCE = "GPUs"


def splits(space: SearchSpace, carried: Mapping[str, Any]) -> tuple[PriorSeed, ...]:
    """The splits over all GPUs of a space that it leaves open, the widest tensor parallelism first; empty for one GPU.

    ``carried`` is what every trial has beside the space's dimensions: its ranks need GPUs of their own.
    """
    gpus = int(space.facts.get("gpus") or 1) // ranks_within(carried)
    tensor, replicas = (_sizes(space, carried, name) for name in (TENSOR, REPLICAS))
    if gpus < 2 or (TENSOR not in space and REPLICAS not in space):
        return ()
    pairs = [(t, d) for t in tensor for d in replicas if t * d <= gpus]
    most = max((t * d for t, d in pairs), default=1)
    full = sorted(((t, d) for t, d in pairs if t * d == most and most > 1), reverse=True)
    return tuple(PriorSeed(_values(space, t, d), _why(t, d), SOURCE) for t, d in full)


def _sizes(space: SearchSpace, carried: Mapping[str, Any], name: str) -> list[int]:
    if name in space:
        return [int(value) for value in space[name].values]
    return [int(carried.get(name) or 1)]


def _values(space: SearchSpace, tensor: int, replicas: int) -> dict[str, int]:
    return {name: size for name, size in ((TENSOR, tensor), (REPLICAS, replicas)) if name in space}


def _why(tensor: int, replicas: int) -> str:
    if replicas == 1:
        return f"one engine over {tensor} GPUs: the shortest steps, and the most KV cache in one place"
    if tensor == 1:
        return f"{replicas} whole replicas: nothing to exchange within a layer"
    return f"{replicas} replicas of {tensor} GPUs each: between the two"
