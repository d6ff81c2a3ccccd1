"""The GPUs of this host, by UUID: what they are, what is free, who holds them. The only importer of NVML.

Without an NVIDIA driver every question has its empty answer; nothing here raises because there is no GPU.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

IDLE_SHARE = 0.01
"""A GPU is free only without compute processes and with less than this share of its memory used."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process with memory on a GPU; its name is empty when this user may not see it."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment. ``None`` where NVML does not tell."""

    uuid: str
    index: int
    name: str
    total_bytes: int
    used_bytes: int
    holders: tuple[Holder, ...] = ()
    capability: tuple[int, int] | None = None
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    ecc_errors: int | None = None
    driver: str = ""

    @property
    def free(self) -> bool:
        return not self.holders and self.used_bytes < self.total_bytes * IDLE_SHARE


def inventory() -> tuple[Gpu, ...]:
    """All GPUs that NVML sees, by index; empty without a driver."""
    with _nvml() as nvml:
        if nvml is None:
            return ()
        driver = _ask(nvml, "nvmlSystemGetDriverVersion") or ""
        return tuple(
            gpu for index in range(nvml.nvmlDeviceGetCount()) if (gpu := _read(nvml, index, _text(driver))) is not None
        )


def select(uuids: Iterable[str]) -> tuple[Gpu, ...]:
    """The GPUs with these UUIDs; one that is no longer there is missing from the answer."""
    wanted = set(uuids)
    return tuple(gpu for gpu in inventory() if gpu.uuid in wanted) if wanted else ()


def visible(gpus: Iterable[Gpu], environ: dict[str, str] | None = None) -> tuple[Gpu, ...]:
    """Those of ``gpus`` that ``CUDA_VISIBLE_DEVICES`` leaves visible, in its order."""
    known = tuple(gpus)
    value = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return known
    found = []
    for word in (part.strip() for part in value.split(",")):
        chosen = [gpu for gpu in known if word and (word == str(gpu.index) or gpu.uuid.startswith(word))]
        if not chosen:
            break  # CUDA itself ignores everything after the first name that it does not know
        found.append(chosen[0])
    return tuple(found)


def cuda_environment(uuids: Iterable[str]) -> dict[str, str]:
    """What makes exactly these GPUs visible. Indices in PCI order, not UUIDs: vLLM calls ``int`` on them up to 0.26. Of GPUs
    that are gone nothing is visible, rather than those of others."""
    wanted, seen = set(uuids), inventory()
    chosen = [gpu for gpu in seen if gpu.uuid in wanted]
    if not chosen:
        return {"CUDA_VISIBLE_DEVICES": "-1"} if wanted and seen else {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(str(gpu.index) for gpu in chosen)}


def memory_in_use() -> tuple[int, int] | None:
    """(used, total) bytes of the GPUs that this process may use; ``None`` without one."""
    seen = visible(inventory())
    return (sum(gpu.used_bytes for gpu in seen), sum(gpu.total_bytes for gpu in seen)) if seen else None


def used_bytes(uuids: Iterable[str]) -> dict[str, int]:
    """Used memory by UUID: the idle level, when taken before an engine starts."""
    return {gpu.uuid: gpu.used_bytes for gpu in select(uuids)}


def busy(chosen: Iterable[str]) -> tuple[Gpu, ...]:
    """GPUs of this host outside ``chosen`` that compute for somebody: the host is shared, its CPUs and power with it."""
    own = set(chosen)
    return tuple(gpu for gpu in inventory() if gpu.uuid not in own and gpu.holders)


def lost(before: Iterable[Gpu]) -> str | None:
    """What became of GPUs that were there before: gone from the bus, or new uncorrected memory errors; ``None``: all well."""
    now = {gpu.uuid: gpu for gpu in inventory()}
    for gpu in before:
        after = now.get(gpu.uuid)
        if after is None:
            return f"GPU {gpu.index} ({gpu.uuid}) is gone"
        if (after.ecc_errors or 0) > (gpu.ecc_errors or 0):
            return f"GPU {gpu.index} has {after.ecc_errors} uncorrected memory errors, {gpu.ecc_errors or 0} before"
    return None


FATAL_XIDS = frozenset({48, 61, 62, 64, 74, 79, 92, 94, 95, 110, 119, 120, 136, 140, 143, 154})
"""Xid errors after which a GPU cannot be trusted: memory, NVLink, bus, firmware (NVIDIA, "XID errors", r570). Those that a
program causes itself (13, 31, 43, 45: a faulty kernel and its end) are charged to the configuration like any crash."""


class CriticalErrors:
    """Listens for critical Xid errors of some GPUs from now on; deaf where NVML offers no events (MIG, vGPU, no driver)."""

    def __init__(self, uuids: Iterable[str]) -> None:
        self._nvml: Any = None
        self._set: Any = None
        wanted = tuple(uuids)
        if not wanted:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            events = pynvml.nvmlEventSetCreate()
            for uuid in wanted:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        except Exception:  # noqa: BLE001 - NVML raises one class per error code, all meaning "not here"
            return
        self._nvml, self._set = pynvml, events

    def seen(self) -> str | None:
        """The first fatal Xid since the last question, in words."""
        while self._nvml is not None:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except Exception:  # noqa: BLE001 - a timeout: nothing (more) happened
                return None
            xid = int(event.eventData)
            if xid in FATAL_XIDS:
                return f"a GPU reported Xid {xid}"
        return None

    def close(self) -> None:
        """Idempotent."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(Exception):
                nvml.nvmlEventSetFree(self._set)
                nvml.nvmlShutdown()


