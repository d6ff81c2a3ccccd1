"""Which knobs this workload can show: before the search from the workload, after the baseline from its own counters.

A knob without evidence stays at vLLM's default and is named with the reason; counters of a later trial reopen it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vopt.search_spaces.parameter import Bound
from vopt.search_spaces.space import SearchSpace

KV_PEAK = 0.8
QUEUED = 0.02
FILLED = 0.05
SMALL_BATCH = 32
SOURCE = "baseline's counters"
NOTHING_STATED = "the workload says nothing of beginnings that prompts share; real traffic may reuse much"
NOTHING_STATED_HYBRID = f"{NOTHING_STATED}; without any, off leaves room for more requests: --vary enable_prefix_caching"
"""Off would win on a hybrid whose workload is lengths alone, for want of anything to reuse, and lose wherever prompts have a
system prompt or a history in common. A workload that states its reuse, if only as none, is evidence."""


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """What is known of the load before an engine starts. Lengths are tokens; ``None``: not known.

    ``concurrency`` is set for closed loops of a fixed width (``None``: found on the baseline); ``shared_prefix_tokens`` is
    the declared or measured prefix that requests share, ``states_reuse`` whether the workload says anything of it: a
    built-in one does not. ``dummy_weights`` with ``acceptance_length``: speculation is
    accepted synthetically at that length.
    """

    prompt_tokens: int | None = None
    longest_prompt: int | None = None
    total_tokens: int | None = None
    longest_total: int | None = None
    concurrency: int | None = None
    shared_prefix_tokens: int = 0
    states_reuse: bool = True
    natural_text: bool = True
    dummy_weights: bool = False
    acceptance_length: float | None = None
    priorities: bool = False


@dataclass(frozen=True, slots=True)
class BaselineFacts:
    """What a trial's own counters said. ``queued`` and ``filled`` are shares of the window (requests waiting; steps that
    used the whole token budget); ``None``: the engine does not tell."""

    kv_peak: float | None = None
    preemptions: float | None = None
    queued: float | None = None
    filled: float | None = None
    hit_rate: float | None = None
    peak_running: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Whether a knob may be searched; ``reopens_on`` names the pressure that would change the answer."""

    active: bool
    reason: str = ""
    reopens_on: str | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What evidence is judged against. ``hybrid_block`` is the hybrid's block in tokens, ``resident`` how many requests of
    the workload's length the KV cache is estimated to hold."""

    workload: WorkloadFacts
    resolved: Mapping[str, Any]
    hybrid: bool = False
    hybrid_block: int | None = None
    resident: int | None = None


def evidence_for(need: str | None, around: Surroundings) -> Evidence:
    """The answer of the workload and the arithmetic to one need of ``base.toml``."""
    return _JUDGES[need](around) if need is not None else Evidence(True)


def _kv_pressure(around: Surroundings) -> Evidence:
    concurrency, resident = around.workload.concurrency, around.resident
    if concurrency is not None and resident is not None and concurrency >= KV_PEAK * resident:
        return Evidence(True)
    return Evidence(False, "no sign that the KV cache will fill (80 %)", "kv_pressure")


def _prefix_caching(around: Surroundings) -> Evidence:
    shared, on = around.workload.shared_prefix_tokens, bool(around.resolved.get("enable_prefix_caching"))
    block = around.hybrid_block or 16
    if not shared and not around.workload.states_reuse:
        return Evidence(False, NOTHING_STATED_HYBRID if around.hybrid and on else NOTHING_STATED, "prefix_caching")
    if around.hybrid and on and shared < block:
        return Evidence(True)  # nothing to hit, and the cached states cost resident requests: off is worth a look
    if shared >= block and not on:
        return Evidence(True)
    if shared >= block:
        return Evidence(False, "already on, and the workload reuses prefixes")
    if shared:
        return Evidence(False, f"the shared prefix of {shared} tokens is below one block of {block}", "prefix_caching")
    return Evidence(False, "the workload declares no shared prefix", "prefix_caching")


def _reuse_beyond_gpu(around: Surroundings) -> Evidence:
    if around.workload.shared_prefix_tokens >= (around.hybrid_block or 16) and _kv_pressure(around).active:
        return Evidence(True)
    return Evidence(False, "no reuse that the GPU's own cache could lose", "reuse_beyond_gpu")


def _speculation(around: Surroundings) -> Evidence:
    load = around.workload
    if load.dummy_weights:
        if load.acceptance_length is not None:
            return Evidence(True)
        return Evidence(False, "dummy weights accept no draft: state an acceptance length to assume one")
    if not load.natural_text:
        return Evidence(False, "random tokens say nothing about acceptance: speculation needs natural text")
    return Evidence(True)


