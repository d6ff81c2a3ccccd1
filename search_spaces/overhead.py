"""What a start of vLLM takes beside weights and KV cache: the peak of its profiling run, CUDA graphs, the driver's share.

``Worker.determine_available_memory`` (``v1/worker/gpu_worker.py``) leaves for the cache what is allowed less the weights, the
growth of memory outside PyTorch, the highest point that PyTorch's allocations reach in one profiling run, and an estimate of
the CUDA graphs. Inside that run compilation, the forward pass and the sampler follow one another, so the highest of the three
counts and not their sum. Read in vLLM 0.20, 0.22.1, 0.26, 0.28, 0.30 and 0.33; checked against fourteen starts of Qwen3-0.6B,
Qwen3-8B and Qwen3.5-9B with vLLM 0.22.1 on an H200 (``tests/assets/h200``), whose caches come out within 0.1 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from vopt.search_spaces.defaults import GIB, LATEST_VERSION, Gpu, Resolved, capture_sizes, version_key
from vopt.search_spaces.shape import DTYPE_BYTES, LayerKind, ModelShape

ACTIVATION_BYTES = 2
"""Activations are bfloat16 or float16."""

OLDER_LOGIT_BYTES = 14
"""``_dummy_sampler_run`` of ``v1/worker/gpu_model_runner.py``, bytes for each request and entry of the vocabulary: the
model's logits (2), their float32 copy (4, ``v1/sample/sampler.py``), the probabilities (4) and the exponential noise that they
are divided by (4, ``v1/sample/ops/topk_topp_sampler.py``, which FlashInfer's sampler does not replace: since 0.22 the
run calls it a second time with generators). Nothing is sorted: from 8 requests on a Triton kernel filters in place."""

NEWER_LOGIT_BYTES = 6
"""The same of ``v1/worker/gpu/model_runner.py``: the model's logits and their float32 copy; the noise is drawn inside the
kernel that takes the maximum (``v1/worker/gpu/sample/gumbel.py``)."""

MULTIPROCESSORS = 132
"""Rows of float32 logits that the filter of the older runner keeps as its buffer, one for each multiprocessor (of an H100 or
H200: 108 on an A100, 148 on a B200)."""

COMPILING_BYTES = 100_000_000
"""What compiling takes beside a copy of the embedding table. Two records: Qwen3.5-9B at 4,096 tokens (0.100 GB) and Qwen3-8B at
8,192 (0.100 GB). 60 MiB of it are the buffer that clears an H200's cache between timings; how the rest grows is not known."""

GRAPH_BYTES_PER_LAYER = 0.30e6
"""One full CUDA graph in one layer (0.55 GiB for 51 + 51 graphs of Qwen3.5-9B, 0.40 GiB for 51 + 35, logged on an H200)."""

PIECEWISE_GRAPH_BYTES = 2**20
"""One piecewise graph: the least that vLLM counts for a graph (``profile_cudagraph_memory``)."""

NON_TORCH_BYTES = round(0.265 * GIB)
"""CUDA context, kernels and libraries' workspaces at tensor parallel size 1, a fit: the fourteen starts lie between 0.26 and
0.28 GiB (published profiles: 0.15 to 0.27)."""

NON_TORCH_PARALLEL_BYTES = round(0.9 * GIB)
"""The same with communicators (0.6-2.1 GiB published)."""

HIDDEN_MIB = {143_771: 143_771 - 139.80 * 1024, 81_559: 81_559 - 79.19 * 1024}
"""MiB of a device that its driver reports (``nvidia-smi``) and CUDA does not show, by what the driver reports: an H200 and an
H100. vLLM takes its share of what CUDA shows ("139.8 GiB" in its logs from H200s)."""

NEWER_TYPES = frozenset({"deepseek_v2", "qwen2_moe"})
"""Mixtures of experts that vLLM 0.26 to 0.28 runs on the newer runner (``DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES``)."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Estimated bytes of one rank that neither weights nor cache take, by cause.

    ``compilation``, ``forward`` and ``sampler`` are what these steps of the profiling run reach, each by itself; ``rotary`` is
    the table of sines and cosines, which vLLM counts as weights.
    """

    compilation: int
    forward: int
    sampler: int
    graphs: int
    rotary: int
    driver: int

    @property
    def peak(self) -> int:
        """The profiling run's highest point."""
        return max(self.compilation, self.forward, self.sampler)

    @property
    def total(self) -> int:
        return self.peak + self.graphs + self.rotary + self.driver


def overhead_estimate(
    shape: ModelShape, gpu: Gpu, resolved: Resolved, version: str = LATEST_VERSION, *, compiled: bool = False
) -> Overhead:
    """What a start takes beside weights and cache. ``compiled``: its compile key is known, so nothing is compiled."""
    cpu = gpu.name == "cpu"
    parallel = resolved.tensor * resolved.pipeline > 1
    newer = newer_runner(shape, resolved, version)
    graphs = 0 if cpu or (newer and version_key(version) < (0, 30)) else _graph_bytes(shape, resolved)
    return Overhead(
        compilation=0 if cpu or compiled or not resolved.compiles else _compilation_bytes(shape, resolved),
        forward=round(resolved.max_num_batched_tokens * _token_bytes(shape, resolved.tensor)),
        sampler=round(_sampler_bytes(shape, resolved, newer)),
        graphs=round(graphs),
        rotary=round(shape.rotary_values * DTYPE_BYTES[shape.dtype]),
        driver=NON_TORCH_PARALLEL_BYTES if parallel else NON_TORCH_BYTES,
    )


