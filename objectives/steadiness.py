"""Is a running load steady? Tokens of an interval, halves that agree, overload, and the KV plateau that ends a warm-up.

Standard library only: this module travels into trial processes. Everything is linear in the number of records, but for one
sorting of their durations (each record costs one C-speed prefix sum over its chunks, and a bisection for each edge).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

from vopt.objectives.records import CounterSample, LoadWindow, RequestRecord

SUB_WINDOWS = 10
"""Equal parts of a window for standard errors and slopes: long against a step, few enough against autocorrelation."""

HALVES_TOLERANCE = 0.03
HALVES_STANDARD_ERRORS = 3.0
HALVES_CEILING = 0.10
"""Most that noise may excuse. A step that is not at mid-window scatters the half it lies in and so widens its own three
standard errors: an engine that halves its speed 9 s into a window of 30 s makes a difference of 46 % and would be allowed
57 %. Under the ceiling every halving inside a window is seen, and every loss of a fifth that is three tenths of the window
or more away from its edges.

What it costs steady loads, simulated (sub-windows correlated by -0.3 to 0.3, 20,000 windows each): nothing where halves
differ by 3 % (standard deviation) or less; at 6 % it flags 10 % of windows instead of 2 %, at 8.5 % (5 s windows at
concurrency 8 on two CPU cores) 24 %. A flagged window is doubled, and then 0.3 % and 2 % remain.
"""

T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)
"""97.5 % quantile of Student's t for 1 to 8 degrees of freedom (any table; a test recomputes them with scipy)."""

RISE_OF_MEAN_IN_FLIGHT = 0.25
RISE_OF_DEVIATION_IN_FLIGHT = 3.0
RISE_OF_MEAN_TTFT = 0.5
RISE_OF_WINDOW_TTFT = 0.02

KV_SAMPLES = 6
KV_TOLERANCE = 0.05
KV_TOLERANCE_ABSOLUTE = 0.02


def token_scale(record: RequestRecord) -> float:
    """What one counted chunk token of ``record`` is worth in output tokens.

    1 where the chunks' own counts add up. A server that does not say how many tokens a chunk holds leaves only the usage
    count at the end, which is right; the chunks then give its shape over time.
    """
    counted = sum(record.chunk_tokens) if record.chunk_tokens else len(record.chunk_times_s)
    if not record.succeeded or counted <= 0 or record.output_tokens <= 0:
        return 1.0
    return record.output_tokens / counted


def tokens_between(records: Iterable[RequestRecord], edges: Sequence[float]) -> list[float]:
    """Tokens in each half-open interval ``[edges[i], edges[i + 1])``; ``edges`` ascend.

    Output tokens by the arrival of their chunk, plus the whole prompt at the arrival of the first chunk (prefill ended
    then). Requests in flight at the end count with what they produced; failed requests credit nothing.
    """
    totals = [0.0] * (len(edges) - 1)
    for record in records:
        times = record.chunk_times_s
        if record.failure is not None or not times or times[-1] < edges[0] or times[0] >= edges[-1]:
            continue
        sums = list(accumulate(record.chunk_tokens or (1,) * len(times), initial=0))
        scale = token_scale(record)
        before = bisect_left(times, edges[0])
        for part in range(len(totals)):
            upto = bisect_left(times, edges[part + 1], before)
            if upto > before:
                totals[part] += scale * (sums[min(upto, len(sums) - 1)] - sums[min(before, len(sums) - 1)])
                if before == 0:
                    totals[part] += record.prompt_tokens
            before = upto
    return totals


def sub_window_edges(start_s: float, end_s: float, parts: int = SUB_WINDOWS) -> tuple[float, ...]:
    """``parts + 1`` equally spaced edges; the last is exactly ``end_s``."""
    return (*(start_s + (end_s - start_s) * part / parts for part in range(parts)), end_s)


