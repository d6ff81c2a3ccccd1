"""``vopt clean``: what dead searches left behind, and caches beyond the disk budget."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from vopt.optimizer import caches
from vopt.optimizer.engine.leftovers import Manifest, dead_trials, sweep


def clean(disk_budget: int, *, dry_run: bool = False, root: Path | None = None) -> Iterator[str]:
    """Sweep, and say in a line each what was done; with ``dry_run`` what would be. ``disk_budget`` is in bytes."""
    nothing = True
    for manifest in dead_trials():
        nothing = False
        yield _swept(manifest, dry_run)
    where = root or caches.cache_root()
    for path, size in over_budget(where, disk_budget):
        nothing = False
        if not dry_run:
            caches.remove(path)
        yield f"{'would remove' if dry_run else 'removed'} cache {path} ({size / 2**30:.1f} GiB)"
    for path in old_packages(where):
        nothing = False
        if not dry_run:
            path.unlink(missing_ok=True)
        yield f"{'would remove' if dry_run else 'removed'} {path}"
    if nothing:
        total = sum(size for _, size, _ in caches.engine_caches(where))
        yield f"nothing to clean: no leftovers, caches of {total / 2**30:.1f} GiB within {disk_budget / 2**30:.1f} GiB"


def _swept(manifest: Manifest, dry_run: bool) -> str:
    living = manifest.living()
    files = [held for held in manifest.held if os.path.exists(held.path)]
    words = f"the trial that logged to {manifest.log}: {len(living)} processes, {len(files)} files"
    if dry_run:
        return f"would end {words}"
    stayed = sweep(manifest)
    return f"ended {words}" + (f"; could not remove {', '.join(stayed)}" if stayed else "")


def over_budget(root: Path, budget_bytes: int) -> tuple[tuple[Path, int], ...]:
    """Engine caches to remove, least recently used first, until the rest fits."""
    found = caches.engine_caches(root)
    total = sum(size for _, size, _ in found)
    chosen = []
    for path, size, _ in found:
        if total <= budget_bytes:
            break
        chosen.append((path, size))
        total -= size
    return tuple(chosen)


KEPT_PACKAGES = 3
KEPT_PACKAGE_S = 30 * 86_400.0


def old_packages(root: Path) -> tuple[Path, ...]:
    """Zips for trials of earlier versions of vopt; the newest few stay, and those that a running search may still use."""
    found = sorted((root / "packages").glob("vopt-trial-*.zip"), key=lambda path: path.stat().st_mtime, reverse=True)
    return tuple(path for path in found[KEPT_PACKAGES:] if time.time() - path.stat().st_mtime > KEPT_PACKAGE_S)
