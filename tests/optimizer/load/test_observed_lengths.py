"""Replayed output lengths are distributed alike however far an engine gets."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vopt.objectives.records import RequestFailure, RequestFailureKind, RequestRecord
from vopt.optimizer.load.lengths import BLOCK, shuffled_blocks
from vopt.optimizer.load.sessions import SessionShape, with_history
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.workload import CHAT
from vopt.optimizer.measurement import natural_ends

PAIRS = shuffled_blocks(CHAT.lengths.block(), 16, seed=1)
SOURCE = RequestSource(lengths=PAIRS, ignore_eos=False)


def natural(index: int, sampled: int, seed: int) -> int:
    """Where the model would have ended this request."""
    return max(1, round(sampled * random.Random(f"{seed} {index}").triangular(0, 1, 0.6)))


def baseline(blocks: int, seed: int, source: RequestSource = SOURCE, in_flight: int = 0) -> dict[int, int]:
    """What a baseline saw that sent ``blocks`` blocks: the ``in_flight`` longest of the last two it saw no end of."""
    ends = {i: natural(i, source.request(i).max_tokens, seed) for i in range(blocks * BLOCK)}
    late = sorted(range(max(0, blocks - 2) * BLOCK, blocks * BLOCK), key=lambda i: -ends[i])
    return {i: tokens for i, tokens in ends.items() if i not in set(late[:in_flight])}


def whole_blocks(observed: Mapping[int, int]) -> list[int]:
    blocks = range(max(observed) // BLOCK + 1)
    return [block for block in blocks if all(i in observed for i in range(block * BLOCK, (block + 1) * BLOCK))]


def block_mean(source: RequestSource, block: int) -> float:
    return fmean(source.request(i).max_tokens for i in range(block * BLOCK, (block + 1) * BLOCK))


@settings(max_examples=15, deadline=None)
@given(st.integers(3, 8), st.integers(0, 1000), st.integers(1, 100))
def test_every_later_block_asks_for_as_much_as_the_observed_ones(blocks: int, seed: int, in_flight: int) -> None:
    observed = baseline(blocks, seed, in_flight=in_flight)
    replayed = SOURCE.with_observed(observed)
    whole = whole_blocks(observed)
    means = [fmean(observed[i] for i in range(block * BLOCK, (block + 1) * BLOCK)) for block in whole]
    later = [block_mean(replayed, block) for block in range(blocks, blocks + 2 * len(whole))]
    assert sorted(later) == pytest.approx(sorted(2 * means))
    for block in set(range(blocks)) - set(whole):
        assert any(block_mean(replayed, block) == pytest.approx(mean) for mean in means)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(0, 1000), st.integers(0, 60))
def test_no_request_is_longer_than_it_was_sampled(blocks: int, seed: int, in_flight: int) -> None:
    replayed = SOURCE.with_observed(baseline(blocks, seed, in_flight=in_flight))
    for i in range(12 * BLOCK):
        assert 1 <= replayed.request(i).max_tokens <= SOURCE.request(i).max_tokens
        assert replayed.request(i).ignore_eos


def test_whole_blocks_are_replayed_as_they_were() -> None:
    observed = baseline(4, seed=2)
    replayed = SOURCE.with_observed(observed)
    assert {i: replayed.request(i).max_tokens for i in observed} == observed


def test_without_a_whole_block_all_blocks_are_alike() -> None:
    """A wide load whose longest requests outlast it: some rank is never seen to its end, in no block."""
    longest = max(pair[1] for pair in PAIRS)
    seen = {i: n for i, n in baseline(5, seed=3).items() if SOURCE.request(i).max_tokens < longest}
    assert not whole_blocks(seen)
    replayed = SOURCE.with_observed(seen)
    means = [fmean(block_mean(replayed, block) for block in range(first, first + 5)) for first in (0, 5, 20)]
    assert means == pytest.approx([means[0]] * 3)
    assert means[0] < 0.9 * block_mean(SOURCE, 0)


def test_a_block_with_a_failure_follows_the_whole_ones() -> None:
    observed = baseline(3, seed=4)
    del observed[BLOCK + 5]
    replayed = SOURCE.with_observed(observed)
    means = [block_mean(replayed, block) for block in range(8)]
    assert means[1] in (means[0], means[2])
    assert set(means[3:]) == {means[0], means[2]}


def test_turns_of_sessions_and_recordings_are_bounded_by_what_was_sampled() -> None:
    talk = RequestSource(with_history(PAIRS, SessionShape(turns=4, think_s=0.0, system_tokens=0)), turns=(4,) * 256)
    recorded = RequestSource(tuple((50 + i, 20 + 7 * i) for i in range(100)))  # no multiple of 64
    for source in (talk, recorded):
        replayed = source.with_observed(baseline(3, seed=5, source=source, in_flight=9))
        shorter = fmean(replayed.request(i).max_tokens / source.request(i).max_tokens for i in range(700, 1400))
        assert all(replayed.request(i).max_tokens <= source.request(i).max_tokens for i in range(1400))
        assert shorter < 0.7


def test_the_replayed_lengths_survive_json() -> None:
    replayed = SOURCE.with_observed(baseline(3, seed=6, in_flight=7))
    again = RequestSource.from_json(json.loads(json.dumps(replayed.to_json())))
    assert [again.request(i) for i in range(400)] == [replayed.request(i) for i in range(400)]


def ended(index: int, tokens: int, reason: str | None = "stop", **changes: object) -> RequestRecord:
    made = RequestRecord(index, 0.0, 0.0, 1.0, 10, 100, tokens, (0.5,), (tokens,), finish_reason=reason)
    return replace(made, **changes)  # type: ignore[arg-type]  # a test's free hand


def test_natural_ends_are_of_all_requests_that_ended() -> None:
    broken = RequestFailure(RequestFailureKind.STREAM_ERROR, "boom")
    records = [
        ended(0, 30),
        ended(1, 100, "length"),
        ended(2, 12, None, censored=True),
        ended(3, 5, None, failure=broken),
    ]
    assert natural_ends(records) == {0: 30, 1: 100}


def test_a_load_of_exact_lengths_has_no_natural_ends() -> None:
    assert natural_ends([ended(0, 100, "length"), ended(1, 100, "length")]) == {}
    assert SOURCE.with_observed({}).request(7).max_tokens == SOURCE.request(7).max_tokens
