"""vLLM's own performance mode, measured by itself, within what the user leaves open. Pure.

A mode is one flag for several arguments: ``throughput`` doubles ``max_num_seqs`` and ``max_num_batched_tokens`` where they are
unset (``vllm/engine/arg_utils.py``, 0.17 to 0.33), ``interactivity`` adds CUDA-graph sizes (``vllm/config/vllm.py``). Where
the user keeps one of these, or bounds it, the flag would change it behind their back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vopt.search_spaces.choices import Choices
from vopt.search_spaces.declaration import SpaceFile
from vopt.search_spaces.defaults import Resolved, capture_sizes, resolve
from vopt.search_spaces.parameter import Parameter, same
from vopt.search_spaces.parse import MODES, bare_mode_config
from vopt.search_spaces.rules import forbidden_violations
from vopt.search_spaces.space import SearchSpace
from vopt.search_spaces.subject import Subject


@dataclass(frozen=True, slots=True)
class BareMode:
    """``config`` is what is measured of a mode: its flag, the part of it that the user leaves open written out, or nothing.
    ``resolved`` is what the flag makes of the arguments that it changes; ``reason`` says why the flag itself is left out."""

    mode: str
    config: Mapping[str, Any]
    resolved: Mapping[str, Any]
    reason: str = ""

    @property
    def words(self) -> str:
        """What is measured, for a trial's line."""
        if self.reason:
            return f"what you leave open of vLLM's {self.mode} mode"
        return f"the bare {self.mode} mode of vLLM"


def mode_changes(subject: Subject, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By mode, what its flag makes of the arguments that it changes beside ``given``; empty where the model is not known."""
    if subject.shape is None:
        return {}
    shape, gpu, version = subject.shape, subject.gpu, subject.arguments.version
    found = {}
    for mode in MODES:
        if bare := bare_mode_config(mode):
            before, after = (_decided(resolve(shape, gpu, of, version), mode) for of in (given, {**given, **bare}))
            found[mode] = {name: after[name] for name in after if after[name] != before[name] and name not in given}
    return found


def _decided(resolved: Resolved, mode: str) -> dict[str, Any]:
    if mode == "interactivity":
        return {"cudagraph_capture_sizes": list(capture_sizes(resolved.capture_size, resolved.performance_mode))}
    return {"max_num_seqs": resolved.max_num_seqs, "max_num_batched_tokens": resolved.max_num_batched_tokens}


def limits_of(parameters: Sequence[Parameter], choices: Choices, user: SpaceFile | None) -> dict[str, list[Any] | None]:
    """What the user leaves of arguments by ``--keep``, ``--vary`` or a space file: the values, or ``None`` for vLLM's own
    alone."""
    known = {parameter.name: list(parameter.values) for parameter in parameters}
    bounded = {name for name, values in choices.vary.items() if values is not None}
    if user is not None:
        bounded |= {narrowing.name for narrowing in user.keeps} | {one.name for one in user.declarations}
    found: dict[str, list[Any] | None] = {name: known.get(name) for name in sorted(bounded)}
    return {**found, **dict.fromkeys(sorted(choices.keep), None)}


def bare_mode(space: SearchSpace, mode: str) -> BareMode:
    """What is measured of ``mode`` in this space."""
    bare, facts = bare_mode_config(mode), space.facts
    changes, limits = facts.get("modes", {}).get(mode, {}), facts.get("limits", {})
    if own := [name for name in bare if name in limits or name in facts.get("set", {})]:
        return BareMode(mode, {}, changes, f"{own[0]} is set or kept by you")
    refused = {name: value for name, value in changes.items() if name in limits and not _allows(limits[name], value)}
    if refused:
        words = (f"{n} to {_short(v)}, which you {'keep' if limits[n] is None else 'bound'}" for n, v in refused.items())
        reason = f"the flag would set {', '.join(words)}"
        bare = {name: value for name, value in changes.items() if name not in refused}
    else:
        reason = ""
    made = bare if refused else changes
    broken = forbidden_violations({**space.default_point(), **made}, facts.get("forbidden", ()))
    return BareMode(mode, {} if broken else bare, changes, broken[0].detail if broken else reason)


def within_limits(space: SearchSpace, config: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
    """Whether a configuration of elsewhere keeps what the user keeps and bounds here; ``fixed`` is in every trial anyway."""
    limits = space.facts.get("limits", {})
    own = {name: value for name, value in config.items() if fixed.get(name) != value}
    mode = own.get("performance_mode")
    if mode is not None and bare_mode(space, mode).reason:
        return False
    return all(name not in limits or _allows(limits[name], value) for name, value in own.items())


def _allows(values: Sequence[Any] | None, value: Any) -> bool:
    return values is not None and any(same(member, value) for member in values)


def _short(value: Any) -> str:
    return f"{len(value)} sizes" if isinstance(value, list) else str(value)
