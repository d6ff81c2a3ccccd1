"""A model's weights in the page cache before an engine asks for them: read while vLLM is being imported, never beside a load.

vLLM maps safetensors files and touches them page by page (its default ``safetensors_load_strategy``, 0.20 to 0.33), so what is
not in the page cache is fetched in small reads, one after the other, while the engine waits. Reading ahead changes nothing in
the engine: the same loader finds the same bytes sooner. ``posix_fadvise`` would not do: the kernel cuts each piece of advice to
the device's read-ahead window (``force_page_cache_ra`` in ``mm/readahead.c``), so the files are read.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vopt.optimizer.room import available_memory_bytes

BLOCK_BYTES = 8 << 20
PROBE_BYTES = 256 << 10
READERS = 4
MOST_OF_MEMORY = 0.8
"""Of what is available: a cache that pushes itself out again helps nobody (vLLM's own prefetch, off by default on local disks,
stops at 90 %)."""
READS_FILES = (None, "auto", "hf", "safetensors")
"""Values of ``load_format`` that read through the page cache; dummy weights need nothing, other loaders have their own way."""


def weight_files(model: str, arguments: Mapping[str, Any]) -> tuple[Path, ...]:
    """The files that vLLM will read for this model, in its order; empty when it is no local directory or nothing is read."""
    directory = Path(model)
    if arguments.get("load_format") not in READS_FILES or not directory.is_dir():
        return ()
    found = sorted(directory.glob("*.safetensors"))
    if len(found) > 1:  # both layouts of one checkpoint: vLLM takes the one that the index names
        found = [path for path in found if not path.name.startswith("consolidated")] or found
    return tuple(found)


@dataclass(slots=True)
class Ahead:
    """What one reading found and did: bytes of all files, bytes that were missing in the cache, seconds that it took."""

    total_bytes: int = 0
    read_bytes: int = 0
    took_s: float = 0.0


class Readahead:
    """Reads missing pages of some files on threads of its own, until it is done or told to stop. Never raises: a file that
    cannot be read is the engine's to complain about."""

    def __init__(self, files: Sequence[Path], *, available_bytes: int | None = None) -> None:
        self.ahead = Ahead()
        self._stopped = False
        self._taking = threading.Lock()
        self._thread: threading.Thread | None = None
        available = available_memory_bytes() if available_bytes is None else available_bytes
        total = sum(map(_size, files))
        if total and available is not None and total <= available * MOST_OF_MEMORY:
            self.ahead.total_bytes = total
            self._thread = threading.Thread(target=self._run, args=(tuple(files),), name="vopt-readahead", daemon=True)
            self._thread.start()

    def _run(self, files: Sequence[Path]) -> None:
        with contextlib.ExitStack() as stack:
            began_s = time.monotonic()
            blocks = _blocks(files, stack)
            readers = [threading.Thread(target=self._read, args=(blocks, began_s), daemon=True) for _ in range(READERS)]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()

    def _read(self, blocks: Iterator[tuple[int, int, int]], began_s: float) -> None:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        while True:
            with self._taking:
                block = None if self._stopped else next(blocks, None)
            if block is None:
                return
            fd, offset, length = block
            with contextlib.suppress(OSError):
                got = os.preadv(fd, [buffer[:length]], offset)
                with self._taking:
                    self.ahead.read_bytes += got
                    self.ahead.took_s = time.monotonic() - began_s

    def settle(self) -> Ahead:
        """Stop, wait until the reads under way are over, and say what was done. Idempotent."""
        with self._taking:
            self._stopped = True
        return self.wait()

    def wait(self) -> Ahead:
        """Let it come to its end."""
        if self._thread is not None:
            self._thread.join()
        return self.ahead


def _blocks(files: Sequence[Path], stack: contextlib.ExitStack) -> Iterator[tuple[int, int, int]]:
    """(open file, offset, length) of what is to be read; the files stay open until ``stack`` is left."""
    for path in files:
        with contextlib.suppress(OSError):
            file = stack.enter_context(path.open("rb", buffering=0))
            for offset, length in missing(file.fileno()):
                yield file.fileno(), offset, length


def missing(fd: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the file's blocks that are not wholly in the page cache, asked as the iteration goes on. A block is
    looked at in steps of ``PROBE_BYTES``: what is evicted goes in runs that are longer."""
    size = os.fstat(fd).st_size
    for offset in range(0, size, BLOCK_BYTES):
        length = min(BLOCK_BYTES, size - offset)
        if not all(_resident(fd, at) for at in (*range(offset, offset + length, PROBE_BYTES), offset + length - 1)):
            yield offset, length


def _resident(fd: int, offset: int) -> bool:
    """Whether a byte can be had without waiting for the disk (``RWF_NOWAIT``, Linux 4.14); ``False`` where nobody can say.
    ``mincore`` would answer for the owner of a file alone."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