def wait_until_idle(idle: dict[str, int], *, patience_s: float = 60.0, poll_s: float = 0.25) -> tuple[str, ...]:
    """Wait until the GPUs are back to ``idle`` bytes used, within 1 % of their memory; names of what still holds memory."""
    until = time.monotonic() + patience_s
    while True:
        held = [gpu for gpu in select(idle) if gpu.used_bytes > idle[gpu.uuid] + gpu.total_bytes * IDLE_SHARE]
        if not held:
            return ()
        if time.monotonic() >= until:
            return tuple(_words(gpu, idle[gpu.uuid]) for gpu in held)
        time.sleep(poll_s)


def _words(gpu: Gpu, idle_bytes: int) -> str:
    who = ", ".join(f"{holder.name or 'process'} {holder.pid}" for holder in gpu.holders) or "no visible process"
    return f"GPU {gpu.index}: {(gpu.used_bytes - idle_bytes) / 2**30:.1f} GiB not returned, held by {who}"


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no driver, no library, no permission: each means that there is no GPU to be seen
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """The answer, or ``None`` where this GPU, driver, user or version of the library cannot have it."""
    try:
        return getattr(nvml, question)(*arguments)
    except Exception:  # noqa: BLE001 - NVML raises one class per error code, all meaning "not here"
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _read(nvml: Any, index: int, driver: str) -> Gpu | None:
    handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
    memory = _memory(nvml, handle) if handle is not None else None
    uuid, name = _ask(nvml, "nvmlDeviceGetUUID", handle), _ask(nvml, "nvmlDeviceGetName", handle)
    if memory is None or uuid is None:
        return None  # lost from the bus, if only since the question before
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    power_mw = _ask(nvml, "nvmlDeviceGetPowerUsage", handle)
    return Gpu(
        uuid=_text(uuid),
        index=index,
        name=_text(name or "unknown"),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        holders=tuple(_holder(entry) for entry in _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or ()),
        capability=(int(capability[0]), int(capability[1])) if capability else None,
        sm_clock_mhz=_ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        temperature_c=_ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        power_w=power_mw / 1000 if power_mw is not None else None,
        ecc_errors=_ask(
            nvml, "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        driver=driver,
    )


def _memory(nvml: Any, handle: Any) -> Any:
    """Total and used bytes. The first version of NVML's answer counts what the driver reserves for itself as used, some
    hundred MB: by that an idle GPU of 24 GB would not be free."""
    second = getattr(nvml, "nvmlMemory_v2", None)
    found = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, second) if second is not None else None
    return found if found is not None else _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)


def _holder(entry: Any) -> Holder:
    name = ""
    with contextlib.suppress(OSError), open(f"/proc/{entry.pid}/comm") as comm:
        name = comm.read().strip()
    return Holder(int(entry.pid), name, int(entry.usedGpuMemory) if entry.usedGpuMemory else None)
