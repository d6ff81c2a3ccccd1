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

    def partial(self, index: int, exchange: Exchange) -> tuple[float, tuple[float, ...], tuple[int, ...]]:
        """``exchange.partial()``, of which a record may be made."""
        if not exchange.state.declared:
            self._assumed.add(index)
        return exchange.partial()

    def ended(self, record: RequestRecord, exchange: Exchange) -> None:
        if not record.succeeded or exchange.state.declared:
            self._assumed.discard(record.index)
            return
        self._assumed.add(record.index)
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
