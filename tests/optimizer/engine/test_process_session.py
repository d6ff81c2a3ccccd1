"""Trials from start to stop in processes of their own, on a bare interpreter with a stand-in for vLLM: every fault, fast."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.children import children
from support.sessions import eventually, leader_of, named, plan, source

from vopt.objectives.records import LoadResult, LoadStatus
from vopt.optimizer.engine import trial_process
from vopt.optimizer.engine.kin import alive
from vopt.optimizer.engine.process import ProcessSession, engine_environment
from vopt.optimizer.engine.spare import Spares
from vopt.optimizer.engine.wire import plan_to_json
from vopt.optimizer.trial import Deadlines, EngineConfig, EngineFailure, Failed, FailureKind, Phase, TrialSpec

STUB = Path(__file__).parents[2] / "support" / "stub_vllm"
MAMBA = "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856). Please lower max_num_seqs to at most 856."

Trial = Callable[..., ProcessSession]


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter without a single package: neither ours nor our dependencies can be imported in it."""
    path = tmp_path_factory.mktemp("bare") / "python"
    path.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S -s "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def trial(tmp_path: Path, bare_python: str) -> Iterator[Trial]:
    sessions: list[ProcessSession] = []

    def make(
        fault: str = "",
        message: str = "",
        arguments: dict[str, Any] | None = None,
        start_s: float = 20.0,
        load_s: float = 60.0,
        spares: Spares | None = None,
    ) -> ProcessSession:
        spec = TrialSpec(
            label=str(len(sessions)),
            model="some/model",
            arguments=EngineConfig(arguments),
            directory=tmp_path / str(len(sessions)),
            python=bare_python,
            environment={"PYTHONPATH": str(STUB), "STUB_FAULT": fault, "STUB_MESSAGE": message},
            deadlines=Deadlines(start_s=start_s, load_s=load_s, stop_s=5.0),
            cache_root=tmp_path / "cache",
        )
        sessions.append(ProcessSession(spec, spares))
        return sessions[-1]

    before = children()
    yield make
    for session in sessions:
        session.close()
    assert children() <= before, "a trial left a process behind"


def no_phase(phase: Phase, words: str) -> None: ...


def failure_of(action: Callable[[], object]) -> Failed:
    with pytest.raises(EngineFailure) as caught:
        action()
    return caught.value.failed


def test_start_load_stop_on_an_interpreter_that_has_none_of_our_packages(trial: Trial) -> None:
    session = trial(arguments={"max_num_seqs": 64})
    phases: list[tuple[Phase, str]] = []
    started = session.start(lambda phase, words: phases.append((phase, words)))
    assert started.vllm_version == "0.32.0+stub"
    assert started.resolved["max_num_seqs"] == 64
    assert started.resolved["max_num_batched_tokens"] == 8192
    assert started.start_parts_s["import"] >= 0
    assert [phase for phase, _ in phases] == [Phase.START, Phase.START]
    ticks: list[Any] = []
    result = session.load(source(), plan(window_s=1.0), lambda tick: ticks.append(tick) or True)
    assert result.status in (LoadStatus.COMPLETE, LoadStatus.UNSTEADY)
    assert ticks
    assert all(record.succeeded or record.censored for record in result.records)
    assert len(result.records) > 100
    second = session.load(source(), plan(window_s=0.5), lambda tick: True)
    assert second.records
    assert session.close() == ()
    assert session.close() == ()
    assert sorted(path.name for path in session.log.parent.iterdir()) == [
        "engine.log",
        "records-1.jsonl.gz",
        "records-2.jsonl.gz",
    ], "prompts are not kept"


@pytest.mark.slow
def test_the_search_can_end_a_load_early(trial: Trial) -> None:
    session = trial()
    session.start(no_phase)
    result = session.load(source(), plan(window_s=60.0), lambda tick: tick.at_s < 1.5)
    assert result.status is LoadStatus.STOPPED_EARLY
    assert result.records


def test_a_spare_process_imports_before_its_turn_and_starts_nothing(trial: Trial) -> None:
    session = trial()
    session.prestart()
    time.sleep(0.5)
    assert named("VLLM") == ()
    session.start(no_phase)
    eventually(lambda: len(named("VLLM")) == 1)


