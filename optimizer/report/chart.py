"""What all figures share: their type, colours, axes and hover texts. Plain Plotly values; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vopt.optimizer.history import TrialRecord
from vopt.optimizer.report import wording
from vopt.optimizer.report.view import StudyView

# Readable on white and on near-black; hue is never the only carrier: markers and dashes differ too.
BASELINE, WINNER, OTHER, FRONT, REJECTED = "#8a7f72", "#2f81f7", "#2da44e", "#8957e5", "#d1242f"
_KIND_COLORS = (REJECTED, "#bf8700", "#bf3989", "#e16f24", "#6e40c9", "#1b7c83", "#8250df", "#a40e26", "#57606a")
_KIND_SYMBOLS = (
    "x",
    "cross",
    "triangle-down",
    "square-open",
    "diamond-open",
    "star-open",
    "hexagon-open",
    "asterisk-open",
    "hash-open",
)
_HOVER_WIDTH = 70


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """One figure. ``name`` is an HTML id; ``alt`` says in words what is drawn, ``height`` is in pixels."""

    name: str
    title: str
    alt: str
    data: tuple[Mapping[str, Any], ...]
    layout: Mapping[str, Any]
    height: int = 380
    half: bool = False

    def to_plotly(self) -> dict[str, Any]:
        return {"data": [dict(trace) for trace in self.data], "layout": dict(self.layout)}


def lines(name: str, x: Sequence[float], y: Sequence[float], **more: Any) -> dict[str, Any]:
    """A line; ``more`` are further keys of the trace."""
    return {"type": "scatter", "mode": "lines", "name": name, "x": [*x], "y": [*y], **more}


def points(
    view: StudyView, name: str, rows: Sequence[tuple[Any, Any, TrialRecord]], marker: Mapping[str, Any]
) -> dict[str, Any]:
    """One marker for each (x, y, engine start), which says what it is when pointed at."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "marker": dict(marker),
        "x": [x for x, _, _ in rows],
        "y": [y for _, y, _ in rows],
        "text": [hover(view, trial) for _, _, trial in rows],
        "hovertemplate": "%{text}<extra></extra>",
    }


def marker(color: str, symbol: str = "circle", size: int = 9) -> dict[str, Any]:
    """Open symbols are drawn as strong as filled ones."""
    return {"color": color, "symbol": symbol, "size": size, "line": {"width": 2, "color": color}}


def kind_marker(number: int) -> dict[str, Any]:
    """The mark of the failure kind that came ``number``-th."""
    return marker(_KIND_COLORS[number % len(_KIND_COLORS)], _KIND_SYMBOLS[number % len(_KIND_SYMBOLS)])


def hover(view: StudyView, trial: TrialRecord) -> str:
    """What an engine start is. Plotly reads a little HTML in hover texts: what comes from engines is escaped."""
    said = [f"trial {trial.label}: {wording.metric_text(view.metric, view.value(trial))}"]
    if (found := view.why_not(trial)) is not None:
        said.append(f"{wording.kind_text(found[0])}: {wording.one_line(found[1], _HOVER_WIDTH)}")
    words = wording.config_text(trial.config).split(" ") if trial.config else [wording.config_text({})]
    said += [wording.one_line(word, _HOVER_WIDTH) for word in words]
    return "<br>".join(line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for line in said)


def axis_title(metric: str) -> str:
    """Label and unit."""
    unit = wording.metric_unit(metric)
    return f"{wording.metric_label(metric)}, {unit}" if unit else wording.metric_label(metric)


def layout_of(x: str, y: str, *, xaxis: dict[str, Any] | None = None, yaxis: dict[str, Any] | None = None) -> dict[str, Any]:
    """Axes with these titles; ``xaxis`` and ``yaxis`` are further keys. Colours come from the page."""
    return {
        "xaxis": {"title": {"text": x}, "automargin": True, "fixedrange": True, "zeroline": False, **(xaxis or {})},
        "yaxis": {"title": {"text": y}, "automargin": True, "fixedrange": True, "zeroline": False, **(yaxis or {})},
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0},
        "margin": {"l": 56, "r": 12, "t": 12, "b": 48},
        "hovermode": "closest",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }
