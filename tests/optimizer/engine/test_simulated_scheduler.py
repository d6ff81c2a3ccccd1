"""The scheduler's invariants, whatever arrives: everything ends, nothing is lost, limits hold, memory comes back."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import DENSE, HYBRID, model

from vopt.optimizer.engine.hardware import hardware
from vopt.optimizer.engine.roofline import StepTime
from vopt.optimizer.engine.simulated_draws import normals, speculative_steps
from vopt.optimizer.engine.simulated_scheduler import Scheduler
from vopt.optimizer.engine.simulated_state import PrefixCache, Sequence
from vopt.search_spaces.memory import memory_plan

MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


def scheduler(name: str, arguments: dict[str, Any]) -> Scheduler:
    shape, device = model(name), hardware("h200")
    plan = memory_plan(shape, device.gpu, arguments)
    speculation = plan.resolved.speculation
    return Scheduler(
        plan.resolved,
        plan.layout,
        plan.blocks,
        StepTime(shape, device, plan.resolved),
        draw_steps=speculative_steps(speculation, normals("test")) if speculation else None,
    )


def summed_up(times: tuple[float, ...], counts: tuple[int, ...], since_s: float) -> tuple[float | None, int, bool]:
    first = bisect_left(times, since_s)
    return times[-1] if times else None, sum(counts[first:]), bool(times) and first == 0


LENGTHS = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 400)), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(
    LENGTHS, st.sampled_from([1, 7, 64]), st.sampled_from([64, 512, 8192]), st.integers(260, 2000), st.booleans(), st.booleans()
)
def test_everything_ends_and_nothing_is_lost(
    lengths: list[tuple[int, int]], seqs: int, tokens: int, blocks: int, speculating: bool, shares: bool
) -> None:
    arguments = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "num_gpu_blocks_override": blocks}
    one = scheduler(HYBRID if speculating else DENSE, {**arguments, **(MTP if speculating else {})})
    sequences = [
        Sequence(i, i, prompt, output, 0.0, ((0, prompt // 3), (1 + i % 2, prompt // 2)) if shares else ())
        for i, (prompt, output) in enumerate(lengths)
    ]
    for sequence in sequences:
        one.add(sequence)
    now_s, finished, looks = 0.0, [], {}
    while not one.idle:
        run = one.plan(now_s)
        assert run.step_s > 0
        assert len(one.running) <= seqs
        assert sum(count for _, count in run.chunks) <= tokens
        finished += one.settle(run, run.steps)
        now_s = run.end_s
        for sequence in sequences[:3]:
            if not sequence.gone:
                looks[sequence.number] = one.chunks(sequence)
                for since_s in (-1.0, now_s / 3, now_s, now_s + 1, sequence.first_time, math.inf):
                    assert one.progress(sequence, since_s) == summed_up(*one.chunks(sequence), since_s)
    assert sorted(s.number for s in finished) == list(range(len(lengths)))
    for sequence, (_, output) in zip(sequences, lengths, strict=True):
        times, counts = sequence.chunk_times, sequence.chunk_tokens
        assert sum(counts) == output
        assert min(counts) >= 1
        assert list(times) == sorted(times)
        assert len(times) == len(counts)
    if one.counters.preemptions == 0:
        for number, (times, counts) in looks.items():  # what was shown in flight is how the stream begins
            assert sequences[number].chunk_times[: len(times)] == times
            assert sequences[number].chunk_tokens[: len(counts)] == counts
    assert one.used == 0
    assert one.decoding == 0
    assert one.counters.generated_tokens == pytest.approx(sum(output for _, output in lengths), abs=2)


def test_a_run_settled_in_parts_is_the_run() -> None:
    whole, parts = scheduler(DENSE, {}), scheduler(DENSE, {})
    for one in (whole, parts):
        one.add(Sequence(0, 0, 100, 50, 0.0))
    first = whole.plan(0.0)
    whole.settle(first, 1)
    parts.settle(parts.plan(0.0), 1)
    run = whole.plan(first.end_s)
    assert run.steps == 49
    other = parts.plan(first.end_s)
    assert whole.settle(run, run.steps)
    assert not parts.settle(other, 10)
    rest = type(other)(other.start_s + 10 * other.step_s, other.step_s, other.steps - 10)
    (ended,) = parts.settle(rest, rest.steps)
    assert sum(ended.chunk_tokens) == 50
    assert parts.step_times == pytest.approx(whole.step_times)


def test_the_newest_sequence_is_preempted_and_computed_again() -> None:
    one = scheduler(DENSE, {"num_gpu_blocks_override": 130, "max_model_len": 2048})
    old, new = Sequence(0, 0, 960, 200, 0.0), Sequence(1, 1, 960, 200, 0.0)
    one.add(old)
    one.add(new)
    now_s, ended = 0.0, []
    while not one.idle:
        run = one.plan(now_s)
        ended += one.settle(run, run.steps)
        now_s = run.end_s
    assert one.counters.preemptions >= 1
    assert ended == [old, new]
    assert sum(new.chunk_tokens) == 200


def test_prompts_are_cut_at_the_threshold_and_whole_without_chunking() -> None:
    one = scheduler(DENSE, {"long_prefill_token_threshold": 256})
    one.add(Sequence(0, 0, 1000, 1, 0.0))
    assert [count for _, count in one.plan(0.0).chunks] == [256]
    whole = scheduler(DENSE, {"enable_chunked_prefill": False, "max_num_batched_tokens": 1500, "max_model_len": 1024})
    for number in range(2):
        whole.add(Sequence(number, number, 1000, 1, 0.0))
    assert [count for _, count in whole.plan(0.0).chunks] == [1000]


def cached(cache: PrefixCache, number: int, prompt: int, *parts: tuple[int, int]) -> Sequence:
    """A sequence that was computed whole and runs no more."""
    sequence = Sequence(number, number, prompt, 1, 0.0, parts)
    cache.use(sequence, cache.look_up(sequence))
    sequence.computed = prompt
    cache.remember(sequence)
    cache.give_back(sequence)
    return sequence


def look(cache: PrefixCache, prompt: int, *parts: tuple[int, int]) -> tuple[int, int]:
    hit = cache.look_up(Sequence(9, 9, prompt, 1, 0.0, parts))
    return hit.tokens, hit.blocks


def test_prefixes_are_evicted_oldest_first_and_from_their_end() -> None:
    cache = PrefixCache(block_size=16, full_groups=1)
    for key in range(3):
        cached(cache, key, 170, (key, 160))
    assert cache.idle == 30
    cache.evict(25)
    assert cache.idle == 25
    assert look(cache, 170, (0, 160)) == (80, 5)
    assert look(cache, 170, (2, 160)) == (160, 10)
    assert look(cache, 160, (2, 160)) == (144, 9), "the last token is always computed"
    cache.evict(18)
    assert look(cache, 170, (0, 160)) == (0, 0)
    assert look(cache, 170, (1, 160)) == (128, 8)


def test_the_parts_of_a_beginning_are_hit_one_behind_the_other() -> None:
    cache = PrefixCache(block_size=16, full_groups=1)
    cached(cache, 0, 400, (0, 100), (1, 200), (2, 390))
    assert cache.idle == 24
    assert look(cache, 1000, (0, 100), (1, 200), (3, 900)) == (192, 12)
    assert look(cache, 1000, (4, 100), (1, 200)) == (0, 0), "another beginning before it"
    cached(cache, 1, 600, (0, 100), (1, 200), (2, 590))  # the next turn of the same session
    assert look(cache, 900, (0, 100), (1, 200), (2, 890)) == (576, 36)


def test_what_running_sequences_share_is_counted_once_and_not_evicted() -> None:
    arguments = {"num_gpu_blocks_override": 1000, "enable_prefix_caching": True}
    one = scheduler(DENSE, arguments)
    for number in range(4):
        one.add(Sequence(number, number, 1616, 100, 0.0, ((0, 1600),)))
        run = one.plan(one.step_times[-1])
        one.settle(run, 1)
    assert len(one.running) == 4
    assert one.used == pytest.approx(100 + 4 + one.growth * 0, abs=4)
    assert [sequence.hit for sequence in one.running.values()] == [0, 1600, 1600, 1600]
    assert one.counters.prefix_hits == 4800
    while not one.idle:
        run = one.plan(one.step_times[-1])
        one.settle(run, run.steps)
    assert one.used == 0
    one.add(Sequence(9, 9, 1616, 2, 0.0, ((0, 1600),)))
    one.settle(one.plan(one.step_times[-1]), 1)
    assert one.counters.prefix_hits == 6400, "kept while there is room"


def test_speculative_steps_have_the_stated_mean() -> None:
    one = scheduler(HYBRID, MTP)
    assert one.draw_steps is not None
    steps = [one.draw_steps(Sequence(i, i, 1, 1000, 0.0), 1000) for i in range(500)]
    assert 1000 * len(steps) / sum(steps) == pytest.approx(1 + 0.75 + 0.75**2, rel=0.01)
    assert min(steps) >= 1000 // 3
