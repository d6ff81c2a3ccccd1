"""How long an engine step takes, and what that predicts for a workload: a roofline with measured constants.

The constants were fitted to vLLM 0.22.1 on one H200 with Qwen3-8B and Qwen3.5-9B (bursts of 400 requests, seven starts) and
with Qwen3-0.6B and 8B in a closed loop of 256 (four starts); ``tests/benchmarks/simulator.py`` prints how well they fit;
the structure is that of Vidur (arXiv 2405.05465) and of LLM roofline practice: weights are read once a step, caches once a
sequence, arithmetic grows with the tokens. Uniform expert routing is assumed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vopt.optimizer.engine.hardware import Hardware
from vopt.search_spaces.defaults import LATEST_VERSION, Resolved, capture_sizes
from vopt.search_spaces.kv_cache import state_bytes, token_bytes
from vopt.search_spaces.memory import MemoryPlan, memory_plan
from vopt.search_spaces.on_load import loaded
from vopt.search_spaces.shape import DTYPE_BYTES, LayerKind, ModelShape

BANDWIDTH_SHARE = 0.72
"""Part of the peak memory bandwidth that kernels reach (fit: mean TPOT of both models)."""
DENSE_SHARE = 0.66
"""Part of the peak arithmetic rate in dense matrix products (fit: mean and p99 TTFT of both models)."""
EXPERTS_SHARE = 0.40
"""The same for grouped products of experts, whose tiles are only partly filled."""
ATTENTION_SHARE = 0.50
LAYER_S = 20e-6
"""Launch time of one layer inside a captured graph."""
PIECEWISE_LAYER_S = 90e-6
"""Launch time of one compiled layer outside a captured graph."""
EAGER_LAYER_S = 250e-6
"""Launch time of one layer without compilation."""
STEP_S = 0.4e-3
"""Fixed time of a step with asynchronous scheduling."""
SEQUENCE_S = 2.5e-6
"""Time per sequence and step: input preparation, sampling, output."""
FRONT_END_S = 55e-6
"""Time per sequence and step of the one Python thread that answers requests (detokenizing, queues, the client in-process):
no step is shorter than that thread needs for its tokens. Measured with vLLM 0.22.1 beside an H200: Qwen3-0.6B, whose GPU steps
are half as long, had a mean TPOT of 15.6 ms at 256 in flight (61 us a sequence) and 15,383 output tokens/s, 15,546 served; with
Qwen3-8B that thread was busy for 64 % of the time at 11,255 output tokens/s (57 us each); a leaner client saw 14,000 output
tokens/s of Qwen3-8B at 400 in flight, which 60 us would not allow."""
SYNC_STEP_S = 1.0e-3
"""What a step costs more when the scheduler waits for its results first."""
SYNC_SEQUENCE_S = 4e-6
MIXED_LAYER_S = 2.3e-3
"""What a step that holds prompt tokens costs more in each gated-delta-net layer: its kernels run outside the graphs (fit:
bursts of 400 and a closed loop of 256 of Qwen3.5-9B).

It does not depend on the token budget, only on how many such steps there are. Twice the budget gave Qwen3.5-9B +10.8 % between
2 and 8 s of a burst of 400 (measured), because half as many full steps took its prompts in: that comes out without any term of
its own. Where no step fills the budget, twice of it lost 3.8 % (256 in flight, H200) or changed 0.2 % (512, published, H100).
"""
ALL_REDUCE_S = 8e-6
HASH_TOKEN_S = 0.05e-6
"""Prefix caching: hashing one prompt token."""
DRAFT_STEP_S = 0.25e-3
"""Fixed time of one pass of a drafter."""
NGRAM_SEQUENCE_S = 15e-6
"""Looking up n-grams of one sequence, on the host and before the next step can be scheduled."""

ACCEPTANCE = {"mtp": 0.75, "eagle3": 0.65, "eagle": 0.6, "draft_model": 0.7, "suffix": 0.45, "ngram": 0.3, "ngram_gpu": 0.3}
"""Chance that a drafted token is accepted given that those before it were, where nothing is stated."""


def acceptance_length(method: str, tokens: int, stated: float | None = None) -> float:
    """Mean tokens per verification step, the model's own included: (1 - a^(k+1)) / (1 - a) for ``k`` drafted tokens."""
    if stated is not None:
        return min(max(stated, 1.0), 1.0 + tokens)
    chance = ACCEPTANCE.get(method, 0.6)
    return float((1 - chance ** (tokens + 1)) / (1 - chance))


