"""The host around a search: its locks, its neighbours, lost GPUs, and the disk budget."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from landscapes import MemoryStudy, small_landscape

from vopt.optimizer import gpus, host
from vopt.optimizer.environment import ModelFiles
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.history import Stage, TrialRequest
from vopt.optimizer.locks import Locked
from vopt.optimizer.recommend import Recommendation
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.optimizer.study import Study, read_study
from vopt.optimizer.subject import Machine, Subject
from vopt.optimizer.trial import EngineConfig, FailureKind
from vopt.search_spaces.arguments import stored_arguments
from vopt.search_spaces.defaults import Gpu

H200 = Gpu("NVIDIA H200", 140 * 2**30)


def subject(*uuids: str) -> Subject:
    return Subject(
        model=ModelFiles("m", {}, None, None),
        shape=None,
        schema=stored_arguments("0.32.0"),
        machine=Machine(H200, uuids),
        python="python3",
        fixed=EngineConfig(),
        baseline=EngineConfig(),
    )


def gpu(uuid: str, index: int = 0, **facts: Any) -> gpus.Gpu:
    return gpus.Gpu(uuid, index, "NVIDIA H200", 140 * 2**30, 0, **facts)


def installed(monkeypatch: pytest.MonkeyPatch, *found: gpus.Gpu) -> None:
    monkeypatch.setattr(gpus, "inventory", lambda: found)


@pytest.mark.fault("GPU locked by another search")
def test_the_gpus_of_a_search_are_its_own(tmp_path: Path) -> None:
    with (
        host.reserved(subject("GPU-a", "GPU-b"), "a search of x", tmp_path),
        pytest.raises(Locked, match="a search of x"),
        host.reserved(subject("GPU-b"), "a search of y", tmp_path),
    ):
        pass
    with host.reserved(subject("GPU-b"), "a search of y", tmp_path):
        pass


def test_busy_neighbours_are_named_in_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, gpu("GPU-a"), gpu("GPU-b", 1, holders=(gpus.Holder(7, "python", None),)))
    (note,) = host.shared_note(host.shared_with(subject("GPU-a")))
    assert "shared host" in note
    assert "GPU 1 (python)" in note
    assert host.shared_note(host.shared_with(subject("GPU-a", "GPU-b"))) == ()
    landscape = small_landscape()
    setup = SearchSetup(landscape.goal, landscape.space, Budget(trials=6, rounds=1, soak_s=0), notes=(note,))
    assert note in answer_of(setup, landscape.evaluator(0)).notes


def answer_of(setup: SearchSetup, evaluate: Any) -> Recommendation:
    return search(setup, MemoryStudy(), evaluate, lambda event: None)


@pytest.mark.fault("GPU lost during a trial that looked well")
def test_a_lost_gpu_stops_the_study_and_is_charged_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    landscape = small_landscape()
    installed(monkeypatch, gpu("GPU-a", ecc_errors=0))
    watch = host.Watch(("GPU-a",))

    def evaluate(request: TrialRequest) -> Any:
        if request.label == "3":
            installed(monkeypatch, gpu("GPU-a", ecc_errors=2))
        return watch.checked(landscape.evaluator(0)(request))

    url = f"sqlite:///{tmp_path}/studies.db"
    setup = SearchSetup(landscape.goal, landscape.space, Budget(trials=8, rounds=0, soak_s=0))
    study = Study.create(url, {"model": "m", "goal": "throughput"}, landscape.space)
    with study, pytest.raises(EnvironmentLacks, match="uncorrected memory errors") as caught:
        search(setup, study, evaluate, lambda event: None)
    assert "vopt resume m-throughput-1" in caught.value.hint
    last = read_study(url).trials[-1]
    assert last.failure is not None
    assert last.failure.kind is FailureKind.GPU_LOST
    installed(monkeypatch, gpu("GPU-a", ecc_errors=2))  # as found by the search that goes on
    watch = host.Watch(("GPU-a",))
    with Study.reopen(url, None, landscape.space) as resumed:
        search(setup, resumed, evaluate, lambda event: None)
    again = [record for record in read_study(url).trials if record.config == last.config and record.stage is Stage.SEARCH]
    assert len(again) == 2
    assert again[1].failure is None or again[1].failure.kind is not FailureKind.GPU_LOST


@pytest.mark.parametrize(("xid", "stops"), [(79, True), (94, True), (31, False), (13, False)])
@pytest.mark.fault("Xid error")
def test_only_a_broken_gpu_stops_the_study_not_a_faulty_kernel(xid: int, stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [SimpleNamespace(eventData=xid)]
    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlEventSetCreate=object,
        nvmlEventSetFree=lambda events: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceRegisterEvents=lambda handle, kinds, events: None,
        nvmlEventTypeXidCriticalError=8,
        nvmlEventSetWait_v2=lambda listened, timeout: events.pop(),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    errors = gpus.CriticalErrors(["GPU-a"])
    assert errors.seen() == (f"a GPU reported Xid {xid}" if stops else None)
    assert errors.seen() is None
    errors.close()
    errors.close()


def test_without_nvml_nothing_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    errors = gpus.CriticalErrors(["GPU-a"])
    assert errors.seen() is None
    errors.close()


@pytest.mark.fault("disk budget exceeded")
def test_old_caches_make_room_but_never_the_one_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    for age, name in enumerate(("nvidia-h200-vllm-0.32.0", "nvidia-h200-vllm-0.31.0", "cpu-vllm-0.32.0")):
        folder = tmp_path / "vopt" / "engines" / name
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(b"x" * 1_000_000)
        os.utime(folder, (1000 + age, 1000 + age))
    study = tmp_path / "study"
    study.mkdir()
    host.shrink(subject(), study, 1_500_000, said.append)
    assert sorted(path.name for path in (tmp_path / "vopt" / "engines").iterdir()) == [
        "cpu-vllm-0.32.0",
        "nvidia-h200-vllm-0.32.0",
    ]
    assert len(said) == 1
    (study / "records").write_bytes(b"x" * 1_000_000)
    host.shrink(subject(), study, 1_500_000, said.append)
    assert [path.name for path in (tmp_path / "vopt" / "engines").iterdir()] == ["nvidia-h200-vllm-0.32.0"]


@pytest.mark.fault("disk too small for the search")
def test_a_search_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    with pytest.raises(EnvironmentLacks, match=r"1\.0 GiB are free"):
        host.check_room(subject(), small_landscape().space, Budget(trials=16), tmp_path)


def test_conditions_are_flat_and_leave_out_what_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, gpu("GPU-a", sm_clock_mhz=1980, holders=(gpus.Holder(7, "python", None),)), gpu("GPU-b", 1))
    found = host.conditions_of(subject("GPU-a"))()
    assert found["gpu0_sm_clock_mhz"] == 1980
    assert found["gpu0_processes"] == 1
    assert found["other_gpus_busy"] == 0
    assert "gpu0_temperature_c" not in found
    simulated = subject("GPU-a")
    assert replace(simulated, machine=Machine(H200)).machine.uuids == ()
