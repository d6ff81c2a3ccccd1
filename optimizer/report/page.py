"""One self-contained HTML page of a study: no network, nothing outside the file. The only importer of plotly."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from vopt.optimizer.history import StudyRecord, TrialRecord
from vopt.optimizer.recommend import Recommendation, Verdict
from vopt.optimizer.report import html, wording
from vopt.optimizer.report.figures import FigureSpec, search_figures
from vopt.optimizer.report.load_figures import Records, record_figures, wanted_records
from vopt.optimizer.report.page_template import SCRIPT, STYLE
from vopt.optimizer.report.raw import records_of
from vopt.optimizer.report.show import comparison_table, cost_text, finalist_table, override_table, rejected_table
from vopt.optimizer.report.view import StudyView

_TONES = {Verdict.BETTER: "good", Verdict.NO_GAIN: "", Verdict.NOTHING_FEASIBLE: "bad", Verdict.UNCONFIRMED: "warn"}
_SECTIONS = (
    ("comparison", "Baseline against winner"),
    ("history-section", "Search"),
    ("parameters", "Parameters"),
    ("latency", "Latency and load"),
    ("time", "Time"),
    ("trials-section", "All engine starts"),
    ("reproduce", "Reproduce"),
    ("provenance", "Provenance"),
)


def page(record: StudyRecord, importance: Mapping[str, float] | None = None, *, secrets: Sequence[str] = ()) -> str:
    """The page of a study. Raw request records are read from the directories that the study names. ``secrets`` are values
    that must not be in it."""
    view = StudyView.of(record, secrets)
    return render_page(view, importance or {}, records_of(wanted_records(view)))


def render_page(view: StudyView, importance: Mapping[str, float], records: Records) -> str:
    """The page as text. Pure."""
    figures = {figure.name: figure for figure in (*search_figures(view, importance), *record_figures(view, records))}
    sections = {
        "comparison": _comparison(view),
        "history-section": _figures(figures, "history", "pareto"),
        "parameters": _figures(figures, "importance", *(name for name in figures if name.startswith("slice-"))),
        "latency": _figures(figures, "ecdf-ttft", "ecdf-tpot", "ecdf-e2e", "load-in-flight", "load-tokens"),
        "time": _figures(figures, "timeline"),
        "trials-section": _trials(view),
        "reproduce": _reproduce(view),
        "provenance": _provenance(view),
    }
    parts = [(name, title, sections[name]) for name, title in _SECTIONS if sections[name]]
    links = "".join(html.element("a", html.text(title), href=f"#{name}") for name, title, _ in parts)
    body = [_head(view), html.element("nav", links)]
    body += [html.element("section", html.element("h2", html.text(title)) + content, id=name) for name, title, content in parts]
    body.append(
        html.element("footer", html.text(f"Made by vopt from the study {view.name}. This file holds everything it shows."))
    )
    return _document(f"{view.name} · vopt", html.element("main", "\n".join(body)), list(figures.values()))


def plotly_figure(figure: FigureSpec) -> Any:
    """The figure as a ``plotly.graph_objects.Figure``, checked by Plotly's own schema."""
    return Figure(figure.to_plotly())


def _document(title: str, body: str, figures: Sequence[FigureSpec]) -> str:
    library, script = get_plotlyjs(), SCRIPT
    # Only these two scripts may run and nothing may be fetched: a text that slipped through escaping could do no harm.
    allowed = " ".join(f"'sha256-{_digest(code)}'" for code in (library, script))
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
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


def _head(view: StudyView) -> str:
    answer = view.answer
    badge = wording.verdict_text(answer.verdict) if answer else "No answer yet"
    parts = [
        html.element("div", html.text(f"{view.model} · {view.machine} · {view.workload}"), cls="eyebrow"),
        html.element("h1", html.text(view.verdict_line())),
        html.element("p", html.element("span", html.text(badge), cls=f"badge {_TONES[answer.verdict] if answer else ''}".strip())
        + html.element("span", html.text(answer.reason if answer else "The search is still running."), cls="soft")),
    ]  # fmt: skip
    if view.simulated:
        parts.insert(
            0, html.element("p", "Simulated: no engine ran. Measure before you rely on any figure here.", cls="simulated")
        )
    if answer and answer.argv is not None:
        parts.append(command_box("command", wording.command_lines(answer.argv)))
    if answer and answer.gain and answer.verdict is not Verdict.NOTHING_FEASIBLE:
        parts.append(_numbers(view, answer))
    if answer and answer.notes:
        parts += [html.element("p", html.text(note), cls="soft") for note in answer.notes]
    return html.element("header", "\n".join(parts))


