"""vLLM's ``/metrics`` as the counters of an engine. Pure.

Metric names: ``vllm/v1/metrics/loggers.py`` and ``spec_decode/metrics.py``, unchanged from 0.20 to 0.33. A server with several
engines (data parallel) reports each under its ``engine`` label; counts are added up, and KV usage is the fullest engine's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from vopt.objectives.records import CounterSample
from vopt.optimizer.load.metrics_text import parse

_KV_USAGE = "vllm:kv_cache_usage_perc"
_COUNTS: Mapping[str, str] = MappingProxyType(
    {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "preemptions": "vllm:num_preemptions_total",
        "prefix_queries": "vllm:prefix_cache_queries_total",
        "prefix_hits": "vllm:prefix_cache_hits_total",
        "prompt_tokens": "vllm:prompt_tokens_total",
        "generation_tokens": "vllm:generation_tokens_total",
        "drafts": "vllm:spec_decode_num_drafts_total",
        "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
        "engine_steps": "vllm:iteration_tokens_total_count",
    }
)


def counter_sample(text: str, at_s: float) -> CounterSample:
    """The engine's counters on a metrics page; what the page lacks, or does not give as a finite number, is ``None``."""
    page = parse(text)
    counts: dict[str, int] = {}
    for field, name in _COUNTS.items():
        values = list(page.get(name, {}).values())
        if values and all(map(math.isfinite, values)):
            counts[field] = int(sum(values))
    usage = [value for value in page.get(_KV_USAGE, {}).values() if math.isfinite(value)]
    return CounterSample(at_s=at_s, kv_usage=max(usage, default=None), **counts)
