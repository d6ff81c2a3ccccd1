"""The smallest change that brings up a configuration which failed for its own fault. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vopt.optimizer.judge import Judged
from vopt.optimizer.setup import SearchSetup
from vopt.optimizer.trial import EngineConfig, FailureKind


def repair(setup: SearchSetup, config: EngineConfig, failed: Judged) -> EngineConfig | None:
    """The smallest change of a configuration that its failure names: the engine's own hint first, then the rules of the
    space, then the step that a kind of failure asks for. ``None`` when nothing is known to help."""
    failure = failed.record.failure
    if failure is None:
        return None
    changes = {name: value for name, bound in failure.hint.items() if (value := _within(bound)) is not None}
    if changes:
        return config | {name: _on_grid(setup, name, value, failure.hint[name]) for name, value in changes.items()}
    point = setup.point(config)
    if point is not None and setup.space.violations(point):
        mended, _ = setup.space.repair(point)
        return setup.config(mended) if not setup.space.violations(mended) else None
    return _one_step(setup, config, failure.kind, failed.record.resolved)


def _within(bound: Mapping[str, Any]) -> Any:
    for key in ("equals", "at_most", "at_least"):
        if key in bound:
            return bound[key]
    return None


def _on_grid(setup: SearchSetup, name: str, value: Any, bound: Mapping[str, Any]) -> Any:
    """The value of the domain nearest to the bound from the allowed side; the bound itself outside the space."""
    if name not in setup.space.names:
        return value
    domain = setup.space[name].values
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
    for name, direction in _STEPS.get(kind, ()):
        current = config.get(name, resolved.get(name))
        if name in setup.space.names:
            parameter = setup.space[name]
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
