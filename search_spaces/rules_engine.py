"""Rules of the scheduler, the cache, CUDA graphs and parallelism."""

from __future__ import annotations

from vopt.search_spaces.parameter import Violation
from vopt.search_spaces.settings import Rule, Settings, collector

RULES: list[Rule] = []
rule = collector(RULES)

# scheduler and cache


@rule
def tokens_below_sequences(s: Settings) -> Violation | None:
    """``config/scheduler.py``; an unset ``max_num_seqs`` is lowered by vLLM itself."""
    tokens, seqs = s.value("max_num_batched_tokens"), s.given("max_num_seqs")
    if tokens is None or seqs is None or tokens >= seqs:
        return None
    detail = f"max_num_batched_tokens {tokens} is below max_num_seqs {seqs}"
    return Violation("tokens_below_sequences", detail, {"max_num_seqs": tokens})


@rule
def tokens_below_length(s: Settings) -> Violation | None:
    """Only without chunked prefill must one step hold a whole prompt."""
    tokens, length = s.given("max_num_batched_tokens"), s.value("max_model_len")
    if s.value("enable_chunked_prefill", True) or tokens is None or length is None or tokens >= length:
        return None
    detail = f"max_num_batched_tokens {tokens} is below max_model_len {length} with chunked prefill off"
    return Violation("tokens_below_length", detail, {"enable_chunked_prefill": True})


@rule
def active_above_sequences(s: Settings) -> Violation | None:
    active, seqs = s.given("max_num_active_seqs"), s.value("max_num_seqs")
    if active is None or seqs is None or active <= seqs:
        return None
    detail = f"max_num_active_seqs {active} is above max_num_seqs {seqs}"
    return Violation("active_above_sequences", detail, {"max_num_active_seqs": seqs})


@rule
def long_prefill_above_length(s: Settings) -> Violation | None:
    threshold, length = s.given("long_prefill_token_threshold"), s.value("max_model_len")
    if not threshold or length is None or threshold <= length:
        return None
    detail = f"long_prefill_token_threshold {threshold} is above max_model_len {length}"
    return Violation("long_prefill_above_length", detail, {"long_prefill_token_threshold": 0})


@rule
def utilization_out_of_range(s: Settings) -> Violation | None:
    share = s.given("gpu_memory_utilization")
    if share is None or 0 < share <= 1:
        return None
    usual = s.facts.get("resolved", {}).get("gpu_memory_utilization")
    repair = {"gpu_memory_utilization": usual} if isinstance(usual, float) and 0 < usual <= 1 else None
    return Violation("utilization_out_of_range", f"gpu_memory_utilization {share} is not in (0, 1]", repair)


AT_LEAST_ONE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "block_size",
    "stream_interval",
)
"""Sizes that the fields of ``vllm/config`` keep above zero (``Field(ge=1)`` or ``gt=0``)."""


@rule
def size_below_one(s: Settings) -> Violation | None:
    for name in AT_LEAST_ONE:
        size = s.given(name)
        if isinstance(size, int) and not isinstance(size, bool) and size < 1:
            return Violation("size_below_one", f"{name} {size} is below 1", {name: None})
    length = s.given("max_model_len")
    if isinstance(length, int) and length < 1 and length != -1:  # -1: as long as the KV cache has room for
        return Violation("size_below_one", f"max_model_len {length} is below 1", {"max_model_len": None})
    return None


LENGTH_OVERRIDES = frozenset({"rope_parameters", "rope_scaling", "max_position_embeddings", "text_config"})
"""Keys of ``hf_overrides`` that change how long a model's contexts may be."""


@rule
def length_above_model(s: Settings) -> Violation | None:
    length, most = s.given("max_model_len"), s.model.get("max_position")
    if length is None or most is None or length <= most or str(s.given("env:VLLM_ALLOW_LONG_MAX_MODEL_LEN")) == "1":
        return None
    overrides = s.given("hf_overrides")
    if isinstance(overrides, dict) and LENGTH_OVERRIDES & set(overrides):
        return None  # the length that the model then has is vLLM's to say
    detail = f"max_model_len {length} is above the {most} of the model's config.json"
    return Violation("length_above_model", detail, {"max_model_len": most})


@rule
def priorities_unknown(s: Settings) -> Violation | None:
    policy = s.given("scheduling_policy")
    if policy in (None, "fcfs", "priority"):
        return None
    return Violation(
        "unknown_policy", f"scheduling_policy {policy!r}: only fcfs and priority exist", {"scheduling_policy": "fcfs"}
    )


@rule
def offload_backend_without_size(s: Settings) -> Violation | None:
    if s.given("kv_offloading_backend") == "lmcache" and not s.given("kv_offloading_size"):
        return Violation("offload_without_size", "kv_offloading_backend has no effect without kv_offloading_size")
    return None


