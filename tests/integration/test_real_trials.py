"""Trials on the real vLLM for the CPU: they start, load, stop, fail and die as a search has to expect."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.segments import SegmentWatch
from support.sessions import eventually, leader_of, named, plan, source, spec

from vopt.objectives.records import LoadStatus
from vopt.optimizer.engine.kin import alive, descendants, identity
from vopt.optimizer.engine.process import ProcessSession
from vopt.optimizer.trial import Deadlines, EngineFailure, Failed, FailureKind, Phase, StartClass

pytestmark = pytest.mark.vllm
Trial = Callable[..., ProcessSession]


@pytest.fixture
def trial(tmp_path: Path, vllm_python: str, tiny_models: tuple[Path, Path], engine_cache: Path) -> Iterator[Trial]:
    sessions: list[ProcessSession] = []

    def make(hybrid: bool = False, deadlines: Deadlines | None = None, **arguments: Any) -> ProcessSession:
        wanted = spec(tmp_path / str(len(sessions)), tiny_models[hybrid], vllm_python, engine_cache, **arguments)
        if deadlines is not None:
            wanted = dataclasses.replace(wanted, deadlines=deadlines)
        sessions.append(ProcessSession(wanted))
        return sessions[-1]

    with SegmentWatch() as watch:
        yield make
        leftovers = [session.close() for session in sessions]
        assert all(left == () for left in leftovers), leftovers
        assert descendants(os.getpid()) == ()
        assert watch.left() == []


def no_phase(phase: Phase, words: str) -> None: ...


def failure_of(action: Callable[[], object]) -> Failed:
    with pytest.raises(EngineFailure) as caught:
        action()
    return caught.value.failed


def listeners_elsewhere(pids: list[int]) -> list[str]:
    """TCP sockets of these processes that listen on anything but the loopback interface."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                address = socket.inet_ntop(family, words)
                if not address.startswith("127.") and address != "::1":
                    found.append(f"{address}:{int(fields[1].partition(':')[2], 16)}")
    return found


def test_a_dense_model_starts_loads_and_stops(trial: Trial) -> None:
    session = trial(max_num_seqs=64)
    started = session.start(no_phase)
    assert started.vllm_version.startswith("0.32")
    assert started.resolved["max_num_seqs"] == 64
    assert started.resolved["max_num_batched_tokens"] == 2048, "the CPU's default in the context of vllm serve, not 128/2048's"
    assert started.resolved["trust_remote_code"] is False
    assert started.resolved["enforce_eager"] is True
    assert (started.kv_cache_tokens or 0) > 10_000
    assert started.start_class in (StartClass.FIRST, StartClass.KNOWN_KEY)
    assert {"import", "engine", "engine_init"} <= set(started.start_parts_s)
    pids = [entry.identity.pid for entry in descendants(os.getpid())]
    assert len(named("VLLM")) >= 2
    assert listeners_elsewhere(pids) == []
    result = session.load(source(), plan(), lambda tick: True)
    assert result.status in (LoadStatus.COMPLETE, LoadStatus.UNSTEADY)
    finished = [record for record in result.records if not record.censored]
    assert len(finished) > 50
    assert all(record.succeeded for record in finished)
    assert all(record.output_tokens == record.requested_output_tokens for record in finished)
    assert result.samples[-1].generation_tokens
    began = time.monotonic()
    assert session.close() == ()
    assert time.monotonic() - began < 10.0


def test_the_defaults_of_vllm_serve_are_those_of_the_exported_command(trial: Trial) -> None:
    session = trial()
    resolved = session.start(no_phase).resolved
    assert resolved["max_num_seqs"] == 128, "AsyncLLM's own context and vllm serve's agree on a CPU: see the faked H200 below"
    assert resolved["performance_mode"] == "balanced"


def test_a_hybrid_model_starts_and_loads(trial: Trial) -> None:
    session = trial(hybrid=True, language_model_only=True)
    started = session.start(no_phase)
    assert started.resolved["block_size"] > 128, "a hybrid's attention blocks grow to the size of its state"
    result = session.load(source(), plan(), lambda tick: True)
    assert all(record.succeeded or record.censored for record in result.records)
    assert sum(record.succeeded for record in result.records) > 20