def _long_prompts(around: Surroundings) -> Evidence:
    longest, typical = around.workload.longest_prompt, around.workload.prompt_tokens
    if longest is not None and typical is not None and longest >= 1024 and longest >= 4 * typical:
        return Evidence(True)
    return Evidence(False, "no prompts much longer than the others")


def _priorities(around: Surroundings) -> Evidence:
    return Evidence(True) if around.workload.priorities else Evidence(False, "requests carry no priority")


def _batch_beyond_graphs(around: Surroundings) -> Evidence:
    largest, concurrency = around.resolved.get("max_cudagraph_capture_size"), around.workload.concurrency
    if largest and concurrency is not None and concurrency > largest:
        return Evidence(True)
    return Evidence(False, f"no batch beyond the captured {largest} is expected", "batch_beyond_graphs")


def _small_batches(around: Surroundings) -> Evidence:
    concurrency = around.workload.concurrency
    if concurrency is not None and concurrency <= SMALL_BATCH:
        return Evidence(True)
    return Evidence(False, f"batches of {SMALL_BATCH} or fewer are not known to be common", "small_batches")


def _measured_only(pressure: str) -> Any:
    return lambda around: Evidence(False, "only counters can show this", pressure)


_JUDGES = {
    "kv_pressure": _kv_pressure,
    "prefix_caching": _prefix_caching,
    "reuse_beyond_gpu": _reuse_beyond_gpu,
    "speculation": _speculation,
    "long_prompts": _long_prompts,
    "priorities": _priorities,
    "batch_beyond_graphs": _batch_beyond_graphs,
    "small_batches": _small_batches,
    "queue": _measured_only("queue"),
    "token_budget": _measured_only("token_budget"),
}


def less_cache(share: float) -> str:
    """Why ``gpu_memory_utilization`` is not searched downwards."""
    return f"at least {share:g}, unless an engine runs out of memory: less KV cache never serves more requests"


def pressures(counters: BaselineFacts, space: SearchSpace) -> dict[str, str]:
    """Pressures that a trial's counters show, each in words."""
    found: dict[str, str] = {}
    if counters.kv_peak is not None and counters.kv_peak >= KV_PEAK:
        found["kv_pressure"] = f"the KV cache was {counters.kv_peak:.0%} full"
    elif counters.preemptions:
        found["kv_pressure"] = f"{counters.preemptions:.0f} preemptions"
    if counters.queued is not None and counters.queued > QUEUED:
        found["queue"] = f"requests queued in {counters.queued:.0%} of the window"
    if counters.filled is not None and counters.filled > FILLED:
        found["token_budget"] = f"{counters.filled:.0%} of the steps filled the token budget"
    if counters.hit_rate is not None and counters.hit_rate > 0.01:
        found["prefix_caching"] = f"{counters.hit_rate:.0%} of the prompt tokens were found in the prefix cache"
        if "kv_pressure" in found:
            found["reuse_beyond_gpu"] = f"{found['prefix_caching']}, and {found['kv_pressure']}"
    largest = space.facts.get("resolved", {}).get("max_cudagraph_capture_size")
    if counters.peak_running is not None:
        if largest and counters.peak_running > largest:
            found["batch_beyond_graphs"] = f"{counters.peak_running} sequences ran at once, graphs end at {largest}"
        if counters.peak_running <= SMALL_BATCH:
            found["small_batches"] = f"at most {counters.peak_running} sequences ran at once"
    return found


def surplus(space: SearchSpace, counters: BaselineFacts) -> dict[str, Bound]:
    """The dimensions whose values above the default cannot matter, by the baseline's counters, and why. What a mode or the
    user asked for (``facts["asked"]``) is not among them."""
    asked, found = space.facts.get("asked", ()), {}
    if "max_num_seqs" in space and "max_num_seqs" not in asked:
        default, wide = space["max_num_seqs"].default, counters.concurrency
        if wide is not None and wide <= default:
            text = f"at most {default}: there are never more than {wide} requests in flight"
            found["max_num_seqs"] = Bound(text, SOURCE)
        elif wide is None and counters.queued is not None and counters.queued <= QUEUED:
            text = f"at most {default}: the baseline never queued (requests waited in {counters.queued:.0%} of the window)"
            found["max_num_seqs"] = Bound(text, SOURCE)
    if "max_num_batched_tokens" in space and "max_num_batched_tokens" not in asked and counters.filled is not None:
        default = space["max_num_batched_tokens"].default
        # Full steps are few among thousands that only decode, and long: requests that wait for one show it as well.
        if counters.filled <= FILLED and (counters.queued or 0.0) <= QUEUED:
            text = f"at most {default}: only {counters.filled:.0%} of the baseline's steps filled the token budget"
            found["max_num_batched_tokens"] = Bound(text, SOURCE)
    return {name: bound for name, bound in found.items() if any(v > space[name].default for v in space[name].values)}
