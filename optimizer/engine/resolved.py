"""vLLM's resolved configuration as flat JSON values, by ``EngineArgs`` field name where one exists. No vLLM import."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

SECTIONS = (
    "scheduler_config",
    "cache_config",
    "model_config",
    "parallel_config",
    "compilation_config",
    "kernel_config",
    "attention_config",
    "mamba_config",
    "offload_config",
    "load_config",
    "observability_config",
)
"""Parts of ``VllmConfig``, in the order in which a name is looked for; a part that a version lacks is passed over."""

RENAMED = {
    "scheduling_policy": ("scheduler_config", "policy"),
    "kv_cache_dtype": ("cache_config", "cache_dtype"),
    "attention_backend": ("attention_config", "backend"),
    "swap_space": ("cache_config", "swap_space_bytes"),
    "model": ("model_config", "model"),
    "seed": ("model_config", "seed"),
}
"""``EngineArgs`` fields that the resolved configuration calls otherwise."""

FURTHER = {
    "num_gpu_blocks": ("cache_config", "num_gpu_blocks"),
    "kv_cache_tokens": ("cache_config", "kv_cache_size_tokens"),  # from 0.24
    "compilation_mode": ("compilation_config", "mode"),
    "cudagraph_mode": ("compilation_config", "cudagraph_mode"),
    "cudagraph_capture_sizes": ("compilation_config", "cudagraph_capture_sizes"),
    "compilation_time_s": ("compilation_config", "compilation_time"),
    "max_model_len": ("model_config", "max_model_len"),
    "mamba_block_size": ("cache_config", "mamba_block_size"),
    "world_size": ("parallel_config", "world_size"),
}
"""What vLLM decides beyond its arguments."""


VOLATILE = ("hf_token", "master_addr", "master_port", "data_parallel_rpc_port", "data_parallel_address")
"""Secrets, and what differs from start to start without meaning anything."""


def flatten(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """``names`` (``EngineArgs`` fields) and ``FURTHER`` as vLLM resolved them; a name that it keeps nowhere is absent."""
    found: dict[str, Any] = {}
    for name in names:
        if name in VOLATILE or name.startswith("_"):
            continue
        value = _look_up(config, name)
        if value is not _ABSENT:
            found[name] = value
    for name, (section, attribute) in FURTHER.items():
        value = _plain(getattr(getattr(config, section, None), attribute, _ABSENT))
        if value is not _ABSENT and value is not None:
            found[name] = value
    for name in ("performance_mode", "optimization_level"):
        value = _plain(getattr(config, name, _ABSENT))
        if value is not _ABSENT:
            found[name] = value
    speculative = getattr(config, "speculative_config", None)
    if speculative is not None:
        found["speculative_config"] = {
            key: value
            for key in ("method", "model", "num_speculative_tokens", "rejection_sample_method")
            if (value := _plain(getattr(speculative, key, _ABSENT))) is not _ABSENT and value is not None
        }
    return found


class _Absent:
    """Told apart from ``None``, which is a value."""


_ABSENT: Any = _Absent()


def _look_up(config: Any, name: str) -> Any:
    if name in RENAMED:
        section, attribute = RENAMED[name]
        return _plain(getattr(getattr(config, section, None), attribute, _ABSENT))
    for section in SECTIONS:
        value = getattr(getattr(config, section, None), name, _ABSENT)
        if value is not _ABSENT:
            return _plain(value)
    return _ABSENT


def _plain(value: Any) -> Any:
    """A JSON value, or absent for what has no faithful one (an object, a function)."""
    if isinstance(value, Enum):  # first: some of vLLM's are strings or integers as well
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item) for item in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
        return _ABSENT if any(item is _ABSENT for item in items) else items
    if isinstance(value, dict):
        entries = {str(key): _plain(item) for key, item in value.items()}
        return _ABSENT if any(item is _ABSENT for item in entries.values()) else entries
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else _ABSENT
