"""An OpenAI-compatible server that misbehaves on order: raw asyncio streams on real sockets, no HTTP library.

What it does with a request is a script: bytes to send, seconds to wait, and the ways a connection can end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class End(Enum):
    """How a script leaves its connection. Without one the connection is kept for the next request."""

    CLOSE = "close"
    RESET = "reset"
    HANG = "hang"


Step = bytes | float | End
Script = Sequence[Step]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
GZIP_HEAD = HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(document: Any) -> bytes:
    text = document if isinstance(document, str) else json.dumps(document)
    return chunk(b"data: " + text.encode() + b"\n\n")


def token(text: str = " word", finish_reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, **more}
    return event({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})


def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": fields, "logprobs": None, "finish_reason": finish_reason}
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def usage(completion_tokens: int, prompt_tokens: int = 3, **more: Any) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": 0, **more}
    return event({"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [], "usage": counts})


DONE = event("[DONE]")
ERROR = event({"error": {"message": "the engine broke", "type": "InternalServerError", "code": 500}})


def good(tokens: int, **of_usage: Any) -> list[bytes]:
    """The steps of a normal completions stream, one event a step."""
    return [
        HEAD,
        *(token() for _ in range(tokens - 1)),
        token(finish_reason="length"),
        usage(tokens, **of_usage),
        DONE,
        LAST_CHUNK,
    ]


def status(line: str, body: str = "", *headers: str) -> bytes:
    more = "".join(f"{header}\r\n" for header in headers)
    return f"HTTP/1.1 {line}\r\ncontent-length: {len(body.encode())}\r\n{more}\r\n{body}".encode()


def gzipped(steps: Sequence[bytes]) -> list[bytes]:
    """The same stream with its body compressed, in HTTP chunks that split events anywhere."""
    body = b"".join(step.split(b"\r\n", 1)[1][:-2] for step in steps if step not in (HEAD, LAST_CHUNK))
    packed = gzip.compress(body)
    return [GZIP_HEAD, *(chunk(packed[at : at + 50]) for at in range(0, len(packed), 50)), LAST_CHUNK]


@dataclass
class FaultServer:
    """``answer`` maps (path, JSON body) to a script. ``requests`` are those that arrived, in order."""

    answer: Callable[[str, dict[str, Any]], Script]
    port: int = 0
    scheme: str = "http"
    requests: list[tuple[str, str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    connections: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            with contextlib.suppress(ConnectionError):
                writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        document = json.loads(body) if body else {}
        self.requests.append((method, path, headers, document))
        for step in self.answer(path, document):
            match step:
                case bytes():
                    writer.write(step)
                    await writer.drain()
                case End.CLOSE:
                    return False
                case End.RESET:
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    writer.transport.abort()
                    return False
                case End.HANG:
                    await asyncio.Event().wait()
                case _:
                    await asyncio.sleep(step)
        return True

    def stop(self) -> list[asyncio.Task[None]]:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks


@contextlib.asynccontextmanager
async def serving(
    answer: Callable[[str, dict[str, Any]], Script] | Script, tls: ssl.SSLContext | None = None
) -> AsyncIterator[FaultServer]:
    """A server on a free port of 127.0.0.1 that answers every request with ``answer``, over TLS where a context is given."""
    scripted = answer if callable(answer) else lambda path, document: answer
    faulty = FaultServer(scripted, scheme="http" if tls is None else "https")
    server = await asyncio.start_server(faulty.serve, "127.0.0.1", 0, backlog=2048, ssl=tls)
    faulty.port = server.sockets[0].getsockname()[1]
    try:
        yield faulty
    finally:
        server.close()
        await asyncio.gather(*faulty.stop(), return_exceptions=True)
        await server.wait_closed()
