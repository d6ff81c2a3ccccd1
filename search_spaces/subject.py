"""What is searched for, and what the rules and the memory arithmetic need to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vopt.search_spaces.arguments import Arguments
from vopt.search_spaces.defaults import Gpu
from vopt.search_spaces.memory import Calibration, Possible, can_start
from vopt.search_spaces.parameter import Violation
from vopt.search_spaces.relief import Fit
from vopt.search_spaces.shape import ModelShape
from vopt.search_spaces.space import Check


@dataclass(frozen=True, slots=True)
class Subject:
    """What is searched for: a model (``None``: its shape could not be read, memory and model rules are off) on some GPUs
    with the arguments of a vLLM. ``resolved`` are vLLM's own values where it was asked; arithmetic fills the rest."""

    arguments: Arguments
    gpu: Gpu
    shape: ModelShape | None = None
    gpus: int = 1
    resolved: Mapping[str, Any] = field(default_factory=dict)


def memory_check(subject: Subject, calibration: Calibration | None = None) -> Check:
    """A check that refuses what exact arithmetic says cannot start."""
    shape, gpu, version = subject.shape, subject.gpu, subject.arguments.version

    def check(config: Mapping[str, Any]) -> Violation | None:
        if shape is None:
            return None
        verdict = can_start(shape, gpu, config, version, calibration)
        if verdict.possible is not Possible.CANNOT:
            return None
        return Violation("memory", verdict.reason, verdict.repair)

    return check


def memory_fit(subject: Subject, calibration: Calibration | None = None) -> Fit | None:
    """Whether memory suffices, by the same arithmetic; ``None`` where the model's shape is not known."""
    shape = subject.shape
    if shape is None:
        return None
    return lambda config: can_start(shape, subject.gpu, config, subject.arguments.version, calibration).possible


def model_facts(shape: ModelShape | None) -> dict[str, Any]:
    """What the rules need to know of a model, as JSON; empty without a shape."""
    if shape is None:
        return {}
    return {
        "name": shape.name,
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "layers": shape.layers,
        "hybrid": shape.hybrid,
        "moe": shape.experts is not None,
        "mla": shape.latent is not None,
        "multimodal": shape.multimodal,
        "mtp_layers": shape.mtp_layers,
        "quantization": shape.quantization.method if shape.quantization else None,
        "dtype": shape.dtype,
        "max_position": shape.max_position,
    }
