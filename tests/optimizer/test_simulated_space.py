"""A simulated search varies what the simulation models, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vopt.optimizer.engine.hardware import hardware
from vopt.optimizer.engine.simulated import MODELLED
from vopt.optimizer.errors import UsageError
from vopt.optimizer.history import Stage, TrialRequest
from vopt.optimizer.launch import prepare
from vopt.optimizer.load.workload import CHAT
from vopt.optimizer.options import SearchOptions
from vopt.optimizer.space_of import NOT_MODELLED, find_space
from vopt.optimizer.study import Study
from vopt.optimizer.subject import find_subject
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.defaults import LATEST_VERSION
from vopt.search_spaces.memory import memory_plan
from vopt.search_spaces.model import known_model
from vopt.search_spaces.parse import base_declarations
from vopt.search_spaces.space import SearchSpace
from vopt.search_spaces.speculation import expand

MOE = "Qwen/Qwen3.5-35B-A3B-FP8"


def space_of(model: str = MOE, goal: str = "throughput", gpus: int = 1, **typed: Any) -> SearchSpace:
    options = SearchOptions(model=model, goal=(goal,), simulate="H200", gpus=str(gpus), **typed)
    return find_space(options, find_subject(options), CHAT, goal, 256)


@pytest.mark.parametrize("goal", ["throughput", "latency", "goodput"])
@pytest.mark.parametrize("model", [MOE, "Qwen/Qwen3-8B"])
def test_no_knob_that_the_simulation_ignores_is_searched(model: str, goal: str) -> None:
    space = space_of(model, goal)
    searched = {"speculative_config" if name == "speculation" else name for name in space.names}
    assert searched
    assert searched <= MODELLED
    assert not {part.name for part in space.dormant} - MODELLED - {"speculation"}


def test_what_is_left_out_is_named_with_its_reason() -> None:
    reasons = {part.name: part.reason for part in space_of().inactive}
    assert reasons["attention_backend"] == reasons["moe_backend"] == NOT_MODELLED
    assert reasons["prefill_schedule_interval"] == NOT_MODELLED
    dense = {part.name: part.reason for part in space_of("Qwen/Qwen3-8B").inactive}
    assert dense["moe_backend"] != NOT_MODELLED  # no mixture of experts is the better reason


def test_seeds_hold_parameters_of_the_space_only() -> None:
    space = space_of()
    assert space.seeds
    for seed in space.seeds:
        assert set(seed.point) == set(space.names)


@pytest.mark.parametrize("vary", ["attention_backend", "optimization_level", "prefill_schedule_interval=1,2", "env:A=1,2"])
def test_asking_for_one_is_refused_with_what_to_type(vary: str) -> None:
    with pytest.raises(UsageError, match=NOT_MODELLED) as refused:
        space_of(vary=(vary,))
    assert "--simulate" in refused.value.hint


def test_asking_for_a_modelled_one_is_not() -> None:
    assert "async_scheduling" in space_of(vary=("async_scheduling",)).names


def test_trials_await_the_name_that_their_command_serves() -> None:
    """``vllm serve --served-model-name x`` lists x and not the model; a start that waits for the model would never end."""
    named = SearchOptions(
        model="Qwen/Qwen3-8B", goal=("throughput",), simulate="H200", set=['served_model_name=["house-model"]']
    )
    study = cast("Study", SimpleNamespace(directory=Path("studies/s"), records=tuple))
    bench = prepare(named, lambda event: None).bench(study, lambda event: None, lambda config: None)
    assert bench.spec_for(TrialRequest("0", EngineConfig(), Stage.SEARCH)).served_model_name == "house-model"


def plans(name: str, values: tuple[Any, ...], model: str) -> list[object]:
    """Everything that a simulated engine is made from, for each value of one parameter."""
    shape, device = known_model(model), hardware("H200")
    assert shape is not None
    made = []
    for value in values:
        arguments = {"speculative_config": expand(str(value))} if name == "speculation" else {name: value}
        plan = memory_plan(shape, device.gpu, arguments, LATEST_VERSION)
        made.append((plan.resolved, plan.blocks, plan.kv_bytes, arguments.get("enforce_eager")))
    return made


@pytest.mark.parametrize("declaration", base_declarations(), ids=lambda declaration: declaration.name)
def test_the_declaration_is_what_the_simulation_does(declaration: Any) -> None:
    """A modelled parameter moves what an engine is made from, on some model; the others move nothing, or too little."""
    name = declaration.name
    partly = {"optimization_level", "compilation_config.cudagraph_mode", "cudagraph_capture_sizes"}
    moves = any(
        any(plan != found[0] for plan in found)
        for found in (plans(name, declaration.values, model) for model in (MOE, "Qwen/Qwen3-8B"))
    )
    if name not in partly:
        assert moves == (("speculative_config" if name == "speculation" else name) in MODELLED)
