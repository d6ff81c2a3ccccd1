"""Raw request records as they lie on disk: gzip JSON lines in the directory of an engine start."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from vopt.objectives.records import RequestRecord
from vopt.optimizer.history import TrialRecord

RECORDS = "records.jsonl.gz"
LOG = "engine.log"


def read_records(directory: Path) -> tuple[RequestRecord, ...]:
    """The records of one start; none when it left none, or when a crash cut the file off (what is whole is given)."""
    path = directory / RECORDS
    if not path.is_file():
        return ()
    rows: list[RequestRecord] = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows.extend(RequestRecord.from_json(json.loads(line)) for line in lines)
    except (EOFError, OSError, ValueError, KeyError, TypeError):
        return tuple(rows)
    return tuple(rows)


def records_of(trials: Iterable[TrialRecord]) -> dict[str, tuple[RequestRecord, ...]]:
    """Records by engine start, of those that left any."""
    found = ((trial.label, read_records(Path(trial.directory))) for trial in trials if trial.directory)
    return {label: rows for label, rows in found if rows}