def command_box(name: str, command: str) -> str:
    """A command with a button that copies it."""
    button = html.element("button", "Copy", type="button", data_copy=name)
    return html.element("div", html.element("pre", html.text(command), id=name) + button, cls="command")


def _numbers(view: StudyView, answer: Recommendation) -> str:
    assert answer.gain is not None
    gain, _, interval = view.gain_text(answer.gain).partition(" (")
    rows = [(gain, f"{wording.metric_word(view.metric)}, {interval.rstrip(')')}")]
    if answer.gain.smallest_visible is not None:
        seen = wording.change_text(answer.gain.smallest_visible).removeprefix("+")
        rows.append((seen, "the smallest gain that this study could have seen"))
    costs = view.costs()
    if costs:
        rows += [(wording.change_text(row.change or 1.0), f"cost: {cost_text(row)}") for row in costs[:2]]
    elif answer.winner_config is not None:
        rows.append(("none", "cost on the other metrics, as far as this study could see"))
    if answer.success:
        share = f"{answer.success.upper_failure_share * 100:.2g} %"
        rows.append((share, f"of requests fail at most (95 % bound): {answer.success.failed:,} of {answer.success.n:,} did"))
    if below := view.below_defaults():
        rows.append(("Less than default", "; ".join(below)))
    boxes = (
        html.element("div", html.element("b", html.text(big)) + html.element("span", html.text(small)), cls="number")
        for big, small in rows
    )
    soak = html.element("p", html.text(f"Soak: {answer.soak}")) if answer.soak else ""
    return html.element("div", "".join(boxes), cls="numbers") + soak


def _comparison(view: StudyView) -> str:
    rows, answer = view.compared(), view.answer
    parts = [html.table(comparison_table(rows))] if rows and view.arm(winner=True) else []
    if answer and answer.overrides:
        table = override_table(view, answer)
        parts += [html.element("h3", html.text(table.title)), html.table(table)]
    if view.rejected_by_kind():
        table = rejected_table(view)
        parts += [html.element("h3", html.text(table.title)), html.table(table)]
    if (table := finalist_table(view)).rows:
        parts += [html.element("h3", html.text(table.title)), html.table(table)]
    return "\n".join(parts)


def _figures(figures: Mapping[str, FigureSpec], *names: str) -> str:
    shown = [figures[name] for name in names if name in figures]
    drawn = (
        html.element(
            "figure",
            html.element("h3", html.text(figure.title))
            + html.element(
                "div", "", cls="plot", id=figure.name, role="img", aria_label=figure.alt, style=f"min-height:{figure.height}px"
            )
            + html.element("figcaption", html.text(figure.alt)),
            cls="half" if figure.half else "",
        )
        for figure in shown
    )
    return html.element("div", "\n".join(drawn), cls="figures") if shown else ""


def _trials(view: StudyView) -> str:
    kinds = "".join(html.element("option", html.text(wording.kind_text(kind)), value=kind) for kind in view.rejected_by_kind())
    choices = (
        '<option value="">all</option><option value="feasible">feasible</option><option value="rejected">rejected</option>'
    )
    controls = (
        '<input id="filter-words" type="search" placeholder="Filter by any words, like max_num_seqs=768" aria-label="Filter by words">'
        f'<select id="filter-kind" aria-label="Filter by result">{choices}{kinds}</select>'
        '<span id="filter-count" class="soft" role="status"></span>'
    )
    names = (
        ("Start", ""),
        ("Stage", ""),
        (wording.metric_label(view.metric), "right"),
        ("Success", "right"),
        ("p95 TTFT", "right"),
        ("Time", "right"),
        ("Result", ""),
        ("Configuration and evidence", "wide"),
    )
    head = "".join(html.element("th", html.text(name), cls=look) for name, look in names)
    body = "".join(_trial_row(view, trial, names) for trial in view.trials)
    table = html.element("table", html.element("thead", html.element("tr", head)) + html.element("tbody", body), id="trials")
    return html.element("div", controls, cls="filter") + table


