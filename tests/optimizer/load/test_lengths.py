from __future__ import annotations

import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vopt.optimizer.load.lengths import BLOCK, Lengths, Marginal, from_histogram, shuffled_blocks, stratified_order
from vopt.optimizer.load.workload import CHAT, NAMED


def test_chat_has_the_published_means_and_a_long_tail() -> None:
    block = CHAT.lengths.block()
    prompts, outputs = [prompt for prompt, _ in block], [output for _, output in block]
    assert statistics.mean(prompts) == pytest.approx(342, abs=0.5)
    assert statistics.mean(outputs) == pytest.approx(281, abs=0.5)
    assert max(prompts) > 5 * statistics.median(prompts)
    assert max(prompts) <= 4000
    assert max(outputs) <= 2000


def test_prompts_and_outputs_are_unrelated_and_each_shows_all_its_quantiles() -> None:
    block = CHAT.lengths.block()
    assert sorted(prompt for prompt, _ in block) == sorted(CHAT.lengths.prompt.block())
    assert sorted(output for _, output in block) == sorted(CHAT.lengths.output.block())
    assert abs(statistics.correlation([p for p, _ in block], [o for _, o in block])) < 0.02


@pytest.mark.parametrize(
    ("name", "pair"), [("throughput", (1024, 128)), ("long-context", (32000, 100)), ("generation", (1000, 2000))]
)
def test_the_fixed_workloads(name: str, pair: tuple[int, int]) -> None:
    assert set(NAMED[name].lengths.block()) == {pair}


@settings(max_examples=40)
@given(mean=st.floats(10, 5000), sigma=st.floats(0.1, 1.5), least=st.integers(1, 8))
def test_a_cut_log_normal_keeps_its_mean(mean: float, sigma: float, least: int) -> None:
    values = Marginal(mean, sigma, least, int(mean * 20)).block()
    assert len(values) == BLOCK
    assert list(values) == sorted(values)
    assert least <= values[0]
    assert values[-1] <= int(mean * 20)
    assert statistics.mean(values) == pytest.approx(mean, abs=0.51)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), blocks=st.integers(1, 5))
def test_every_block_holds_the_same_64_quantiles_in_an_order_of_its_own(seed: int, blocks: int) -> None:
    block = CHAT.lengths.block()
    lengths = shuffled_blocks(block, blocks, seed)
    parts = [lengths[start : start + BLOCK] for start in range(0, len(lengths), BLOCK)]
    assert all(Counter(part) == Counter(block) for part in parts)
    assert len(set(parts)) == len(parts)
    assert lengths == shuffled_blocks(block, blocks, seed)
    assert lengths != shuffled_blocks(block, blocks, seed + 1)


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 10_000), max_size=400), seed=st.integers(0, 9))
def test_recorded_requests_are_spread_and_none_is_lost(sizes: list[int], seed: int) -> None:
    order = stratified_order(sizes, seed)
    assert sorted(order) == list(range(len(sizes)))
    assert order == stratified_order(sizes, seed)


def test_each_64_recorded_requests_span_the_whole_range() -> None:
    sizes = list(range(640))
    order = stratified_order(sizes, seed=3)
    for start in range(0, 640, BLOCK):
        assert sorted(sizes[i] // 10 for i in order[start : start + BLOCK]) == list(range(BLOCK))


def test_lengths_survive_json() -> None:
    for lengths in (CHAT.lengths, Lengths(pairs=((3, 4), (5, 6))), Lengths(Marginal(3, quantiles=(1, 5)), Marginal(2))):
        assert Lengths.from_json(lengths.to_json()) == lengths


@pytest.mark.parametrize(
    ("mean", "sigma", "least", "most"), [(0, 1, 1, 10), (20, 1, 1, 10), (5, -1, 1, 10), (5, 1, 0, 10), (5, 1, 9, 3)]
)
def test_a_marginal_that_cannot_be_meant(mean: float, sigma: float, least: int, most: int) -> None:
    with pytest.raises(ValueError, match="length"):
        Marginal(mean, sigma, least, most)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 20_000), min_size=30, max_size=300))
def test_a_histogram_gives_back_its_mean_and_stays_in_its_buckets(lengths: list[int]) -> None:
    bounds = [base * 10**power for power in range(5) for base in (1, 2, 5)]
    buckets = [(float(bound), float(sum(length <= bound for length in lengths))) for bound in bounds]
    buckets.append((float("inf"), float(len(lengths))))
    found = from_histogram(buckets, sum(lengths))
    assert statistics.mean(found) == pytest.approx(statistics.mean(lengths), rel=0.12)
    assert list(found) == sorted(found)
    for bound, count in buckets[:-1]:
        share = sum(value <= bound for value in found) / len(found)
        assert share == pytest.approx(count / len(lengths), abs=0.02)


def test_an_empty_histogram_is_refused() -> None:
    with pytest.raises(ValueError, match="counted nothing"):
        from_histogram([(1.0, 0.0), (float("inf"), 0.0)], 0)
