"""What a study may be called: its name is a directory, a word on command lines, and part of file names. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vopt.optimizer.errors import UsageError

MOST_BYTES = 120
"""With the endings that exports and records add, below the 255 bytes that file systems take."""
ROOM = 8
"""Of these, for the number behind a name that was made."""
_NAME = re.compile(r"\w[\w.+=@-]*")


def checked_name(name: str) -> str:
    """The name itself. Raises ``UsageError`` when it would need quotes in a shell, or leave the directory of the studies."""
    if _NAME.fullmatch(name) and len(name.encode("utf-8", errors="surrogateescape")) <= MOST_BYTES:
        return name
    shown = name if len(name) <= MOST_BYTES else name[: MOST_BYTES // 2] + "…"
    raise UsageError(
        f"--study {shown!r}: a name is made of letters, digits and . _ + = @ -, begins with a letter or digit, and has at most "
        f"{MOST_BYTES} bytes",
        hint=f"--study {safe_name(name)}",
    )


def safe_name(text: str, most_bytes: int = MOST_BYTES) -> str:
    """The nearest name that a study may have: other characters become ``-``."""
    kept = re.sub(r"-{2,}", "-", re.sub(r"[^\w.+=@-]", "-", text)).strip("-.+=@")
    return kept.encode("utf-8", errors="ignore")[:most_bytes].decode("utf-8", errors="ignore").rstrip("-.+=@") or "study"


def next_name(taken: Collection[str], setup: Mapping[str, Any]) -> str:
    """``<model in lower case>-<goal>-<n>``, the first free n."""
    goal = setup["goal"]
    model = str(setup["model"]).rstrip("/").rsplit("/", 1)[-1].lower()
    stem = safe_name(f"{safe_name(model, 80)}-{goal['name'] if isinstance(goal, Mapping) else goal}", MOST_BYTES - ROOM)
    return next(name for n in range(1, len(taken) + 2) if (name := f"{stem}-{n}") not in taken)


MOST_LISTED = 10


def unknown_study(name: str, matching: Sequence[str], names: Sequence[str]) -> UsageError:
    """What is wrong with a name that is not that of one study: those that it could be, else those most like it, else the
    latest. ``names`` are in order, the latest last."""
    like = matching or difflib.get_close_matches(name, names, n=3) or [other for other in names if name in other]
    shown = list(like or names)[-MOST_LISTED:]
    found = len(like or names)
    more = f" and {found - len(shown)} more" if found > len(shown) else ""
    what = f"{name!r} could be {', '.join(shown)}{more}" if matching else f"{name!r} names no study"
    hint = "one of them in full" if matching else f"studies: {', '.join(shown)}{more}"
    return UsageError(what, hint=f"{hint}   # vopt show --all lists every study")
