"""The figures of a search, as plain Plotly values: page and dashboard draw the same ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from vopt.optimizer.history import Arm, TrialRecord
from vopt.optimizer.report import wording
from vopt.optimizer.report.chart import (
    BASELINE,
    FRONT,
    OTHER,
    REJECTED,
    WINNER,
    FigureSpec,
    axis_title,
    kind_marker,
    layout_of,
    lines,
    marker,
    points,
)
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.trial import Phase

_PHASE_COLORS = {
    Phase.PREFLIGHT: "#8c959f",
    Phase.START: "#bf8700",
    Phase.WARMUP: "#54aeff",
    Phase.LOAD: "#2f81f7",
    Phase.STOP: "#57606a",
}
MOST_SLICES = 6
MOST_TICKS = 24
MOST_TICK = 18
_DEFAULT = "default"


def search_figures(view: StudyView, importance: Mapping[str, float]) -> list[FigureSpec]:
    """Every figure of the search that the study has data for, in reading order."""
    times = [str(one["metric"]) for one in view.goal.get("objectives", ()) if wording.is_time(str(one["metric"]))]
    made = [history(view), pareto(view, *times[:1]), confirmation(view), importance_bars(importance)]
    made += [*slices(view, importance), timeline(view)]
    return [figure for figure in made if figure is not None]


def history(view: StudyView) -> FigureSpec | None:
    """The search in order: feasible starts, the best so far, the baseline, and failures marked by kind."""
    rows = view.searched
    if not rows:
        return None
    fine = [(place, trial) for place, trial in enumerate(rows) if view.feasible(trial)]
    known = [value for trial in rows if (value := view.value(trial)) is not None]
    scale = [wording.shown(view.metric, value) for value in known]
    # A start without a figure is drawn below all figures, where its mark can be seen.
    floor = min(scale) - 0.06 * ((max(scale) - min(scale)) or max(scale) or 1) if scale else 0.0

    def height(trial: TrialRecord) -> float:
        value = view.value(trial)
        return floor if value is None else wording.shown(view.metric, value)

    traces: list[dict[str, Any]] = []
    if (base := next((view.value(trial) for trial in rows[:1]), None)) is not None:
        y = wording.shown(view.metric, base)
        line = {"color": BASELINE, "dash": "dash", "width": 1.5}
        traces.append(lines("baseline", [0, len(rows) - 1], [y, y], line=line, hoverinfo="skip"))
    best, curve = None, []
    for place, trial in fine:
        value = view.value(trial)
        assert value is not None
        best = value if best is None or view.better(value, best) else best
        curve.append((place, wording.shown(view.metric, best)))
    if curve:
        curve.append((len(rows) - 1, curve[-1][1]))
        line = {"color": WINNER, "shape": "hv", "width": 2}
        traces.append(lines("best so far", [x for x, _ in curve], [y for _, y in curve], line=line, hoverinfo="skip"))
        traces.append(points(view, "feasible", [(place, height(trial), trial) for place, trial in fine], marker(WINNER)))
    groups: dict[str, list[tuple[int, TrialRecord]]] = {}
    for place, trial in enumerate(rows):
        if (found := view.why_not(trial)) is not None:
            groups.setdefault(found[0], []).append((place, trial))
    for number, (kind, group) in enumerate(groups.items()):
        rows_of_kind = [(place, height(trial), trial) for place, trial in group]
        traces.append(points(view, wording.kind_text(kind), rows_of_kind, kind_marker(number)))
    ticks: dict[str, Any] = {"tickvals": [*range(len(rows))], "ticktext": [trial.label for trial in rows]}
    layout = layout_of("engine start", axis_title(view.metric), xaxis=ticks if len(rows) <= MOST_TICKS else {})
    alt = f"{len(rows)} engine starts of the search: {len(fine)} feasible, {len(rows) - len(fine)} not."
    return FigureSpec("history", "Search history", alt, tuple(traces), layout, 420)


def pareto(view: StudyView, latency: str = "p95_ttft_s") -> FigureSpec | None:
    """Throughput against latency of all starts of the search, with the baseline, the front and the rejected."""
    rate = "tokens_per_s"
    rows = [trial for trial in view.searched if trial.metrics and {rate, latency} <= trial.metrics.values.keys()]
    if len(rows) < 2:
        return None

    def at(trial: TrialRecord) -> tuple[float, float]:
        assert trial.metrics is not None
        return wording.shown(latency, trial.metrics[latency]), wording.shown(rate, trial.metrics[rate])

    fine = [trial for trial in rows if view.feasible(trial)]
    out = [trial for trial in rows if not view.feasible(trial)]
    traces = []
    if front := sorted(at(trial) for trial in fine if not any(_dominates(at(other), at(trial)) for other in fine)):
        line = {"color": FRONT, "width": 2, "dash": "dot"}
        traces.append(lines("front", [x for x, _ in front], [y for _, y in front], line=line, hoverinfo="skip"))
    winner = view.answer.winner_config if view.answer else None
    won = [trial for trial in fine if winner is not None and trial.config == winner]
    base = [trial for trial in rows if trial is view.baseline_start]
    groups = (
        ("feasible", [trial for trial in fine if trial not in won and trial not in base], marker(OTHER)),
        ("rejected", out, marker(REJECTED, "x")),
        ("baseline", base, marker(BASELINE, "square", 12)),
        ("winner", won, marker(WINNER, "star", 15)),
    )
    for name, group, look in groups:
        if group:
            traces.append(points(view, name, [(*at(trial), trial) for trial in group], look))
    layout = layout_of(axis_title(latency), axis_title(rate))
    alt = f"Throughput against {wording.metric_label(latency)} of {len(rows)} engine starts; better is up and to the left."
    return FigureSpec("pareto", "Throughput against latency", alt, tuple(traces), layout, 420)


def confirmation(view: StudyView) -> FigureSpec | None:
    """Every start of the confirmation by arm: what the interval of the gain rests on."""
    rows = [trial for trial in view.confirmed if trial.arm and view.value(trial) is not None]
    if len(rows) < 2:
        return None
    traces = []
    for arm, color in ((Arm.BASELINE, BASELINE), (Arm.FINALIST, OTHER), (Arm.LITE, WINNER)):
        group = [trial for trial in rows if trial.arm is arm]
        if group:
            places = [(wording.shown(view.metric, view.value(trial) or 0.0), str(arm), trial) for trial in group]
            traces.append(points(view, str(arm), places, marker(color, "circle-open", 11)))
    arms = {"type": "category", "autorange": "reversed"}
    layout = layout_of(axis_title(view.metric), "", yaxis=arms) | {"showlegend": False}
    starts = max(sum(trial.arm is arm for trial in rows) for arm in Arm)
    alt = f"{len(rows)} fresh engine starts, {starts} of each arm. Only these decide whether the gain is real."
    return FigureSpec("confirmation", "Confirmation", alt, tuple(traces), layout, 240)


def importance_bars(importance: Mapping[str, float]) -> FigureSpec | None:
    """How much of the spread of the feasible starts each parameter explains."""
    rows = sorted(importance.items(), key=lambda row: row[1])
    if not rows:
        return None
    bar = {
        "type": "bar",
        "orientation": "h",
        "x": [100 * share for _, share in rows],
        "y": [name for name, _ in rows],
        "marker": {"color": WINNER},
        "hovertemplate": "%{y}: %{x:.0f} %<extra></extra>",
    }
    layout = layout_of("share, %", "", yaxis={"automargin": True, "fixedrange": True})
    alt = "Importance: " + ", ".join(f"{name} {share * 100:.0f} %" for name, share in reversed(rows)) + "."
    return FigureSpec("importance", "Parameter importance (feasible starts)", alt, (bar,), layout, 140 + 34 * len(rows))


def slices(view: StudyView, importance: Mapping[str, float]) -> list[FigureSpec]:
    """The goal's metric over each parameter, most important first."""
    shares = {name: share for names, share in importance.items() for name in names.split(wording.TOGETHER)}
    names = sorted({name for trial in view.searched for name in trial.config}, key=lambda name: (-shares.get(name, 0.0), name))
    made = (_slice(view, name) for name in names)
    return [figure for figure in made if figure is not None][:MOST_SLICES]