def _trial_row(view: StudyView, trial: TrialRecord, names: Sequence[tuple[str, str]]) -> str:
    excluded, metrics = view.why_not(trial), trial.metrics
    stage = f"{trial.stage}, {trial.arm}" if trial.arm else str(trial.stage)
    cells = (
        html.text(trial.label),
        html.text(stage),
        html.text(wording.metric_text(view.metric, view.value(trial))),
        html.text(wording.metric_text("success_rate", metrics.get("success_rate") if metrics else None)),
        html.text(wording.metric_text("p95_ttft_s", metrics.get("p95_ttft_s") if metrics else None)),
        html.text(wording.duration(sum(trial.phase_s.values()))),
        html.element("span", html.text(wording.kind_text(excluded[0])), cls="bad") if excluded else "ok",
        _trial_details(view, trial, excluded[1] if excluded else ""),
    )
    row = "".join(html.element("td", cell, cls=look, data_name=name) for cell, (name, look) in zip(cells, names, strict=True))
    kind = excluded[0] if excluded else "ok"
    return html.element(
        "tr", row, cls="out" if excluded else "", data_kind=kind, data_group="rejected" if excluded else "feasible"
    )


def _trial_details(view: StudyView, trial: TrialRecord, reason: str) -> str:
    phases = ", ".join(f"{phase} {wording.duration(seconds)}" for phase, seconds in trial.phase_s.items())
    rows = [
        ("Reason", html.text(reason)),
        ("Command", html.element("code", html.text(wording.command_text(trial.argv)))),
        ("Loaded over", "HTTP, as the served command" if trial.served else "in-process"),
        ("Began", html.text(trial.began_at)),
        ("Phases", html.text(phases)),
        ("Start class", html.text(trial.start_class or "")),
        ("KV cache", html.text(f"{trial.kv_cache_tokens:,} tokens") if trial.kv_cache_tokens else ""),
        ("Requests", html.text(_requests(trial))),
        (
            "Conditions",
            html.element("code", html.text(json.dumps(trial.environment, ensure_ascii=False))) if trial.environment else "",
        ),
        ("Raw records, log", html.element("code", html.text(trial.directory))),
        ("Flags", html.text(", ".join(trial.flags))),
    ]
    log = html.element("pre", html.text("\n".join(trial.failure.log_tail))) if trial.failure and trial.failure.log_tail else ""
    summary = html.element("summary", html.element("code", html.text(wording.config_text(trial.config))))
    return html.element("details", summary + html.facts([(name, value) for name, value in rows if value]) + log)


def _requests(trial: TrialRecord) -> str:
    metrics = trial.metrics
    if metrics is None:
        return ""
    kinds = "; ".join(
        f"{kind}: {count.n:,} ({wording.one_line(count.first_message, 90)})" for kind, count in metrics.failures.items()
    )
    return f"{metrics.succeeded:,} succeeded, {metrics.failed:,} failed, {metrics.censored:,} censored" + (
        f"; {kinds}" if kinds else ""
    )


def _reproduce(view: StudyView) -> str:
    answer = view.answer
    steps = [
        ("Script of the answer", f"vopt export {view.name}"),
        ("Measure winner and baseline again", f"vopt bench --study {view.name}"),
    ]
    if answer and answer.baseline_argv:
        steps.append(("The baseline", wording.command_lines(answer.baseline_argv)))
    if answer is None or answer.argv is None:
        steps = steps[2:]
    parts = []
    for number, (title, command) in enumerate(steps):
        parts += [html.element("h3", html.text(title)), command_box(f"reproduce-{number}", command)]
    options = {name: value for name, value in (view.setup.get("options") or {}).items() if value not in (None, [], "", False)}
    rows = [(name, html.element("code", html.text(json.dumps(value, ensure_ascii=False)))) for name, value in options.items()]
    if rows:
        parts += [html.element("h3", "Options of the search"), html.facts(rows)]
    return "\n".join(parts)


def _provenance(view: StudyView) -> str:
    setup = view.setup
    rows: list[tuple[str, Any]] = [
        ("Study", view.name),
        ("Begun", view.record.created_at),
        ("Model", view.model),
        ("Model revision", setup.get("model_revision")),
        ("Machine", view.machine),
        ("Goal", setup.get("goal")),
        ("Limits", "; ".join(view.limits)),
        ("Workload", setup.get("workload")),
        ("Workload digest", setup.get("workload_digest")),
        ("Load plan", setup.get("load_plan")),
        ("Search space digest", setup.get("space_digest")),
        ("Mode", setup.get("mode")),
        ("Seed", setup.get("seed")),
        ("Raw records and logs", view.record.directory),
    ]
    environment = setup.get("environment") or {}
    rows += [(f"Environment: {name}", value) for name, value in environment.items()]
    said = [
        (name, html.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
        for name, value in rows
        if value not in (None, "")
    ]
    return html.facts(said)
