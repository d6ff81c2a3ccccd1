"""Golden files: what people read, kept under review. ``UPDATE_GOLDEN=1 pytest …`` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"


def check(name: str, text: str) -> None:
    """``text`` is what the golden file says."""
    path = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path} is missing: run with UPDATE_GOLDEN=1, then read it"
    assert text == path.read_text(encoding="utf-8"), f"differs from {path}; UPDATE_GOLDEN=1 accepts it"
