"""How the starts that an answer rests on were loaded, in one sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vopt.optimizer.report import wording
from vopt.optimizer.report.view import StudyView


def load_said(view: StudyView) -> str:
    """``12.1 requests/s at random times, 0.6 of what the baseline sustained; windows of 40 s, 459 requests counted a start``;
    empty before a start was measured."""
    measured = [trial for trial in view.confirmed or view.searched if trial.metrics and not trial.failure]
    starts = [trial for trial in measured if trial.environment.get("load_plan")]
    if not starts:
        return ""
    plan: Mapping[str, Any] = starts[0].environment["load_plan"]
    counted = [trial.metrics.succeeded + trial.metrics.failed for trial in starts if trial.metrics]
    low, high = min(counted), max(counted)
    requests = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    load = wording.load_words(plan)
    if plan.get("rate"):
        load += f" at random times, the same in every start{_share(plan)}{_other(plan, view.load_plan)}"
    window = f"windows of {wording.duration(plan['window_s'])}, " if plan.get("window_s") else ""
    return "; ".join(filter(None, (load, f"{window}{requests} requests counted a start")))


def _share(plan: Mapping[str, Any]) -> str:
    sustained = plan.get("sustained_per_s")
    return f", {plan['rate'] / sustained:.2g} of what the baseline sustained" if sustained else ""


def _other(plan: Mapping[str, Any], searched: Mapping[str, Any]) -> str:
    """Says it when the served commands did not sustain the rate of the search."""
    if not searched.get("rate") or searched["rate"] == plan["rate"]:
        return ""
    return f" (in the search {searched['rate']:.3g}, at which the served baseline's queue grew)"
