"""Tokens of chunks that do not say how many they hold: loads whose truth is known, bundled as servers bundle."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from counted import halves_agree
from hypothesis import given, settings
from hypothesis import strategies as st

from vopt.objectives.bundles import recounted
from vopt.objectives.consistency import contradictions
from vopt.objectives.metrics import compute_metrics, token_curve
from vopt.objectives.records import LoadResult, LoadStatus, LoadWindow, RequestFailure, RequestFailureKind, RequestRecord
from vopt.objectives.steadiness import SUB_WINDOWS, rates_agree, sub_window_edges, tokens_between
from vopt.optimizer.load.chunks import spread_tokens

TPOT_S = 0.02
CLOSED_S = 20.0
WINDOW = LoadWindow(10.0, CLOSED_S)
EVERY = range(10**6)
Bundle = Callable[[random.Random, list[float]], list[tuple[float, int]]]


def one_by_one(rng: random.Random, tokens: list[float]) -> list[tuple[float, int]]:
    return [(at, 1) for at in tokens]


@cache
def interval(width: int) -> Bundle:
    """vLLM's ``stream_interval``: the first token alone, then so many together."""

    def bundle(rng: random.Random, tokens: list[float]) -> list[tuple[float, int]]:
        parts = [tokens[at : at + width] for at in range(1, len(tokens), width)]
        return [(tokens[0], 1), *((part[-1], len(part)) for part in parts)]

    return bundle


@cache
def speculation(most: int) -> Bundle:
    """Between 1 and ``most`` tokens a step, in the mean the same for every request; steps are equally long."""

    def bundle(rng: random.Random, tokens: list[float]) -> list[tuple[float, int]]:
        chunks, at = [(tokens[0], 1)], 1
        while at < len(tokens):
            n = min(len(tokens) - at, rng.randint(1, most))
            at += n
            chunks.append((tokens[at - 1], n))
        return chunks

    return bundle


@cache
def silent(begin_s: float, end_s: float) -> Bundle:
    """An API server that says nothing for a while, and then everything that has come meanwhile."""

    def bundle(rng: random.Random, tokens: list[float]) -> list[tuple[float, int]]:
        late, chunks = end_s + 0.3 * rng.random(), dict[float, int]()
        for at in tokens:
            at = late if begin_s <= at < late else at
            chunks[at] = chunks.get(at, 0) + 1
        return sorted(chunks.items())

    return bundle


@cache
def load(bundle: Bundle, concurrency: int = 96) -> list[RequestRecord]:
    """A closed loop, cut at ``CLOSED_S``, with true counts."""
    rng, records = random.Random(0), list[RequestRecord]()
    for _ in range(concurrency):
        free = rng.uniform(0, 2)
        while free < CLOSED_S:
            tokens = [free + 0.1 + TPOT_S * token for token in range(rng.randint(40, 400))]
            chunks = bundle(rng, tokens)
            ended = chunks[-1][0]
            seen = [(at, n) for at, n in chunks if at < CLOSED_S]
            records.append(
                RequestRecord(
                    index=len(records),
                    scheduled_s=free,
                    sent_s=free,
                    ended_s=min(ended, CLOSED_S),
                    prompt_tokens=50,
                    requested_output_tokens=len(tokens),
                    output_tokens=sum(n for _, n in seen),
                    chunk_times_s=tuple(at for at, _ in seen),
                    chunk_tokens=tuple(n for _, n in seen),
                    finish_reason="length" if ended <= CLOSED_S else None,
                    censored=ended > CLOSED_S,
                )
            )
            free = ended
    return records


