"""What the tests on the real vLLM for the CPU share: an interpreter that has it, tiny models, one cache for all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.tiny_models import write_tiny_models

from vopt.optimizer.engine.interpreter import probe


@pytest.fixture(scope="session")
def vllm_python() -> str:
    if not probe(sys.executable).cpu_build:
        pytest.skip("this interpreter has no vLLM for the CPU: make test installs it")
    return sys.executable


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(dense, hybrid)."""
    return write_tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def engine_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")
