from __future__ import annotations

import asyncio
import time

import pytest

from vopt.optimizer.load.virtual_time import NothingLeftToAwait, VirtualTimeLoop, run_virtual


def test_the_clock_jumps_to_the_next_timer() -> None:
    async def sleep_a_day() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtual(sleep_a_day()) == pytest.approx(86_400)
    assert time.monotonic() - began < 60  # a day passed; any real wait would be far longer


def test_timers_fire_in_order_of_their_times_and_then_of_their_making() -> None:
    async def wake() -> list[str]:
        seen: list[str] = []

        async def after(delay_s: float, name: str) -> None:
            await asyncio.sleep(delay_s)
            seen.append(name)

        await asyncio.gather(after(2, "c"), after(1, "a"), after(1, "b"), after(0, "now"))
        return seen

    assert run_virtual(wake()) == ["now", "a", "b", "c"]


def test_timeouts_count_virtual_seconds() -> None:
    async def bounded() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert run_virtual(bounded()) == pytest.approx(30)


def test_waiting_for_what_cannot_come_is_an_error_instead_of_a_hang() -> None:
    async def wait_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingLeftToAwait, match="no timer left"):
        run_virtual(wait_for_ever())


def test_left_over_tasks_are_cancelled_and_the_loop_is_closed() -> None:
    ended: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def linger() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("cancelled")

    async def leave() -> asyncio.Task[None]:
        loops.append(asyncio.get_running_loop())
        task = asyncio.create_task(linger())
        await asyncio.sleep(1)
        return task

    assert run_virtual(leave()).cancelled()
    assert ended == ["cancelled"]
    assert loops[0].is_closed()


def test_an_exception_comes_out() -> None:
    async def fail() -> None:
        await asyncio.sleep(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_virtual(fail())


def test_it_marks_itself_as_virtual() -> None:
    loop = VirtualTimeLoop()
    try:
        assert loop.virtual
        assert loop.time() == 0
    finally:
        loop.close()
