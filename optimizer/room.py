"""Is there room for a search on this host: disk for weights, caches and results, memory for offloading. Before any start."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vopt.optimizer.caches import BYTES_PER_COMPILE_KEY
from vopt.optimizer.errors import EnvironmentLacks, UsageError

BYTES_PER_TRIAL = 150_000_000
"""Log (at most 16 MiB) and compressed records of one trial with a load of about 100,000 requests."""

MOST_OFFLOADED_SHARE = 0.5
"""KV offload takes locked memory; beyond half of what is free the host itself runs short."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a search will write, by where. ``weights`` is what is still to be fetched."""

    weights: int
    caches: int
    results: int


def need(*, weights_bytes: int, starts: int, compile_keys: int) -> Need:
    """``starts`` engine starts with ``compile_keys`` different keys among them."""
    return Need(weights_bytes, compile_keys * BYTES_PER_COMPILE_KEY, starts * BYTES_PER_TRIAL)


def check_disk(wanted: Need, *, hub: Path, cache: Path, results: Path) -> None:
    """``EnvironmentLacks`` when a file system lacks the room; what lands on the same one is added up."""
    by_device: dict[int, tuple[Path, int]] = {}
    for place, size in ((hub, wanted.weights), (cache, wanted.caches), (results, wanted.results)):
        existing = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
        device = existing.stat().st_dev
        first, sum_bytes = by_device.get(device, (existing, 0))
        by_device[device] = (first, sum_bytes + size)
    for place, size in by_device.values():
        free = shutil.disk_usage(place).free
        if free < size:
            raise EnvironmentLacks(
                f"{free / 2**30:.1f} GiB are free in {place}, this search may write {size / 2**30:.1f} GiB there",
                hint="vopt clean --disk-budget 1G, or fewer --trials, or another --data-dir or $XDG_CACHE_HOME",
            )


def available_memory_bytes() -> int | None:
    """What the kernel calls MemAvailable; ``None`` where it does not say."""
    try:
        with open("/proc/meminfo") as table:
            return next((int(line.split()[1]) * 1024 for line in table if line.startswith("MemAvailable:")), None)
    except OSError:
        return None


def oom_kills(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes the kernel has killed for lack of memory: in this process's control group (v2 counts its
    subgroups, v1 does not) and on the host. Only its growth between two calls means anything."""
    counters = [proc / "vmstat"]
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                counters.append(groups / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                counters.append(groups / "memory" / path.lstrip("/") / "memory.oom_control")
    found = 0
    for counter in counters:
        with contextlib.suppress(OSError):
            found += sum(
                int(words[1]) for words in map(str.split, counter.read_text().splitlines()) if words[:1] == ["oom_kill"]
            )
    return found


def load_average() -> float:
    """Processes that wanted a core over the last minute."""
    return os.getloadavg()[0]


def check_offload(arguments: Mapping[str, Any], available_bytes: int | None) -> None:
    """``UsageError`` for KV or weight offload beyond half of the free memory. Sizes are GiB, as vLLM takes them."""
    if available_bytes is None:
        return
    for name in ("kv_offloading_size", "cpu_offload_gb", "swap_space"):
        size = arguments.get(name)
        if isinstance(size, int | float) and size * 2**30 > available_bytes * MOST_OFFLOADED_SHARE:
            most = available_bytes * MOST_OFFLOADED_SHARE / 2**30
            raise UsageError(
                f"{name} = {size:g} GiB is more than half of the {available_bytes / 2**30:.0f} GiB of free memory",
                hint=f"--set {name}={most:.0f}, or less",
            )
