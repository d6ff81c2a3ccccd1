"""JSON lines between the search, the supervisor and the trial process. Standard library only.

A message is one JSON object a line. Bulk data (requests, records) never travels here: it lies in files beside the trial.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vopt.optimizer.load.plan import Arrivals, LoadPlan, Tick

Message = dict[str, Any]


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel:
    """Two pipe ends that carry JSON lines. ``receive`` waits at most so long; the descriptors belong to the channel."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._pending = b""
        self._messages: deque[Message] = deque()
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN | select.POLLHUP)
        self._open = True

    def fileno(self) -> int:
        return self._read_fd

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one message; ``ChannelClosed`` when nobody reads any more."""
        data = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._write_fd, data) :]
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def has_room(self) -> bool:
        """Whether a message of up to 4 KiB can be written without waiting for the reader (``PIPE_BUF``, pipe(7))."""
        poll = select.poll()
        poll.register(self._write_fd, select.POLLOUT)
        return bool(poll.poll(0))

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or ``None`` after ``timeout_s``; ``ChannelClosed`` once all were read and the writer is gone."""
        until = time.monotonic() + timeout_s
        if not self._open:
            raise ChannelClosed("closed at this end")
        while not self._messages:
            left_s = until - time.monotonic()
            if not self._poll.poll(max(0.0, left_s) * 1000):
                return None
            self._read()
        return self._messages.popleft()

    def _read(self) -> None:
        data = os.read(self._read_fd, 1 << 16)
        if not data:
            raise ChannelClosed("end of stream")
        *lines, self._pending = (self._pending + data).split(b"\n")
        self._messages.extend(json.loads(line) for line in lines if line)

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._read_fd)
            if self._write_fd != self._read_fd:
                os.close(self._write_fd)


def plan_to_json(plan: LoadPlan) -> dict[str, Any]:
    return asdict(plan)


def plan_from_json(data: Mapping[str, Any]) -> LoadPlan:
    return LoadPlan(**{**data, "arrivals": Arrivals(data["arrivals"])})


def tick_to_json(tick: Tick) -> dict[str, Any]:
    return asdict(tick)


def tick_from_json(data: Mapping[str, Any]) -> Tick:
    return Tick(**data)
