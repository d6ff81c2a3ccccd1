"""The parts of the HTML page. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vopt.optimizer.history import TrialRecord
from vopt.optimizer.recommend import Importance, Recommendation, Verdict
from vopt.optimizer.report import html, wording
from vopt.optimizer.report.chart import FigureSpec
from vopt.optimizer.report.load_said import load_said
from vopt.optimizer.report.raw import LOG, RECORDS
from vopt.optimizer.report.shell import exported_variables
from vopt.optimizer.report.show import comparison_table, cost_text, front_table, override_table, rejected_table
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.stated_acceptance import WRONG_TEXT
from vopt.optimizer.way_on import USUAL, with_storage

_TONES = {Verdict.BETTER: "good", Verdict.NO_GAIN: "", Verdict.NOTHING_FEASIBLE: "bad", Verdict.UNCONFIRMED: "warn"}
_SIMULATED = "Simulated: no engine ran. Measure before you rely on any figure here."


def head(view: StudyView) -> str:
    """Verdict, command, and the figures that belong to them."""
    answer = view.answer
    badge = wording.verdict_text(answer.verdict) if answer else "No answer yet"
    reason = answer.reason if answer else "The search is still running, or was interrupted."
    reason = reason.removeprefix(f"{badge.lower()}: ")  # the badge has just said it
    tone = _TONES[answer.verdict] if answer else ""
    marked = html.element("span", html.text(badge), cls=f"badge {tone}".strip())
    parts = [html.element("p", _SIMULATED, cls="simulated")] if view.simulated else []
    parts += [
        html.element("div", html.text(f"{view.model} · {view.machine} · {view.workload}"), cls="eyebrow"),
        html.element("h1", html.text(view.verdict_line()).replace(" %", "&nbsp;%")),
        html.element("p", marked + html.element("span", html.text(reason), cls="soft")),
    ]
    if answer and answer.argv is not None:
        parts.append(command_box("command", wording.command_lines(answer.argv, exported_variables(view))))
    if answer and answer.gain and answer.verdict is not Verdict.NOTHING_FEASIBLE:
        parts.append(_numbers(view, answer))
    looks = ("simulated" if note.startswith(WRONG_TEXT) else "soft" for note in view.notes)  # framed, as a simulation is
    parts += [html.element("p", html.text(note), cls=look) for note, look in zip(view.notes, looks, strict=True)]
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
        seen = wording.visible_text(answer.gain.smallest_visible, maximize=view.maximize)
        rows.append((seen, f"the smallest {'gain' if view.maximize else 'fall'} that this study could have seen"))
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
    said = [("Load", load_said(view)), ("Soak", answer.soak)]
    lines = "".join(html.element("p", html.text(f"{name}: {text}")) for name, text in said if text)
    return html.element("div", "".join(_box(big, small) for big, small in rows), cls="numbers") + lines


def _box(big: str, small: str) -> str:
    return html.element("div", html.element("b", html.text(big)) + html.element("span", html.text(small)), cls="number")


def comparison(view: StudyView) -> str:
    """Baseline against winner, what each override is worth, what was rejected."""
    rows, answer = view.compared(), view.answer
    parts = []
    if rows and view.challenger_starts():
        compared = comparison_table(rows, view.challenger)
        parts = [html.element("h3", html.text(compared.title)), html.table(compared)]
    tables = [front_table(view, answer)] if answer and answer.front else []
    tables += [override_table(view, answer)] if answer and answer.overrides else []
    tables += [rejected_table(view)] if view.rejected_by_kind() else []
    for table in tables:
        if table.rows:
            parts += [html.element("h3", html.text(table.title)), html.table(table)]
    return "\n".join(parts)


def drawn(figures: Mapping[str, FigureSpec], *names: str) -> str:
    """The figures of these names that exist."""
    shown = [figures[name] for name in names if name in figures]
    return html.element("div", "\n".join(_figure(figure) for figure in shown), cls="figures") if shown else ""


def parameters(figures: Mapping[str, FigureSpec], importance: Importance) -> str:
    """What each parameter did; where the data cannot tell which mattered, why not."""
    said = html.element("p", html.text(f"Importance: {importance.why}."), cls="soft") if importance.why else ""
    plots = drawn(figures, "importance", *(name for name in figures if name.startswith("slice-")))
    return said + plots if plots else ""


def _figure(figure: FigureSpec) -> str:
    look = f"min-height:{figure.height}px"
    title, caption = html.element("h3", html.text(figure.title)), html.element("figcaption", html.text(figure.alt))
    plot = html.element("div", "", cls="plot", id=figure.name, role="img", aria_label=figure.alt, style=look)
    return html.element("figure", title + plot + caption, cls="half" if figure.half else "")


def trials(view: StudyView) -> str:
    """Every engine start, with its command, its conditions and where its evidence lies; a filter above."""
    choices = [("", "all"), ("feasible", "feasible"), ("rejected", "rejected")]
    choices += [(kind, wording.kind_text(kind)) for kind in view.rejected_by_kind()]
    options = "".join(html.element("option", html.text(label), value=value) for value, label in choices)
    controls = (
        '<input id="filter-words" type="search" placeholder="Filter, like max_num_seqs=768" aria-label="Filter by words">'
        f'<select id="filter-kind" aria-label="Filter by result">{options}</select>'
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
    titles = "".join(html.element("th", html.text(name), cls=look) for name, look in names)
    rows = "".join(_trial_row(view, trial, names) for trial in view.trials)
    whole = html.element("thead", html.element("tr", titles)) + html.element("tbody", rows)
    return html.element("div", controls, cls="filter") + html.element("table", whole, id="trials")


def _trial_row(view: StudyView, trial: TrialRecord, names: Sequence[tuple[str, str]]) -> str:
    excluded, metrics = view.why_not(trial), trial.metrics
    stage = f"{trial.stage}, {trial.arm}" if trial.arm else str(trial.stage)
    cells = (
        html.text(trial.label),
        html.text(stage),
        html.text(wording.metric_text(view.metric, view.comparable(trial))),
        html.text(wording.metric_text("success_rate", metrics.get("success_rate") if metrics else None)),
        html.text(wording.metric_text("p95_ttft_s", metrics.get("p95_ttft_s") if metrics else None)),
        html.text(wording.duration(sum(trial.phase_s.values()))),
        html.element("span", html.text(wording.kind_text(excluded[0])), cls="bad") if excluded else "ok",
        _trial_details(trial, excluded[1] if excluded else "", view.simulated),
    )
    row = "".join(html.element("td", cell, cls=look, data_name=name) for cell, (name, look) in zip(cells, names, strict=True))
    if excluded is None:
        return html.element("tr", row, data_kind="ok", data_group="feasible")
    return html.element("tr", row, cls="out", data_kind=excluded[0], data_group="rejected")


def _trial_details(trial: TrialRecord, reason: str, simulated: bool) -> str:
    phases = ", ".join(f"{phase} {wording.duration(seconds)}" for phase, seconds in trial.phase_s.items())
    rows = [
        ("Reason", html.text(reason)),
        ("Command", _code(wording.command_text(trial.argv))),
        ("Loaded over", wording.loaded_over(trial.served, simulated)),
        ("Began", html.text(trial.began_at)),
        ("Phases", html.text(phases)),
        ("Start class", html.text(trial.start_class or "")),
        ("KV cache", html.text(f"{trial.kv_cache_tokens:,} tokens") if trial.kv_cache_tokens else ""),
        ("Requests", html.text(_requests(trial))),
        ("Conditions", _code(_value(trial.environment)) if trial.environment else ""),
        ("Raw records", _code(f"{trial.directory}/{RECORDS}") if trial.directory else ""),
        ("Engine log", _code(f"{trial.directory}/{LOG}") if trial.directory and not simulated else ""),
        ("Flags", html.text(", ".join(trial.flags))),
    ]
    failure = trial.failure
    log = html.element("pre", html.text("\n".join(failure.log_tail))) if failure and failure.log_tail else ""
    summary = html.element("summary", _code(wording.config_text(trial.config)))
    return html.element("details", summary + html.facts([(name, value) for name, value in rows if value]) + log)


def _requests(trial: TrialRecord) -> str:
    metrics = trial.metrics
    if metrics is None:
        return ""
    said = [f"{metrics.succeeded:,} succeeded, {metrics.failed:,} failed, {metrics.censored:,} censored"]
    said += [f"{kind}: {count.n:,} ({wording.one_line(count.first_message, 90)})" for kind, count in metrics.failures.items()]
    return "; ".join(said)


def reproduce(view: StudyView, storage: str = USUAL) -> str:
    """What to type to measure it again, where the study lies in ``storage``."""
    answer = view.answer
    steps = []
    if answer and answer.argv is not None:
        steps = [
            ("Script of the answer", f"vopt export {view.name} -o serve.sh"),
            ("Measure winner and baseline again", f"vopt bench --study {view.name}"),
        ]
    if answer and answer.baseline_argv:
        steps.append(("The baseline", wording.command_lines(answer.baseline_argv)))
    parts = []
    for number, (title, command) in enumerate(steps):
        parts += [html.element("h3", html.text(title)), command_box(f"reproduce-{number}", with_storage(command, storage))]
    typed = {name: value for name, value in (view.setup.get("options") or {}).items() if value not in (None, [], "", False)}
    if typed:
        parts += [
            html.element("h3", "Options of the search"),
            html.facts((name, _code(_value(v))) for name, v in typed.items()),
        ]
    return "\n".join(parts)


def provenance(view: StudyView) -> str:
    """What fixed the study."""
    setup = view.setup
    rows: list[tuple[str, Any]] = [
        ("Study", view.name),
        ("Begun", view.record.created_at),
        ("Model", view.model),
        ("Model revision", setup.get("model_revision")),
        ("Machine", view.machine),
        ("Goal", f"{view.goal.get('name', '')}: {'highest' if view.maximize else 'lowest'} {view.metric}"),
        ("Limits", "; ".join(view.limits)),
        ("Workload", setup.get("workload")),
        ("Workload digest", setup.get("workload_digest")),
        ("Load plan", dict(view.load_plan)),
        ("Search space digest", setup.get("space_digest")),
        ("Mode", setup.get("mode")),
        ("Seed", setup.get("seed")),
        ("Raw records and logs", view.record.directory),
    ]
    rows += [(f"Environment: {name}", value) for name, value in (setup.get("environment") or {}).items()]
    return html.facts((name, _code(_value(value))) for name, value in rows if value not in (None, "", {}))


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _code(text: str) -> str:
    return html.element("code", html.text(text))