@pytest.mark.slow
@pytest.mark.fault("waiting process killed")
def test_the_next_trial_takes_the_process_that_imported_during_this_start(trial: Trial) -> None:
    spares = Spares()
    first, second, third = trial(spares=spares), trial(spares=spares, arguments={"max_num_seqs": 7}), trial(spares=spares)
    first.start(no_phase)
    first.load(source(), plan(window_s=0.5), lambda tick: True)
    assert len(named("VLLM")) == 1, "the waiting process starts no engine"
    first.close()
    waiting = spares._waiting
    started = second.start(no_phase)
    assert waiting is not None
    assert second._hosted is waiting
    assert started.resolved["max_num_seqs"] == 7
    assert "import_ahead" in started.start_parts_s
    second.load(source(), plan(window_s=0.5), lambda tick: True)
    second.close()
    assert second.log.exists()
    assert spares._waiting is not None
    os.kill(leader_of(spares._waiting.process), signal.SIGKILL)  # a spare that died is no trial's failure
    third.start(no_phase)
    third.close()
    spares.close()
    assert not [path for path in third.log.parent.parent.iterdir() if path.name.startswith(".spare")]


def test_weights_are_read_ahead_until_the_engine_is_up(trial: Trial, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with (model / "model.safetensors").open("wb") as file:
        file.write(os.urandom(20 << 20))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    session = trial()
    session._spec = dataclasses.replace(session._spec, model=str(model))
    assert session.start(no_phase).start_parts_s["weights_ahead"] > 0
    assert not [thread for thread in threading.enumerate() if thread.name == "vopt-readahead"], "nothing reads beside a load"
    again = trial()
    again._spec = dataclasses.replace(again._spec, model=str(model))
    assert "weights_ahead" not in again.start(no_phase).start_parts_s, "they are in the page cache"


START_FAULTS = [
    ("fail_start", MAMBA, {}, FailureKind.MAMBA_BLOCKS, {"max_num_seqs": {"at_most": 856}}),
    ("fail_start", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB.", {}, FailureKind.OOM_START, {}),
    ("fail_start", "OSError: [Errno 28] No space left on device: '/cache'", {}, FailureKind.DISK_FULL, {}),
    ("fail_start", "RuntimeError: something never seen before", {}, FailureKind.ENGINE_DIED, {}),
    ("fail_start", "torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing", {},
     FailureKind.GRAPH_CAPTURE, {}),
    ("fail_start", "ValueError: Free memory on device cuda:0 (5.1/139.8 GiB) on startup is less than desired GPU memory"
     " utilization (0.92, 128.62 GiB).", {}, FailureKind.MEMORY_HELD, {}),
    ("", "", {"max_num_sequences": 4}, FailureKind.INVALID_CONFIG, {}),
    ("", "", {"max_num_batched_tokens": 16, "max_num_seqs": 128}, FailureKind.INVALID_CONFIG,
     {"max_num_batched_tokens": {"at_least": 128}}),
    ("exit_start", "", {}, FailureKind.ENGINE_DIED, {}),
    ("fail_import", "", {}, FailureKind.DRIVER, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "message", "arguments", "kind", "hint"),
    [pytest.param(*case, marks=() if number in (0, 7, 8) else pytest.mark.slow) for number, case in enumerate(START_FAULTS)],
)
@pytest.mark.fault("start fails")
def test_a_failed_start_has_its_kind_and_leaves_nothing(
    trial: Trial, fault: str, message: str, arguments: dict[str, Any], kind: FailureKind, hint: dict[str, Any]
) -> None:
    session = trial(fault, message, arguments)
    failed = failure_of(lambda: session.start(no_phase))
    assert (failed.phase, failed.kind, failed.hint) == (Phase.START, kind, hint)
    if message:
        assert failed.detail == message, "the engine core's own words, not the frontend's summary"
    assert session.close() == ()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "last_words"), [("hang_import", "(nothing)"), ("hang_start", "shard 3 of 9")])
