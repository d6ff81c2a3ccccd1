"""Tokens of chunks that do not say how many they hold.

A stream of an OpenAI-compatible server tells its tokens once, in the usage block at its end. In between there are chunks, and
what is in one is not told: one token as a rule, several under speculation or a stream interval, and as many as have come
meanwhile where the server falls behind its engine (vLLM's ``RequestOutputCollector`` merges what nobody has fetched yet). A
request that is in flight when a load ends has no usage block. Counted one token a chunk, 48 streams read for 8 s of requests
that last 4.4 s show 16 % too few tokens at 2 tokens a chunk and 24 % at 4, at one and the same speed.

Asking for counts would change what is measured. Users' clients do not ask; vLLM alone can answer; a running count
(``continuous_usage_stats``) costs its API server 45 % more for writing a chunk (7.8 -> 11.4 us in vLLM 0.32's own classes on
one x86 core; ``return_token_ids`` 4 %), and on an H200 with an 8B model and 256 streams that server is already the limit; and
either makes every chunk another JSON document, which costs this package's client 8 us of parsing instead of 0.5. So the
requests that have finished say what chunks held while the others were read. Tokens beyond one in a chunk are its *excess*, and
what it depends on is taken to be

* whether it is a request's first one (one token under speculation and stream intervals), its last one (what was left over), or
  between them;
* how long the stream was silent before it: a chunk after a gap is a server that fell behind, or an engine that paused, and
  which of them it was is different in each eighth of the load;
* for a first chunk, whether most other streams had been silent too.

The mean excess of each kind comes from the finished requests alone, of each of which the sum is known: Richardson's and Lucy's
iteration (*J. Opt. Soc. Am.* 62, 1972; *Astron. J.* 79, 1974), which keeps what is positive positive. One ratio for all (all
tokens / all chunks) would do for speculation; where the server was silent for 3 s in a window of 10 s it leaves 14 % of the
tokens out, and this 1 %. An H200's in-process loads, whose true counts are known, bundled in eleven ways and cut at windows of
10 and 20 s: it is off by 1.2 % at most, 1.4 % where acceptance differs greatly from request to request, and 2.3 % where the
server falls silent for 3 s as the window ends.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vopt.objectives.records import RequestRecord

BLOCKS = 8
"""Parts of a load that are taken apart for chunks after a long silence."""
LONG = 3.0
"""A silence of more than so many median ones is long; each doubling of it is a kind of its own."""
LONG_KINDS = 12
SHORT_KINDS = 4
MOMENT_S = 0.5
ITERATIONS = 30
MOST_FITTED = 2000
"""Finished requests that are looked at: enough for 1 % of each kind, and a bound on the time that it takes."""

_FIRST = SHORT_KINDS
_FIRST_AFTER_SILENCE = _FIRST + 1
_LONG = _FIRST_AFTER_SILENCE + BLOCKS
_KINDS = _LONG + LONG_KINDS * BLOCKS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def recounted(records: Sequence[RequestRecord], uncounted: Container[int]) -> list[RequestRecord]:
    """``records`` with the tokens of each chunk as the finished requests of the load tell them; in the same order.

    ``uncounted``: indices of the requests whose chunks said nothing, so that their ``chunk_tokens`` are assumed: those that
    succeeded keep their sum, those in flight get one. Nothing is changed where every finished request has as many chunks as
    tokens, or where none has finished.
    """
    places = [
        place
        for place, record in enumerate(records)
        if record.failure is None and record.chunk_times_s and record.index in uncounted
    ]
    finished = [records[place] for place in places if records[place].succeeded]
    excess = sum(record.output_tokens - len(record.chunk_times_s) for record in finished)
    if not finished or -len(finished) <= excess <= 0:
        return list(records)  # at most one empty chunk for each request: servers send those at the end
    streams = _Streams.of([records[place] for place in places])
    if excess > 0:
        counts, changed = streams.with_excess()
    else:
        counts, changed = streams.with_empty_chunks()
    result = list(records)
    flat: list[int] = counts.tolist()
    for stream in np.flatnonzero(changed).tolist():
        begin = int(streams.begins[stream])
        tokens = tuple(flat[begin : begin + int(streams.chunks[stream])])
        place = places[stream]
        result[place] = replace(records[place], chunk_tokens=tokens, output_tokens=sum(tokens))
    return result


@dataclass(frozen=True, slots=True, eq=False)
class _Streams:
    """Requests as arrays: one entry for each, and (``at_s``, ``owner``) one for each of their chunks, request by request.
    ``excess`` is tokens minus chunks of finished ones, and of the others the most that they may have."""

    chunks: Ints
    begins: Ints
    finished: NDArray[np.bool_]
    excess: Ints
    at_s: Floats
    owner: Ints

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> _Streams:
        chunks = np.array([len(record.chunk_times_s) for record in records], np.int64)
        total = int(chunks.sum())
        most = [record.output_tokens if record.succeeded else record.requested_output_tokens for record in records]
        return cls(
            chunks=chunks,
            begins=np.cumsum(chunks) - chunks,
            finished=np.array([record.succeeded for record in records], np.bool_),
            excess=np.array(most, np.int64) - chunks,
            at_s=np.fromiter(chain.from_iterable(record.chunk_times_s for record in records), np.float64, total),
            owner=np.repeat(np.arange(len(records)), chunks),
        )

    def with_excess(self) -> tuple[Ints, NDArray[np.bool_]]:
        """(tokens of each chunk, which requests changed) where chunks hold several tokens."""
        kinds = self._kinds()
        weights = self._mean_excess(kinds)[kinds]
        sums = np.bincount(self.owner, weights, len(self.chunks))
        room = np.maximum(self.excess, 0)
        flat = self.finished & (sums <= 0)  # excess where nothing like it was expected: spread evenly
        weights = np.where(flat[self.owner], 1.0, weights)
        sums = np.where(flat, self.chunks, sums)
        too_much = self.finished | (sums > room)
        weights *= np.divide(room, sums, out=np.ones_like(sums), where=too_much & (sums > 0))[self.owner]
        changed = (self.finished & (self.excess > 0)) | ~self.finished
        return 1 + self._whole(weights), changed

    def with_empty_chunks(self) -> tuple[Ints, NDArray[np.bool_]]:
        """As above where chunks without a token come among the others; the finished ones stay as they are."""
        done = self.finished
        share = (self.chunks[done] + self.excess[done]).sum() / self.chunks[done].sum()
        return self._whole(np.full(len(self.at_s), float(share))), ~done

    def _whole(self, weights: Floats) -> Ints:
        """Whole numbers with the same running sums, to the nearest, within each request."""
        running = np.cumsum(weights)
        before = (running - weights)[self.begins]
        running = np.rint(running - before[self.owner]).astype(np.int64)
        counts = np.diff(running, prepend=0)
        counts[self.begins] = running[self.begins]
        return counts

    def _kinds(self) -> Ints:
        """The kind of each chunk; those of a finished request's last one are ``_KINDS`` higher."""
        silence = np.diff(self.at_s, prepend=0.0)
        silence[self.begins] = 0.0
        known = silence[silence > 0]
        median = float(np.median(known)) if len(known) else 1.0
        edges = median * np.concatenate([2.0 ** np.arange(-1, SHORT_KINDS - 2), LONG * 2.0 ** np.arange(LONG_KINDS)])
        kinds: Ints = np.searchsorted(edges, silence, side="right")
        long = np.flatnonzero(kinds >= SHORT_KINDS)
        begin, span = float(self.at_s.min()), float(np.ptp(self.at_s)) or 1.0

        def part(chunks: Ints, length_s: float) -> Ints:
            return ((self.at_s[chunks] - begin) / length_s).astype(np.int64)

        def block(chunks: Ints) -> Ints:
            return np.minimum(part(chunks, span / BLOCKS), BLOCKS - 1)

        kinds[long] = _LONG + (kinds[long] - SHORT_KINDS) * BLOCKS + block(long)
        first, moments = self.begins, int(span / MOMENT_S) + 1
        every = np.histogram(self.at_s, moments, (begin, begin + moments * MOMENT_S))[0]
        others = every - np.bincount(part(first, MOMENT_S), minlength=moments)
        silent = np.bincount(part(long, MOMENT_S), minlength=moments) > 0.5 * others
        silent &= others > 0
        kinds[first] = np.where(silent[part(first, MOMENT_S)], _FIRST_AFTER_SILENCE + block(first), _FIRST)
        kinds[(self.begins + self.chunks - 1)[self.finished & (self.chunks > 1)]] += _KINDS
        return kinds

    def _mean_excess(self, kinds: Ints) -> Floats:
        """The mean excess of a chunk of each kind, shape (2 * _KINDS,)."""
        fitted = np.flatnonzero(self.finished)
        fitted = fitted[:: -(-len(fitted) // MOST_FITTED)]
        row = np.full(len(self.chunks), -1)
        row[fitted] = np.arange(len(fitted))
        rows = row[self.owner]
        cells = rows[rows >= 0] * (2 * _KINDS) + kinds[rows >= 0]
        counts: Any = np.bincount(cells, minlength=len(fitted) * 2 * _KINDS).reshape(len(fitted), 2 * _KINDS)
        counts = counts.astype(np.float64)
        excess = np.maximum(self.excess[fitted], 0).astype(np.float64)
        seen = counts.sum(axis=0)
        usual = slice(0, SHORT_KINDS)
        mean = np.full(2 * _KINDS, excess.sum() / seen.sum())
        for _ in range(ITERATIONS):
            expected = counts @ mean
            found = mean * (counts.T @ np.divide(excess, expected, out=np.zeros_like(expected), where=expected > 0))
            # A kind of which little was seen leans, by one chunk, on itself with last chunks and others together, and those on
            # the chunks between which nothing happened.
            plain = found[usual].sum() / max(float(seen[usual].sum()), 1.0)
            both = (found[:_KINDS] + found[_KINDS:] + plain) / (seen[:_KINDS] + seen[_KINDS:] + 1)
            mean = (found + np.tile(both, 2)) / (seen + 1)
        return np.asarray(mean, np.float64)
