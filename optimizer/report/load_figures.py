"""Figures from raw request records: latency distributions and the load over time, baseline and winner. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vopt.objectives.records import RequestRecord
from vopt.optimizer.history import TrialRecord
from vopt.optimizer.report.chart import BASELINE, WINNER, FigureSpec, layout_of, lines
from vopt.optimizer.report.view import StudyView

Records = Mapping[str, Sequence[RequestRecord]]
"""Raw request records by engine start."""

WARMUP_FACTOR = 1.5
MOST_POINTS = 400
"""Points of one curve: an ECDF of more shows nothing more."""
_HOVER = "%{y:.0f} % within %{x:,.0f} ms"


def record_figures(view: StudyView, records: Records) -> list[FigureSpec]:
    """Every figure that there are raw records for."""
    return [*distributions(view, records), *load_over_time(view, records)]


def distributions(view: StudyView, records: Records) -> list[FigureSpec]:
    """ECDFs of TTFT, TPOT and E2E of the requests that succeeded, baseline and winner."""
    return [
        figure
        for name, title in (("ttft_s", "Time to first token"), ("tpot_s", "Time per output token"), ("e2e_s", "End to end"))
        if (figure := _ecdf_figure(view, records, name, title)) is not None
    ]


def _ecdf_figure(view: StudyView, records: Records, name: str, title: str) -> FigureSpec | None:
    traces, said = [], []
    for arm, starts in _arms(view):
        values = sorted(
            value * 1000
            for trial in starts
            for record in settled(view, trial, records.get(trial.label, ()))
            if record.succeeded and (value := getattr(record, name)) is not None
        )
        if len(values) >= 2:
            x, y = ecdf(values)
            traces.append(lines(arm, x, y, line=_arm_line(arm), hovertemplate=_HOVER))
            said.append(f"{arm}: half of {len(values):,} requests within {values[len(values) // 2]:,.0f} ms")
    if not traces:
        return None
    layout = layout_of("ms", "requests, %", yaxis={"range": [0, 101], "fixedrange": True})
    return FigureSpec(
        f"ecdf-{name.removesuffix('_s')}",
        title,
        "; ".join(said) + ", after the warm-up.",
        tuple(traces),
        layout,
        320,
        half=name != "e2e_s",
    )


def settled(view: StudyView, trial: TrialRecord, records: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
    """Without the requests that ended while a closed loop warmed up: the first burst waits for itself and describes nobody's
    service. All of them when there is no concurrency, or when nothing would be left."""
    plan = trial.environment.get("load_plan") or view.setup.get("load_plan") or {}
    warm = int((plan.get("concurrency") or 0) * (plan.get("warmup_factor") or WARMUP_FACTOR))
    return sorted(records, key=lambda record: record.ended_s)[warm:] if 0 < warm < len(records) else records


def ecdf(ordered: Sequence[float]) -> tuple[list[float], list[float]]:
    """(values, percent of all at or below each) of ascending ``ordered``, thinned to ``MOST_POINTS``, both ends kept."""
    n = len(ordered)
    places = [*range(n)] if n <= MOST_POINTS else [round(i * (n - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)]
    return [round(ordered[place], 3) for place in places], [round(100 * (place + 1) / n, 3) for place in places]


def load_over_time(view: StudyView, records: Records) -> list[FigureSpec]:
    """Requests in flight and output tokens per second through the load, one start of each arm."""
    flight, rate, said = [], [], []
    for arm, starts in _arms(view):
        trial = next((trial for trial in starts if records.get(trial.label)), None)
        if trial is None:
            continue
        rows = records[trial.label]
        seconds = [*range(int(max(row.ended_s for row in rows)) + 1)]
        flight.append(lines(arm, seconds, in_flight(rows, len(seconds)), line=_arm_line(arm)))
        rate.append(lines(arm, seconds, tokens_per_second(rows, len(seconds)), line=_arm_line(arm)))
        said.append(f"{arm}: engine start {trial.label}, {len(rows):,} requests over {len(seconds)} s")
    if not flight:
        return []
    alt = "; ".join(said) + "."
    under = layout_of("seconds since the load began", "requests in flight", yaxis={"rangemode": "tozero", "fixedrange": True})
    tokens = layout_of("seconds since the load began", "output tokens/s", yaxis={"rangemode": "tozero", "fixedrange": True})
    return [
        FigureSpec("load-in-flight", "Requests in flight", alt, tuple(flight), under, 300, half=True),
        FigureSpec("load-tokens", "Output tokens over time", alt, tuple(rate), tokens, 300, half=True),
    ]


def in_flight(records: Sequence[RequestRecord], seconds: int) -> list[int]:
    """Requests that were sent and had not ended, in the middle of each second."""
    steps = [0] * (seconds + 1)
    for record in records:
        begin, end = (min(seconds, max(0, int(moment + 0.5))) for moment in (record.sent_s, record.ended_s))
        steps[begin] += 1
        steps[end] -= 1
    counts, running = [], 0
    for step in steps[:seconds]:
        running += step
        counts.append(running)
    return counts


def tokens_per_second(records: Sequence[RequestRecord], seconds: int) -> list[int]:
    """Output tokens by the second in which they were produced: a chunk's tokens are spread back to the chunk before."""
    sums = [0.0] * seconds
    for record in records:
        before = record.chunk_times_s[0] if record.chunk_times_s else 0.0
        for moment, tokens in zip(record.chunk_times_s, record.chunk_tokens, strict=False):
            _spread_over(sums, before, moment, tokens)
            before = moment
    return [round(total) for total in sums]


def _spread_over(sums: list[float], begin: float, end: float, amount: float) -> None:
    first, last = int(begin), min(int(end), len(sums) - 1)
    if last <= first or end <= begin:
        sums[min(first, len(sums) - 1)] += amount
        return
    for second in range(first, last + 1):
        share = (min(end, second + 1) - max(begin, second)) / (end - begin)
        sums[second] += amount * share


def _arms(view: StudyView) -> list[tuple[str, tuple[TrialRecord, ...]]]:
    return [(name, starts) for name, winner in (("baseline", False), ("winner", True)) if (starts := view.arm(winner=winner))]


def wanted_records(view: StudyView) -> tuple[TrialRecord, ...]:
    """The starts whose raw records the figures need."""
    return tuple(trial for _, starts in _arms(view) for trial in starts)


def _arm_line(arm: str) -> dict[str, Any]:
    return {"color": WINNER, "width": 2} if arm == "winner" else {"color": BASELINE, "width": 2, "dash": "dash"}
