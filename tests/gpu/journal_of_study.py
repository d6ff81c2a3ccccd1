"""The in-process starts of a stored study as a journal, the form that the benchmark of the simulator reads.

    python tests/gpu/journal_of_study.py sqlite:///gpu-results/studies.db 9b-throughput >qwen3.5-9b-starts.jsonl

Served starts are left out: a simulation has no API server.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import starts

from vopt.optimizer.history import StudyRecord, TrialRecord
from vopt.optimizer.study import read_study

DIGITS = 6
HOST = ("python", "machine", "cpus", "driver")


def header_of(study: StudyRecord) -> dict[str, Any]:
    """What fixed the starts; raises ``ValueError`` for a study without a measured start or with an open loop."""
    setup = study.setup
    plan = next((trial.environment["load_plan"] for trial in study.trials if trial.metrics is not None), None)
    if plan is None or plan["arrivals"] != "closed":
        raise ValueError(f"{study.name} has no closed loop that was measured")
    return {
        "format": "vopt-recorded-table",
        "format_version": 1,
        "model": Path(setup["model"]).name,
        "gpus": setup["gpus"],
        "vllm_version": setup["vllm_version"],
        "simulated": setup["simulated"],
        "fixed": setup["fixed"],
        "workload": setup["workload"],
        "workload_digest": setup["workload_digest"],
        "seed": setup["seed"],
        "levels": [plan["concurrency"]],
        "window_s": plan["window_s"],
        "space": {},
        "environment": {name: setup["environment"][name] for name in HOST if name in setup["environment"]},
    }


def line_of(row: int, trial: TrialRecord) -> dict[str, Any]:
    """One start, figures rounded to what they are worth."""
    failure, metrics, plan = trial.failure, trial.metrics, trial.environment.get("load_plan", {})
    started = {
        "resolved": {name: trial.resolved[name] for name in starts.KEPT if name in trial.resolved},
        "kv_cache_tokens": trial.kv_cache_tokens,
        "kv_cache_bytes": trial.kv_cache_bytes,
        "num_gpu_blocks": trial.resolved.get("num_gpu_blocks"),
        "start_class": trial.start_class,
        "start_parts_s": rounded(trial.start_parts_s),
    }
    load = metrics and {
        "concurrency": plan["concurrency"],
        "status": trial.status,
        "window_s": round(metrics.succeeded / metrics["requests_per_s"], 1)
        if metrics.get("requests_per_s")
        else plan["window_s"],
        "succeeded": metrics.succeeded,
        "failed": metrics.failed,
        "censored": metrics.censored,
        "client_limited": "client_limited" in trial.flags,
        "metrics": rounded(metrics.values),
    }
    return {
        "row": row,
        "start": trial.attempt - 1,
        "label": trial.label,
        "config": trial.config.to_json(),
        "served": False,
        "began_at": trial.began_at,
        "outcome": "measured" if failure is None else "failed",
        "failure": failure and {"phase": failure.phase, "kind": failure.kind, "detail": failure.detail},
        "started": started if trial.start_class is not None else None,
        "phase_s": rounded(trial.phase_s),
        "wall_s": round(sum(trial.phase_s.values()), 3),
        "loads": [load] if load else [],
        "left_behind": [],
    }


def rounded(values: Mapping[Any, float]) -> dict[str, float]:
    return {str(name): float(f"{value:.{DIGITS}g}") for name, value in values.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("storage")
    parser.add_argument("study")
    typed = parser.parse_args(arguments)
    study = read_study(typed.storage, typed.study)
    print(json.dumps(header_of(study), separators=(",", ":")))
    for row, trial in enumerate(trial for trial in study.trials if not trial.served):
        print(json.dumps(line_of(row, trial), separators=(",", ":")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