def shown_bytes(gpu: Gpu) -> int:
    """What CUDA shows of a device's memory; a size that is not known here is taken as it stands."""
    return gpu.memory_bytes - round(HIDDEN_MIB.get(gpu.memory_bytes >> 20, 0.0) * 2**20)


def newer_runner(shape: ModelShape, resolved: Resolved, version: str = LATEST_VERSION) -> bool:
    """Whether vLLM runs this on its newer model runner (``use_v2_model_runner`` in ``config/vllm.py``).

    Never before 0.22; then for ``Qwen3ForCausalLM`` without quantization; from 0.26 on for all but hybrids and most mixtures of
    experts; from 0.29 on for all. Speculation that it does not support falls back. What 0.23 to 0.25 do was not read: they
    count as 0.22.
    """
    key = version_key(version)
    method = resolved.speculation.method if resolved.speculation else None
    if key < (0, 22) or method == "suffix" or (method in ("ngram", "ngram_gpu") and key < (0, 29)):
        return False
    if key >= (0, 29):
        return True
    if shape.hybrid:
        return False
    if key >= (0, 26):
        return shape.experts is None or shape.model_type in NEWER_TYPES
    return shape.model_type == "qwen3" and shape.quantization is None


def _sampler_bytes(shape: ModelShape, resolved: Resolved, newer: bool) -> float:
    """The sampler of a full batch, with the hidden states of the whole forward pass still held."""
    requests = min(resolved.max_num_seqs, resolved.max_num_batched_tokens)
    hidden = shape.hidden * ACTIVATION_BYTES
    held = resolved.max_num_batched_tokens * hidden
    if newer:
        return held + requests * (hidden + shape.vocab * NEWER_LOGIT_BYTES)
    # The rejection sampler is tried with one drafted token for each request.
    rows = requests * (2 if resolved.speculation else 1)
    return held + requests * 2 * hidden + rows * shape.vocab * OLDER_LOGIT_BYTES + min(rows, MULTIPROCESSORS) * shape.vocab * 4


def _token_bytes(shape: ModelShape, tensor: int) -> float:
    """Activations of one token at the fullest point of the fullest layer.

    A layer's input and residual, and: of an MLP its gate and up projections and their product; of experts the two workspaces
    (``workspace_shapes`` of ``layers/fused_moe``); of attention its projections, the rotated copies and the output; of a gated
    delta net its projections and two outputs. The profiling run has no attention metadata: neither attention nor the delta rule
    itself runs, and their convolution and state take nothing. In all recorded starts the sampler or compilation was higher.
    """
    h, experts, linear = shape.hidden, shape.experts, shape.linear
    q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    most = [2 * q * (2 if shape.gated_attention else 1) + 3 * kv + q]
    if experts is None or experts.layers < shape.layers:
        most.append(3 * shape.ffn)
    if experts is not None:
        spaces = max(experts.width, h * tensor) + max(2 * experts.width, h * tensor)
        most.append(experts.per_token * spaces + 3 * experts.shared_width)
    if linear is not None and shape.count(LayerKind.LINEAR):
        most.append(2 * linear.k_heads * linear.k_dim + 4 * linear.v_heads * linear.v_dim + 4 * linear.v_heads)
    return (max(most) / tensor + 2 * h) * ACTIVATION_BYTES


def _compilation_bytes(shape: ModelShape, resolved: Resolved) -> int:
    """Inductor times kernels with made-up arguments of the real ones' sizes (``benchmark_combo_kernel``, which vLLM sets in
    ``config/compilation.py``): the largest is the embedding table, where the compiled graph looks tokens up itself.
    """
    table = shape.vocab * shape.hidden * DTYPE_BYTES[shape.dtype] / resolved.tensor if resolved.text_only else 0.0
    return round(table) + COMPILING_BYTES


def _graph_bytes(shape: ModelShape, resolved: Resolved) -> float:
    """vLLM's own estimate: the first capture, which needs the largest batch's activations, and each further graph."""
    sizes = capture_sizes(resolved.capture_size, resolved.performance_mode)
    if not sizes:
        return 0.0
    most = resolved.max_num_seqs * (1 + resolved.speculative_tokens)
    full = sum(size <= most for size in sizes) if resolved.full_graphs else 0
    layers = -(-shape.layers // resolved.pipeline)
    return (
        sizes[-1] * _token_bytes(shape, resolved.tensor)
        + (len(sizes) - 1) * PIECEWISE_GRAPH_BYTES
        + max(0, full - 1) * layers * GRAPH_BYTES_PER_LAYER
    )
