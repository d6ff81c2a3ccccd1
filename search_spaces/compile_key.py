"""Which arguments enter vLLM's compilation key: an engine that differs only in the others starts from a warm cache.

Measured on vLLM 0.32.0 (H200 platform, ``VllmConfig.compute_hash``): two configurations share their compiled code exactly
when every other argument is equal. Up to 0.28 ``max_num_seqs`` was no factor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

NEVER = frozenset(
    {
        "gpu_memory_utilization",
        "stream_interval",
        "scheduling_policy",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "prefill_schedule_interval",
        "scheduler_reserve_full_isl",
        "watermark",
        "max_num_active_seqs",
        "seed",
        "mamba_backend",
    }
)
ONLY_ON_HYBRIDS = frozenset({"max_model_len", "enable_prefix_caching"})
NOT_ON_HYBRIDS_KNOWN = frozenset({"enable_chunked_prefill", "language_model_only"})
FRONT_END = frozenset({"served_model_name", "tokenizer", "disable_log_stats", "load_format", "revision", "trust_remote_code"})


def enters_compile_key(name: str, release: tuple[int, int, int], *, hybrid: bool) -> bool:
    """Whether a new value of this argument means a new compilation; unknown arguments are taken to."""
    if name in NEVER or name in FRONT_END:
        return False
    if name in ONLY_ON_HYBRIDS or name in NOT_ON_HYBRIDS_KNOWN:
        return hybrid
    if name == "max_num_seqs":
        return release >= (0, 29, 0)
    if name == "kv_cache_memory_bytes":
        return release < (0, 26, 0)
    return True


def compile_key(config: Mapping[str, Any], release: tuple[int, int, int], *, hybrid: bool) -> str:
    """Twelve hex digits: equal for configurations that share compiled code."""
    part = {name: value for name, value in config.items() if enters_compile_key(name, release, hybrid=hybrid)}
    body = json.dumps(part, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{release}{body}".encode()).hexdigest()[:12]
