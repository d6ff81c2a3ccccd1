"""The figures that ``vllm bench serve`` would print for a load, under its names and in its units (milliseconds).

They cover the whole load, warm-up and drain included, are shown beside the window's and decide nothing. Definitions:
``calculate_metrics`` in vLLM 0.32's ``benchmarks/serve.py``, with two differences: what is undefined is absent (there it is 0),
and the times between chunks are called ITL only if every chunk holds one token, else ``icl`` (inter-chunk latency).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from vopt.objectives.intervals import Array
from vopt.objectives.records import LoadResult, RequestFailureKind, RequestRecord


def whole_run_figures(load: LoadResult, good: Callable[[RequestRecord], bool] | None = None) -> dict[str, float]:
    """Figures over all records of ``load``; ``good`` says which succeeded requests count as goodput.

    ``duration`` runs from the first send to the last end. Throughputs count succeeded requests only, as the original does,
    so that requests in flight at the end are lost here (and not in the window's metrics).
    """
    sent = [record for record in load.records if not _never_sent(record)]
    done = [record for record in sent if record.succeeded]
    figures: dict[str, float] = {
        "completed": len(done),
        "failed": sum(1 for record in sent if record.failure is not None),
        "total_input_tokens": sum(record.prompt_tokens for record in done),
        "total_output_tokens": sum(record.output_tokens for record in done),
    }
    duration = max(record.ended_s for record in sent) - min(record.sent_s for record in sent) if sent else 0.0
    if duration > 0 and np.isfinite(duration):
        total = figures["total_input_tokens"] + figures["total_output_tokens"]
        figures["duration"] = duration
        figures["request_throughput"] = len(done) / duration
        figures["output_throughput"] = figures["total_output_tokens"] / duration
        figures["total_token_throughput"] = total / duration
        if good is not None:
            figures["request_goodput"] = sum(map(good, done)) / duration
    single = all(record.chunk_tokens.count(1) == len(record.chunk_times_s) for record in done)
    for name, seconds in (
        ("ttft", _known([record.ttft_s for record in done])),
        ("tpot", _known([record.tpot_s for record in done])),
        ("itl" if single else "icl", _between_chunks(done)),
        ("e2el", _known([record.e2e_s for record in done])),
    ):
        if len(seconds):
            figures[f"mean_{name}_ms"] = float(seconds.mean()) * 1000
            figures[f"median_{name}_ms"] = float(np.median(seconds)) * 1000
            figures[f"std_{name}_ms"] = float(seconds.std()) * 1000
            figures[f"p99_{name}_ms"] = float(np.percentile(seconds, 99)) * 1000
    return figures


def _never_sent(record: RequestRecord) -> bool:
    return record.failure is not None and record.failure.kind is RequestFailureKind.NOT_SENT


def _known(values: Sequence[float | None]) -> Array:
    array = np.array([value for value in values if value is not None], np.float64)
    finite: Array = array[np.isfinite(array)]
    return finite


def _between_chunks(records: Sequence[RequestRecord]) -> Array:
    """Seconds between successive chunks of the same request."""
    lengths = [len(record.chunk_times_s) for record in records]
    at = np.fromiter(chain.from_iterable(record.chunk_times_s for record in records), np.float64, sum(lengths))
    if len(at) < 2:
        return np.empty(0)
    gaps = np.diff(at)
    inside = np.ones(len(gaps), np.bool_)
    ends = np.cumsum(lengths)[:-1]
    ends = ends[(ends > 0) & (ends < len(at))]
    inside[ends - 1] = False  # the step from one request's last chunk to the next one's first
    gaps = gaps[inside]
    finite: Array = gaps[np.isfinite(gaps)]
    return finite
