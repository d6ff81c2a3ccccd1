"""The plan of a search as text: phases, engine starts, times. Pure."""

from __future__ import annotations

from vopt.optimizer.report.blocks import Column, TableMaker, plain_text
from vopt.optimizer.report.wording import duration
from vopt.optimizer.schedule import Plan


def plan_text(plan: Plan) -> str:
    """One row a phase, the sum, and what was reduced to fit the budget."""
    table = TableMaker(
        "Plan", (Column("Phase"), Column("Starts", right=True), Column("Expected", right=True), Column("What", wide=True))
    )
    for phase in plan.phases:
        table.add(phase.stage, str(phase.starts), duration(phase.expected_s), phase.detail)
    table.add("in all", str(plan.starts), duration(plan.expected_s), "")
    notes = "".join(f"\n{note}" for note in plan.notes)
    return plain_text([table.done()]).rstrip() + notes
