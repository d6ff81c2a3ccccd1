"""The children of the tests' own process: what a trial must not add to."""

from __future__ import annotations

import os
from multiprocessing import resource_tracker

from vopt.optimizer.engine.kin import Identity, descendants


def children() -> frozenset[Identity]:
    """Everything below this process now. With multiprocessing's resource tracker, which is started once and lives as long as we
    do: whatever needs it later adds none."""
    resource_tracker.ensure_running()
    return frozenset(entry.identity for entry in descendants(os.getpid()))
