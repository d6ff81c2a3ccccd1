"""What fits: weights, KV cache and concurrency of a configuration on a device, and whether its engine can start at all.

Only exact arithmetic rejects. Weights and cache layout are exact; what is left over for the cache is not, because the peak
of profiling, CUDA graphs and the driver's share are estimates until an engine of this study has started and said so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from vopt.search_spaces.defaults import GIB, LATEST_VERSION, Gpu, Resolved, resolve
from vopt.search_spaces.kv_cache import KvLayout, kv_layout
from vopt.search_spaces.on_load import loaded
from vopt.search_spaces.overhead import Overhead, overhead_estimate, shown_bytes
from vopt.search_spaces.shape import ModelShape

__all__ = ["GIB", "Calibration", "Gpu", "MemoryPlan", "Possible", "Verdict", "can_start", "memory_plan"]

MARGIN = 0.05
"""What a hard reject must clear: it never rests on a difference smaller than this."""

START_MARGIN = 0.01
"""By how much of the memory it may use a start's cache differs from that of another (0.9 % between two of Qwen3.5-9B on an
H200, one of which compiled; on a CPU the process itself varies by tens of MB)."""

WEIGHT_MARGIN = 0.01
"""How far the weights' size may be off: vectors are not counted, and checkpoints keep small modules unquantized."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One successful start: what was estimated beside weights and cache, and what it was."""

    estimated_bytes: int
    actual_bytes: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """What successful starts of one model, device and vLLM taught about the overhead. Immutable; grows by ``learn``."""

    observations: tuple[Observation, ...] = ()

    def learn(
        self,
        shape: ModelShape,
        gpu: Gpu,
        arguments: Mapping[str, Any],
        kv_cache_bytes: int,
        version: str = LATEST_VERSION,
        *,
        compiled: bool = False,
    ) -> Calibration:
        """This and one start that reported ``kv_cache_bytes`` of KV cache per rank; ``compiled``: its compile key was known."""
        shape = loaded(shape, arguments, version)
        resolved = resolve(shape, gpu, arguments, version)
        if resolved.kv_cache_memory_bytes is not None:
            return self  # the size was given, not what was left over
        estimated = overhead_estimate(shape, gpu, resolved, version, compiled=compiled).total
        actual = _limit(gpu, resolved) - _weights(shape, resolved) - kv_cache_bytes
        return replace(self, observations=(*self.observations, Observation(estimated, actual)))

    def overhead(self, estimate: Overhead) -> float:
        """The estimate corrected by what was observed: a line through starts that differ, a shift otherwise."""
        pairs = [(float(o.estimated_bytes), float(o.actual_bytes)) for o in self.observations]
        if not pairs:
            return float(estimate.total)
        mean_x = math.fsum(x for x, _ in pairs) / len(pairs)
        mean_y = math.fsum(y for _, y in pairs) / len(pairs)
        spread = math.fsum((x - mean_x) ** 2 for x, _ in pairs)
        slope = 1.0
        if spread > (0.02 * mean_x) ** 2:
            slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread
        # A slope far from one comes from noise between starts that are almost alike.
        return mean_y + min(2.0, max(0.0, slope)) * (estimate.total - mean_x)

    @property
    def known(self) -> bool:
        return bool(self.observations)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where one rank's memory goes, in bytes, and what its cache holds. ``kv_bytes`` may be negative: nothing fits.

    ``kv_bytes_at_most`` is what would be left if nothing but weights took memory; rejects rest on it.
    """

    resolved: Resolved
    layout: KvLayout
    limit_bytes: int
    weight_bytes: int
    overhead_bytes: int
    kv_bytes: int
    kv_bytes_at_most: int
    overhead: Overhead
    calibrated: bool

    @property
    def blocks(self) -> int:
        """Blocks of the pool, the estimate; ``num_gpu_blocks_override`` wins as in vLLM."""
        if self.resolved.num_gpu_blocks is not None:
            return self.resolved.num_gpu_blocks
        return max(0, self.kv_bytes // self.layout.block_bytes)

    @property
    def blocks_at_most(self) -> int:
        return max(0, self.kv_bytes_at_most // self.layout.block_bytes)

    @property
    def max_concurrency(self) -> float:
        """Requests of ``max_model_len`` that fit at once."""
        return self.layout.max_concurrency(self.blocks, self.resolved.max_model_len)

    @property
    def logged_tokens(self) -> int:
        """The "GPU KV cache size" that vLLM logs."""
        return int(self.max_concurrency * self.resolved.max_model_len)

    def resident(self, length: int) -> int:
        """Requests of ``length`` tokens that the cache holds at once."""
        return self.blocks // self.layout.blocks_for(length)


def memory_plan(
    shape: ModelShape,
    gpu: Gpu,
    arguments: Mapping[str, Any],
    version: str = LATEST_VERSION,
    calibration: Calibration | None = None,
    *,
    compiled: bool = False,
) -> MemoryPlan:
    """The memory of one configuration. ``compiled``: an earlier start has compiled it, which leaves more for the cache."""
    calibration, shape = calibration or Calibration(), loaded(shape, arguments, version)
    resolved = resolve(shape, gpu, arguments, version)
    estimate = overhead_estimate(shape, gpu, resolved, version, compiled=compiled)
    weights = _weights(shape, resolved)
    limit = _limit(gpu, resolved)
    overhead = round(calibration.overhead(estimate))
    given = resolved.kv_cache_memory_bytes
    return MemoryPlan(
        resolved=resolved,
        layout=kv_layout(shape, resolved),
        limit_bytes=limit,
        weight_bytes=weights,
        overhead_bytes=overhead,
        kv_bytes=limit - weights - overhead if given is None else given,
        kv_bytes_at_most=limit - round(weights * (1 - WEIGHT_MARGIN)) if given is None else given,
        overhead=estimate,
        calibrated=calibration.known,
    )


def _limit(gpu: Gpu, resolved: Resolved) -> int:
    return int(resolved.gpu_memory_utilization * shown_bytes(gpu))


def _weights(shape: ModelShape, resolved: Resolved) -> int:
    mtp = resolved.speculation is not None and resolved.speculation.method == "mtp"
    size = shape.weight_bytes_per_rank(resolved.tensor, resolved.pipeline, text_only=resolved.text_only, mtp=mtp)
    return max(0, size - resolved.cpu_offload_bytes)


class Possible(StrEnum):
    """Whether an engine can start, as far as arithmetic goes."""

    CAN = "can"
    CANNOT = "cannot"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer with its reason and the numbers behind it; ``repair`` is the change that would make it start."""

    possible: Possible
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    repair: Mapping[str, Any] | None = None


