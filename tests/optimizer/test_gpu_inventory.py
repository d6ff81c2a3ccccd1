"""GPUs as NVML tells of them, with a stand-in for the driver's library: no driver is needed to test what is made of it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vopt.optimizer import gpus
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.subject import find_machine

GIB = 2**30


class FakeNvml:
    """Two H200s; ``used`` may be a list of readings, the last of which stays."""

    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0

    def __init__(self, *used: list[int], holders: tuple[int, ...] = (), broken: bool = False) -> None:
        self._used, self._holders, self._broken = [list(readings) for readings in used], holders, broken

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own names, here and below
        if self._broken:
            raise RuntimeError("Driver Not Loaded")

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.159.04"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._used)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        readings = self._used[handle]
        return SimpleNamespace(total=140 * GIB, used=readings.pop(0) if len(readings) > 1 else readings[0])

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:  # noqa: N802
        return f"GPU-{handle}{handle}{handle}".encode()

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self._holders]

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:  # noqa: N802
        raise RuntimeError("Not Supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*used: list[int], **options: Any) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*used, **options))

    return install


def test_without_a_driver_there_are_no_gpus(nvml: Any) -> None:
    nvml([0], broken=True)
    assert gpus.inventory() == ()
    assert gpus.used_bytes(["GPU-000"]) == {}
    assert gpus.cuda_environment(["GPU-000"]) == {}
    assert gpus.wait_until_idle({"GPU-000": 0}, patience_s=0) == ()


def test_what_a_gpu_does_not_tell_is_none(nvml: Any) -> None:
    nvml([GIB], holders=(1,))
    (gpu,) = gpus.inventory()
    assert (gpu.uuid, gpu.name, gpu.driver) == ("GPU-000", "NVIDIA H200", "580.159.04")
    assert gpu.temperature_c is None
    assert gpu.capability is None
    assert gpu.holders[0].pid == 1
    assert not gpu.free


def test_free_means_no_process_and_under_one_percent(nvml: Any) -> None:
    nvml([GIB], [2 * GIB])
    assert [gpu.free for gpu in gpus.inventory()] == [True, False]


def test_gpus_are_made_visible_by_index_in_pci_order(nvml: Any) -> None:
    nvml([0], [0])
    assert gpus.cuda_environment(["GPU-111"]) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}
    assert [gpu.index for gpu in gpus.visible(gpus.inventory(), {"CUDA_VISIBLE_DEVICES": "1,0"})] == [1, 0]
    assert [gpu.index for gpu in gpus.visible(gpus.inventory(), {"CUDA_VISIBLE_DEVICES": "GPU-11,nonsense,0"})] == [1]
    assert gpus.visible(gpus.inventory(), {"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_waiting_ends_when_the_memory_is_back(nvml: Any) -> None:
    nvml([100 * GIB, 50 * GIB, GIB])
    assert gpus.wait_until_idle({"GPU-000": GIB // 2}, patience_s=5, poll_s=0.001) == ()


@pytest.mark.fault("GPU memory not returned")
def test_who_still_holds_memory_is_named(nvml: Any) -> None:
    nvml([60 * GIB], holders=(4_000_000,))
    (words,) = gpus.wait_until_idle({"GPU-000": GIB}, patience_s=0)
    assert words == "GPU 0: 59.0 GiB not returned, held by process 4000000"


@pytest.mark.fault("GPU lost")
def test_a_gpu_that_fell_off_the_bus_is_missed(nvml: Any) -> None:
    nvml([0], [0])
    before = gpus.inventory()
    assert gpus.lost(before) is None
    nvml([0])
    assert gpus.lost(before) == "GPU 1 (GPU-111) is gone"
    assert gpus.lost(()) is None


def test_other_gpus_that_compute_make_a_host_shared(nvml: Any) -> None:
    nvml([0], [GIB], holders=(1,))
    assert [gpu.uuid for gpu in gpus.busy(["GPU-000"])] == ["GPU-111"]


@pytest.mark.fault("chosen GPU is somebody's")
def test_a_gpu_on_which_somebody_computes_is_not_shared(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vopt.optimizer.subject.vllm_version", lambda python: "0.32.0")
    nvml([2 * GIB], [0])  # a screen's memory, nobody computes
    assert find_machine(None, "0", "python").uuids == ("GPU-000",)
    assert find_machine(None, None, "python").uuids == ("GPU-111",)
    nvml([50 * GIB], holders=(4321,))
    for wanted in ("0", "GPU-000", None):
        with pytest.raises(EnvironmentLacks, match=r"4321 computes on GPU 0|no GPU is free") as refused:
            find_machine(None, wanted, "python")
        assert "vopt doctor" in refused.value.hint
