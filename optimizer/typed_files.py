"""Files that a user names: read whole, so only what has an end is read."""

from __future__ import annotations

from pathlib import Path

from vopt.optimizer.errors import UsageError

SMALL_BYTES = 16 * 2**20
"""A command, a key, a search space: far below."""


def read_typed(path: Path, what: str, *, most_bytes: int | None = SMALL_BYTES, hint: str = "") -> str:
    """The text of a file that was typed for ``what`` (an option, for the message).

    A pipe may stand for a file (``<(command)``); a device may not: ``/dev/zero`` ends when the memory does.

    Raises:
        UsageError: it is absent, no file, larger than ``most_bytes``, or no UTF-8 text.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_fifo()):
            raise UsageError(f"{what} {path}: {'a directory' if path.is_dir() else 'a device'}, not a file", hint=hint)
        with path.open("rb") as file:
            content = file.read() if most_bytes is None else file.read(most_bytes + 1)
        if most_bytes is not None and len(content) > most_bytes:
            raise UsageError(f"{what} {path}: larger than {most_bytes // 2**20} MiB, so not what it is read as", hint=hint)
        return content.decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror or error}", hint=hint) from None
    except ValueError as error:  # no UTF-8, or a path with a null character
        raise UsageError(f"{what} {path}: {error}", hint=hint) from None
