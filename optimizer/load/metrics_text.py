"""A workload from what a running vLLM counted: two scrapes of its ``/metrics``, no prompts needed. Pure.

The text format is Prometheus' exposition format 0.0.4; the names are those of vLLM 0.20 to 0.33
(``vllm/v1/metrics/loggers.py``).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.lengths import Lengths, Marginal, from_histogram
from vopt.optimizer.load.source import HEADER_DIGITS, room_for_prefix
from vopt.optimizer.load.workload import Reuse, Workload

Labels = frozenset[tuple[str, str]]
Scrape = Mapping[str, Mapping[Labels, float]]

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\.")
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}

PROMPT = "vllm:request_prompt_tokens"
OUTPUT = "vllm:request_generation_tokens"
LIMIT = "vllm:request_params_max_tokens"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a server did between two scrapes ``seconds`` apart. Shares are 0-1; ``None``: not offered."""

    workload: Workload
    seconds: float
    requests: int
    requests_per_s: float
    running: float | None = None
    waiting: float | None = None
    notes: tuple[str, ...] = ()


def parse(text: str) -> dict[str, dict[Labels, float]]:
    """Samples by name and labels. Comments and lines of another shape are passed over, as scrapers do."""
    found: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line.strip())
        if sample is None:
            continue
        name, labels, value = sample.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        pairs = _LABEL.findall(labels or "")
        key = frozenset((label, _ESCAPE.sub(lambda found: _ESCAPES.get(found[0], found[0]), word)) for label, word in pairs)
        found.setdefault(name, {})[key] = number
    return found


def from_histograms(before: Scrape, after: Scrape, *, seconds: float, name: str = "measured") -> Traffic:
    """The workload that a server had between ``before`` and ``after``.

    Prompt and output lengths follow their histograms (quantiles within a bucket are spread evenly on a log scale and moved
    so that the sums agree); their joint distribution is not recorded, so they are taken as independent. Engines and models
    of one server are added up. ``UsageError`` when nothing finished in between or a counter was reset.
    """
    if not seconds > 0:
        raise UsageError(f"the scrapes must be some time apart, got {seconds} seconds", hint="--for 10m")
    prompts, outputs = _histogram(before, after, PROMPT), _histogram(before, after, OUTPUT)
    requests = round(_change(before, after, PROMPT + "_count") or 0)
    if requests < 1 or not prompts or not outputs:
        raise UsageError(
            f"no request finished within {seconds:g} s, so there is nothing to learn from",
            hint="give it a longer time, or scrape while there is traffic",
        )
    notes = [f"{requests} requests in {seconds:g} s; prompts and outputs are taken as independent of each other"]
    hits = _change(before, after, "vllm:prefix_cache_hits_total")
    queries = _change(before, after, "vllm:prefix_cache_queries_total")
    share = hits / queries if hits is not None and queries else None
    prompt = _marginal(from_histogram(prompts, _change(before, after, PROMPT + "_sum") or 0.0), HEADER_DIGITS)
    output = _marginal(from_histogram(outputs, _change(before, after, OUTPUT + "_sum") or 0.0), 1)
    reuse = Reuse()
    if share is not None and share >= 0.01:
        tokens = _prefix_tokens(prompt.block(), share)
        reuse = Reuse(prefixes=1, prefix_tokens=tokens, share=_shared(prompt.block(), tokens))
        notes.append(
            f"the prefix cache served {share:.0%} of the prompt tokens; one shared beginning of {tokens} tokens "
            f"({reuse.share:.0%}) stands in for it"
        )
    limits = _change(before, after, LIMIT + "_sum"), _change(before, after, LIMIT + "_count")
    if limits[0] and limits[1]:
        notes.append(f"clients allowed {limits[0] / limits[1]:.0f} output tokens on average and got {output.mean:.0f}")
    if requests < 100:
        notes.append(f"{requests} requests are few: the tails of the length distribution are guesses")
    return Traffic(
        workload=Workload(name, Lengths(prompt, output), reuse),
        seconds=seconds,
        requests=requests,
        requests_per_s=requests / seconds,
        running=_gauge(before, after, "vllm:num_requests_running"),
        waiting=_gauge(before, after, "vllm:num_requests_waiting"),
        notes=tuple(notes),
    )


def _marginal(quantiles: tuple[int, ...], least: int) -> Marginal:
    raised = tuple(max(least, value) for value in quantiles)
    return Marginal(sum(raised) / len(raised), least=min(raised), most=max(raised), quantiles=raised)


def _shared(prompts: Sequence[int], prefix_tokens: int) -> float:
    """The share of all prompt tokens that a common beginning makes up; short prompts hold what they have room for."""
    return sum(min(prefix_tokens, room_for_prefix(tokens)) for tokens in prompts) / sum(prompts)


def _prefix_tokens(prompts: Sequence[int], share: float) -> int:
    """How long a beginning common to all prompts must be to make up ``share`` of their tokens, as far as that can be."""
    longest = range(room_for_prefix(max(prompts)) + 1)
    return min(bisect_left(longest, share, key=lambda tokens: _shared(prompts, tokens)), longest[-1])


def _histogram(before: Scrape, after: Scrape, name: str) -> list[tuple[float, float]]:
    """(upper bound, requests up to it) between the scrapes, ascending; empty when the server has no such histogram."""
    counts: dict[float, float] = {}
    for labels, value in after.get(name + "_bucket", {}).items():
        bound = float(dict(labels).get("le", "nan").replace("+Inf", "inf"))
        counts[bound] = counts.get(bound, 0.0) + value - before.get(name + "_bucket", {}).get(labels, 0.0)
    buckets = sorted(counts.items())
    if any(count < 0 for _, count in buckets):
        raise UsageError("a histogram went backwards between the scrapes: the server was restarted", hint="measure again")
    return buckets


def _change(before: Scrape, after: Scrape, name: str) -> float | None:
    if name not in after:
        return None
    change = sum(after[name].values()) - sum(before.get(name, {}).values())
    if change < 0:
        raise UsageError(f"{name} went backwards between the scrapes: the server was restarted", hint="measure again")
    return change


def _gauge(before: Scrape, after: Scrape, name: str) -> float | None:
    """Mean of both scrapes, summed over engines."""
    return (sum(before[name].values()) + sum(after[name].values())) / 2 if name in before and name in after else None