def _slice(view: StudyView, name: str) -> FigureSpec | None:
    rows = [trial for trial in view.searched if view.value(trial) is not None]
    values = [_slice_value(trial.config.get(name)) for trial in rows]
    if len({*values}) < 2 or sum(value != _DEFAULT for value in values) < 2:
        return None
    numbers = {value for value in values if isinstance(value, int | float)}
    order = [_DEFAULT] if _DEFAULT in values else []
    order += [str(value) for value in sorted(numbers)] + sorted({str(v) for v in values if v != _DEFAULT and v not in numbers})
    traces = []
    for group, wanted, look in (("feasible", True, marker(WINNER)), ("rejected", False, marker(REJECTED, "x"))):
        chosen = [(value, trial) for value, trial in zip(values, rows, strict=True) if view.feasible(trial) is wanted]
        if chosen:
            heights = [(str(value), wording.shown(view.metric, view.value(trial) or 0.0), trial) for value, trial in chosen]
            traces.append(points(view, group, heights, look))
    ticks = {"tickvals": order, "ticktext": tick_texts(order)}
    layout = layout_of(
        "", axis_title(view.metric), xaxis={"type": "category", "categoryorder": "array", "categoryarray": order, **ticks}
    )
    alt = f"{wording.metric_label(view.metric)} over {name} for {len(rows)} engine starts."
    return FigureSpec(f"slice-{_html_id(name)}", name, alt, tuple(traces), layout, 300, half=True)