def as_seen(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """What a client records that is told no count before the end."""
    seen = []
    for record in records:
        chunks = len(record.chunk_times_s)
        if record.censored:
            seen.append(replace(record, chunk_tokens=(1,) * chunks, output_tokens=chunks))
        else:
            seen.append(replace(record, chunk_tokens=spread_tokens(chunks, {}, record.output_tokens)))
    return seen


def output(records: Sequence[RequestRecord]) -> list[float]:
    edges = sub_window_edges(WINDOW.opened_s, WINDOW.closed_s)
    return tokens_between([replace(record, prompt_tokens=0) for record in records], edges)


BUNDLES = {
    "pairs": (interval(2), 0.005),
    "fours": (interval(4), 0.005),
    "thirty-twos": (interval(32), 0.01),
    "speculation": (speculation(4), 0.015),
    "silence": (silent(13.0, 15.0), 0.02),
    "silence as the window ends": (silent(16.5, 18.5), 0.04),
}


@pytest.mark.parametrize(("bundle", "most"), BUNDLES.values(), ids=list(BUNDLES))
def test_a_window_has_the_tokens_that_came_in_it(bundle: Bundle, most: float) -> None:
    """However they were bundled."""
    true = load(bundle)
    seen = as_seen(true)
    found = recounted(seen, EVERY)
    assert sum(output(found)) == pytest.approx(sum(output(true)), rel=most)
    errors = [[abs(a - b) for a, b in zip(output(records), output(true), strict=True)] for records in (seen, found)]
    assert max(errors[0]) > 5 * max(errors[1])


@pytest.mark.parametrize(("bundle", "_"), BUNDLES.values(), ids=list(BUNDLES))
def test_halves_and_curve_are_those_of_the_true_counts(bundle: Bundle, _: float) -> None:
    true = load(bundle)
    found = recounted(as_seen(true), EVERY)
    assert halves_agree(found, WINDOW)[0] == halves_agree(true, WINDOW)[0]
    curves = [token_curve(LoadResult(tuple(records), WINDOW, LoadStatus.COMPLETE, concurrency=96)) for records in (true, found)]
    assert curves[1] == pytest.approx(curves[0], rel=0.06)


def test_a_window_in_which_nothing_but_the_bundles_changes_is_steady() -> None:
    """Two thirds of the last tenth's tokens are in requests that the window cuts off, and hardly any of the first one's."""
    seen = as_seen(load(interval(4)))
    assert not halves_agree(seen, WINDOW)[0]
    assert halves_agree(recounted(seen, EVERY), WINDOW)[0]


def test_the_same_speed_reads_the_same_at_every_bundle() -> None:
    rates = []
    for bundle in (one_by_one, interval(2), interval(4), interval(8), speculation(3)):
        records = tuple(recounted(as_seen(load(bundle)), EVERY))
        metrics = compute_metrics(LoadResult(records, WINDOW, LoadStatus.COMPLETE, concurrency=96))
        rates.append(metrics.values["output_tokens_per_s"])
    assert rates == pytest.approx([rates[0]] * len(rates), rel=0.02)


@pytest.mark.parametrize("bundle", [interval(4), silent(13.0, 15.0)])
def test_what_is_known_stays(bundle: Bundle) -> None:
    seen = as_seen(load(bundle))
    found = recounted(seen, EVERY)
    for before, after in zip(seen, found, strict=True):
        assert replace(after, chunk_tokens=(), output_tokens=0) == replace(before, chunk_tokens=(), output_tokens=0)
        assert not contradictions(after)
        assert min(after.chunk_tokens, default=1) >= 1
        assert after.censored or after.output_tokens == before.output_tokens
        assert after.output_tokens <= after.requested_output_tokens


def test_a_token_a_chunk_is_left_as_it_is() -> None:
    seen = as_seen(load(one_by_one))
    assert recounted(seen, EVERY) == seen


def test_declared_counts_are_left_as_they_are() -> None:
    true = load(interval(4))
    assert recounted(true, ()) == true
    half = [record.index for record in true if record.index % 2]
    mixed = [seen if seen.index % 2 else record for seen, record in zip(as_seen(true), true, strict=True)]
    found = recounted(mixed, half)
    assert [record for record in found if not record.index % 2] == [record for record in true if not record.index % 2]
    assert sum(output(found)) == pytest.approx(sum(output(true)), rel=0.01)


def test_without_a_finished_request_nothing_is_known() -> None:
    seen = [record for record in as_seen(load(interval(4))) if record.censored]
    assert recounted(seen, EVERY) == seen
    assert recounted([], EVERY) == []


def test_failures_neither_tell_nor_get_anything() -> None:
    failure = RequestFailure(RequestFailureKind.CONNECTION, "lost")
    seen = as_seen(load(interval(4)))
    broken = [
        replace(record, failure=failure, censored=False, output_tokens=0, chunk_tokens=(0,) * len(record.chunk_times_s))
        for record in seen
    ]
    assert recounted(broken, EVERY) == broken
    some = [lost if lost.index % 10 == 0 else record for lost, record in zip(broken, seen, strict=True)]
    assert [record for record in recounted(some, EVERY) if record.failure] == broken[::10]


def test_an_empty_chunk_at_the_end_is_no_sign_of_empty_chunks() -> None:
    """Many servers send the reason to finish by itself."""
    ended = [
        replace(
            record,
            chunk_times_s=(*record.chunk_times_s, record.ended_s),
            chunk_tokens=(*record.chunk_tokens, 0),
        )
        if record.succeeded
        else record
        for record in as_seen(load(one_by_one))
    ]
    assert recounted(ended, EVERY) == ended


def test_empty_chunks_among_the_others_are_not_counted() -> None:
    def every_other_empty(rng: random.Random, tokens: list[float]) -> list[tuple[float, int]]:
        return [chunk for at in tokens for chunk in ((at, 1), (at + TPOT_S / 2, 0))]

    true = load(every_other_empty)
    found = recounted(as_seen(true), EVERY)
    cut = [(a.output_tokens, b.output_tokens) for a, b in zip(true, found, strict=True) if a.censored]
    assert sum(b for _, b in cut) == pytest.approx(sum(a for a, _ in cut), rel=0.01)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 30), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=60)
def test_any_load_keeps_its_sums(streams: list[tuple[list[int], int, bool]]) -> None:
    """Chunks at one and the same moment, one chunk alone, more chunks than tokens."""
    records = []
    for index, (at, more, cut) in enumerate(streams):
        times = tuple(sorted(moment / 4 for moment in at))
        tokens = max(1, len(times) - 2 + more)
        counts = (1,) * len(times) if cut else spread_tokens(len(times), {}, tokens)
        records.append(
            RequestRecord(
                index=index,
                scheduled_s=0.0,
                sent_s=0.0,
                ended_s=11.0,
                prompt_tokens=1,
                requested_output_tokens=max(tokens, len(times)),
                output_tokens=sum(counts),
                chunk_times_s=times,
                chunk_tokens=counts,
                finish_reason=None if cut else "stop",
                censored=cut,
            )
        )
    for before, after in zip(records, recounted(records, EVERY), strict=True):
        assert not contradictions(after)
        assert len(after.chunk_tokens) == len(before.chunk_tokens)
        assert min(after.chunk_tokens) >= 0
        assert before.censored or sum(after.chunk_tokens) == before.output_tokens


def test_the_parts_of_a_window_that_several_clients_saw_add_up() -> None:
    """Each client counts its own requests anew; together they are the load."""
    true = load(interval(4), concurrency=160)
    found = [recounted(as_seen(true[client::2]), EVERY) for client in range(2)]
    together = [sum(parts) for parts in zip(*map(output, found), strict=True)]
    assert len(together) == SUB_WINDOWS
    assert sum(together) == pytest.approx(sum(output(true)), rel=0.01)
    assert rates_agree(together)[0] == rates_agree(output(true))[0]
