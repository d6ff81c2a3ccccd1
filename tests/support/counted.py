"""The tokens of a window, by the product's own rule, for what a load said of itself."""

from __future__ import annotations

from collections.abc import Iterable

from vopt.objectives.records import LoadWindow, RequestRecord
from vopt.objectives.steadiness import rates_agree, sub_window_edges, tokens_between


def tokens_in(records: Iterable[RequestRecord], start_s: float, end_s: float) -> float:
    """Output tokens produced in ``[start_s, end_s)`` plus the prompt tokens whose prefill ended in it."""
    return tokens_between(records, (start_s, end_s))[0]


def halves_agree(records: Iterable[RequestRecord], window: LoadWindow) -> tuple[bool, str]:
    """Whether both halves of a window have the same rate, and the figures."""
    return rates_agree(tokens_between(records, sub_window_edges(window.opened_s, window.closed_s)))