def tick_texts(values: Sequence[str]) -> list[str]:
    """Labels of at most 18 characters that differ where the values do: of JSON that is cut, the end is kept."""
    cut = [wording.one_line(value, MOST_TICK) for value in values]
    return [
        text if cut.count(text) == 1 else f"{value[: MOST_TICK // 3]}…{value[-(MOST_TICK - MOST_TICK // 3 - 1) :]}"
        for text, value in zip(cut, values, strict=True)
    ]


def _slice_value(value: Any) -> int | float | str:
    if value is None:
        return _DEFAULT
    return (
        value if isinstance(value, int | float) and not isinstance(value, bool) else wording.one_line(wording.value_text(value))
    )


def timeline(view: StudyView) -> FigureSpec | None:
    """When each engine start ran, and what it spent its time on."""
    rows = [(trial, moment) for trial in view.trials if (moment := _moment(trial.began_at)) is not None]
    if not rows:
        return None
    first = min(moment for _, moment in rows)
    offsets = {trial.label: (moment - first) / 60 for trial, moment in rows}
    bars: dict[Phase, dict[str, list[Any]]] = {phase: {"x": [], "y": [], "base": [], "text": []} for phase in Phase}
    base = 0.0
    for trial, _ in rows:
        # A simulation's seconds pass in no time: its starts follow each other by their own clock.
        base = base if view.simulated else offsets[trial.label]
        for phase in Phase:
            minutes = trial.phase_s.get(phase, 0.0) / 60
            if minutes > 0:
                bar = bars[phase]
                bar["x"].append(round(minutes, 4))
                bar["y"].append(trial.label)
                bar["base"].append(round(base, 4))
                bar["text"].append(f"{trial.label}, {phase}: {wording.duration(minutes * 60)}")
            base += minutes
    look = {"type": "bar", "orientation": "h", "textposition": "none", "hovertemplate": "%{text}<extra></extra>"}
    traces = [
        look | {"name": str(phase), "marker": {"color": _PHASE_COLORS[phase], "line": {"width": 0}}} | bar
        for phase, bar in bars.items()
        if bar["x"]
    ]
    labels = [trial.label for trial, _ in rows]
    ordered = {
        "type": "category",
        "autorange": "reversed",
        "categoryorder": "array",
        "categoryarray": labels,
        "automargin": True,
    }
    layout = layout_of("minutes since the study began", "", yaxis=ordered | {"dtick": 1, "fixedrange": True})
    layout |= {"barmode": "overlay", "bargap": 0.25}
    totals = ", ".join(f"{phase} {wording.duration(seconds)}" for phase, seconds in view.phase_totals().items())
    return FigureSpec("timeline", "Where the time went", f"By phase: {totals}.", tuple(traces), layout, 130 + 19 * len(rows))


def _dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] >= other[1]


def _moment(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _html_id(text: str) -> str:
    return "".join(ch if ch.isalnum() and ch.isascii() else "-" for ch in text)
