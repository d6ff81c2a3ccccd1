"""How much memory vLLM's CPU build takes its share of: what ``gpu_memory_utilization`` means without a GPU.

``vllm/utils/cpu_resource_utils.py`` (0.28 to 0.32): the memory of the node of the first core that the process may use, or the
limit of its control group where that is less; the whole host's only where the kernel tells no nodes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

UNLIMITED = 1 << 62  # what the first version of control groups says for "no limit" lies above


def memory_bytes(root: Path = Path("/"), core: int | None = None) -> int:
    """Bytes, at least 1. ``core`` is the first core that may be used (``None``: asked of the kernel)."""
    core = min(os.sched_getaffinity(0)) if core is None else core
    total = _node(root, core) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(total, _limit(root) or total))


def _node(root: Path, core: int) -> int | None:
    nodes = sorted((root / f"sys/devices/system/cpu/cpu{core}").glob("node[0-9]*"))
    name = nodes[0].name if nodes else "node0"
    try:
        text = (root / "sys/devices/system/node" / name / "meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemTotal:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None


def _limit(root: Path) -> int | None:
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int((root / name).read_text())
        except (OSError, ValueError):  # absent, or "max"
            continue
        return limit if limit < UNLIMITED else None
    return None
