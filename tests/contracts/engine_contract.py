"""What every engine promises to the load driver (``optimizer/engine/base.py``), as tests that each engine inherits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from statistics import median
from typing import Any, TypeVar

import pytest
from counted import tokens_in

from vopt.objectives.records import RequestFailureKind, RequestRecord
from vopt.optimizer.engine.base import Engine
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Request, Tick
from vopt.optimizer.load.source import RequestSource

T = TypeVar("T")
Execute = Callable[[Callable[[Engine], Awaitable[Any]]], Any]


def request(index: int, prompt: int = 40, output: int = 12, **changes: Any) -> Request:
    return Request(
        index=index,
        prompt_token_ids=tuple(8 + (index + position) % 200 for position in range(prompt)),
        prompt_tokens=prompt,
        max_tokens=output,
        prompt_sha256=f"{index:064x}",
        **changes,
    )


async def send(engine: Engine, wanted: Request, idle_timeout_s: float = 60.0) -> RequestRecord:
    origin_s = engine.now()
    return await engine.run(wanted, origin_s=origin_s, scheduled_s=0.0, idle_timeout_s=idle_timeout_s)


async def first_token(engine: Engine, index: int) -> None:
    while (seen := engine.partial(index)) is None or not seen[1]:  # noqa: ASYNC110 - engines offer no event for it
        await asyncio.sleep(0.01)


def decoding_speed(records: Iterable[RequestRecord]) -> float:
    """Tokens per second between the first and the last chunk, the median of requests with three chunks or more."""
    spans = [(sum(record.chunk_tokens[1:]), record.chunk_times_s) for record in records if len(record.chunk_times_s) >= 3]
    return median(tokens / (times[-1] - times[0]) for tokens, times in spans)


class EngineContract:
    """Inherit, and give ``execute`` (runs a coroutine function with an engine, in the loop that the engine needs) and, where
    the engine can be killed, ``kill``. ``too_long`` is a prompt length beyond the model's; ``None``: it has no limit."""

    too_long: int | None = None

    @pytest.fixture
    def execute(self) -> Execute:
        raise NotImplementedError

    def kill(self, engine: Any) -> None:
        pytest.skip("this engine cannot be killed")

    def test_it_is_an_engine(self, execute: Execute) -> None:
        async def check(engine: Engine) -> None:
            assert isinstance(engine, Engine)
            assert engine.dead is None
            assert engine.now() <= engine.now()

        execute(check)

    def test_all_tokens_come_under_ignore_eos_and_times_add_up(self, execute: Execute) -> None:
        record = execute(lambda engine: send(engine, request(1_000, output=12)))
        assert record.succeeded, record.failure
        assert record.output_tokens == record.requested_output_tokens == 12
        assert sum(record.chunk_tokens) == 12
        assert len(record.chunk_times_s) == len(record.chunk_tokens)
        assert list(record.chunk_times_s) == sorted(record.chunk_times_s)
        assert 0 <= record.sent_s <= record.chunk_times_s[0] <= record.chunk_times_s[-1] <= record.ended_s
        assert record.finish_reason in ("length", "stop")
        assert record.prompt_tokens == 40
        assert record.index == 1_000
        assert record.prompt_sha256 == f"{1_000:064x}"

    def test_one_token_is_a_request_too(self, execute: Execute) -> None:
        record = execute(lambda engine: send(engine, request(1_001, output=1)))
        assert record.succeeded, record.failure
        assert record.output_tokens == 1
        assert record.ttft_s is not None
        assert record.tpot_s is None

    def test_times_count_from_the_origin_of_the_load(self, execute: Execute) -> None:
        async def check(engine: Engine) -> RequestRecord:
            return await engine.run(request(1_002), origin_s=engine.now() - 100.0, scheduled_s=99.5, idle_timeout_s=60.0)

        record = execute(check)
        assert record.scheduled_s == 99.5
        assert 100.0 <= record.sent_s < 110.0
        assert record.e2e_s < 60.0

    def test_partial_times_count_from_the_origin_of_the_load_too(self, execute: Execute) -> None:
        """Else a request in flight as a window closes has none of its tokens in it, and nothing that hangs is seen."""

        async def check(engine: Engine) -> None:
            began_s = engine.now()
            task = asyncio.ensure_future(
                engine.run(request(1_003, output=1_500), origin_s=began_s - 100.0, scheduled_s=100.0, idle_timeout_s=60.0)
            )
            await first_token(engine, 1_003)
            partial = engine.partial(1_003)
            now_s = engine.now() - began_s + 100.0
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert partial is not None
            sent_s, times, _ = partial
            assert 100.0 <= sent_s <= times[0] <= times[-1] <= now_s

        execute(check)

    def test_many_at_once_each_get_their_own_record(self, execute: Execute) -> None:
        async def check(engine: Engine) -> list[RequestRecord]:
            return list(await asyncio.gather(*(send(engine, request(1_100 + n, output=4 + n)) for n in range(8))))

        records = execute(check)
        assert [record.index for record in records] == [1_100 + n for n in range(8)]
        assert [record.output_tokens for record in records] == [4 + n for n in range(8)]
        assert all(record.succeeded for record in records)

    def test_a_cancelled_request_leaves_what_it_had_and_the_engine_goes_on(self, execute: Execute) -> None:
        async def check(engine: Engine) -> None:
            origin_s = engine.now()
            task = asyncio.ensure_future(
                engine.run(request(1_200, output=1_500), origin_s=origin_s, scheduled_s=0.0, idle_timeout_s=60.0)
            )
            await first_token(engine, 1_200)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            partial = engine.partial(1_200)
            if partial is not None:
                sent_s, times, tokens = partial
                assert sent_s >= 0
                assert len(times) == len(tokens) >= 1
                assert sum(tokens) < 1_500
            after = await send(engine, request(1_201))
            assert after.succeeded, after.failure

        execute(check)

    def test_requests_that_a_window_cuts_off_count_as_those_that_end_in_it(self, execute: Execute) -> None:
        """By tokens, whatever number of them comes in a chunk: else an engine that bundles them reads slower than it is."""
        outputs = (97, 61, 133, 79, 115, 151)
        source = RequestSource(
            lengths=tuple((40, output) for output in outputs), bodies=(tuple(range(20, 400)),), digit_ids=tuple(range(8, 18))
        )
        plan = LoadPlan(
            Arrivals.CLOSED, 0.5, concurrency=6, warmup_factor=1.0, min_requests=0, max_doublings=0, tick_s=0.1, deadline_s=60.0
        )
        ticks: list[Tick] = []

        def on_tick(tick: Tick) -> bool:
            ticks.append(tick)
            return True

        async def check(engine: Engine) -> Any:
            return await drive(engine, source, plan, on_tick)

        load = execute(check)
        ended = [record for record in load.records if record.succeeded]
        cut = [record for record in load.records if record.censored]
        assert len(ended) >= 6
        assert len(cut) == 6
        # A host that stalls slows either kind; one token a chunk would be an eighth where eight are bundled.
        assert 0.5 < decoding_speed(cut) / decoding_speed(ended) < 2
        assert all(sum(record.chunk_tokens) == record.output_tokens <= 151 for record in cut)
        seen = [tick for tick in ticks if tick.window_open_s is not None][-1]
        assert seen.window_tokens == pytest.approx(tokens_in(load.records, seen.window_open_s or 0.0, seen.at_s), rel=0.25)

    def test_counters_grow_with_the_work(self, execute: Execute) -> None:
        async def check(engine: Engine) -> None:
            origin_s = engine.now()
            before = await engine.counters(origin_s=origin_s)
            await asyncio.gather(*(send(engine, request(1_300 + n, output=20)) for n in range(4)))
            await asyncio.sleep(1.5)  # an engine may gather its statistics in steps of a second
            after = await engine.counters(origin_s=origin_s)
            assert after.at_s > before.at_s
            if after.generation_tokens is not None:
                assert after.generation_tokens - (before.generation_tokens or 0) >= 80
            if after.kv_usage is not None:
                assert 0 <= after.kv_usage <= 1

        execute(check)

    def test_a_prompt_beyond_the_model_is_a_failure_of_that_request_alone(self, execute: Execute) -> None:
        if self.too_long is None:
            pytest.skip("this engine has no longest prompt")
        length = self.too_long

        async def check(engine: Engine) -> None:
            record = await send(engine, request(1_400, prompt=length))
            assert record.failure is not None
            assert record.failure.kind is not RequestFailureKind.ENGINE_DIED
            assert record.failure.message
            assert engine.dead is None
            assert (await send(engine, request(1_401))).succeeded

        execute(check)

    def test_z_a_dead_engine_says_so_at_once(self, execute: Execute) -> None:
        """Last by its name: an engine that is shared between these tests does not outlive it."""

        async def check(engine: Engine) -> None:
            began_s = engine.now()
            wanted = [request(1_500 + n, output=1_500) for n in range(4)]
            flights = [
                asyncio.ensure_future(engine.run(one, origin_s=began_s, scheduled_s=0.0, idle_timeout_s=60.0)) for one in wanted
            ]
            await first_token(engine, 1_500)
            killed_s = engine.now()
            self.kill(engine)
            records = await asyncio.wait_for(asyncio.gather(*flights), 5.0)
            assert {record.failure.kind for record in records if record.failure} == {RequestFailureKind.ENGINE_DIED}
            assert all(record.ended_s >= killed_s - began_s for record in records), (
                "they failed when it died, not with their last token"
            )
            assert engine.dead
            late = await asyncio.wait_for(send(engine, request(1_600)), 1.0)
            assert late.failure is not None
            assert late.failure.kind is RequestFailureKind.ENGINE_DIED

        execute(check)
