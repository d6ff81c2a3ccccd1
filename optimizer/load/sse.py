"""Server-sent events, incrementally and purely: bytes in, the data of whole events out.

Grammar: the HTML standard's "9.2.6 Interpreting an event stream". Lines end with LF, CR or CRLF; a leading byte order mark
is dropped; a line that begins with a colon is a comment; the data lines of one event are joined with LF; an event without
data is nothing. Ids, retry times and event names are read over, for streams of OpenAI-compatible servers put all meaning in
the data; but an event that is named ``error`` is delivered as an error object, whatever form its data has. One deviation, on
purpose: an event that the end of the stream cuts off before its empty line is delivered by
:meth:`SseParser.close`, because a server that ends with ``data: [DONE]`` and no line end did end.
"""

from __future__ import annotations

import json

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseParser:
    """The state between two reads of one stream. However the stream is split, the events are the same.

    ``clean``: the next byte begins an event, and nothing is held back.
    """

    __slots__ = ("_begun", "_data", "_is_error", "_pending", "_pending_parts", "_skip_lf", "clean")

    def __init__(self) -> None:
        self._begun = False
        self.clean = False
        self._pending = b""  # of a line that has not ended
        self._pending_parts: list[bytes] = []  # its earlier pieces: a line of n reads costs n, not n squared
        self._data: list[bytes] = []  # data lines of an event that has not ended
        self._is_error = False  # the event that has not ended is named so
        self._skip_lf = False  # the last byte was CR, so an LF now belongs to it

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that ``chunk`` completes, in order."""
        # What servers send is LF only and "data: ..." only. Split there and count line ends: if each event has its two and
        # no other, no line was overlooked.
        if self.clean and chunk.startswith(b"data: ") and b"\r" not in chunk:
            if chunk.endswith(b"\n\n"):
                events = chunk[6:-2].split(b"\n\ndata: ")
                if chunk.count(b"\n") == 2 * len(events):
                    return events
            else:
                whole, separator, rest = chunk.rpartition(b"\n\n")
                events = whole[6:].split(b"\n\ndata: ")
                if separator and whole.count(b"\n") == 2 * len(events) - 2:
                    return events + self._feed_any(rest)
        elif not self.clean and self._begun and not self._data and b"\n\n" in chunk:
            end = chunk.index(b"\n\n") + 2  # the rest of one event, and behind it whole ones
            events = self._feed_any(chunk[:end])
            return events + self.feed(chunk[end:]) if end < len(chunk) else events
        return self._feed_any(chunk)

    def close(self) -> list[bytes]:
        """The event that the end of the stream cut off before its empty line, if it had data."""
        self._begun = True
        events = self._feed_any(b"\n\n") if self._pending or self._pending_parts or self._data else []
        self._skip_lf = False
        return events

    def _feed_any(self, chunk: bytes) -> list[bytes]:
        events = self._lines(chunk)
        held = self._pending or self._pending_parts or self._data or self._is_error or self._skip_lf
        self.clean = self._begun and not held
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        if not self._begun:
            chunk = self._begin(chunk)
            if not self._begun:
                return []
        if self._skip_lf and chunk:
            self._skip_lf = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        if not chunk:
            return []
        if b"\r" in chunk:
            self._skip_lf = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *lines = chunk.split(b"\n")
        if not lines:
            self._pending_parts.append(first)
            return []
        lines.insert(0, b"".join((self._pending, *self._pending_parts, first)))
        self._pending_parts.clear()
        self._pending = lines.pop()
        events: list[bytes] = []
        for line in lines:
            self._line(line, events)
        return events

    def _begin(self, chunk: bytes) -> bytes:
        """Drop a byte order mark; until three bytes are here nobody can tell."""
        chunk = self._pending + chunk
        if len(chunk) < len(BYTE_ORDER_MARK) and BYTE_ORDER_MARK.startswith(chunk):
            self._pending = chunk
            return b""
        self._pending = b""
        self._begun = True
        return chunk.removeprefix(BYTE_ORDER_MARK)

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                data = b"\n".join(self._data)
                events.append(_error_object(data) if self._is_error else data)
                self._data.clear()
            self._is_error = False
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"event":
            self._is_error = value.removeprefix(b" ") == b"error"


def _error_object(data: bytes) -> bytes:
    """The data of an event named ``error`` as a document with an ``error``."""
    try:
        said = json.loads(data)
    except ValueError:
        said = data.decode("utf-8", "replace")
    if isinstance(said, dict) and said.get("error"):
        return data
    return json.dumps({"error": said or "an event named error, without words"}).encode()
