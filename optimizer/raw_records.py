"""Raw request records of a start, on disk."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

from vopt.objectives.records import LoadResult, RequestRecord

RECORDS = "records.jsonl.gz"
SECOND_RECORDS = "second-records.jsonl.gz"
"""Those of the open loop that followed the closed one."""

SIMULATED_CHUNKS = 6
"""Chunks kept of a simulated request: its times between first and last token are arithmetic, not observation."""


def drop_last_raw(directory: Path) -> None:
    """Remove the trial process's own copy of the deciding load, which now stands in ``records.jsonl.gz``; probes stay."""
    raw = sorted(directory.glob("records-*.jsonl.gz"), key=lambda path: int(path.name.split("-")[1].split(".")[0]))
    for path in raw[-1:]:
        path.unlink()


def write_records(path: Path, load: LoadResult, most_chunks: int | None = None) -> None:
    """Raw request records as gzip JSON lines, complete or absent: written aside, then renamed.

    ``most_chunks`` joins neighbouring chunks, first one apart, until no record has more.
    """
    aside = path.with_suffix(".part")
    with gzip.open(aside, "wt", encoding="utf-8", compresslevel=1) as lines:
        for record in load.records:
            kept = record if most_chunks is None else _joined(record, most_chunks)
            lines.write(json.dumps(kept.to_json(), separators=(",", ":")) + "\n")
    aside.replace(path)


def _joined(record: RequestRecord, most: int) -> RequestRecord:
    times, tokens = record.chunk_times_s, record.chunk_tokens
    if len(times) <= most:
        return record
    width = -(-(len(times) - 1) // (most - 1))
    ends = [*range(width, len(times) - 1, width), len(times) - 1]
    starts = [1, *(end + 1 for end in ends[:-1])]
    return replace(
        record,
        chunk_times_s=(times[0], *(times[end] for end in ends)),
        chunk_tokens=(tokens[0], *(sum(tokens[start : end + 1]) for start, end in zip(starts, ends, strict=True))),
    )
