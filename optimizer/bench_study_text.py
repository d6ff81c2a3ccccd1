"""What ``vopt bench --study`` says, from its document. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vopt.optimizer.command import shell_line
from vopt.optimizer.report.blocks import Block, Code, Column, Facts, Line, Table, TableMaker, plain_text
from vopt.optimizer.report.wording import NONE, change_text, metric_label, metric_text, one_line, plural

_SHOWN = ("tokens_per_s", "requests_per_s", "goodput_per_s", "mean_e2e_s", "p95_ttft_s", "p95_tpot_s", "success_rate")


def study_text(document: Mapping[str, Any]) -> str:
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
    return plain_text(blocks).rstrip("\n")


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    alternative = next(name for name in document["arms"] if name != document["recommended"])
    against = f"{document['recommended']} against {alternative}"
    then, now = document["gain_then"], document["gain"]
    rows = [("Then", f"{against}: {change_text(then['ratio'])}" if then else NONE)]
    if now is not None:
        starts = " and ".join(map(str, now["starts"]))
        spread = (
            f"94 % interval {change_text(now['low'])} to {change_text(now['high'])}"
            if now["low"] is not None
            else "no interval from one start each: --repeat 3 gives one"
        )
        rows.append(("Now", f"{against}: {change_text(now['ratio'])} ({spread}; {starts} starts)"))
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
            table.add(metric_label(metric), *cells)
    return table.done()
