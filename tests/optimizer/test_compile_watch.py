"""Kernels compiled in a measured window: seen in the engine's log, flagged, measured again once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from vopt.objectives.records import LoadResult, LoadStatus, LoadWindow, RequestRecord
from vopt.optimizer.bench import run_bench
from vopt.optimizer.compile_watch import (
    COMPILED,
    NUMBERS_APART,
    REMEASURED,
    LogWatch,
    WatchedLoads,
    compile_message,
    stamp_of,
)
from vopt.optimizer.engine.base import OnPhase, OnTick
from vopt.optimizer.evaluate import Bench, Evaluator
from vopt.optimizer.events import Event, Note
from vopt.optimizer.history import Stage, TrialRecord, TrialRequest
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Tick
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.measurement import Asked, Measurement
from vopt.optimizer.trial import EngineConfig, Started, TrialSpec

NOON = datetime(2026, 11, 30, 12, 0, 0).timestamp()  # noqa: DTZ001 - logs are in local time
JIT = "Triton kernel JIT compilation during inference: _zero_kv_blocks_kernel. This causes a latency spike; consider extending"
PLAN = LoadPlan(Arrivals.CLOSED, 60.0, concurrency=4)
SOURCE = RequestSource(((100, 100),) * 64, first_number=7)


def stamped(text: str, at: float) -> str:
    """A line as an engine core of vLLM logs it."""
    when = datetime.fromtimestamp(at).strftime("%m-%d %H:%M:%S")  # noqa: DTZ006 - logs are in local time
    return f"(EngineCore pid=1121) WARNING {when} [jit_monitor.py:103] {text}"


def tick(at_s: float, window_open_s: float | None = None) -> Tick:
    window_s = 0.0 if window_open_s is None else at_s - window_open_s
    return Tick(at_s, window_open_s, 10, 5, 0, 4, window_tokens=100 * window_s, window_s=window_s, kv_usage=None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (stamped(JIT, NOON), "Triton kernel JIT compilation: _zero_kv_blocks_kernel"),
        (
            "WARNING 11-30 03:41:03 [jit_monitor.py:139] CuTeDSL JIT compilation during inference: gemm (key=3). This causes a",
            "CuTeDSL JIT compilation: gemm",
        ),
        ("(Worker pid=3) Triton autotuning for function _chunk_fwd,", "Triton autotuning: _chunk_fwd"),
        (
            "INFO 11-30 03:37:16 [backends.py:393] Compiling a graph for compile range (1, 8192) takes 17.07 s",
            "Compiling a graph for compile range: (1, 8192)",
        ),
        ("INFO 11-30 03:37:16 [backends.py:1] Dynamo bytecode transform time: 3.05 s", "Dynamo bytecode transform"),
        (
            "V1130 03:41:03.12 77 torch/_dynamo/guards.py:1] Recompiling function forward in m.py:3",
            "Recompiling function: forward",
        ),
        (
            "W1130 03:41:03.12 77 torch/_dynamo/convert_frame.py:1] torch._dynamo hit config.recompile_limit (8)",
            "torch._dynamo hit config.recompile_limit",
        ),
        ("AUTOTUNE mm(64x128, 128x256)", "AUTOTUNE: mm"),
        ("(EngineCore pid=9) SingleProcess AUTOTUNE benchmarking takes 1.2 seconds", "AUTOTUNE benchmarking"),
        (
            "INFO [jit_monitor.py:54] Kernel JIT monitor activated - Triton JIT compilations during inference will be logged",
            None,
        ),
        (
            "INFO [backends.py:295] Directly load the compiled graph(s) for compile range (1, 8) from the cache",
            None,
        ),
        ("INFO [loggers.py:1] Engine 000: Avg prompt throughput: 10.0 tokens/s", None),
        ("", None),
    ],
)
def test_messages(line: str, words: str | None) -> None:
    assert compile_message(line) == words


def test_stamps_have_no_year_and_may_be_absent() -> None:
    assert stamp_of(stamped("x", NOON), NOON + 5) == NOON
    assert stamp_of("W1130 12:00:00.25 77 torch/_dynamo/x.py:1] hit", NOON + 5) == NOON
    new_year = datetime(2027, 1, 1, 0, 0, 10).timestamp()  # noqa: DTZ001 - as above
    assert stamp_of(stamped("x", new_year - 20), new_year) == new_year - 20
    assert stamp_of("Triton autotuning for function f,", NOON) is None
    assert stamp_of("INFO 02-30 12:00:00 no such day", NOON) is None


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "engine.log"
    path.write_text(stamped(JIT.replace("_zero", "_started_before"), NOON - 30) + "\n")
    return path


def write(log: Path, *lines: str) -> None:
    with log.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def test_only_what_was_compiled_in_the_window_counts(log: Path) -> None:
    clock = Clock()
    watch = LogWatch(log, clock)
    for second in range(1, 31):  # the window is from 10 to 20 s
        clock.now = NOON + second + 0.1  # ticks arrive a little late
        if second == 5:
            write(log, stamped(JIT.replace("_zero", "_warm"), NOON + 5), "Triton autotuning for function warm,")
        if second == 15:
            write(log, stamped(JIT.replace("_zero", "_inside"), NOON + 15), "Triton autotuning for function inside,")
            write(log, stamped(JIT.replace("_zero", "_inside"), NOON + 15))
        if second == 25:
            write(log, stamped(JIT.replace("_zero", "_late"), NOON + 25), "Triton autotuning for function late,")
        watch.tick(tick(second, 10.0 if second >= 10 else None))
    assert watch.within(LoadWindow(10.0, 20.0)) == (
        "Triton kernel JIT compilation: _inside_kv_blocks_kernel",
        "Triton autotuning: inside",
    )
    assert watch.within(None) == ()


def test_a_line_that_was_written_in_pieces_and_a_log_that_was_cut(log: Path) -> None:
    clock = Clock()
    watch = LogWatch(log, clock)
    line = stamped(JIT, NOON + 2)
    with log.open("a") as file:
        file.write(line[:60])
        file.flush()
        clock.now = NOON + 2
        watch.tick(tick(2.0, 1.0))
        file.write(line[60:] + "\n")
    clock.now = NOON + 3
    watch.tick(tick(3.0, 1.0))
    assert len(watch.within(LoadWindow(1.0, 10.0))) == 1
    log.write_text("short\n")
    watch.tick(tick(4.0, 1.0))
    write(log, stamped(JIT.replace("_zero", "_after"), NOON + 5))
    clock.now = NOON + 5
    watch.tick(tick(5.0, 1.0))
    assert len(watch.within(LoadWindow(1.0, 10.0))) == 2


@dataclass
class CompilingSession:
    """An engine whose log gets a compile message in the windows of the loads whose numbers are in ``compiles``."""

    directory: Path
    compiles: frozenset[int] = frozenset()
    status: LoadStatus = LoadStatus.COMPLETE
    sources: list[RequestSource] = field(default_factory=list)
    curves: list[int] = field(default_factory=list)

    def start(self, on_phase: OnPhase) -> Started:
        self.directory.mkdir(parents=True, exist_ok=True)
        write(self.directory / "engine.log", stamped(JIT, time.time() - 60))
        return Started(vllm_version="0", resolved={})

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        number = len(self.sources)
        self.sources.append(source)
        on_tick(tick(0.0))
        on_tick(tick(0.1, 0.05))
        if number in self.compiles:
            write(self.directory / "engine.log", stamped(JIT, time.time()), "Triton autotuning for function f,")
        for second in range(1, 6):
            on_tick(tick(second + 0.05, 0.05))
        tokens = 20 * (number + 1)
        record = RequestRecord(1, 0.06, 0.06, 2.0, 10, tokens, tokens, (0.5, 2.0), (1, tokens - 1), 0.5, "length")
        return LoadResult((record,), LoadWindow(0.05, 6.0), self.status, concurrency=4)

    def close(self) -> tuple[str, ...]:
        return ()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vopt.optimizer.compile_watch.LOG_LAG_S", 0.01)


def evaluated(
    session: CompilingSession, measurement: Measurement | None, said: list[str] | None = None, stage: Stage = Stage.SEARCH
) -> TrialRecord:
    def listener(event: Event) -> None:
        if said is not None and isinstance(event, Note):
            said.append(event.text)

    parts: dict[str, Any] = {
        "spec_for": lambda request: TrialSpec(request.label, "m", request.config, session.directory, "python3"),
        "argv_for": lambda request: (),
        "open_session": lambda spec, served: session,
        "source": SOURCE,
        "soak_source": SOURCE,
        "asked": Asked(Arrivals.CLOSED, concurrency=4, window_s=6.0),
        "slos": {},
        "listener": listener,
        "served_confirmation": False,
        "served_trials": False,
        "soak_s": 600.0,
        "simulated": False,
        "dummy_weights": False,
        "conditions": dict,
    }
    return Evaluator(Bench(**parts), measurement)(TrialRequest("1", EngineConfig(), stage))


@pytest.mark.parametrize("measurement", [None, Measurement(PLAN, {})], ids=["baseline", "later"])
def test_a_trial_is_measured_again_on_the_same_engine(tmp_path: Path, measurement: Measurement | None) -> None:
    session, said = CompilingSession(tmp_path, frozenset({0})), list[str]()
    record = evaluated(session, measurement, said)
    assert [source.first_number for source in session.sources] == [7, 7 + NUMBERS_APART], "no prompt is sent twice"
    assert record.flags == (REMEASURED,)
    assert record.metrics is not None
    assert record.metrics.whole_run["total_output_tokens"] == 40, "the second load is what counts"
    assert len(record.token_curve) <= 7, "of one load, not of both"
    assert any("Triton kernel JIT compilation: _zero_kv_blocks_kernel" in text and "once more" in text for text in said)


def test_a_second_compilation_is_flagged_and_not_chased(tmp_path: Path) -> None:
    session, said = CompilingSession(tmp_path, frozenset({0, 1, 2})), list[str]()
    record = evaluated(session, Measurement(PLAN, {}), said)
    assert len(session.sources) == 2
    assert record.flags == (REMEASURED, COMPILED)
    assert TrialRecord.from_json(record.to_json()).flags == record.flags, "it is stored"
    assert "measured again" in said[-1]


def test_a_quiet_log_changes_nothing(tmp_path: Path) -> None:
    session = CompilingSession(tmp_path)
    record = evaluated(session, Measurement(PLAN, {}))
    assert len(session.sources) == 1
    assert record.flags == ()


def test_a_load_whose_engine_is_gone_is_only_flagged(tmp_path: Path) -> None:
    session = CompilingSession(tmp_path, frozenset({0}), LoadStatus.ENGINE_DIED)
    assert evaluated(session, Measurement(PLAN, {})).flags == (COMPILED,)
    assert len(session.sources) == 1


def test_a_soak_is_not_repeated(tmp_path: Path) -> None:
    session = CompilingSession(tmp_path, frozenset({0}))
    evaluated(session, Measurement(PLAN, {}), stage=Stage.SOAK)
    assert len(session.sources) == 1


def test_a_bench_measures_again_and_its_document_says_so(tmp_path: Path) -> None:
    made: list[CompilingSession] = []

    def open_session(start: int) -> CompilingSession:
        made.append(CompilingSession(tmp_path / str(start), frozenset({0})))
        return made[-1]

    log_of: Callable[[int], Path] = lambda start: tmp_path / str(start) / "engine.log"  # noqa: E731 - one line says it
    result = run_bench(open_session, replace(SOURCE, first_number=0), PLAN, repeat=2, log_of=log_of)
    assert [[load.load.flags for load in loads] for loads in result.starts] == [[(REMEASURED,), ()], [(REMEASURED,)]]
    numbers = [source.first_number for session in made for source in session.sources]
    assert len(set(numbers)) == len(numbers)


def test_an_engine_without_a_log_is_loaded_once(tmp_path: Path) -> None:
    session = CompilingSession(tmp_path, frozenset({0}))
    session.start(lambda phase, words: None)
    for log in (None, tmp_path / "absent.log"):
        assert WatchedLoads(session.load, log, lambda text: None).load(SOURCE, PLAN, lambda tick: True).flags == ()
