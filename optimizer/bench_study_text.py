"""What ``vopt bench --study`` says: entries of its document, and the text that follows from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vopt.optimizer.command import shell_line
from vopt.optimizer.history import TrialRecord
from vopt.optimizer.recommend import Gain
from vopt.optimizer.report.blocks import Block, Code, Column, Facts, Line, Table, TableMaker, plain_text
from vopt.optimizer.report.wording import (
    NONE,
    gain_text,
    lower_is_better,
    metric_label,
    metric_text,
    metric_unit,
    metric_word,
    one_line,
    plural,
)

_SHOWN = ("tokens_per_s", "requests_per_s", "goodput_per_s", "mean_e2e_s", "p95_ttft_s", "p95_tpot_s", "success_rate")


def study_text(document: Mapping[str, Any], width: int | None = None) -> str:
    """The verdict first, then why, both arms then and now, what changed, and retired arguments with their modern form."""
    held = "still holds" if document["holds"] else "does not hold any more"
    prefix = "SIMULATED. " if document["simulated"] else ""
    blocks: list[Block] = [Line(f"{prefix}The recommendation of {document['study']} {held}: {document['reason']}")]
    blocks += [Facts(tuple(_facts(document))), _table(document)]
    for finding in document["retired"]:
        instead = f"; write {shell_line(finding['instead'])}" if finding["instead"] else "; nothing is needed in its place"
        blocks.append(Line(f"Retired: {finding['written']}: {finding['message']}{instead}"))
    for arm in document["arms"].values():
        for start in arm["starts"]:
            for kind, count in start["failures"].items():
                blocks.append(
                    Line(f"Failed requests in {start['label']}: {count['n']} x {kind}: {one_line(count['first_message'])}")
                )
            if start["failure"]:
                blocks.append(
                    Line(f"{start['label']} failed: {start['failure']['kind']}: {one_line(start['failure']['detail'])}")
                )
    blocks.append(Code(document["arms"][document["recommended"]]["command"]))
    return plain_text(blocks, width).rstrip("\n")


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    alternative = next(name for name in document["arms"] if name != document["recommended"])
    against = f"{document['recommended']} against {alternative}"
    then, now = document["gain_then"], document["gain"]
    metric, maximize = document["metric"], not lower_is_better(document["metric"])
    said = f"{against}: {metric_word(metric)}"
    # As everywhere: the change of the metric itself, so half the latency is -50 %, not +100 %.
    rows = [("Then", f"{said} {gain_text(Gain(then['ratio']), maximize=maximize).partition(' (')[0]}" if then else NONE)]
    if now is not None:
        starts = " and ".join(map(str, now["starts"]))
        change = gain_text(Gain(now["ratio"], now["low"], now["high"]), maximize=maximize)
        if now["low"] is None:
            change = change.replace("(no interval)", "(no interval from one start each: --repeat 3 gives one)")
        rows.append(("Now", f"{said} {change}, {starts} starts"))
    if document["gate"] is not None:
        rows.append(("Gate", f"{document['gate']:.1%}: {'failed' if document['gate_failed'] else 'passed'}"))
    rows += [(f"Changed: {name}", f"{values['then']} -> {values['now']}") for name, values in document["changed"].items()]
    return rows


def _table(document: Mapping[str, Any]) -> Table:
    columns = [Column("Metric")]
    for name, arm in document["arms"].items():
        columns += [Column(f"{name} then", right=True), Column(f"now ({plural(len(arm['starts']), 'start')})", right=True)]
    table = TableMaker("Figures", tuple(columns))
    for metric in dict.fromkeys((document["metric"], *_SHOWN)):
        cells: list[str] = []
        for arm in document["arms"].values():
            now = [start["metrics"][metric] for start in arm["starts"] if metric in start["metrics"]]
            cells += [
                metric_text(metric, arm["then"].get(metric), unit=False),
                ", ".join(metric_text(metric, value, unit=False) for value in now) or NONE,
            ]
        if any(cell != NONE for cell in cells):
            unit = metric_unit(metric)
            table.add(metric_label(metric) + (f", {unit}" if unit else ""), *cells)
    return table.done()


def start_entry(start: TrialRecord) -> dict[str, Any]:
    """One engine start as the document has it."""
    metrics, failure = start.metrics, start.failure
    return {
        "label": start.label,
        "status": start.status.value if start.status else None,
        "failure": None
        if failure is None
        else {"kind": failure.kind.value, "phase": failure.phase.value, "detail": failure.detail},
        "metrics": {} if metrics is None else dict(metrics.values),
        "intervals_95": {} if metrics is None else {key: list(value) for key, value in metrics.intervals.items()},
        "whole_run": {} if metrics is None else dict(metrics.whole_run),
        "failures": {}
        if metrics is None
        else {kind: {"n": count.n, "first_message": count.first_message} for kind, count in metrics.failures.items()},
        "flags": list(start.flags),
        "directory": start.directory,
    }
