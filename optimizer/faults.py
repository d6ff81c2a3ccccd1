"""What ends a command, in the form of an expected error: an interruption, a refused file, and a fault of our own."""

from __future__ import annotations

import os
import tempfile
import traceback

from vopt.optimizer.errors import EnvironmentLacks, Interrupted, Unforeseen, VoptError
from vopt.optimizer.interruption import was_interrupted
from vopt.optimizer.secrecy import clean_text, known_secrets


def ending(error: Exception | KeyboardInterrupt) -> VoptError:
    """What a command says of the exception that ended it, and the exit code."""
    if isinstance(error, Interrupted):
        return error
    if was_interrupted(error):
        return Interrupted("interrupted")
    match error:
        case VoptError():
            return error
        case OSError():
            return refused(error)
        case _:
            return unforeseen(error)


def refused(error: OSError) -> EnvironmentLacks:
    """A file, directory or socket that the system refused, by its name."""
    what = f"{error.filename}: " if error.filename is not None else ""
    return EnvironmentLacks(
        f"{what}{error.strerror or error}", hint="another path, or the rights and the room that this one needs; then again"
    )


def unforeseen(error: BaseException) -> Unforeseen:
    """An error that should not be possible: said in one line, its traceback kept in a file of the user's own."""
    secrets = known_secrets(os.environ)
    said = clean_text(f"{type(error).__name__}: {error}", secrets)
    try:
        number, path = tempfile.mkstemp(prefix="vopt-fault-", suffix=".txt")
        with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(clean_text("".join(traceback.format_exception(error)), secrets))
    except OSError:
        path = ""
    where = f" with {path}" if path else ""
    return Unforeseen(
        f"a fault of vopt itself: {said}",
        hint=f"vopt resume goes on with a search that was stopped by it; please report it{where}",
    )
