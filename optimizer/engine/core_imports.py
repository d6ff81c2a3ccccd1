"""Imported by the fork server of a trial process alone: what an engine core imports before its own work begins.

Each core is forked from that server, and a process that has initialised CUDA cannot be forked: so nothing here may, and whether
anything did is written down (``core_start.note``), for the trial process to decide.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib

from vopt.optimizer.engine.core_start import CLEAN, note

MODULES = ("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.compilation.backends", "vllm.model_executor.model_loader")
"""The first is what vLLM lets its own fork server import (``entrypoints/openai/api_server.py``, 0.20 to 0.33). It took 10.7 s
on an H200 host, the third, which is Inductor, 4.3 s (0.22.1). No models: the gated delta net asks CUDA for the device."""
TOUCHED = "touched the GPU"
LIBRARY = "libcuda.so.1"
NOT_INITIALISED = 3
"""``CUDA_ERROR_NOT_INITIALIZED``: what every call of the driver answers in a process that has not initialised it (CUDA Driver
API). Open files do not tell: NVML, which vLLM asks for the platform, opens the same devices."""


def initialised_cuda() -> bool:
    """Whether this process did, through torch, Triton or any other library."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != NOT_INITIALISED


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
