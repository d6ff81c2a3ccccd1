"""One self-contained HTML page of a study: no network, nothing outside the file. The only importer of plotly."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

import vopt.optimizer.report.page_sections as sections
from vopt.optimizer.history import StudyRecord
from vopt.optimizer.recommend import Importance
from vopt.optimizer.report import html
from vopt.optimizer.report.chart import FigureSpec
from vopt.optimizer.report.figures import search_figures
from vopt.optimizer.report.load_figures import Records, record_figures, wanted_records
from vopt.optimizer.report.page_template import SCRIPT, STYLE
from vopt.optimizer.report.raw import records_of
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.secrecy import clean_text
from vopt.optimizer.way_on import USUAL

_SECTIONS = (
    ("comparison", "Result"),
    ("history-section", "Search and confirmation"),
    ("parameters", "Parameters"),
    ("latency", "Latency and load"),
    ("time", "Time"),
    ("trials-section", "All engine starts"),
    ("reproduce", "Reproduce"),
    ("provenance", "Provenance"),
)


def page(
    record: StudyRecord, importance: Importance | None = None, *, secrets: Sequence[str] = (), storage: str = USUAL
) -> str:
    """The page of a study. Raw request records are read from the directories that the study names. ``secrets`` are values
    that must not be in it; ``storage`` is where the study lies, for the lines to type."""
    view = StudyView.of(record, secrets)
    return render_page(view, importance or Importance(), records_of(wanted_records(view)), clean_text(storage, secrets))


def render_page(view: StudyView, importance: Importance, records: Records, storage: str = USUAL) -> str:
    """The page as text. Pure."""
    figures = {figure.name: figure for figure in (*search_figures(view, importance.shares), *record_figures(view, records))}
    contents = {
        "comparison": sections.comparison(view),
        "history-section": sections.drawn(figures, "history", "pareto", "confirmation"),
        "parameters": sections.parameters(figures, importance),
        "latency": sections.drawn(figures, "ecdf-ttft", "ecdf-tpot", "ecdf-e2e", "load-in-flight", "load-tokens"),
        "time": sections.drawn(figures, "timeline"),
        "trials-section": sections.trials(view),
        "reproduce": sections.reproduce(view, storage),
        "provenance": sections.provenance(view),
    }
    parts = [(name, title, contents[name]) for name, title in _SECTIONS if contents[name]]
    links = "".join(html.element("a", html.text(title), href=f"#{name}") for name, title, _ in parts)
    body = [sections.head(view), html.element("nav", links)]
    for name, title, content in parts:
        body.append(html.element("section", html.element("h2", html.text(title)) + content, id=name))
    end = f"Made by vopt from the study {view.name}. This file holds everything that it shows."
    body.append(html.element("footer", html.text(end)))
    return _document(f"{view.name} · vopt", html.element("main", "\n".join(body)), list(figures.values()))


def plotly_figure(figure: FigureSpec) -> Any:
    """The figure as a ``plotly.graph_objects.Figure``, checked by Plotly's own schema."""
    return Figure(figure.to_plotly())


def _document(title: str, body: str, figures: Sequence[FigureSpec]) -> str:
    library, script = get_plotlyjs(), SCRIPT
    # Only these two scripts may run and nothing may be fetched: a text that slipped through escaping could do no harm.
    allowed = " ".join(f"'sha256-{_digest(code)}'" for code in (library, script))
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    policy += "; base-uri 'none'; form-action 'none'"
    data = html.embedded_json([figure.to_plotly() | {"name": figure.name, "height": figure.height} for figure in figures])
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{html.text(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            '<link rel="icon" href="data:,">',
            html.element("title", html.text(title)),
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            body,
            f'<script type="application/json" id="figures">{data}</script>',
            f"<script>{library}</script>",
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _digest(code: str) -> str:
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