@pytest.mark.parametrize(
    ("arguments", "kind", "hinted"),
    [
        ({"max_num_batched_tokens": 16, "max_num_seqs": 128}, FailureKind.INVALID_CONFIG, {"max_num_batched_tokens"}),
        ({"max_num_sequences": 4}, FailureKind.INVALID_CONFIG, set()),
        ({"kv_cache_memory_bytes": 1 << 20}, FailureKind.KV_TOO_SMALL, {"max_model_len"}),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, FailureKind.UNSUPPORTED, set()),
        ({"gpu_memory_utilization": 1.0}, FailureKind.MEMORY_HELD, set()),
    ],
)
@pytest.mark.fault("start cannot be")
def test_a_start_that_cannot_be_has_its_kind(
    trial: Trial, arguments: dict[str, Any], kind: FailureKind, hinted: set[str]
) -> None:
    session = trial(**arguments)
    failed = failure_of(lambda: session.start(no_phase))
    assert (failed.phase, failed.kind) == (Phase.START, kind), failed.detail
    assert set(failed.hint) == hinted
    assert "See root cause above" not in failed.detail


@pytest.mark.parametrize("victim", ["VLLM::EngineCor", "VLLM::Worker"])
@pytest.mark.fault("killed under load")
def test_a_killed_engine_process_ends_the_load_within_5_seconds(trial: Trial, victim: str) -> None:
    session = trial()
    session.start(no_phase)
    killed_at: list[float] = []

    def kill_once(tick: Any) -> bool:
        if tick.succeeded and not killed_at:
            os.kill(named(victim)[0].identity.pid, signal.SIGKILL)
            killed_at.append(time.monotonic())
        return True

    failed = failure_of(lambda: session.load(source(), plan(window_s=60.0), kill_once))
    assert (failed.phase, failed.kind) == (Phase.LOAD, FailureKind.ENGINE_DIED), failed.detail
    assert failed.load is not None
    died = [record.ended_s for record in failed.load.records if record.failure]
    assert died
    assert time.monotonic() - killed_at[0] < 5.0 + 5.0, "noticed within 5 s, and cleaned up within 5 more"
    assert session.close() == ()


@pytest.mark.parametrize(("finished", "which"), [(0, "first"), (1, "middle"), (2, "last")])
@pytest.mark.fault("engine core killed in a request of a load")
def test_a_death_in_any_request_keeps_what_was_seen_before(trial: Trial, finished: int, which: str) -> None:
    """Three requests one after the other; the engine core is killed while one of them is being answered."""
    session = trial(max_model_len=40_000, hf_overrides={"max_position_embeddings": 40_000})
    session.start(no_phase)
    in_turn = dataclasses.replace(
        plan(window_s=60.0, concurrency=1), max_requests=3, min_requests=0, warmup_factor=0.0, tick_s=0.05
    )
    killed_at: list[float] = []

    def kill_once(tick: Any) -> bool:
        if tick.running and tick.succeeded == finished and not killed_at:
            os.kill(named("VLLM::EngineCor")[0].identity.pid, signal.SIGKILL)
            killed_at.append(time.monotonic())
        return True

    # A tick may get here seconds after what it tells of, where two cores are the engine's: what is killed must run for long.
    outputs = [20, 20, 20]
    outputs[finished] = 30_000
    requests = dataclasses.replace(source(), lengths=tuple((100, output) for output in outputs))
    failed = failure_of(lambda: session.load(requests, in_turn, kill_once))
    assert (failed.phase, failed.kind) == (Phase.LOAD, FailureKind.ENGINE_DIED), failed.detail
    assert failed.load is not None
    assert sum(record.succeeded for record in failed.load.records) == finished
    assert [record.index for record in failed.load.records if record.failure] == [finished]
    assert time.monotonic() - killed_at[0] < 5.0 + 5.0, "noticed within 5 s, and cleaned up within 5 more"
    assert session.close() == ()


