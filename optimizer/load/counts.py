"""What a client over HTTP knows of the tokens in chunks that do not declare any."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from vopt.objectives.bundles import recounted
from vopt.objectives.records import RequestRecord
from vopt.optimizer.load.exchange import Exchange
from vopt.optimizer.load.ledger import Progress

RECENT = 256
"""Requests whose end tells how many tokens a chunk holds at present: about one generation of a usual load."""


class ChunkCounts:
    """Of one engine: which requests' counts are assumed, and what those that finished lately say of the others."""

    def __init__(self) -> None:
        self._assumed: set[int] = set()
        self._recent: deque[tuple[int, int]] = deque()
        self._tokens = self._chunks = 0

    def seen(self, index: int, exchange: Exchange) -> None:
        """A record of this request was asked for, whether or not it is over."""
        if exchange.begun and not exchange.state.declared:
            self._assumed.add(index)

    def ended(self, record: RequestRecord, exchange: Exchange) -> None:
        self.seen(record.index, exchange)
        if not record.succeeded or record.index not in self._assumed:
            return
        self._recent.append((record.output_tokens, len(record.chunk_times_s)))
        if len(self._recent) > RECENT:
            tokens, chunks = self._recent.popleft()
            self._tokens, self._chunks = self._tokens - tokens, self._chunks - chunks
        self._tokens, self._chunks = self._tokens + record.output_tokens, self._chunks + len(record.chunk_times_s)

    def scaled(self, progress: Progress, exchange: Exchange) -> Progress:
        """``progress`` with as many tokens a chunk as requests had that ended lately: what ``recounted`` comes to, roughly and
        at no cost."""
        if exchange.state.declared or not self._chunks:
            return progress
        return progress._replace(tokens=progress.tokens * self._tokens / self._chunks)

    def recounted(self, records: Sequence[RequestRecord]) -> list[RequestRecord]:
        return recounted(records, self._assumed)
