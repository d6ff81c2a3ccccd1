"""The smallest change that brings up a configuration which failed for its own fault. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vopt.optimizer.judge import Judged
from vopt.optimizer.setup import SearchSetup
from vopt.optimizer.trial import EngineConfig, FailureKind
from vopt.search_spaces.parse import base_declarations
from vopt.search_spaces.relief import SHARE, TENSOR, Fit, more_gpus, more_memory, service_arguments


def repair(setup: SearchSetup, config: EngineConfig, failed: Judged, fit: Fit | None = None) -> EngineConfig | None:
    """The smallest change of a configuration that its failure names: what takes nothing from clients, then the engine's own
    hint, then the rules of the space, then the step that a kind of failure asks for. What the user set or keeps is not
    touched. ``None`` when nothing is known to help."""
    failure = failed.record.failure
    if failure is None:
        return None
    theirs = fixed_by_user(setup)
    changes = {
        name: value for name, bound in failure.hint.items() if name not in theirs and (value := _within(bound)) is not None
    }
    if changes.keys() <= service_arguments(base_declarations()) and (room := _room(setup, config, failure.kind, fit)):
        return config | room
    if changes:
        return config | {name: _on_grid(setup, name, value, failure.hint[name]) for name, value in changes.items()}
    point = setup.point(config)
    if point is not None and setup.space.violations(point):
        mended, _ = setup.space.repair(point)
        return setup.config(mended) if not setup.space.violations(mended) else None
    return _one_step(setup, config, failure.kind, failed.record.resolved)


def fixed_by_user(setup: SearchSetup) -> frozenset[str]:
    """Arguments that the user set, or keeps as they are."""
    facts = setup.space.facts
    return frozenset({*facts.get("set", {}), *facts.get("keep", ())})


def _room(setup: SearchSetup, config: EngineConfig, kind: FailureKind, fit: Fit | None) -> dict[str, Any] | None:
    """More memory for an engine that lacks it, at nobody's cost; each way once, since the arithmetic may be wrong."""
    space = setup.space.whole
    complete = {**space.facts.get("set", {}), **config}

    def open_to(name: str) -> bool:
        return name in space and config.get(name) == setup.baseline.get(name) and name not in fixed_by_user(setup)

    if kind in (FailureKind.KV_TOO_SMALL, FailureKind.OOM_START) and open_to(TENSOR):
        found = more_gpus(complete, int(space.facts.get("gpus") or 1), space[TENSOR].values, fit)
        if found is not None:
            return found
    if kind is FailureKind.KV_TOO_SMALL and open_to(SHARE):
        return more_memory(complete, space[SHARE].default, space[SHARE].values, fit)
    return None


def _within(bound: Mapping[str, Any]) -> Any:
    for key in ("equals", "at_most", "at_least"):
        if key in bound:
            return bound[key]
    return None


def _on_grid(setup: SearchSetup, name: str, value: Any, bound: Mapping[str, Any]) -> Any:
    """The value of the domain nearest to the bound from the allowed side; the bound itself outside the space."""
    space = setup.space.whole
    if name not in space:
        return value
    domain = space[name].values
    if "at_most" in bound:
        return max((member for member in domain if isinstance(member, int | float) and member <= value), default=value)
    if "at_least" in bound:
        return min((member for member in domain if isinstance(member, int | float) and member >= value), default=value)
    return value


# Which argument a failure is mended by when the engine gives no figure, and in which direction its value moves.
_STEPS: Mapping[FailureKind, tuple[tuple[str, int], ...]] = {
    FailureKind.OOM_START: (("gpu_memory_utilization", -1), ("max_num_batched_tokens", -1), ("max_num_seqs", -1)),
    FailureKind.OOM_LOAD: (("gpu_memory_utilization", -1), ("max_num_seqs", -1), ("max_num_batched_tokens", -1)),
    FailureKind.GRAPH_CAPTURE: (("max_num_seqs", -1), ("gpu_memory_utilization", -1)),
    FailureKind.MAMBA_BLOCKS: (("max_num_seqs", -1),),
    FailureKind.KV_TOO_SMALL: (("gpu_memory_utilization", 1), ("max_num_seqs", -1)),
}


def _one_step(setup: SearchSetup, config: EngineConfig, kind: FailureKind, resolved: Mapping[str, Any]) -> EngineConfig | None:
    space, theirs = setup.space.whole, fixed_by_user(setup)
    for name, direction in _STEPS.get(kind, ()):
        if name in theirs:
            continue
        current = config.get(name, resolved.get(name))
        if name in space:
            parameter = space[name]
            current = parameter.default if current is None else current
            numbers = [member for member in parameter.values if isinstance(member, int | float)]
            beyond = [member for member in numbers if isinstance(current, int | float) and (member - current) * direction > 0]
            if beyond:
                return config | {name: max(beyond) if direction < 0 else min(beyond)}
        elif isinstance(current, int) and current > 1 and direction < 0:
            return config | {name: current // 2}
        elif isinstance(current, float) and 0 < current <= 1:
            return config | {name: round(min(0.97, current + 0.03 * direction), 2)}
    return None
