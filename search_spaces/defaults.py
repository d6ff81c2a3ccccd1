"""The values that ``vllm serve`` gives to the arguments that decide memory and scheduling, by model, GPU and version.

Source: ``vllm/engine/arg_utils.py`` (``get_batch_defaults``, ``_set_default_max_num_seqs_and_batched_tokens_args``) and
``vllm/config/vllm.py`` (capture sizes) of vLLM 0.17 to 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vopt.search_spaces.shape import ModelShape

GIB = 1024**3
LATEST_VERSION = "0.33.0"

CPU_BLOCK, CPU_LATENT_BLOCK = 128, 16
"""Tokens in a block of the CPU build (``platforms/cpu.py``), where a GPU's are 16 (64 for MLA); a hybrid's grow in steps of
it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device: the name that its driver reports and its memory in bytes."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a ``speculative_config`` asks for: the method and the tokens drafted per step."""

    method: str
    tokens: int
    acceptance_length: float | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """The arguments after vLLM's defaults were applied. ``capture_size`` is 0 when no CUDA graphs are captured; ``compiles``
    says whether Inductor compiles the model."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    gpu_memory_utilization: float
    kv_cache_dtype: str
    state_dtype: str | None
    prefix_caching: bool
    chunked_prefill: bool
    async_scheduling: bool
    capture_size: int
    full_graphs: bool
    tensor: int
    pipeline: int
    data: int
    block_size: int | None
    text_only: bool
    speculation: Speculation | None
    performance_mode: str
    long_prefill_token_threshold: int = 0
    stream_interval: int = 1
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks: int | None = None
    cpu_offload_bytes: int = 0
    compiles: bool = True

    @property
    def speculative_tokens(self) -> int:
        return self.speculation.tokens if self.speculation else 0

    @property
    def batches_in_flight(self) -> int:
        """How many batches may be scheduled and not yet settled."""
        return self.pipeline + (1 if self.async_scheduling else 0)


def version_key(version: str) -> tuple[int, int]:
    """(major, minor) of a version; what cannot be read counts as the latest."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else version_key(LATEST_VERSION)


def batch_defaults(gpu: Gpu, version: str = LATEST_VERSION) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) of ``vllm serve`` on a device, before any performance mode."""
    name = gpu.name.lower()
    if name == "cpu":
        return 128, 2048
    if gpu.memory_bytes >= 160 * GIB and version_key(version) >= (0, 28):
        return 1024, 16384
    if gpu.memory_bytes >= 70 * GIB and "a100" not in name and "gb10" not in name:
        return 1024, 8192
    return 256, 2048


def resolve(shape: ModelShape, gpu: Gpu, arguments: Mapping[str, Any], version: str = LATEST_VERSION) -> Resolved:
    """What ``vllm serve`` makes of ``arguments`` (by ``EngineArgs`` name). It checks nothing: see ``can_start``."""
    mode = str(arguments.get("performance_mode") or "balanced")
    speculation = read_speculation(arguments, shape)
    length = _length(arguments.get("max_model_len"), shape)
    chunked = arguments.get("enable_chunked_prefill") is not False
    seqs, tokens = _batch(arguments, batch_defaults(gpu, version), mode, length, chunked)
    eager = bool(arguments.get("enforce_eager")) or _level(arguments) == 0
    graph_mode = _compilation(arguments, "cudagraph_mode")
    graphs = not eager and str(graph_mode or "").upper() not in ("NONE", "0")
    return Resolved(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        gpu_memory_utilization=float(
            arguments.get("gpu_memory_utilization") or (0.92 if version_key(version) >= (0, 20) else 0.9)
        ),
        kv_cache_dtype=_kv_dtype(arguments, shape),
        state_dtype=_state_dtype(arguments, shape),
        prefix_caching=_prefix_caching(arguments, shape, version),
        chunked_prefill=chunked,
        async_scheduling=_async(arguments, speculation, version),
        capture_size=_capture_size(arguments, seqs, tokens, speculation, gpu, version) if graphs else 0,
        full_graphs=graphs and str(graph_mode or "FULL").upper() != "PIECEWISE" and _level(arguments) != 1,
        tensor=int(arguments.get("tensor_parallel_size") or 1),
        pipeline=int(arguments.get("pipeline_parallel_size") or 1),
        data=int(arguments.get("data_parallel_size") or 1),
        block_size=arguments.get("block_size") or _block_size(shape, gpu),
        text_only=bool(arguments.get("language_model_only")) or not shape.multimodal,
        speculation=speculation,
        performance_mode=mode,
        long_prefill_token_threshold=int(arguments.get("long_prefill_token_threshold") or 0),
        stream_interval=int(arguments.get("stream_interval") or 1),
        kv_cache_memory_bytes=arguments.get("kv_cache_memory_bytes"),
        num_gpu_blocks=arguments.get("num_gpu_blocks_override"),
        cpu_offload_bytes=round(float(arguments.get("cpu_offload_gb") or 0) * GIB),
        compiles=not eager,
    )


def read_speculation(arguments: Mapping[str, Any], shape: ModelShape) -> Speculation | None:
    """The speculation that ``speculative_config`` or the ``spec_*`` arguments ask for.

    ``synthetic_acceptance_length`` becomes the acceptance length, as does the sum of ``synthetic_acceptance_rates``.
    """
    config = dict(arguments.get("speculative_config") or {})
    for short, key in (("spec_method", "method"), ("spec_model", "model"), ("spec_tokens", "num_speculative_tokens")):
        if arguments.get(short) is not None:
            config.setdefault(key, arguments[short])
    if not config:
        return None
    method = str(config.get("method") or ("draft_model" if config.get("model") else "mtp"))
    length = config.get("synthetic_acceptance_length")
    if length is None and (rates := config.get("synthetic_acceptance_rates")):
        length = 1.0 + sum(rates)
    tokens = int(config.get("num_speculative_tokens") or max(1, shape.mtp_layers))
    return Speculation("mtp" if method.endswith("_mtp") else method, tokens, length, config.get("model"))


def _batch(arguments: Mapping[str, Any], defaults: tuple[int, int], mode: str, length: int, chunked: bool) -> tuple[int, int]:
    given_seqs, given_tokens = arguments.get("max_num_seqs"), arguments.get("max_num_batched_tokens")
    factor = 2 if mode == "throughput" else 1
    seqs = int(given_seqs) if given_seqs is not None else defaults[0] * factor
    if given_tokens is not None:
        tokens = int(given_tokens)
    else:
        tokens = defaults[1] * factor if chunked else max(length, defaults[1] * factor)
        tokens = min(seqs * length, tokens)
    return (min(seqs, tokens) if given_seqs is None else seqs), tokens


def _block_size(shape: ModelShape, gpu: Gpu) -> int | None:
    """What the CPU build takes by itself; ``None``: the layout's own."""
    if gpu.name != "cpu":
        return None
    return CPU_BLOCK if shape.latent is None else CPU_LATENT_BLOCK