FLOODS = """
import os, sys, threading, time
def flood():
    while not os.path.exists(os.environ["FLOOD_WHEN"]):
        time.sleep(0.05)
    for _ in range(100):
        os.write(1, b"f" * 99 + b"\\n" + (b"o" * 99 + b"\\n") * 9999)
if "--multiprocessing-fork" in sys.argv:  # in what vLLM spawns: the engine core and its worker
    threading.Thread(target=flood, daemon=True).start()
"""


@pytest.mark.fault("100 MB of output of engine core and worker each, under load")
def test_a_flood_of_output_changes_nothing(
    tmp_path: Path, vllm_python: str, tiny_models: tuple[Path, Path], engine_cache: Path
) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(FLOODS)
    wanted = spec(tmp_path / "0", tiny_models[0], vllm_python, engine_cache)
    when = tmp_path / "now"
    wanted = dataclasses.replace(wanted, environment={"PYTHONPATH": str(tmp_path / "hook"), "FLOOD_WHEN": str(when)})
    session = ProcessSession(wanted)
    try:
        session.start(no_phase)
        result = session.load(source(), plan(window_s=4.0), lambda tick: when.touch() or True)
    finally:
        assert session.close() == ()
    assert result.status in (LoadStatus.COMPLETE, LoadStatus.UNSTEADY)
    assert all(record.succeeded or record.censored for record in result.records)
    log = session.log.read_text()
    assert "f" * 99 in log, "the flood came"
    assert "bytes left out" in log
    assert session.log.stat().st_size < 20 << 20
    assert "init engine" in log, "how the engine started is kept"


@pytest.mark.parametrize("victim", ["VLLM::EngineCor", "VLLM::Worker", "leader"])
@pytest.mark.fault("killed in start")
def test_a_process_killed_in_the_start_fails_the_start(trial: Trial, victim: str) -> None:
    session = trial()

    def kill(phase: Phase, words: str) -> None:
        if words == "starting the engine":
            assert session._hosted is not None
            script = (
                "import sys, time; from support.sessions import eventually, named; import os, signal\n"
                "victim = eventually(lambda: named(sys.argv[1], int(sys.argv[2])), 60)[0].identity.pid\n"
                "os.kill(victim, signal.SIGKILL)"
            )
            if victim == "leader":
                script = "import os, signal, sys, time; time.sleep(1); os.kill(int(sys.argv[2]), signal.SIGKILL)"
            argv = [sys.executable, "-c", script, victim, str(session._hosted.process.pid)]
            killer.append(subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}))

    killer: list[subprocess.Popen[bytes]] = []
    try:
        failed = failure_of(lambda: session.start(kill))
    finally:
        for process in killer:
            process.wait()
    assert failed.phase is Phase.START
    assert failed.kind is FailureKind.ENGINE_DIED, failed.detail


@pytest.mark.fault("hang in start")
def test_a_start_that_hangs_ends_at_its_deadline(trial: Trial) -> None:
    session = trial(deadlines=Deadlines(start_s=14.0, load_s=60.0, stop_s=5.0))

    def freeze(phase: Phase, words: str) -> None:
        if words == "starting the engine":
            assert session._hosted is not None
            os.kill(leader_of(session._hosted.process), signal.SIGSTOP)

    failed = failure_of(lambda: session.start(freeze))
    assert failed.kind is FailureKind.HANG
    assert session.close() == ()


@pytest.mark.fault("leader killed, engine core and worker frozen")
def test_a_trial_with_frozen_processes_and_a_dead_leader_is_still_cleaned_up(trial: Trial) -> None:
    session = trial()
    session.start(no_phase)
    assert session._hosted is not None
    frozen = named("VLLM")
    for entry in frozen:
        os.kill(entry.identity.pid, signal.SIGSTOP)  # a stopped process does not even see SIGTERM
    os.kill(leader_of(session._hosted.process), signal.SIGKILL)
    failed = failure_of(lambda: session.load(source(), plan(), lambda tick: True))
    assert failed.kind is FailureKind.ENGINE_DIED
    assert session.close() == ()
    assert not any(alive(entry.identity) for entry in frozen)


