"""Standard output and error as a user's machine has them: closed, full, without a reader, or in an encoding without dashes.

Progress is worth less than the search that it tells of, so what standard error refuses is dropped. Standard output carries the
answer: what it refuses is an error with a name and an exit code.
"""

from __future__ import annotations

import codecs
import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

from vopt.optimizer.errors import EnvironmentLacks

SPOKEN = "vopt.spoken"
"""The name of our error handler for ``str.encode``: signs that an encoding lacks become ones that it has."""
_SPOKEN = {
    "–": "-",  # en dash: an undefined figure, a range
    "−": "-",  # minus sign
    "→": "->",
    "…": "...",
    "·": "|",
    "×": "x",
    "█": "#",
    "≥": ">=",
    "≤": "<=",
    "╭": "+",
    "╮": "+",
    "╰": "+",
    "╯": "+",
    "─": "-",
    "│": "|",
    "━": "=",
}


class ReaderGone(Exception):
    """Whoever read standard output has closed it (``| head``)."""

    exit_code = 141
    """128 + SIGPIPE: what a shell sees of any command that ends this way."""


class Output(io.TextIOBase):
    """Standard output. Raises ``ReaderGone`` or ``EnvironmentLacks`` once, and drops everything after that."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lost = stream, False

    def write(self, text: str) -> int:
        if not self._lost:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if not self._lost:
            try:
                self._stream.flush()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self._lost = True
        _point_at_nothing(self._stream)
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from None
        raise EnvironmentLacks(
            f"standard output cannot be written: {error.strerror or error}",
            hint="what was measured is stored: vopt show, or vopt export -o FILE",
        ) from None

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def buffer(self) -> Any:
        return self._stream.buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a read-only property, as of the stream it stands for
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # the same
        return self._stream.errors


class Progress(Output):
    """Standard error: a terminal that went away, or a full disk under a log, ends no search."""

    def _lose(self, error: OSError) -> None:
        self._lost = True
        _point_at_nothing(self._stream)


def secure() -> None:
    """Make this process's standard streams safe to write to. Call it once, first."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Else the next file that is opened, the database for one, gets this number and every print goes into it.
            os.open(os.devnull, os.O_RDWR)
    codecs.register_error(SPOKEN, spoken)
    sys.stdout = Output(_speaking(sys.stdout, 1))
    sys.stderr = Progress(_speaking(sys.stderr, 2))


def spoken(error: UnicodeError) -> tuple[str | bytes, int]:
    """Our error handler: dashes and arrows in ASCII; bytes of a file name as they were; anything else as ``\\u2713``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    said = b""
    for sign in error.object[error.start : error.end]:
        if "\udc80" <= sign <= "\udcff":  # a byte of a name that is not in the file system's encoding
            said += bytes([ord(sign) - 0xDC00])
        else:
            said += _SPOKEN.get(sign, ascii(sign)[1:-1]).encode("ascii")
    return said, error.end


def _speaking(stream: TextIO | None, number: int) -> TextIO:
    if stream is None:  # it was closed when Python started
        stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # lives as long as the process
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=SPOKEN)
    return stream


def _point_at_nothing(stream: TextIO) -> None:
    """What is still buffered goes to the null device: else the interpreter complains of it while it ends."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nothing, stream.fileno())
        finally:
            os.close(nothing)
    except (OSError, ValueError):
        return


def columns() -> int | None:
    """How wide standard output is where a person reads it; ``None`` in a pipe or a file, where nothing is to be folded."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def say(text: str) -> None:
    """To standard output, on a terminal without breaks inside words."""
    from vopt.optimizer.report.blocks import folded

    print(folded(text, columns()))  # noqa: T201  # the command line's own output


def write_text(text: str, output: Path | None) -> None:
    """To standard output, or to a file that only its owner may read. Raises ``EnvironmentLacks``."""
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8", errors="surrogateescape")
        if output.is_file():  # not a device: as root this would take /dev/null from everybody
            output.chmod(0o700 if text.startswith("#!") else 0o600)
    except OSError as error:
        raise EnvironmentLacks(
            f"{output} cannot be written: {error.strerror or error}", hint="-o with a file in a directory that you may write to"
        ) from None
