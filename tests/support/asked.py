"""One question to the vLLM of an interpreter, by a child that answers nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vopt.optimizer.engine.arguments import VllmProbe
from vopt.search_spaces.arguments import Arguments


def read_arguments(python: str, *, cache: Path | None = None, environment: Mapping[str, str] | None = None) -> Arguments:
    """The arguments that this vLLM takes."""
    with VllmProbe(python, environment=environment) as probe:
        return probe.arguments(cache)