def rates_agree(rates: Sequence[float]) -> tuple[bool, str]:
    """Whether both halves of a window have the same token rate, within max(3 %, 3 standard errors) but at most 10 %; and the
    figures. By the tokens of each of its ten sub-windows: those of several clients add up.

    The standard error of the difference comes from ten sub-windows, five a half, about each half's own mean. About the
    common mean a real step between the halves would widen its own tolerance: a step d alone has a standard error of d/3
    there, so that three of them could never reject it. For steps elsewhere there is ``HALVES_CEILING``.
    """
    half = SUB_WINDOWS // 2
    first, second = rates[:half], rates[half:]
    mean = sum(rates) / SUB_WINDOWS
    if mean <= 0:
        return False, "no token came in the window"
    means = sum(first) / half, sum(second) / half
    squares = sum((rate - means[0]) ** 2 for rate in first) + sum((rate - means[1]) ** 2 for rate in second)
    error = math.sqrt(squares / (SUB_WINDOWS - 2) * 2 / half) / mean
    tolerance = max(HALVES_TOLERANCE, min(HALVES_CEILING, HALVES_STANDARD_ERRORS * error))
    difference = (means[1] - means[0]) / mean
    agrees = abs(difference) <= tolerance
    verb = "agree" if agrees else "differ"
    return agrees, f"the halves {verb}: the second has {difference:+.1%} tokens, {tolerance:.1%} is allowed"


def overloaded(records: Sequence[RequestRecord], window: LoadWindow) -> tuple[bool, str]:
    """Whether an open-loop load outran its engine: requests in flight or TTFT rise through the window; with the figures.

    Rising means: the slope over ten sub-window means is positive at 95 % (two-sided t interval, as GuideLLM's
    over-saturation constraint does), *and* the fitted rise is larger than chance makes it. The second is needed because
    successive sub-windows are not independent (a busy spell lasts as long as a request does): the slope alone flags 8 to 26 %
    of steady loads. The floors:

    * in flight: 25 % of the mean and 3 standard deviations of a Poisson count with that mean (requests in flight of a
      steady open loop are Poisson: M/G/inf); an overload of fraction f at rate r adds f x r x span requests.
    * TTFT: half its mean and 2 % of the span; an overload of fraction f makes it f x span longer.

    In simulated M/M/c queues (rates 1 to 10 per second, durations 3 to 30 s, windows of max(60 s, 2 durations)) this flags
    at most 2 % of loads at 0.6 of capacity, 85 to 96 % at 1.2 to 1.5 of it from 4 requests per second; fewer than 2 a
    second are too few for a sharp answer, and an overload of long requests shows only once the engine is full.

    The load starts empty and fills within one request's duration, which is no overload: the fit leaves out the time until
    the 90th percentile of E2E after the first send (at most half the window) and adds what is still missing after it.
    Counted from the scheduled send, so that a client that lags cannot hide a queue.
    """
    start = _filled_s(records, window)
    edges = sub_window_edges(start, window.closed_s)
    span = window.closed_s - start
    if span <= 0:
        return False, "the window is empty"
    missing = _not_yet_sent(records, edges)
    in_flight = [count + gap for count, gap in zip(_in_flight(records, edges), missing, strict=True)]
    ttft = _ttft(records, edges)

    def in_flight_floor(mean: float) -> float:
        return max(RISE_OF_MEAN_IN_FLIGHT * mean, RISE_OF_DEVIATION_IN_FLIGHT * math.sqrt(mean))

    def ttft_floor(mean: float) -> float:
        return max(RISE_OF_MEAN_TTFT * mean, RISE_OF_WINDOW_TTFT * span)

    rises = _rise("requests in flight", "", in_flight, in_flight_floor), _rise("TTFT", " s", ttft, ttft_floor)
    return any(rise for rise, _ in rises), "; ".join(detail for _, detail in rises)


