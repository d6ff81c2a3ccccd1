"""vLLM's ``/metrics``: Prometheus text to numbers. Pure.

Metric names: ``vllm/v1/metrics/loggers.py`` and ``spec_decode/metrics.py``, unchanged from 0.20 to 0.33. A server with several
engines (data parallel) reports each under its ``engine`` label; counts are added up, and KV usage is the fullest engine's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vopt.objectives.records import CounterSample

_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

_COUNTS: Mapping[str, str] = MappingProxyType(
    {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "preemptions": "vllm:num_preemptions_total",
        "prefix_queries": "vllm:prefix_cache_queries_total",
        "prefix_hits": "vllm:prefix_cache_hits_total",
        "prompt_tokens": "vllm:prompt_tokens_total",
        "generation_tokens": "vllm:generation_tokens_total",
        "drafts": "vllm:spec_decode_num_drafts_total",
        "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
        "engine_steps": "vllm:iteration_tokens_total_count",
    }
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the exposition format."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by upper bound: ``counts[i]`` lie above ``bounds[i - 1]`` and at or below ``bounds[i]``; the last bound is
    infinite. ``total`` is the sum of all observed values."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def n(self) -> float:
        return sum(self.counts)

    def since(self, earlier: Histogram) -> Histogram:
        """What was observed after ``earlier`` was read. ``ValueError`` if the server restarted or the buckets differ."""
        if self.bounds != earlier.bounds:
            raise ValueError("the buckets of the histogram changed between two scrapes")
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        if min(counts, default=0.0) < 0:
            raise ValueError("a counter went backwards: the server restarted between two scrapes")
        return Histogram(self.bounds, counts, self.total - earlier.total)


def parse_metrics(text: str) -> Iterator[Sample]:
    """The samples of a page in Prometheus' text format 0.0.4; lines that are none are skipped."""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        yield Sample(name, _labels(labels) if labels else {}, number)


def _labels(text: str) -> dict[str, str]:
    return {name: re.sub(r'\\[\\"n]', lambda found: _ESCAPES[found[0]], value) for name, value in _LABEL.findall(text)}


def counter_sample(text: str, at_s: float) -> CounterSample:
    """The engine's counters on a metrics page; what the page lacks is ``None``."""
    sums: dict[str, float] = {}
    kv_usage: float | None = None
    for sample in parse_metrics(text):
        if not math.isfinite(sample.value):
            continue
        if sample.name == "vllm:kv_cache_usage_perc":
            kv_usage = sample.value if kv_usage is None else max(kv_usage, sample.value)
        else:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    counts = {field: int(sums[name]) for field, name in _COUNTS.items() if name in sums}
    return CounterSample(at_s=at_s, kv_usage=kv_usage, **counts)


def histogram(text: str, name: str) -> Histogram | None:
    """The histogram called ``name`` (``vllm:request_prompt_tokens``), added up over its other labels; ``None`` if absent."""
    cumulative: dict[float, float] = {}
    total = 0.0
    for sample in parse_metrics(text):
        if sample.name == f"{name}_bucket" and "le" in sample.labels:
            bound = float(sample.labels["le"])
            cumulative[bound] = cumulative.get(bound, 0.0) + sample.value
        elif sample.name == f"{name}_sum":
            total += sample.value
    if not cumulative:
        return None
    bounds = tuple(sorted(cumulative))
    heights = [cumulative[bound] for bound in bounds]
    counts = tuple(now - before for now, before in zip(heights, [0.0, *heights], strict=False))
    return Histogram(bounds, counts, total)


def total_of(text: str, name: str) -> float | None:
    """A counter or gauge added up over its labels; ``None`` if absent."""
    values = [sample.value for sample in parse_metrics(text) if sample.name == name]
    return sum(values) if values else None
