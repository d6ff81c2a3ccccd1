"""What an engine's start says of its KV cache, against the arithmetic: before, and after the study learnt from one start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.sessions import SMALL, spec

from vopt.optimizer.engine.process import ProcessSession
from vopt.optimizer.environment import ModelFiles
from vopt.optimizer.history import Stage, TrialRecord
from vopt.optimizer.lessons import calibrated
from vopt.optimizer.memory_of import memory_checks, space_subject
from vopt.optimizer.options import CheckedSpaceOptions
from vopt.optimizer.subject import Machine, Subject, find_subject
from vopt.optimizer.trial import EngineConfig, StartClass, Started
from vopt.search_spaces.memory import Calibration, memory_plan
from vopt.search_spaces.model import shape_from_config

pytestmark = pytest.mark.vllm


def started(directory: Path, model: Path, python: str, cache: Path, **arguments: object) -> Started:
    session = ProcessSession(spec(directory, model, python, cache, **arguments))
    try:
        return session.start(lambda phase, words: None)
    finally:
        session.close()


def record(config: dict[str, object], start: Started) -> TrialRecord:
    """What a search keeps of this start."""
    return TrialRecord(
        label="0",
        config=EngineConfig(config),
        stage=Stage.SEARCH,
        arm=None,
        attempt=1,
        status=None,
        metrics=None,
        failure=None,
        argv=(),
        resolved=dict(start.resolved),
        kv_cache_tokens=start.kv_cache_tokens,
        kv_cache_bytes=start.kv_cache_bytes,
        start_class=StartClass.FIRST,
        phase_s={},
        start_parts_s={},
        began_at="",
        directory="",
    )


@pytest.mark.parametrize("hybrid", [False, True])
def test_one_start_teaches_the_size_of_the_next_ones_cache(
    tmp_path: Path, vllm_python: str, tiny_models: tuple[Path, Path], engine_cache: Path, hybrid: bool
) -> None:
    model = tiny_models[hybrid]
    fixed = EngineConfig({**SMALL, **({"language_model_only": True} if hybrid else {})})
    subject = Subject(
        model=ModelFiles(str(model), {}, model, None),
        shape=shape_from_config(json.loads((model / "config.json").read_text()), model.name),
        schema=find_subject(
            CheckedSpaceOptions(
                model=str(model), python=Path(vllm_python), set=["load_format=dummy", "language_model_only=true"]
            )
        ).schema,
        machine=Machine(None),
        python=vllm_python,
        fixed=fixed,
        baseline=EngineConfig(),
    )
    of = space_subject(subject)
    assert of.shape is not None
    first = started(tmp_path / "first", model, vllm_python, engine_cache, **fixed)
    assert first.kv_cache_bytes, "the start log says how large the cache is"
    version = subject.schema.version

    learnt = calibrated(Calibration(), of, [record({}, first)], fixed)
    assert learnt.known
    same = memory_plan(of.shape, of.gpu, fixed, version, learnt)
    # The arithmetic of blocks is exact: the reported bytes hold the reported tokens.
    assert same.logged_tokens == pytest.approx(first.kv_cache_tokens, rel=0.01)

    larger = {**fixed, "gpu_memory_utilization": 0.1}
    second = started(tmp_path / "second", model, vllm_python, engine_cache, **larger)
    assert second.kv_cache_bytes
    guess = memory_plan(of.shape, of.gpu, larger, version)
    after = memory_plan(of.shape, of.gpu, larger, version, learnt)
    assert abs(after.kv_bytes - second.kv_cache_bytes) < abs(guess.kv_bytes - second.kv_cache_bytes)
    assert after.kv_bytes == pytest.approx(second.kv_cache_bytes, rel=0.15)

    # And the check of the study rests on it: what the first start showed to be too long is refused without an engine.
    (check,) = memory_checks(subject, Calibration())([record({}, first)])
    assert check(dict(fixed)) is None
    assert check({**fixed, "gpu_memory_utilization": 0.02}) is not None, "less than the engine's own process takes"
