"""One engine start's result on disk and fitted into a database row; how a start that was asked for is written down."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vopt.optimizer.history import Arm, Stage, TrialRecord, TrialRequest
from vopt.optimizer.trial import EngineConfig

MOST_RECORD_BYTES = 60_000  # a MySQL TEXT column holds 64 KiB
RESULT = "result.json"
SHOWN_METRICS = ("success_rate",)  # each attribute is a transaction; the dashboard adds the rest to its copy
"""Metrics that are attributes of their own, for sorting in a dashboard; each costs a transaction. All are in ``record``."""


def write_result(directory: Path, record: TrialRecord) -> None:
    """Write a start's result so that it is either whole or absent after a power cut."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = directory / (RESULT + ".part")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(record.to_json(), file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(directory / RESULT)
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_result(directory: Path) -> TrialRecord | None:
    """The result of a start; ``None`` when it is absent or damaged (then the start is simply made again)."""
    try:
        return TrialRecord.from_json(json.loads((directory / RESULT).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fitted(record: TrialRecord) -> dict[str, Any]:
    """The record as JSON within ``MOST_RECORD_BYTES``: what is long and also on disk goes first."""
    data = record.to_json()
    for field, shorter in (("token_curve", []), ("resolved", {}), ("start_parts_s", {}), ("environment", {}), ("argv", [])):
        if len(json.dumps(data)) <= MOST_RECORD_BYTES:
            return data
        if field == "token_curve" and data["failure"]:
            data["failure"]["log_tail"] = [line[:500] for line in data["failure"]["log_tail"][-20:]]
        data[field] = shorter
    return data


def request_json(request: TrialRequest) -> dict[str, Any]:
    return {
        "label": request.label,
        "config": request.config.to_json(),
        "stage": str(request.stage),
        "arm": str(request.arm) if request.arm else None,
        "attempt": request.attempt,
        "incumbent_curve": [round(value, 1) for value in request.incumbent_curve] if request.incumbent_curve else None,
    }


def request_of(data: Mapping[str, Any]) -> TrialRequest:
    curve = data["incumbent_curve"]
    return TrialRequest(
        label=data["label"],
        config=EngineConfig(data["config"]),
        stage=Stage(data["stage"]),
        arm=Arm(data["arm"]) if data["arm"] else None,
        attempt=data["attempt"],
        incumbent_curve=tuple(curve) if curve else None,
    )


def shown(record: TrialRecord) -> dict[str, Any]:
    """What people sort by in a dashboard: a few flat figures beside the record (each attribute is a transaction)."""
    flat: dict[str, Any] = {"status": str(record.status) if record.status else "failed"}
    if record.failure:
        flat["failure"] = f"{record.failure.kind}: {record.failure.detail}"[:500]
    if record.metrics:
        flat |= {name: value for name, value in record.metrics.values.items() if name in SHOWN_METRICS}
    return flat


def where_it_lies(record: TrialRecord, directory: Path) -> TrialRecord:
    """The same start with the directory of its evidence as it is now, should the study have been moved or copied since."""
    here = directory / Path(record.directory).name
    return replace(record, directory=str(here)) if record.directory and here.is_dir() else record
