"""Raw request records of a start, on disk."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from vopt.objectives.records import LoadResult

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
    encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder for every record
    with gzip.open(aside, "wt", encoding="utf-8", compresslevel=1) as lines:
        for record in load.records:
            row = record.to_json()
            if most_chunks is not None:
                row |= _joined(record.chunk_times_s, record.chunk_tokens, most_chunks)
            lines.write(encode(row) + "\n")
    aside.replace(path)


def _joined(times: tuple[float, ...], tokens: tuple[int, ...], most: int) -> dict[str, tuple[float, ...] | tuple[int, ...]]:
    """The chunks of a record's row, at most ``most`` of them: the first as it is, then as many as needed in one."""
    if len(times) <= most:
        return {}
    width = -(-(len(times) - 1) // (most - 1))
    return {
        "chunk_times_s": (times[0], *times[width:-1:width], times[-1]),
        "chunk_tokens": (tokens[0], *[sum(tokens[start : start + width]) for start in range(1, len(times), width)]),
    }
