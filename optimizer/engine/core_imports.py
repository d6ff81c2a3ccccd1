"""Imported by the fork server of a trial process alone: what an engine core imports before its own work begins.

Each core is forked from that server, and a process that has initialised CUDA cannot be forked: so nothing here may, and whether
anything did is written down (``core_start.note``), for the trial process to decide.
"""

from __future__ import annotations

import contextlib
import importlib
import os

from vopt.optimizer.engine.core_start import CLEAN, note

MODULES = ("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.compilation.backends")
"""The first is what vLLM lets its own fork server import (``entrypoints/openai/api_server.py``, 0.20 to 0.33), and holds nine
tenths of what a core imports. Model runners do not belong here: theirs (``gdn_attn.py``, 0.22.1) asks CUDA for the device."""
TOUCHED = "touched the GPU"
OPENED_BY_CUDA = "/dev/nvidia-uvm"
"""What CUDA's initialisation opens and NVML's, which vLLM asks for the platform while it is imported, does not."""


def initialised_cuda() -> bool:
    """Whether this process did, through torch, Triton or any other library."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            if os.readlink(f"/proc/self/fd/{number}").startswith(OPENED_BY_CUDA):
                return True
    return False


def import_all() -> None:
    """Imports, then says in what state that left the process. What cannot be imported the core itself will say."""
    for name in MODULES:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    draft = note().with_suffix(".draft")
    with contextlib.suppress(OSError):  # without a note the server is not used
        draft.write_text(TOUCHED if initialised_cuda() else CLEAN)
        draft.replace(note())


if note().exists():
    import_all()
