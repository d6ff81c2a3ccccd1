"""Shared fixtures and the switch for GPU tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vopt.optimizer.interruption import SIGNALS
from vopt.optimizer.one_thread import one_thread

with one_thread():  # as `vopt search` does: else a hundred model fits wait for threads, and a busy machine makes minutes of it
    import numpy  # noqa: F401 - loaded for its one thread
    import scipy.linalg  # noqa: F401 - likewise

sys.path.insert(0, str(Path(__file__).parent))  # tests.support and tests.contracts, as `support` and `contracts`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests that need a CUDA GPU and vLLM")


@pytest.fixture(autouse=True)
def _signals_hit_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 and negative numbers would mean whole groups, this test run's own included."""

    def guarded(call: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def send(pid: int, number: int) -> None:
            assert pid > 1, f"a signal to {pid} would hit processes that the test did not start"
            call(pid, number)

        return send

    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))


@pytest.fixture(autouse=True)
def _fault_row(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """A test marked ``fault`` becomes a row of the fault suite's table."""
    marker = request.node.get_closest_marker("fault")
    if marker is not None:
        case = request.node.name.partition("[")[2].rstrip("]")
        record_property("fault", f"{marker.args[0]}{f' ({case[:60]})' if case else ''}")
        record_property("engine", "vLLM on the CPU" if "vllm" in request.node.keywords else "without vLLM")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The fault suite prints its table."""
    rows = [
        (dict(report.user_properties), outcome, report.duration)
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        if report.when == "call"
    ]
    faults = sorted((facts["engine"], facts["fault"], outcome, took) for facts, outcome, took in rows if "fault" in facts)
    if faults:
        terminalreporter.section(f"fault suite: {len(faults)} faults")
        for engine, fault, outcome, took in faults:
            terminalreporter.write_line(f"{outcome:<7} {took:6.1f} s  {engine:<16} {fault}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gpu"):
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU and vLLM; give --gpu")
    for item in items:
        if item.get_closest_marker("gpu"):  # not item.keywords, which holds the name of every folder above
            item.add_marker(skip)


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """The handlers of the signals that end a search, as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
