from __future__ import annotations

import asyncio

import pytest

from vopt.objectives.records import ClientHealth
from vopt.optimizer.load.health import HealthWatch
from vopt.optimizer.load.virtual_time import run_virtual


def watch(late_every: int | None) -> ClientHealth:
    """100 sends at 10 per second; every ``late_every``-th goes out 0.2 s late."""

    async def run() -> ClientHealth:
        health = HealthWatch(asyncio.get_running_loop())
        health.start()
        for number in range(1, 101):
            late = late_every is not None and number % late_every == 0
            health.sent(number / 10, number / 10 + (0.2 if late else 0.0))
        await asyncio.sleep(10)
        health.stop()
        return health.report()

    return run_virtual(run())


def test_a_punctual_client_is_not_limited_and_virtual_time_has_no_cpu_share() -> None:
    health = watch(None)
    assert not health.limited
    assert health.cpu_share is None
    assert health.requested_rate == pytest.approx(10)
    assert health.achieved_rate == pytest.approx(10)


def test_a_few_late_sends_are_forgiven_and_many_are_not() -> None:
    assert not watch(50).limited
    assert watch(10).limited


def test_a_client_that_falls_behind_achieves_less_than_was_asked() -> None:
    health = watch(100)
    assert health.achieved_rate is not None
    assert health.requested_rate is not None
    assert health.achieved_rate < health.requested_rate