# graphs and compilation


@rule
def capture_given_twice(s: Settings) -> Violation | None:
    for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        if s.given(name) is not None and s.nested("compilation_config", name) is not None:
            return Violation("capture_given_twice", f"{name} is given both by itself and in compilation_config", {name: None})
    return None


@rule
def capture_inconsistent(s: Settings) -> Violation | None:
    sizes, largest = s.given("cudagraph_capture_sizes"), s.given("max_cudagraph_capture_size")
    if not sizes or largest is None or max(sizes) == largest or s.given("enforce_eager"):
        return None
    detail = f"max_cudagraph_capture_size {largest} is not the largest of cudagraph_capture_sizes ({max(sizes)})"
    return Violation("capture_inconsistent", detail, {"max_cudagraph_capture_size": None})


@rule
def backend_given_twice(s: Settings) -> Violation | None:
    pairs = (
        ("attention_backend", "attention_config", "backend"),
        ("enable_flashinfer_autotune", "kernel_config", "enable_flashinfer_autotune"),
        ("moe_backend", "kernel_config", "moe_backend"),
        ("linear_backend", "kernel_config", "linear_backend"),
    )
    for name, outer, key in pairs:
        given = s.given(name)
        if given not in (None, "auto") and s.nested(outer, key) is not None:
            return Violation("backend_given_twice", f"{name} is given both by itself and in {outer}", {name: None})
    return None


# parallel


@rule
def more_ranks_than_gpus(s: Settings) -> Violation | None:
    gpus = s.facts.get("gpus")
    sizes = {name: int(s.value(name, 1)) for name in PARALLEL}
    ranks = 1
    for size in sizes.values():
        ranks *= size
    if gpus is None or ranks <= gpus:
        return None
    largest = max(sizes, key=lambda name: (sizes[name], name))
    detail = f"{' x '.join(f'{name} {size}' for name, size in sizes.items() if size > 1)} needs {ranks} GPUs, {gpus} are given"
    return Violation("more_ranks_than_gpus", detail, {largest: max(1, sizes[largest] * gpus // ranks)})


PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size")


@rule
def heads_not_divisible(s: Settings) -> Violation | None:
    tensor, heads = int(s.value("tensor_parallel_size", 1)), s.model.get("q_heads")
    if not heads or heads % tensor == 0:
        return None
    detail = f"{heads} attention heads are not divisible by tensor_parallel_size {tensor}"
    possible = max(size for size in range(1, tensor) if heads % size == 0)
    return Violation("heads_not_divisible", detail, {"tensor_parallel_size": possible})


@rule
def expert_parallel_on_dense(s: Settings) -> Violation | None:
    if s.given("enable_expert_parallel") and s.model.get("moe") is False:
        return Violation("expert_parallel_on_dense", "the model has no experts", {"enable_expert_parallel": False})
    return None


@rule
def eplb_alone(s: Settings) -> Violation | None:
    if not s.given("enable_eplb"):
        return None
    ranks = 1
    for name in ("tensor_parallel_size", "data_parallel_size", "prefill_context_parallel_size"):
        ranks *= int(s.value(name, 1))
    if s.given("enable_expert_parallel") and ranks > 1:
        return None
    return Violation("eplb_alone", "enable_eplb needs enable_expert_parallel and more than one rank", {"enable_eplb": False})


@rule
def context_parallel_heads(s: Settings) -> Violation | None:
    """Decode context parallelism splits the KV heads that tensor parallelism replicates (``config/model.py``)."""
    decode, tensor = int(s.value("decode_context_parallel_size", 1)), int(s.value("tensor_parallel_size", 1))
    if decode == 1:
        return None
    kv_heads = s.model.get("kv_heads")
    fits = tensor % decode == 0
    if fits and kv_heads and not s.model.get("mla"):
        fits = tensor > kv_heads and decode <= tensor // kv_heads
    if fits:
        return None
    detail = f"decode_context_parallel_size {decode} does not fit tensor_parallel_size {tensor} with {kv_heads} KV heads"
    return Violation("context_parallel_heads", detail, {"decode_context_parallel_size": 1})


@rule
def numa_without_bind(s: Settings) -> Violation | None:
    for name in ("numa_bind_nodes", "numa_bind_cpus"):
        if s.given(name) and not s.given("numa_bind"):
            return Violation("numa_without_bind", f"{name} needs numa_bind", {name: None})
    return None


@rule
def small_dbo_threshold(s: Settings) -> Violation | None:
    batches = max(2, int(s.value("ubatch_size", 0)))
    for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
        given = s.given(name)
        if s.given("enable_dbo") and given is not None and given < batches:
            return Violation("small_dbo_threshold", f"{name} {given} is below the {batches} micro-batches", {name: batches})
    return None
