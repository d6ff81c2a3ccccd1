"""Hosts with several GPUs: which ones a search takes, what its engines see of them, and what a simulation makes of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_gpu_inventory import GIB, FakeNvml

from vopt.optimizer import gpus, locks, subject
from vopt.optimizer.engine.arguments import EngineVerdict, VllmProbe
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.options import BenchOptions
from vopt.optimizer.sessions import opener
from vopt.optimizer.trial import EngineConfig, EngineFailure, FailureKind, TrialSpec
from vopt.search_spaces.arguments import Arguments, stored_arguments


class FourGpus(FakeNvml):
    """``gone`` are lost from the bus."""

    def __init__(self, *used: list[int], gone: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__(*(used or ([0], [0], [0], [0])), **options)
        self.gone = gone

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:  # noqa: N802 - NVML's own name
        if handle in self.gone:
            raise RuntimeError("GPU is lost")
        return super().nvmlDeviceGetUUID(handle)


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(*used: list[int], **options: Any) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", FourGpus(*used, **options))

    return install


@pytest.fixture
def lock_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(subject, "held_gpu_locks", lambda: locks.held_gpu_locks(tmp_path))
    return tmp_path


def chosen(wanted: str | None = None) -> list[str]:
    return [gpu.uuid for gpu in subject._chosen(gpus.inventory(), wanted)]


def test_a_second_search_takes_another_gpu(four: Callable[..., None], lock_folder: Path) -> None:
    """Between two trials of the first search its GPU is idle, and would be taken for free."""
    four()
    assert chosen() == ["GPU-000"]
    first = locks.lock_gpus(chosen(), "a search of one", folder=lock_folder)
    assert chosen() == ["GPU-111"]
    second = locks.lock_gpus(chosen(), "a search of two", folder=lock_folder)
    assert chosen() == ["GPU-222"]
    for lock in (*first, *second):
        lock.release()
    assert chosen() == ["GPU-000"]


def test_when_every_gpu_is_taken_the_searches_are_named(four: Callable[..., None], lock_folder: Path) -> None:
    four([0], [9 * GIB])
    words = r"GPU 0: in use by a search of one .*; GPU 1: 9.0 GiB used"
    with locks.lock_gpus(["GPU-000"], "a search of one", folder=lock_folder)[0], pytest.raises(EnvironmentLacks, match=words):
        chosen()


def test_searches_on_disjoint_gpus_do_not_meet_and_overlapping_ones_do(four: Callable[..., None], lock_folder: Path) -> None:
    four()
    left = locks.lock_gpus(chosen("0,1"), "one", folder=lock_folder)
    right = locks.lock_gpus(chosen("3,2"), "two", folder=lock_folder)
    with pytest.raises(locks.Locked):
        locks.lock_gpus(chosen("1"), "three", folder=lock_folder)
    for lock in (*left, *right):
        lock.release()


def test_each_search_sees_its_own_gpus_and_waits_for_their_memory_alone(four: Callable[..., None]) -> None:
    four([0], [0], [80 * GIB], [GIB])
    assert gpus.cuda_environment(chosen("1,3"))["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert gpus.wait_until_idle({"GPU-000": 0, "GPU-333": 0}, patience_s=0) == ()
    (held,) = gpus.wait_until_idle({"GPU-222": 0, "GPU-333": 0}, patience_s=0)
    assert held.startswith("GPU 2: 80.0 GiB not returned")


def test_vllm_is_asked_with_the_gpus_of_the_trials_in_sight(
    four: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else it would take a tensor-parallel size for which there are GPUs enough, but not ours."""
    four([80 * GIB], [0], [0], [0])
    asked: list[dict[str, str]] = []

    class Recorded(VllmProbe):
        def wake(self) -> None:
            asked.append({name: value for name, value in self._environment.items() if name.startswith("CUDA")})

        def arguments(self, cache: Path | None = None) -> Arguments:
            return stored_arguments("0.22.1")

        def ask(self, model: str, config: Mapping[str, Any]) -> EngineVerdict:
            self.wake()
            return EngineVerdict(True)

    monkeypatch.setattr(subject, "vllm_version", lambda python: "0.22.1")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NewForCausalLM"], "model_type": "new"}))
    options = BenchOptions(model=str(tmp_path), gpus="3,1")
    found = subject.find_subject(options, probe=Recorded(sys.executable))
    assert found.machine.uuids == ("GPU-333", "GPU-111")
    assert asked == [{"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,3"}] * 2


def test_a_gpu_that_is_lost_while_it_is_asked_does_not_hide_the_others(four: Callable[..., None]) -> None:
    four()
    before = gpus.inventory()
    four(gone=(1,))
    assert [gpu.index for gpu in gpus.inventory()] == [0, 2, 3]
    assert gpus.lost(before) == "GPU 1 (GPU-111) is gone"
    assert gpus.cuda_environment(["GPU-111"]) == {"CUDA_VISIBLE_DEVICES": "-1"}, "not the GPUs of others"
    assert gpus.cuda_environment(["GPU-111", "GPU-222"])["CUDA_VISIBLE_DEVICES"] == "2"


def test_what_the_driver_reserves_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first version of NVML's answer says 450 MB on an idle L4, which is above 1 % of its memory."""

    class Reserving(FakeNvml):
        nvmlMemory_v2 = 2  # noqa: N815 - NVML's own name

        def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:  # noqa: N802
            return SimpleNamespace(total=22 * GIB, used=0 if version == 2 else 450 * 2**20)

    monkeypatch.setitem(sys.modules, "pynvml", Reserving([0]))
    assert gpus.inventory()[0].free


def test_without_the_second_version_the_first_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(FakeNvml):
        nvmlMemory_v2 = 2  # noqa: N815

        def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:  # noqa: N802
            if version is not None:
                raise RuntimeError("Function Not Found")
            return super().nvmlDeviceGetMemoryInfo(handle)

    monkeypatch.setitem(sys.modules, "pynvml", Old([GIB]))
    assert gpus.inventory()[0].used_bytes == GIB


@pytest.mark.parametrize("arguments", [{"tensor_parallel_size": 4}, {"data_parallel_size": 2, "tensor_parallel_size": 2}])
def test_a_simulation_has_as_many_gpus_as_were_given(tmp_path: Path, arguments: dict[str, int]) -> None:
    """With one for all the search found every split of the model impossible."""

    def start(count: str) -> int:
        found = subject.find_subject(BenchOptions(model="Qwen/Qwen3-32B", simulate="h200", gpus=count))
        spec = TrialSpec("0", "Qwen/Qwen3-32B", EngineConfig(arguments), tmp_path, sys.executable)
        return opener("simulated", found)(spec, False).start(lambda phase, words: None).kv_cache_tokens or 0

    assert start("4") > 0
    with pytest.raises(EngineFailure) as caught:
        start("2")
    assert caught.value.failed.kind is FailureKind.INVALID_CONFIG
    assert "number of available GPUs (2)" in caught.value.failed.detail
