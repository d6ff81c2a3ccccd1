"""How a simulated engine fails: the kinds and the words of vLLM, at start and under load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vopt.optimizer.trial import Failed, FailureKind, Phase
from vopt.search_spaces.defaults import GIB, Resolved
from vopt.search_spaces.memory import Gpu, MemoryPlan
from vopt.search_spaces.on_load import refusal
from vopt.search_spaces.overhead import shown_bytes
from vopt.search_spaces.shape import ModelShape

SPECULATION_METHODS = frozenset({"mtp", "ngram", "ngram_gpu", "eagle", "eagle3", "draft_model", "suffix"})

DRIVER_SHARE = 0.004
"""Part of the memory that CUDA shows of a device which is taken before an engine starts."""

LOAD_RESERVE_BYTES = round(0.75 * GIB)
"""What fragmentation and late allocations take beyond the profile: less than that left free and the load runs out."""


@dataclass(frozen=True, slots=True)
class CrashRegion:
    """Speculation that breaks at high load.

    From ``tokens`` drafted per step and ``in_flight`` requests on: when as many requests as were in flight have finished
    (the first wave), either the engine dies or ``failing_share`` of all later requests end in an error, the longest first.
    """

    method: str
    tokens: int
    in_flight: int
    below: int | None = None
    dies: bool = True
    failing_share: float = 0.0

    def applies(self, resolved: Resolved) -> bool:
        """Whether a configuration speculates in the way that breaks."""
        speculation = resolved.speculation
        return speculation is not None and speculation.method == self.method and speculation.tokens >= self.tokens

    def holds(self, peak: int) -> bool:
        """Whether a load with ``peak`` requests in flight is inside."""
        return peak >= self.in_flight and (self.below is None or peak < self.below)


CRASH_REGIONS = (
    CrashRegion("mtp", tokens=4, in_flight=512),
    CrashRegion("mtp", tokens=4, in_flight=128, below=512, dies=False, failing_share=0.5),
)
"""The first is published: GPUStack's Qwen3.5-9B (H100) and Qwen3.5-35B-A3B (H200) runs of vLLM 0.17.1 with MTP of 4 tokens
at 512 in flight ended 514 and 516 of 1,000 requests, the short ones, at 1.6 to 2.5 times the token rate. The second is an
assumption: the same defect at a load that does not kill the engine, so that a search meets a rate that its successes
cannot be trusted with."""

FIRST_WAVE = 516 / 512
"""Requests that finish before the crash, per request in flight."""


def start_failure(shape: ModelShape, gpu: Gpu, arguments: Mapping[str, Any], plan: MemoryPlan, gpus: int) -> Failed | None:
    """Why the engine would not start, in the order in which vLLM finds out; ``None`` when it would."""
    return _config(shape, plan.resolved, arguments, gpus) or _speculation(shape, plan.resolved) or _memory(shape, gpu, plan)


def _failed(kind: FailureKind, detail: str, hint: Mapping[str, Mapping[str, Any]] | None = None) -> Failed:
    frontend = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
    tail = (f"(EngineCore) ERROR EngineCore failed to start. {detail}", f"RuntimeError: {frontend}")
    config = kind in (FailureKind.INVALID_CONFIG, FailureKind.UNSUPPORTED)
    return Failed(Phase.START, kind, detail, log_tail=(detail,) if config else tail, hint=hint or {})


def _config(shape: ModelShape, r: Resolved, arguments: Mapping[str, Any], gpus: int) -> Failed | None:
    invalid = FailureKind.INVALID_CONFIG
    if r.max_num_batched_tokens < r.max_num_seqs:
        detail = (
            f"max_num_batched_tokens ({r.max_num_batched_tokens}) must be greater than or equal to "
            f"max_num_seqs ({r.max_num_seqs})."
        )
        return _failed(invalid, detail, {"max_num_batched_tokens": {"at_least": r.max_num_seqs}})
    if not r.chunked_prefill and r.max_num_batched_tokens < r.max_model_len:
        detail = (
            f"max_num_batched_tokens ({r.max_num_batched_tokens}) is smaller than max_model_len ({r.max_model_len}). "
            "This effectively limits the maximum sequence length to max_num_batched_tokens."
        )
        return _failed(invalid, detail, {"max_num_batched_tokens": {"at_least": r.max_model_len}})
    if not 0 < r.gpu_memory_utilization <= 1:
        return _failed(invalid, f"GPU memory utilization must be less than 1.0. Got {r.gpu_memory_utilization}.")
    if r.max_model_len > shape.max_position:
        detail = (
            f"User-specified max_model_len ({r.max_model_len}) is greater than the derived max_model_len "
            f"(max_position_embeddings={shape.max_position})."
        )
        return _failed(invalid, detail, {"max_model_len": {"at_most": shape.max_position}})
    if shape.q_heads % r.tensor:
        detail = f"Total number of attention heads ({shape.q_heads}) must be divisible by tensor parallel size ({r.tensor})."
        return _failed(invalid, detail)
    world = r.tensor * r.pipeline * r.data
    if world > gpus:
        return _failed(invalid, f"World size ({world}) is larger than the number of available GPUs ({gpus}) in this node.")
    query = 1 + r.speculative_tokens
    if r.speculation is not None and 0 < r.capture_size < query:
        detail = f"No valid cudagraph sizes after rounding to multiple of {query} (num_speculative_tokens + 1)"
        return _failed(FailureKind.GRAPH_CAPTURE, detail, {"max_cudagraph_capture_size": {"at_least": query}})
    own = shape.quantization.method if shape.quantization else None
    if refused := refusal(own, arguments):
        return _failed(invalid, refused)
    dtype = str(arguments.get("kv_cache_dtype") or "auto")
    if dtype in ("float16", "bfloat16") and dtype != shape.dtype:
        return _failed(invalid, f"kv_cache_dtype {dtype} must equal the model's dtype {shape.dtype}")
    return None


def _speculation(shape: ModelShape, r: Resolved) -> Failed | None:
    if r.speculation is None:
        return None
    method = r.speculation.method
    if method not in SPECULATION_METHODS or (method == "mtp" and not shape.mtp_layers):
        return _failed(FailureKind.UNSUPPORTED, f"NotImplementedError: Unsupported speculative method: '{method}'")
    if method == "suffix":
        detail = "ImportError: Arctic Inference is required for suffix decoding: pip install arctic-inference==0.1.1"
        return _failed(FailureKind.UNSUPPORTED, detail)
    if method in ("eagle", "eagle3", "draft_model") and not r.speculation.model:
        return _failed(FailureKind.INVALID_CONFIG, f"speculative method '{method}' needs a draft model")
    length = r.speculation.acceptance_length
    if length is not None and not 1 <= length <= r.speculation.tokens + 1:
        detail = f"synthetic_acceptance_length must be in [1, {r.speculation.tokens + 1}], got {length}"
        return _failed(FailureKind.INVALID_CONFIG, detail)
    return None


def _memory(shape: ModelShape, gpu: Gpu, plan: MemoryPlan) -> Failed | None:
    r, layout = plan.resolved, plan.layout
    shown = shown_bytes(gpu)
    free = shown * (1 - DRIVER_SHARE)
    if plan.limit_bytes > free and r.kv_cache_memory_bytes is None:
        detail = (
            f"Free memory on device cuda:0 ({free / GIB:.2f}/{shown / GIB:.2f} GiB) on startup is less than "
            f"desired GPU memory utilization ({r.gpu_memory_utilization}, {plan.limit_bytes / GIB:.2f} GiB). Decrease GPU "
            "memory utilization or reduce GPU memory used by other processes."
        )
        return _failed(FailureKind.OOM_START, detail, {"gpu_memory_utilization": {"at_most": round(1 - DRIVER_SHARE, 3)}})
    if plan.weight_bytes > free:
        left = max(0.0, free - 0.95 * free) / 2**20
        detail = f"OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has {left:.2f} MiB free."
        return _failed(FailureKind.OOM_START, detail)
    if plan.weight_bytes + plan.overhead_bytes + (r.kv_cache_memory_bytes or 0) > free:
        return _failed(FailureKind.OOM_START, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    if plan.kv_bytes <= 0:
        detail = (
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
        )
        return _failed(FailureKind.KV_TOO_SMALL, detail)
    needed = layout.blocks_for(r.max_model_len)
    if needed > plan.blocks:
        longest = layout.longest(plan.blocks, r.max_model_len)
        detail = (
            f"To serve at least one request with the model's max seq len ({r.max_model_len}), "
            f"({needed * layout.block_bytes / GIB:.2f} GiB KV cache is needed, which is larger than the available KV cache "
            f"memory ({plan.kv_bytes / GIB:.2f} GiB). Based on the available memory, the estimated maximum model length is "
            f"{longest}. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
        )
        return _failed(FailureKind.KV_TOO_SMALL, detail, {"max_model_len": {"at_most": longest}})
    if shape.hybrid and r.full_graphs and r.capture_size and r.max_num_seqs > plan.blocks:
        detail = (
            f"max_num_seqs ({r.max_num_seqs}) exceeds available Mamba cache blocks ({plan.blocks}). Each decode sequence "
            "requires one Mamba cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most "
            f"{plan.blocks} or increase gpu_memory_utilization."
        )
        return _failed(FailureKind.MAMBA_BLOCKS, detail, {"max_num_seqs": {"at_most": plan.blocks}})
    return None


def most_decoding(shape: ModelShape, gpu: Gpu, resolved: Resolved) -> float:
    """Sequences above which a batch takes more memory than was left outside the engine's share; infinite without a limit.

    Rejection sampling holds float32 probabilities of every drafted token, which the profile at start does not see.
    """
    if resolved.kv_cache_memory_bytes is not None:
        return math.inf
    left = shown_bytes(gpu) * (1 - DRIVER_SHARE - resolved.gpu_memory_utilization) - LOAD_RESERVE_BYTES
    if left < 0:
        return 0
    if resolved.speculation is None:
        return math.inf
    return left // ((1 + resolved.speculative_tokens) * shape.vocab * 4 / resolved.tensor)
