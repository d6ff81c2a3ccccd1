"""The ``--json`` document of an answer: versioned, for programs. Pure.

Format history (``FORMAT_VERSION``):
1 - first.
"""

from __future__ import annotations

import shlex
from typing import Any

from vopt.optimizer.history import TrialRecord
from vopt.optimizer.recommend import Gain, Override, Verdict
from vopt.optimizer.report.raw import LOG, RECORDS
from vopt.optimizer.report.shell import exported_variables
from vopt.optimizer.report.view import Spread, StudyView

FORMAT_VERSION = 1


def answer_document(view: StudyView) -> dict[str, Any]:
    """The answer of one study. ``verdict`` is ``None`` while the search runs; ``winner`` is ``None`` without a gain, and
    ``command`` and ``argv`` are ``None`` only when nothing is feasible or nothing is known yet. Times are in seconds,
    ratios 0-1, ``gain.ratio`` above 1 is better whatever the direction of the goal's metric."""
    answer = view.answer
    argv = list(answer.argv) if answer and answer.argv is not None else None
    return {
        "format_version": FORMAT_VERSION,
        "study": view.name,
        "created_at": view.record.created_at,
        "simulated": view.simulated,
        "goal": str(view.goal.get("name", "")),
        "metric": view.metric,
        "direction": "maximize" if view.maximize else "minimize",
        "limits": list(view.goal.get("limits", ())),
        "slos": dict(view.goal.get("slos") or {}),
        "verdict": str(answer.verdict) if answer else None,
        "reason": answer.reason if answer else "",
        "command": shlex.join(argv) if argv is not None else None,
        "argv": argv,
        "variables": exported_variables(view) if argv is not None else {},
        "baseline": _baseline(view),
        "winner": _winner(view),
        "gain": _gain(answer.gain) if answer else None,
        "stated_acceptance": view.stated_length,
        **_several_goals(view),
        "overrides": [_override(row) for row in answer.overrides] if answer else [],
        "rejected": [
            {"trial": row.label, "engine_config": row.config.to_json(), "kind": row.kind, "reason": row.reason}
            for row in (answer.rejected if answer else ())
        ],
        "success": {"failed": s.failed, "n": s.n, "upper_failure_share": s.upper_failure_share}
        if answer and (s := answer.success)
        else None,
        "soak": answer.soak if answer else "",
        "below_defaults": list(view.below_defaults()),
        "notes": list(view.notes),
        "trials": dict(answer.trials) if answer else {},
        "model": view.model,
        "model_revision": view.setup.get("model_revision"),
        "gpus": list(view.gpus),
        "workload": view.setup.get("workload"),
        "workload_digest": view.setup.get("workload_digest"),
        "space_digest": view.setup.get("space_digest"),
        "seed": view.setup.get("seed"),
        "environment": view.setup.get("environment") or {},
    }


def study_document(view: StudyView) -> dict[str, Any]:
    """The answer with every engine start and the comparison over starts: what ``vopt show STUDY --json`` prints."""
    return answer_document(view) | {
        "comparison": [
            {"metric": row.metric, "baseline": _spread(row.baseline), "winner": _spread(row.winner), "change": row.change}
            for row in view.compared()
        ],
        "compared_with": view.challenger,
        "load_plan": dict(view.load_plan),
        "second_load_plan": dict(view.second_load_plan) or None,
        "phase_s": {str(phase): seconds for phase, seconds in view.phase_totals().items()},
        "starts": [_start(view, trial) for trial in view.trials],
    }


def list_document(views: list[StudyView]) -> dict[str, Any]:
    """All studies in short: what ``vopt show --json`` prints."""
    return {
        "format_version": FORMAT_VERSION,
        "studies": [
            {
                "study": view.name,
                "created_at": view.record.created_at,
                "simulated": view.simulated,
                "goal": str(view.goal.get("name", "")),
                "model": view.model,
                "verdict": str(view.verdict) if view.verdict else None,
                "gain": _gain(view.answer.gain) if view.answer else None,
                "starts": len(view.trials),
            }
            for view in views
        ],
    }