@pytest.mark.parametrize("victim", ["VLLM::EngineCor", "VLLM::Worker"])
@pytest.mark.fault("killed in stop")
def test_a_process_killed_while_stopping_leaves_nothing(trial: Trial, victim: str) -> None:
    session = trial()
    session.start(no_phase)
    everyone = named("VLLM")
    os.kill(named(victim)[0].identity.pid, signal.SIGKILL)
    assert session.close() == ()
    assert not any(alive(entry.identity) for entry in everyone)


@pytest.mark.fault("search killed under load")
def test_sigkill_of_the_search_ends_engine_core_and_workers(
    tmp_path: Path, vllm_python: str, tiny_models: tuple[Path, Path], engine_cache: Path
) -> None:
    search = tmp_path / "search.py"
    search.write_text(
        textwrap.dedent(
            f"""
            from pathlib import Path
            from support.sessions import plan, source, spec
            from vopt.optimizer.engine.process import ProcessSession
            session = ProcessSession(spec(Path({str(tmp_path)!r}) / "t", {str(tiny_models[0])!r}, {vllm_python!r},
                                          Path({str(engine_cache)!r})))
            session.start(lambda phase, words: None)
            up = Path({str(tmp_path)!r}) / "up"
            session.load(source(), plan(window_s=60.0), lambda tick: up.touch() or True)
            """
        )
    )
    with SegmentWatch() as watch:
        running = subprocess.Popen([sys.executable, search], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        try:
            eventually((tmp_path / "up").exists, 120.0)
            everyone = [entry.identity for entry in descendants(running.pid)]
            assert len(everyone) >= 4, "supervisor, trial process, engine core, worker"
        finally:
            running.kill()
            running.wait()
        eventually(lambda: not any(alive(who) for who in everyone), 30.0)
        assert watch.made >= 2, "the queues from and to the worker"
        assert watch.left() == []
    assert identity(running.pid) is None


FAKED_H200 = """
import sys, types
for name in ("vllm._C", "vllm._moe_C", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch",
             "vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C"):
    sys.modules.setdefault(name, types.ModuleType(name))
import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability

class H200(NonNvmlCudaPlatform):
    @classmethod
    def get_device_capability(cls, device_id=0): return DeviceCapability(9, 0)
    @classmethod
    def get_device_name(cls, device_id=0): return "NVIDIA H200"
    @classmethod
    def get_device_total_memory(cls, device_id=0): return 150754820096
    @classmethod
    def device_count(cls): return 8
    @classmethod
    def import_kernels(cls): pass

vllm.platforms._current_platform = H200()
import vllm._custom_ops
for name in dir(vllm._custom_ops):
    if name.startswith("cutlass_") and "supports" in name:
        setattr(vllm._custom_ops, name, lambda *arguments: True)
from vopt.optimizer.engine.vllm import engine_arguments, usage_context
from vopt.optimizer.engine.resolved import flatten
given = {"load_format": "dummy", "skip_tokenizer_init": True, **eval(sys.argv[2])}
config = engine_arguments(sys.argv[1], given).create_engine_config(usage_context())
found = flatten(config, ["max_num_seqs", "max_num_batched_tokens"])
print("RESOLVED", found["max_num_seqs"], found["max_num_batched_tokens"])
"""


@pytest.mark.parametrize(("arguments", "expected"), [({}, "1024 8192"), ({"performance_mode": "throughput"}, "2048 16384")])
def test_on_an_h200_trials_get_the_defaults_of_vllm_serve(
    vllm_python: str, tiny_models: tuple[Path, Path], arguments: dict[str, Any], expected: str
) -> None:
    """``AsyncLLM``'s own usage context would give 128 and 2048. Only the platform is faked: the defaults are vLLM's own."""
    done = subprocess.run(
        [vllm_python, "-c", FAKED_H200, str(tiny_models[0]), repr(arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"RESOLVED {expected}" in done.stdout, done.stderr[-3000:]
