"""An engine's output on its way to the log: bounded, redacted, and never able to block the engine.

The engine writes straight into an unnamed-to-others file in the trial's private directory; nothing has to keep up with it.
The supervisor reads that file at its leisure, strikes secrets out, appends to the log, and gives the disk space back.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from vopt.optimizer.secrecy import clean_text, known_secrets, url_passwords

CHUNK_BYTES = 1 << 20
MOST_BEHIND_BYTES = 32 << 20
GIVE_BACK_BYTES = 4 << 20
LONGEST_LINE_BYTES = 1 << 16
FALLOC_FL_PUNCH_HOLE_KEEP_SIZE = 0x03  # <linux/falloc.h>

SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|glpat-[\w-]{16,})"
    r"|(?P<before>(?:api[_-]key|hf[_-]token|access[_-]token|password|Authorization: Bearer)['\"]?\s*[=:]?\s*\[?['\"]?)"
    r"(?!None\b|null\b)(?P<value>[^\s'\",\])}]{6,})",
    re.IGNORECASE,
)
STRUCK = "[struck out]"


def secrets_in(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values of variables that are secret by their names, and what is secret in the others (a password in a URL); longest
    first, so that none hides inside another."""
    found = {value for name, value in environment.items() if SECRET_NAME.search(name) and len(value) >= 8}
    found |= {value for value in known_secrets(environment) if len(value) >= 8}
    found |= {secret for value in environment.values() for secret in url_passwords(value) if len(secret) >= 8}
    return tuple(sorted(found, key=len, reverse=True))


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` with known secrets and whatever looks like a token, key or password struck out."""
    for secret in secrets:
        text = text.replace(secret, STRUCK)
    return clean_text(_SECRET_TEXT.sub(lambda match: (match["before"] or "") + STRUCK, text), mark=STRUCK)


class Drain:
    """From the raw output file to the log. ``step`` is cheap and is called a few times a second.

    The log never exceeds ``cap_bytes``: its first and last quarters stay, a line between them says how much is missing.
    """

    def __init__(self, raw_fd: int, log: Path, *, cap_bytes: int, secrets: tuple[str, ...] = ()) -> None:
        self._raw_fd, self._log, self._cap_bytes, self._secrets = raw_fd, log, cap_bytes, secrets
        self._offset = self._given_back = 0
        self._pending = b""
        self._out_fd = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        self._size = os.fstat(self._out_fd).st_size

    def step(self, *, final: bool = False) -> None:
        """Move what has arrived. ``final``: also a last line without its end."""
        end = os.fstat(self._raw_fd).st_size
        if end - self._offset > MOST_BEHIND_BYTES:
            self._read(self._offset + CHUNK_BYTES)
            skipped = end - self._offset - CHUNK_BYTES
            self._offset += skipped
            self._pending += f"\n[{skipped} bytes left out: more output than could be kept]\n".encode()
        self._read(end)
        if final and self._pending:
            self._write(self._pending + b"\n")
            self._pending = b""
        self._give_back()

    def follow(self, log: Path) -> None:
        """The log was renamed; the open file is the same."""
        self._log = log

    def _read(self, end: int) -> None:
        while self._offset < end:
            data = os.pread(self._raw_fd, min(CHUNK_BYTES, end - self._offset), self._offset)
            if not data:
                return
            self._offset += len(data)
            self._take(data)

    def _take(self, data: bytes) -> None:
        whole, newline, rest = (self._pending + data).rpartition(b"\n")
        if newline:
            self._write(whole + b"\n")
        self._pending = rest
        if len(rest) > LONGEST_LINE_BYTES:
            self._write(rest + b"\n")
            self._pending = b""

    def _write(self, lines: bytes) -> None:
        data = redact(lines.decode(errors="replace"), self._secrets).encode(errors="replace")
        with contextlib.suppress(OSError):  # a full disk must not end the trial by its log
            self._size += os.write(self._out_fd, data)
            if self._size > self._cap_bytes:
                self._shorten()

    def _shorten(self) -> None:
        quarter = self._cap_bytes // 4
        with self._log.open("rb") as log:
            head = log.read(quarter).rpartition(b"\n")[0]
            log.seek(-quarter, os.SEEK_END)
            tail = log.read().partition(b"\n")[2]
        missing = self._size - len(head) - len(tail)
        shorter = self._log.with_suffix(".shorter")
        shorter.write_bytes(head + f"\n[{missing} bytes left out here]\n".encode() + tail)
        shorter.chmod(0o600)
        os.replace(shorter, self._log)
        os.close(self._out_fd)
        self._out_fd = os.open(self._log, os.O_APPEND | os.O_WRONLY)
        self._size = os.fstat(self._out_fd).st_size

    def _give_back(self) -> None:
        """Free the disk blocks of what was read; where the file system cannot punch holes, they wait for the trial's end."""
        if self._offset - self._given_back >= GIVE_BACK_BYTES:
            _LIBC.fallocate(
                self._raw_fd,
                FALLOC_FL_PUNCH_HOLE_KEEP_SIZE,
                ctypes.c_long(self._given_back),
                ctypes.c_long(self._offset - self._given_back),
            )
            self._given_back = self._offset

    def close(self) -> None:
        self.step(final=True)
        os.close(self._out_fd)


_LIBC = ctypes.CDLL(None, use_errno=True)
