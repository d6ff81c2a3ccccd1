"""The file of ``vopt bench --records``, read again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from vopt.objectives.records import RequestRecord


def read_records(path: Path) -> tuple[RequestRecord, ...]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return tuple(RequestRecord.from_json(json.loads(line)) for line in lines)
