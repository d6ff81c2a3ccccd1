"""Shared fixtures and the switch for GPU tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests.support and tests.contracts, as `support` and `contracts`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests that need a CUDA GPU and vLLM")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gpu"):
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU and vLLM; give --gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
