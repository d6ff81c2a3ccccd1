"""The progress of a search on standard error, as its terminal allows, with the GPU's memory where there is one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from vopt.optimizer.gpus import memory_in_use
from vopt.optimizer.report.console import ProgressDisplay, display_mode
from vopt.optimizer.report.live import MemoryUse, Progress
from vopt.optimizer.secrecy import known_secrets


def shown_progress(
    metric: str, maximize: bool, simulated: bool, quiet: bool, objectives: Sequence[str] = ()
) -> ProgressDisplay:
    """A listener's context manager; ``quiet``: only what is important."""
    progress = Progress(metric, maximize, simulated, known_secrets(os.environ), objectives)
    return ProgressDisplay(progress, sys.stderr, display_mode(sys.stderr, quiet=quiet), memory=None if simulated else _memory)


def _memory() -> MemoryUse | None:
    used = memory_in_use()
    return MemoryUse(*used) if used else None