@pytest.mark.fault("hang in start")
def test_a_hang_in_the_start_ends_at_its_deadline_with_the_last_log_lines(trial: Trial, fault: str, last_words: str) -> None:
    session = trial(fault, start_s=1.5)
    failed = failure_of(lambda: session.start(no_phase))
    assert failed.kind is FailureKind.HANG
    assert last_words in failed.detail


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 200, 1000])
@pytest.mark.parametrize(
    ("fault", "message", "kind"),
    [
        ("die_at", "RuntimeError: unknown horror", FailureKind.ENGINE_DIED),
        ("die_at", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", FailureKind.OOM_LOAD),
        ("leader_exit0_at", "", FailureKind.ENGINE_DIED),
        ("leader_kill_at", "", FailureKind.ENGINE_DIED),
    ],
)
@pytest.mark.fault("death under load")
def test_a_death_under_load_is_noticed_at_once(trial: Trial, fault: str, message: str, kind: FailureKind, at: int) -> None:
    session = trial(f"{fault}:{at}", message)
    started = session.start(no_phase)
    failed = failure_of(lambda: session.load(source(), plan(window_s=30.0), lambda tick: True))
    assert (failed.phase, failed.kind) == (Phase.LOAD, kind)
    assert failed.started == started
    if fault == "die_at":
        assert failed.load is not None
        assert failed.load.status is LoadStatus.ENGINE_DIED
        assert len(failed.load.records) > at, "what was seen before the death is kept"
        assert failed.detail == message
    assert session.close() == ()


@pytest.mark.slow
@pytest.mark.parametrize("at", ["start", "load"])
@pytest.mark.fault("out-of-memory kill")
def test_a_kill_that_the_kernel_counted_is_lack_of_memory(trial: Trial, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    kills = [3]
    monkeypatch.setattr("vopt.optimizer.room.oom_kills", lambda: kills[0])
    session = trial("hang_start" if at == "start" else "", start_s=30.0)

    def kernel_kills(pid: int) -> None:
        kills[0] += 1
        os.kill(pid, signal.SIGKILL)

    def on_phase(phase: Phase, words: str) -> None:
        if at == "start" and words == "starting the engine":
            threading.Timer(0.5, kernel_kills, (leader_of(session._up.process),)).start()

    def on_tick(tick: Any) -> bool:
        if kills[0] == 3:
            kernel_kills(leader_of(session._up.process))
        return True

    def start_and_load() -> None:
        session.start(on_phase)
        session.load(source(), plan(window_s=30.0), on_tick)

    failed = failure_of(start_and_load)
    assert failed.kind is (FailureKind.OOM_START if at == "start" else FailureKind.OOM_LOAD)
    assert "the kernel killed a process for lack of memory" in failed.detail
    assert session.close() == ()


@pytest.mark.slow
@pytest.mark.fault("trial process stops")
def test_a_trial_process_whose_loop_stops_is_a_hang(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vopt.optimizer.engine.process.SILENCE_S", 3.0)
    session = trial("stuck_load:3")
    session.start(no_phase)
    failed = failure_of(lambda: session.load(source(), plan(window_s=30.0), lambda tick: True))
    assert (failed.phase, failed.kind) == (Phase.LOAD, FailureKind.HANG)


@pytest.mark.slow
@pytest.mark.fault("100 MB of output under load")
def test_100_mb_of_output_change_nothing(trial: Trial) -> None:
    session = trial("flood:20")
    session.start(no_phase)
    result = session.load(source(), plan(window_s=1.0), lambda tick: True)
    assert all(record.succeeded or record.censored for record in result.records)
    session.close()
    assert session.log.stat().st_size < 20 << 20


@pytest.mark.slow
@pytest.mark.fault("engine core killed while idle")
def test_engine_core_killed_while_idle_fails_the_next_load(trial: Trial) -> None:
    session = trial()
    session.start(no_phase)
    (core,) = eventually(lambda: named("VLLM"))
    os.kill(core.identity.pid, signal.SIGKILL)
    eventually(lambda: not alive(core.identity))
    failed = failure_of(lambda: session.load(source(), plan(window_s=5.0), lambda tick: True))
    assert failed.kind is FailureKind.ENGINE_DIED


def test_closing_before_anything_began_is_clean(trial: Trial) -> None:
    assert trial().close() == ()
    session = trial()
    session.prestart()
    assert session.close() == ()


def test_secrets_stay_out_of_trials(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "top-secret-key")
    monkeypatch.setenv("HF_TOKEN", "hf_top_secret")
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    spec = trial()._spec
    environment, _ = engine_environment(dataclasses.replace(spec, revision="abc"))
    assert "VLLM_API_KEY" not in environment
    assert "HF_TOKEN" not in environment
    assert "VLLM_ENABLE_STARTUP_PLAN" not in environment
    assert environment["HF_HUB_OFFLINE"] == "1"
    fetching, _ = engine_environment(spec)
    assert "HF_HUB_OFFLINE" not in fetching
    assert fetching["VLLM_HOST_IP"] == "127.0.0.1"
    assert fetching["VLLM_NO_USAGE_STATS"] == "1"


async def test_nothing_is_collected_that_the_imports_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``vllm serve`` takes its heap out of garbage collection; in-process streams must not stop for it either."""
    frozen: list[int] = []
    result = LoadResult((), None, LoadStatus.COMPLETE)

    async def drive(*_: Any) -> LoadResult:
        frozen.append(gc.get_freeze_count())
        return result

    monkeypatch.setattr("vopt.optimizer.load.drive.drive", drive)
    (tmp_path / "source.json").write_text(json.dumps(source().to_json()))
    order = {"source": str(tmp_path / "source.json"), "records": str(tmp_path / "r.gz"), "plan": plan_to_json(plan())}
    told: list[Any] = []
    commands = SimpleNamespace(stop_load=threading.Event())
    try:
        engine = SimpleNamespace(dead=None)
        # A channel that only listens.
        await trial_process.load(engine, order, commands, SimpleNamespace(send=told.append))  # type: ignore[arg-type]
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000
    assert told[-1]["event"] == "loaded"