def _baseline(view: StudyView) -> dict[str, Any]:
    answer = view.answer
    first = next((trial for trial in view.searched if trial.metrics), None)
    argv = answer.baseline_argv if answer else view.setup.get("baseline_argv") or ()
    metrics = answer.baseline_metrics if answer else first.metrics.values if first and first.metrics else {}
    repair = answer.repair if answer else None
    repaired = {"engine_config": repair.changes.to_json(), "reason": repair.reason} if repair else None
    breaks = (answer.baseline_breaks or None) if answer else None
    return {"argv": list(argv), "metrics": dict(metrics), "repaired": repaired, "breaks": breaks}


def _winner(view: StudyView) -> dict[str, Any] | None:
    answer = view.answer
    if answer is None or answer.winner_config is None or answer.verdict in (Verdict.NO_GAIN, Verdict.NOTHING_FEASIBLE):
        return None
    return {
        "trial": answer.winner_label,
        "engine_config": answer.winner_config.to_json(),
        "metrics": dict(answer.winner_metrics),
    }


def _gain(gain: Gain | None) -> dict[str, Any] | None:
    if gain is None:
        return None
    return {"ratio": gain.ratio, "low": gain.low, "high": gain.high, "smallest_visible": gain.smallest_visible}


def _several_goals(view: StudyView) -> dict[str, Any]:
    """Of several goals: the front, each member with the figure of every goal, and what is said of each goal on its own."""
    answer = view.answer
    if not view.goal.get("objectives"):
        return {}
    return {
        "objectives": list(view.goal["objectives"]),
        "front": [
            {
                "trial": member.label,
                "engine_config": member.config.to_json(),
                "metrics": dict(member.values),
                "knee": member.knee,
                "baseline": member.baseline,
            }
            for member in (answer.front if answer else ())
        ],
        "goals": [
            {"goal": one.name, "metric": one.metric, "verdict": one.verdict, "gain": _gain(one.gain)}
            for one in (answer.goals if answer else ())
        ],
    }


def _override(row: Override) -> dict[str, Any]:
    return {"name": row.name, "value": row.value, "kept": row.kept, "reason": row.reason, "worth": _gain(row.worth)}


def _spread(spread: Spread | None) -> dict[str, Any] | None:
    return {"mean": spread.mean, "low": spread.low, "high": spread.high, "starts": spread.starts} if spread else None


def _evidence(view: StudyView, trial: TrialRecord) -> dict[str, str | None] | None:
    if not trial.directory:
        return None
    log = None if view.simulated else f"{trial.directory}/{LOG}"  # a simulated engine writes none
    return {"records": f"{trial.directory}/{RECORDS}", "log": log}


def _start(view: StudyView, trial: TrialRecord) -> dict[str, Any]:
    excluded = view.why_not(trial)
    return {
        "trial": trial.label,
        "stage": str(trial.stage),
        "arm": str(trial.arm) if trial.arm else None,
        "engine_config": trial.config.to_json(),
        "argv": list(trial.argv),
        "status": str(trial.status) if trial.status else None,
        "value": view.value(trial),
        "feasible": view.feasible(trial),
        "kind": excluded[0] if excluded else None,
        "reason": excluded[1] if excluded else "",
        "metrics": dict(trial.metrics.values) if trial.metrics else None,
        "phase_s": {str(phase): seconds for phase, seconds in trial.phase_s.items()},
        "start_class": str(trial.start_class) if trial.start_class else None,
        "began_at": trial.began_at,
        "served": trial.served,
        "kv_cache_tokens": trial.kv_cache_tokens,
        "environment": dict(trial.environment),
        "directory": trial.directory,
        "evidence": _evidence(view, trial),
    }
