"""Command lines in what vopt says: where a study does not lie in the default place, the line to type says where it lies."""

from __future__ import annotations

import re
import shlex

USUAL = "sqlite:///studies.db"
"""Where every verb looks that is told of no other storage."""
_LINE = re.compile(r"\bvopt (?:resume|show|export|report|bench --study) \w[\w.+=@-]*(?<!\.)(?![^\n]*--storage)")


def with_storage(text: str, storage: str) -> str:
    """``text`` with ``--storage`` behind each line that names a study: typed as it stands, it has to find that study."""
    if storage == USUAL:
        return text
    return _LINE.sub(lambda line: f"{line[0]} --storage {shlex.quote(storage)}", text)