def _length(value: object, shape: ModelShape) -> int:
    if value is None or value in ("auto", -1):
        return shape.max_position
    return int(str(value))


def _level(arguments: Mapping[str, Any]) -> int:
    level = arguments.get("optimization_level")
    return 2 if level is None else int(str(level).lstrip("O"))


def _compilation(arguments: Mapping[str, Any], key: str) -> Any:
    config = arguments.get("compilation_config")
    value = arguments.get(key)
    return value if value is not None or not isinstance(config, Mapping) else config.get(key)


def _kv_dtype(arguments: Mapping[str, Any], shape: ModelShape) -> str:
    dtype = str(arguments.get("kv_cache_dtype") or "auto")
    if dtype != "auto":
        return dtype
    model = str(arguments.get("dtype") or "auto")
    return shape.dtype if model == "auto" else model


def _state_dtype(arguments: Mapping[str, Any], shape: ModelShape) -> str | None:
    if shape.linear is None:
        return None
    dtype = str(arguments.get("mamba_ssm_cache_dtype") or "auto")
    return shape.linear.state_dtype if dtype == "auto" else dtype


def _prefix_caching(arguments: Mapping[str, Any], shape: ModelShape, version: str) -> bool:
    value = arguments.get("enable_prefix_caching")
    if value is not None:
        return bool(value)
    return not shape.hybrid or version_key(version) >= (0, 28)  # on for hybrids since vLLM 0.28 (PR #50991)


def _async(arguments: Mapping[str, Any], speculation: Speculation | None, version: str) -> bool:
    """On unless the speculation method cannot: n-gram on the V1 model runner (the default before 0.29), suffix always."""
    value = arguments.get("async_scheduling")
    if value is not None:
        return bool(value)
    if speculation is None:
        return True
    return not (speculation.method == "suffix" or (speculation.method == "ngram" and version_key(version) < (0, 29)))


def _capture_size(
    arguments: Mapping[str, Any], seqs: int, tokens: int, speculation: Speculation | None, gpu: Gpu, version: str
) -> int:
    sizes = _compilation(arguments, "cudagraph_capture_sizes")
    if sizes is not None:
        return max((int(size) for size in sizes), default=0)
    given = _compilation(arguments, "max_cudagraph_capture_size")
    cap = 1024 if "b200" in gpu.name.lower() and version_key(version) >= (0, 28) else 512
    query = 1 + (speculation.tokens if speculation else 0)
    return min(int(given) if given is not None else min(seqs * query * 2, cap), tokens)


def capture_sizes(largest: int, mode: str = "balanced") -> tuple[int, ...]:
    """vLLM's default capture sizes up to ``largest``: 1, 2, 4 (interactivity: 1..32), then steps of 8, from 256 of 16."""
    small = range(1, min(32, largest) + 1) if mode == "interactivity" else (1, 2, 4)
    sizes = {size for size in small if size <= largest} | set(range(8, min(largest + 1, 256), 8))
    return tuple(sorted(sizes | set(range(256, largest + 1, 16))))
