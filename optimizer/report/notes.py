"""Markdown notes for the dashboard: one for the study, one for each engine start. Pure."""

from __future__ import annotations

import re

from vopt.optimizer.history import TrialRecord
from vopt.optimizer.recommend import Verdict
from vopt.optimizer.report import wording
from vopt.optimizer.report.shell import exported_variables
from vopt.optimizer.report.show import cost_text, spread_text
from vopt.optimizer.report.view import StudyView


def study_note(view: StudyView) -> str:
    """Verdict and command first, then what they rest on."""
    answer = view.answer
    parts = [f"## {_text(view.verdict_line())}"]
    if answer is None:
        parts.append("The search is still running, or was interrupted.")
    else:
        parts.append(_text(answer.reason))
        if answer.argv is not None:
            parts.append(fenced(wording.command_lines(answer.argv, exported_variables(view)), "sh"))
    facts = [
        ("Model", view.model),
        ("Machine", view.machine),
        ("Goal", f"{'highest' if view.maximize else 'lowest'} {view.metric}"),
        ("Limits", "; ".join(view.limits)),
        ("Workload", view.workload),
    ]
    facts += [("Cost", cost_text(row)) for row in view.costs()]
    if answer and answer.soak:
        facts.append(("Soak", answer.soak))
    if below := view.below_defaults():
        facts.append(("Less than default", "; ".join(below)))
    if view.simulated:
        facts.insert(0, ("Simulated", "no engine ran"))
    parts.append(_list(facts))
    if answer and answer.verdict is not Verdict.NOTHING_FEASIBLE and (rows := view.compared()):
        alone = all(row.winner is None for row in rows)
        table = [
            "| Metric | Baseline |" + ("" if alone else f" {view.challenger.capitalize()} | Change |"),
            "| --- | ---: |" + ("" if alone else " ---: | ---: |"),
        ]
        for row in rows:
            name, unit = wording.metric_label(row.metric), wording.metric_unit(row.metric)
            change = wording.change_text(row.change) if row.change is not None else wording.NONE
            compared = "" if alone else f" {spread_text(row.metric, row.winner)} | {change} |"
            table.append(f"| {_text(name)}{', ' + unit if unit else ''} | {spread_text(row.metric, row.baseline)} |{compared}")
        parts.append("\n".join(table))
    return "\n\n".join(parts) + "\n"


def trial_note(view: StudyView, trial: TrialRecord) -> str:
    """What was started, what came of it, and why it can or cannot win."""
    excluded = view.why_not(trial)
    value = wording.metric_text(view.metric, view.value(trial))
    if excluded is None:
        parts = [f"### {_text(value)}: feasible"]
    else:
        parts = [f"### Infeasible: {_text(wording.kind_text(excluded[0]))}", fenced(excluded[1])]
        if view.value(trial) is not None:
            parts.append(_text(f"It showed {value}, which decides nothing."))
    parts.append(fenced(wording.command_lines(trial.argv), "sh"))
    success = trial.metrics.get("success_rate") if trial.metrics else None
    facts = [
        ("Engine start", f"{trial.label}, {trial.stage}" + (f", {trial.arm}" if trial.arm else "")),
        ("Success rate", wording.metric_text("success_rate", success)),
        ("Loaded over", wording.loaded_over(trial.served, view.simulated)),
        ("Time", ", ".join(f"{phase} {wording.duration(seconds)}" for phase, seconds in trial.phase_s.items())),
        ("Evidence", trial.directory),
    ]
    parts.append(_list([(name, said) for name, said in facts if said and said != wording.NONE]))
    if trial.failure and trial.failure.log_tail:
        parts += ["Last lines of the log:", fenced("\n".join(trial.failure.log_tail))]
    return "\n\n".join(parts) + "\n"


def fenced(text: str, language: str = "") -> str:
    """A code block that no text in it can end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _list(facts: list[tuple[str, str]]) -> str:
    return "\n".join(f"- **{name}**: {_text(value)}" for name, value in facts if value)


def _text(text: str) -> str:
    """Without meaning for Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>#|&~])", r"\\\1", wording.one_line(text))
