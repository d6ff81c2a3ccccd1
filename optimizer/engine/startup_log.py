"""What an engine's start left in its log: how long each part took and how large its KV cache is. Pure.

The lines are vLLM's own, 0.20 to 0.33 (``gpu_worker.py``, ``cpu_worker.py``, ``kv_cache_utils.py``, ``core.py``,
``monitor.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_PARTS = {
    "weights": re.compile(r"Loading weights took ([\d.]+) seconds"),
    "model_load": re.compile(r"Model loading took .*?([\d.]+) seconds"),
    "compile": re.compile(r"torch\.compile (?:takes|took) ([\d.]+) s(?:econds)? in total"),
    "capture": re.compile(r"Graph capturing finished in ([\d.]+) secs"),
    "engine_init": re.compile(r"init engine \(.*?\) took ([\d.]+) s"),
}
_KV_TOKENS = re.compile(r"(?:GPU|CPU) KV cache size: ([\d,]+) tokens")
_KV_GIB = re.compile(r"(?:Available KV cache memory: |(?:Auto|Explicitly) set \()([\d.]+)(?: GiB|/[\d.]+\) GiB for KV cache)")
"""On a GPU, and on the CPU, which says "Auto set (1.16/23.47) GiB for KV cache on node 0"."""


@dataclass(frozen=True, slots=True)
class StartLog:
    """Seconds by part, and the size of the KV cache; ``None`` where no line said."""

    parts_s: dict[str, float] = field(default_factory=dict)
    kv_cache_tokens: int | None = None
    kv_cache_bytes: int | None = None
    messages: tuple[str, ...] = ()


def read_start_log(lines: Iterable[str]) -> StartLog:
    """Values of several workers: the slowest part, the smallest cache (the one that bounds the engine)."""
    parts: dict[str, float] = {}
    tokens: list[int] = []
    gib: list[float] = []
    warnings: list[str] = []
    for line in lines:
        for name, pattern in _PARTS.items():
            if found := pattern.search(line):
                parts[name] = max(parts.get(name, 0.0), float(found[1]))
        if found := _KV_TOKENS.search(line):
            tokens.append(int(found[1].replace(",", "")))
        if found := _KV_GIB.search(line):
            gib.append(float(found[1]))
        if found := re.search(r"WARNING .*?\] (.*)", line):
            warnings.append(found[1].strip())
    return StartLog(
        parts_s=parts,
        kv_cache_tokens=min(tokens) if tokens else None,
        kv_cache_bytes=round(min(gib) * 2**30) if gib else None,
        messages=tuple(dict.fromkeys(warnings))[:50],
    )