def _rise(name: str, unit: str, means: Sequence[float | None], floor: Callable[[float], float]) -> tuple[bool, str]:
    """Whether sub-window means rise at 95 % confidence and by more than ``floor(mean)``; ``None`` marks an empty part."""
    points = [(float(part), mean) for part, mean in enumerate(means) if mean is not None]
    if len(points) < 3:
        return False, f"{name}: too few to see a trend"
    x_mean = sum(x for x, _ in points) / len(points)
    mean = sum(y for _, y in points) / len(points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    slope = sum((x - x_mean) * (y - mean) for x, y in points) / spread
    rest = sum((y - mean - slope * (x - x_mean)) ** 2 for x, y in points)
    freedom = len(points) - 2
    lower = slope - T_975[freedom - 1] * math.sqrt(rest / freedom / spread)
    rise = slope * (len(means) - 1)
    risen = lower > 0 and rise > floor(mean)
    return risen, f"{name} {'rise' if risen else 'steady'}: mean {mean:.3g}{unit}, trend {rise:+.3g}{unit} over the window"


def _filled_s(records: Sequence[RequestRecord], window: LoadWindow) -> float:
    """When a load that began empty can first be full: the first send plus the 90th percentile of E2E, at most mid-window."""
    durations = sorted(record.scheduled_e2e_s for record in records if record.succeeded)
    if not durations:
        return window.opened_s
    first = min(record.scheduled_s for record in records)
    long = durations[min(len(durations) - 1, int(0.9 * len(durations)))]
    return max(window.opened_s, min(first + long, window.opened_s + window.length_s / 2))


def _in_flight(records: Iterable[RequestRecord], edges: Sequence[float]) -> list[float]:
    """Mean requests in flight (from the scheduled send to the end) in each part; parts are equally long."""
    parts = len(edges) - 1
    length = (edges[-1] - edges[0]) / parts
    totals = [0.0] * parts
    for record in records:
        begin = (max(record.scheduled_s, edges[0]) - edges[0]) / length
        end = (min(record.ended_s, edges[-1]) - edges[0]) / length
        if end <= begin:
            continue
        for part in range(int(begin), min(parts, math.ceil(end))):
            totals[part] += min(end, part + 1) - max(begin, part)
    return totals


def _not_yet_sent(records: Sequence[RequestRecord], edges: Sequence[float]) -> list[float]:
    """Requests that a load which had always run would have in flight in each part, sent before this one began.

    rate x integral of P(duration > u) for u from the part's middle (since the first send) on: what a steady M/G/inf system
    lacks after starting empty. The distribution of durations is Kaplan and Meier's estimate (*JASA* 53, 1958), because
    the longest requests are the ones still in flight at the end. Nothing where more than half of all requests never ended:
    a window of two durations leaves at most half in flight, so that is a queue, and durations say nothing.
    """
    if not records or 2 * sum(record.censored for record in records) > len(records):
        return [0.0] * (len(edges) - 1)
    first = min(record.scheduled_s for record in records)
    rate = len(records) / max(edges[-1] - first, 1e-9)
    ends = sorted((record.scheduled_e2e_s, record.censored) for record in records)
    survival, steps = 1.0, [(0.0, 1.0)]
    for rank, (duration, censored) in enumerate(ends):
        if not censored:
            survival *= 1 - 1 / (len(ends) - rank)
            steps.append((duration, survival))
    # beyond[i]: integral of the survival from steps[i]'s duration to the longest duration seen
    longest = ends[-1][0]
    beyond = [0.0] * len(steps)
    right = max(longest, steps[-1][0])
    for i in range(len(steps) - 1, -1, -1):
        following = beyond[i + 1] if i + 1 < len(steps) else 0.0
        beyond[i] = following + steps[i][1] * (right - steps[i][0])
        right = steps[i][0]
    durations = [duration for duration, _ in steps]
    missing = []
    for left, end in pairwise(edges):
        age = (left + end) / 2 - first
        i = bisect_right(durations, age)
        stop = durations[i] if i < len(steps) else max(longest, durations[-1])
        rest = (beyond[i] if i < len(steps) else 0.0) + (steps[i - 1][1] * max(0.0, stop - age) if i else 0.0)
        missing.append(rate * rest)
    return missing


def _ttft(records: Iterable[RequestRecord], edges: Sequence[float]) -> list[float | None]:
    """Mean TTFT of the first tokens that arrived in each part.

    By arrival, not by send: what was sent late has no first token yet when the window closes, and leaving those out would
    make an overload look like an improvement.
    """
    parts = len(edges) - 1
    sums, counts = [0.0] * parts, [0] * parts
    for record in records:
        ttft = record.scheduled_ttft_s
        if ttft is None or record.failure is not None or not edges[0] <= record.chunk_times_s[0] < edges[-1]:
            continue
        part = min(parts - 1, int((record.chunk_times_s[0] - edges[0]) / (edges[-1] - edges[0]) * parts))
        sums[part] += ttft
        counts[part] += 1
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def kv_levelled(samples: Sequence[CounterSample]) -> bool:
    """Whether KV usage has stopped rising: the last three samples' mean against the three before.

    Levelled: within 5 % of it or 2 points of usage, or lower. An engine that does not tell its KV usage counts as levelled
    (the rule of finished requests then decides alone); one that does needs six samples.
    """
    tail: list[float] = []
    for sample in reversed(samples):
        if sample.kv_usage is not None:
            tail.append(sample.kv_usage)
        if len(tail) == KV_SAMPLES:
            break
    if not tail:
        return True
    if len(tail) < KV_SAMPLES:
        return False
    half = KV_SAMPLES // 2
    late, early = sum(tail[:half]) / half, sum(tail[half:]) / half
    return late - early <= max(KV_TOLERANCE * early, KV_TOLERANCE_ABSOLUTE)