def can_start(
    shape: ModelShape,
    gpu: Gpu,
    arguments: Mapping[str, Any],
    version: str = LATEST_VERSION,
    calibration: Calibration | None = None,
    *,
    exact: bool = False,
) -> Verdict:
    """Whether a configuration's engine can start.

    ``CANNOT`` rests on the most that the cache could get and clears a margin of 5 % (on a calibrated study: on the learnt
    size, with the same margin and what starts differ by); ``CAN`` needs the estimate to fit by the same margin; between
    them lies ``UNKNOWN``. ``exact``: the estimate is the truth, as for a simulated engine, and nothing lies between.
    """
    plan = memory_plan(shape, gpu, arguments, version, calibration)
    resolved, layout = plan.resolved, plan.layout
    numbers: dict[str, float] = {
        "memory_bytes": gpu.memory_bytes,
        "limit_bytes": plan.limit_bytes,
        "weight_bytes": plan.weight_bytes,
        "kv_bytes": plan.kv_bytes,
        "blocks": plan.blocks,
        "block_size": layout.block_size,
    }
    if plan.weight_bytes * (1 - WEIGHT_MARGIN) > plan.limit_bytes:
        reason = f"weights take {plan.weight_bytes / GIB:.1f} GiB a rank, {plan.limit_bytes / GIB:.1f} GiB may be used"
        return Verdict(Possible.CANNOT, reason, numbers)
    if exact and plan.kv_bytes <= 0:
        return Verdict(Possible.CANNOT, "weights and activations leave no memory for the KV cache", numbers)
    if resolved.num_gpu_blocks is not None:
        at_most = float(resolved.num_gpu_blocks)
    elif exact:
        at_most = float(plan.blocks)
    elif plan.calibrated:
        most = plan.kv_bytes + MARGIN * max(0, plan.kv_bytes) + START_MARGIN * plan.limit_bytes
        at_most = max(0.0, most / layout.block_bytes)
    else:
        at_most = plan.blocks_at_most * (1 + MARGIN)
    needed = layout.blocks_for(resolved.max_model_len)
    numbers |= {"blocks_needed": needed, "blocks_at_most": math.floor(at_most)}
    auto_length = arguments.get("max_model_len") in ("auto", -1)
    if needed > at_most and not auto_length:
        longest = layout.longest(max(0, int(plan.blocks)), resolved.max_model_len)
        reason = f"one request of max_model_len {resolved.max_model_len} needs {needed} KV blocks, at most {int(at_most)} fit"
        return Verdict(Possible.CANNOT, reason, numbers, {"max_model_len": longest} if longest else None)
    if _needs_state_blocks(shape, resolved) and resolved.max_num_seqs > at_most:
        reason = f"max_num_seqs {resolved.max_num_seqs} exceeds the {int(at_most)} state blocks that can fit (CUDA graphs)"
        return Verdict(Possible.CANNOT, reason, numbers, {"max_num_seqs": max(1, plan.blocks)})
    tight = plan.blocks * (1 if exact else 1 - MARGIN)
    if plan.kv_bytes <= 0 or (needed > tight and not auto_length):
        reason = (
            f"one request of max_model_len {resolved.max_model_len} needs {needed} KV blocks, about {plan.blocks} are expected"
        )
        return Verdict(Possible.UNKNOWN, f"the KV cache may be too small for max_model_len: {reason}", numbers)
    if _needs_state_blocks(shape, resolved) and resolved.max_num_seqs > tight:
        return Verdict(Possible.UNKNOWN, "max_num_seqs is close to the number of state blocks", numbers)
    return Verdict(Possible.CAN, f"{plan.kv_bytes / GIB:.1f} GiB are left for the KV cache", numbers)


def _needs_state_blocks(shape: ModelShape, resolved: Resolved) -> bool:
    """Full CUDA graphs need one state block for each sequence (``config/compilation.py``)."""
    return shape.hybrid and resolved.full_graphs and resolved.capture_size > 0
