"""Imported by the fork server of a trial process alone: what an engine core imports before its own work begins.

Each core is forked from that server, and a process that has initialised CUDA cannot be forked: so nothing here may, and whether
anything did is written down (``core_start.note``), for the trial process to decide.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import threading

from vopt.optimizer.engine.core_start import CLEAN, note

MODULES = ("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.compilation.backends", "vllm.model_executor.model_loader")
"""The first is what vLLM lets its own fork server import (``entrypoints/openai/api_server.py``, 0.20 to 0.33). It took 10.7 s
on an H200 host, the third, which is Inductor, 4.3 s (0.22.1). No models: the gated delta net asks CUDA for the device."""
TOUCHED = "its imports touched the GPU"
LIBRARY = "libcuda.so.1"
NOT_INITIALISED = 3
"""``CUDA_ERROR_NOT_INITIALIZED``: what every call of the driver answers in a process that has not initialised it (CUDA Driver
API). Open files do not tell: NVML, which vLLM asks for the platform, opens the same devices."""
DEVICES = ("/dev/kfd", "/dev/dri/", "/dev/accel/")


def initialised_cuda() -> bool:
    """Whether this process did, through torch, Triton or any other library."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != NOT_INITIALISED


def opened_devices() -> list[str]:
    """Devices that ROCm's and Level Zero's runtimes open when they are initialised: there is no driver's answer to ask for."""
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(DEVICES)]


def state() -> str:
    """What forbids to fork from this process, or ``CLEAN``."""
    if initialised_cuda() or opened_devices():
        return TOUCHED
    if threading.active_count() > 1:  # a thread does not come along with a fork
        return f"left threads: {', '.join(thread.name for thread in threading.enumerate()[1:])}"
    return CLEAN


def failure() -> str | None:
    """Imports; what of it failed. That leaves modules behind that are half imported, and others that know no GPU: the core of a
    new process will say why, or be well. A vLLM that has no such module is not at fault."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                return f"{name}: {error}"
        except Exception as error:  # noqa: BLE001 - an import can raise anything
            return f"{name}: {type(error).__name__}: {error}"
    return None


def import_all() -> None:
    """Imports, then says in what state that left the process."""
    said = failure() or state()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # or each process that is forked would write it again
    draft = note().with_suffix(".draft")
    with contextlib.suppress(OSError):  # without a note the server is not used
        draft.write_text(said)
        draft.replace(note())


if note().exists():
    import_all()
