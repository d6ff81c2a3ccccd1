"""What is kept of engine starts for later studies, and vLLM's own word before one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from landscapes import THROUGHPUT, Landscape, Truth, parameter, space

from vopt.optimizer.engine.arguments import EngineVerdict, VllmProbe
from vopt.optimizer.environment import ModelFiles
from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.history import Stage, TrialRecord, TrialRequest
from vopt.optimizer.lessons import LessonBook, lessons_file, read_lessons, section_of
from vopt.optimizer.memory_of import memory_checks, space_subject
from vopt.optimizer.options import CheckedSpaceOptions, SearchOptions
from vopt.optimizer.preflight import Preflight, speaks_for
from vopt.optimizer.space_of import find_space
from vopt.optimizer.subject import Machine, Subject, find_machine, find_subject
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase
from vopt.search_spaces.arguments import stored_arguments
from vopt.search_spaces.defaults import Gpu
from vopt.search_spaces.memory import can_start, memory_plan
from vopt.search_spaces.model import known_model

H200 = Gpu("NVIDIA H200", 150754820096)
SPACE = space(
    parameter("max_num_seqs", (256, 512, 1024), 256), parameter("moe_backend", ("auto", "triton"), "auto", ordered=False)
)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def subject(fixed: dict[str, Any] | None = None, gpu: Gpu | None = H200) -> Subject:
    model = ModelFiles("Qwen/Qwen3-8B", {}, None, "abc")
    schema, shape = stored_arguments("0.32.0"), known_model("Qwen/Qwen3-8B")
    return Subject(model, shape, schema, Machine(gpu), "python", EngineConfig(fixed or {}), EngineConfig())


def start(config: dict[str, Any], crash: FailureKind | None = None, kv_bytes: int | None = None) -> TrialRecord:
    landscape = Landscape("one", SPACE, lambda point: Truth(1.0, crash=crash), THROUGHPUT)
    record = landscape.evaluator(0)(TrialRequest("1", EngineConfig(config), Stage.SEARCH))
    return replace(record, kv_cache_bytes=kv_bytes)


def book(of: Subject) -> LessonBook:
    return LessonBook(of, space_subject(of), SPACE, EngineConfig())


def test_a_later_study_of_the_same_model_gpu_and_vllm_knows_the_failures() -> None:
    of = subject()
    book(of).add(start({"max_num_seqs": 512}, FailureKind.OOM_START))
    learned = read_lessons(lessons_file(of), section_of(of)).learned
    home = SPACE.default_point()
    assert learned.violations({**home, "max_num_seqs": 1024}, home)
    assert not learned.violations(home, home)
    assert read_lessons(lessons_file(of), section_of(subject({"max_model_len": 4096}))).learned.lessons == ()
    other = replace(of, schema=stored_arguments("0.30.0"))
    assert lessons_file(other) != lessons_file(of)


def test_what_a_load_or_the_machine_broke_is_not_kept() -> None:
    of = subject()
    book(of).add(start({"max_num_seqs": 512}, FailureKind.GPU_LOST))
    died = start({"max_num_seqs": 512}, FailureKind.OOM_LOAD)
    assert died.failure is not None
    book(of).add(replace(died, failure=replace(died.failure, phase=Phase.LOAD)))
    assert read_lessons(lessons_file(of), section_of(of)).learned.lessons == ()


def test_a_value_that_works_after_all_is_searched_again() -> None:
    of, home = subject(), SPACE.default_point()
    triton = {"moe_backend": "triton"}
    book(of).add(start(triton, FailureKind.UNSUPPORTED))
    assert read_lessons(lessons_file(of), section_of(of)).learned.violations({**home, **triton}, home)
    book(of).add(start(triton))
    assert not read_lessons(lessons_file(of), section_of(of)).learned.culprits


def test_a_damaged_file_is_no_lesson_and_is_replaced() -> None:
    of = subject()
    path = lessons_file(of)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text('{"learned": [')
    assert read_lessons(path, section_of(of)).learned.lessons == ()
    book(of).add(start({"max_num_seqs": 512}, FailureKind.OOM_START))
    assert json.loads(path.read_text())["format_version"] == 2


def test_memory_observations_of_an_older_format_are_not_believed() -> None:
    of = subject()
    book(of).add(start({"max_num_seqs": 512}, FailureKind.OOM_START))
    book(of).add(start({}, kv_bytes=2**36))
    path = lessons_file(of)
    assert path is not None
    assert read_lessons(path, section_of(of)).calibration.observations
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 1}))
    old = read_lessons(path, section_of(of))
    assert not old.calibration.observations
    assert old.learned.lessons, "limits are of the engine and stay true"


def test_a_simulation_keeps_nothing() -> None:
    simulated = find_subject(SearchOptions(model="Qwen/Qwen3-8B", goal=["throughput"], simulate="h200"))
    assert lessons_file(simulated) is None


def test_successful_starts_calibrate_the_memory_checks() -> None:
    """An engine that reports half of the cache that was estimated makes a length impossible that seemed to fit."""
    of = subject()
    shape = of.shape
    assert shape is not None
    tight = {"gpu_memory_utilization": 0.2, "max_model_len": 40960}
    assert can_start(shape, H200, tight, "0.32.0").possible != "cannot"
    before = memory_checks(of, read_lessons(None, "").calibration)
    assert before([])[0](tight) is None
    reported = memory_plan(shape, H200, {}, "0.32.0").kv_bytes - 10 * 2**30
    after = before([start({}, kv_bytes=reported)])
    violation = after[0](tight)
    assert violation is not None
    assert violation.rule == "memory"
    book(of).add(start({}, kv_bytes=reported))
    kept = read_lessons(lessons_file(of), section_of(of)).calibration
    assert memory_checks(of, kept)([])[0](tight) == violation


class Asked(VllmProbe):
    """Counts what it is asked; refuses more sequences than 512."""

    def __init__(self) -> None:
        self.questions: list[Any] = []
        self.closed = False

    def ask(self, model: str, config: Any) -> EngineVerdict:
        self.questions.append(dict(config))
        if config.get("max_num_seqs") == 77:
            raise EnvironmentLacks("no answer")
        refused = config.get("max_num_seqs", 0) > 512
        return EngineVerdict(not refused, "ValueError", "too many sequences" if refused else "")

    def close(self) -> None:
        self.closed = True


def test_each_configuration_is_asked_once_and_set_arguments_are_in_it() -> None:
    asked, said = Asked(), list[str]()
    preflight = Preflight(subject({"seed": 3}), said.append, asked)
    config = EngineConfig({"max_num_seqs": 1024, "env:VLLM_X": 1})
    assert preflight.refusal(config) == preflight.refusal(config) == "too many sequences"
    assert preflight.refusal(EngineConfig({"max_num_seqs": 256})) is None
    assert asked.questions == [{"max_num_seqs": 1024, "seed": 3}, {"max_num_seqs": 256, "seed": 3}]
    assert preflight.refusal(EngineConfig({"max_num_seqs": 77})) is None
    assert asked.closed
    assert preflight.refusal(config) is None
    assert len(said) == 1


def test_a_cpu_builds_verdict_counts_on_a_cpu_only() -> None:
    cpu = replace(subject(), schema=replace(stored_arguments("0.32.0"), device="cpu"))
    assert not speaks_for(cpu)
    assert speaks_for(replace(cpu, machine=Machine(None)))
    assert not speaks_for(find_subject(SearchOptions(model="Qwen/Qwen3-8B", goal=["throughput"], simulate="h200")))


@pytest.mark.parametrize(("typed", "count"), [(None, 1), ("1", 1), ("4", 4), ("0,1", 2)])
def test_a_simulation_has_as_many_gpus_as_are_said(typed: str | None, count: int) -> None:
    machine = find_machine("h200", typed, "python")
    assert machine.count == len(machine.names) == count


@pytest.mark.parametrize("typed", ["0", "all", "1,1", "-2"])
def test_another_number_of_simulated_gpus_is_refused(typed: str) -> None:
    with pytest.raises(UsageError, match="number of GPUs"):
        find_machine("h200", typed, "python")


def test_an_unknown_shape_goes_on_only_when_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NewForCausalLM"], "model_type": "new", "text": {}}))
    monkeypatch.setattr("vopt.optimizer.subject.find_machine", lambda *_: Machine(H200))
    monkeypatch.setattr("vopt.optimizer.subject.find_arguments", lambda *_, **__: stored_arguments("0.32.0"))
    monkeypatch.setattr("vopt.optimizer.subject.ask_engine", lambda *_: {})
    with pytest.raises(UsageError, match="cannot derive") as refused:
        find_subject(CheckedSpaceOptions(model=str(tmp_path)))
    assert "--no-memory-check" in refused.value.hint
    options = CheckedSpaceOptions(model=str(tmp_path), no_memory_check=True)
    found = find_subject(options)
    assert found.shape is None
    from vopt.optimizer.load.workload import CHAT

    made = find_space(options, found, CHAT, "throughput", None)
    assert made.checks == ()
    assert "max_num_seqs" in made