class StepTime:
    """Seconds of a step of one configuration; the work that does not depend on the batch is done once here."""

    def __init__(self, shape: ModelShape, hardware: Hardware, resolved: Resolved, *, eager: bool = False) -> None:
        self.resolved, self.eager = resolved, eager
        tensor = resolved.tensor
        self._ranks = tensor
        self._split = resolved.data * resolved.pipeline
        self._bandwidth = BANDWIDTH_SHARE * hardware.bandwidth_bytes_per_s
        parts = shape.params
        experts = shape.experts
        self._expert_bytes = parts["experts"] * shape.bytes_per_weight("experts") / tensor
        self._miss = 1 - experts.per_token / experts.number if experts else 0.0
        others = ("head", "attention", "linear_attention", "mlp", "shared_experts", "router")
        other_bytes = sum(parts[part] * shape.bytes_per_weight(part) for part in others)
        other_bytes += parts["embeddings"] * shape.bytes_per_weight("embeddings") if shape.tied else 0
        self._other_bytes = other_bytes / tensor
        stored = shape.quantization
        eight_bit = stored is not None and stored.bits == 8 and not stored.weight_only
        peak = hardware.fp8_flops if eight_bit else hardware.bf16_flops
        head = parts["head"] or parts["embeddings"]
        share = EXPERTS_SHARE if experts else DENSE_SHARE
        self._token_s = 2 * (shape.active_params - head) / tensor / (share * peak)
        self._head_s = 2 * head / tensor / (DENSE_SHARE * hardware.bf16_flops)
        kv = token_bytes(shape, resolved.kv_cache_dtype, tensor)
        self._full_kv_s = shape.count(LayerKind.FULL) * kv / self._bandwidth
        self._window_kv_s = shape.count(LayerKind.SLIDING) * kv / self._bandwidth
        self._window = shape.window or 0
        linear_layers = shape.count(LayerKind.LINEAR)
        self._state_s = 0.0
        if linear_layers and shape.linear is not None:
            state = state_bytes(shape, resolved.state_dtype, tensor)
            # Read once, written once for each token that is verified.
            self._state_s = linear_layers * state * (2 + resolved.speculative_tokens) / self._bandwidth
        attention_layers = shape.layers - linear_layers
        per_pair = 4 * shape.q_heads * shape.head_dim * attention_layers / tensor
        self._pair_s = per_pair / (ATTENTION_SHARE * hardware.bf16_flops)
        self._mixed_s = linear_layers * MIXED_LAYER_S
        self._layers = shape.layers
        self._reduce_token_s = 0.0
        self._reduce_s = 0.0
        if tensor > 1:
            self._reduce_s = 2 * shape.layers * ALL_REDUCE_S
            moved = 2 * (tensor - 1) / tensor * shape.hidden * DTYPE_BYTES[shape.dtype]
            self._reduce_token_s = 2 * shape.layers * moved / hardware.link_bytes_per_s
        self._sizes = capture_sizes(resolved.capture_size, resolved.performance_mode)
        self._draft_s = self._drafting(shape, hardware)
        self._hash_s = HASH_TOKEN_S if resolved.prefix_caching else 0.0

    def _drafting(self, shape: ModelShape, hardware: Hardware) -> float:
        """Seconds of all drafting passes of a step: each reads the drafter's weights and the head's."""
        speculation = self.resolved.speculation
        if speculation is None or speculation.method in ("ngram", "suffix"):
            return 0.0
        head = (shape.params["head"] or shape.params["embeddings"]) * shape.bytes_per_weight("head")
        layer = shape.attention_params_per_layer + 3 * shape.hidden * max(shape.ffn, shape.hidden)
        size = {"draft_model": 0.08 * shape.weight_bytes(text_only=True)}.get(speculation.method, layer * 2.0 + head)
        return speculation.tokens * (DRAFT_STEP_S + size / self._ranks / self._bandwidth)

    def __call__(self, decoding: int, context: float, prompt: int = 0, pairs: float = 0.0, finished_prompts: int = 0) -> float:
        """Seconds of one step.

        ``decoding`` sequences hold ``context`` tokens together; ``prompt`` tokens are prefilled, ``pairs`` is the sum over
        them of the tokens each attends to, and ``finished_prompts`` prompts end in this step (their head is computed).
        """
        if self._split > 1:
            decoding, prompt, finished_prompts = (-(-n // self._split) for n in (decoding, prompt, finished_prompts))
            context, pairs = context / self._split, pairs / self._split
        verified = decoding * (1 + self.resolved.speculative_tokens)
        tokens = verified + prompt
        if not tokens:
            return STEP_S
        captured = tokens <= self.resolved.capture_size
        computed = self._sizes[bisect_left(self._sizes, tokens)] if captured and not prompt else tokens
        weights_s = (self._other_bytes + self._expert_bytes * (1 - self._miss**tokens)) / self._bandwidth
        arithmetic_s = computed * self._token_s + (verified + finished_prompts) * self._head_s
        caches_s = context * self._full_kv_s + decoding * self._state_s + pairs * self._pair_s
        if self._window:
            caches_s += min(context, decoding * self._window) * self._window_kv_s
        gpu_s = max(weights_s, arithmetic_s) + caches_s + self._reduce_s + tokens * self._reduce_token_s
        launch_s = self._layers * (EAGER_LAYER_S if self.eager else LAYER_S if captured else PIECEWISE_LAYER_S)
        # Inside a graph the gaps between kernels remain; outside, launching overlaps with execution and the gaps are wider.
        step_s = gpu_s + launch_s if captured else max(gpu_s, launch_s) + self._layers * 1.5 * LAYER_S
        if prompt:
            step_s += self._mixed_s + prompt * self._hash_s
        sequences = decoding + finished_prompts
        return max(step_s + self._host_s(sequences), sequences * FRONT_END_S)

    def _host_s(self, sequences: int) -> float:
        """What the host and the drafter add."""
        resolved = self.resolved
        host_s = STEP_S + sequences * SEQUENCE_S + (self._draft_s if sequences else 0.0)
        if not resolved.async_scheduling:
            host_s += SYNC_STEP_S + sequences * SYNC_SEQUENCE_S / min(4, max(1, resolved.stream_interval))
        if resolved.speculation is not None and resolved.speculation.method in ("ngram", "suffix"):
            host_s += sequences * NGRAM_SEQUENCE_S
        return host_s


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a roofline predicts for a workload at a concurrency; ``None`` in ``possible`` fields never happens: a
    configuration whose cache is too small for one request has ``tokens_per_s`` 0 and ``resident`` 0."""

    tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    resident: float


def estimate(
    shape: ModelShape,
    hardware: Hardware,
    arguments: Mapping[str, Any],
    lengths: Sequence[tuple[int, int]],
    concurrency: int,
    version: str = LATEST_VERSION,
) -> Estimate:
    """The steady state of a closed loop, in closed form: for ranking, not for answers.

    ``lengths`` are (prompt, output) tokens. Every step holds the resident sequences and, on average, as many prompt tokens
    as keep them coming; requests beyond those resident wait.
    """
    plan: MemoryPlan = memory_plan(shape, hardware.gpu, arguments, version)
    shape = loaded(shape, arguments, version)
    resolved = plan.resolved
    prompt = sum(p for p, _ in lengths) / len(lengths)
    output = max(1.0, sum(o for _, o in lengths) / len(lengths))
    held = plan.layout.blocks_for(max(1, round(prompt + output / 2)))
    resident = float(min(concurrency, resolved.max_num_seqs * resolved.data, plan.blocks * resolved.data / held))
    if resident < 1:
        return Estimate(0.0, 0.0, float("inf"), float("inf"), 0.0)
    speculation = resolved.speculation
    per_step = 1.0
    if speculation is not None:
        per_step = acceptance_length(speculation.method, speculation.tokens, speculation.acceptance_length)
    step = StepTime(shape, hardware, resolved, eager=bool(arguments.get("enforce_eager")))
    arrivals = resident * per_step / output  # requests that begin in a step
    context = resident * (prompt + output / 2)
    plain_s = step(round(resident), context)
    # Arrivals within a step are nearly Poisson: the share of steps with none is decode only.
    mixed_share = 1 - 2.718281828459045 ** (-arrivals)
    tokens = max(1, round(prompt * arrivals / mixed_share))
    passes = max(1.0, (resident * (1 + resolved.speculative_tokens) + tokens) / resolved.max_num_batched_tokens)
    mixed_s = step(round(resident), context, tokens, tokens * prompt / 2, max(1, round(arrivals / mixed_share)))
    step_s = (mixed_share * mixed_s + (1 - mixed_share) * plain_s) * passes
    output_rate = resident * per_step / step_s
    waiting_s = (concurrency - resident) * output / output_rate
    return Estimate(
        tokens_per_s=output_rate * (prompt + output) / output,
        output_tokens_per_s=output_rate,
        ttft_s=waiting_s + mixed_s * max(1.0, prompt / resolved.max_num_batched_tokens) + step_s / 2,
        tpot_s=step_s / per_step,
        resident=resident,
    )
