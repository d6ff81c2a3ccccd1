"""A cheap completions server for measuring clients: it streams ready-made chunks in the shape that vLLM sends.

    python stream_server.py [--every SECONDS]

It binds 127.0.0.1, prints its port, and serves until its standard input closes. Without ``--every`` it sends as fast as the
client reads; with it each stream gets one chunk every SECONDS, counted from the stream's own first chunk, so that streams
are spread over the interval. Each chunk is an HTTP chunk of its own, as uvicorn sends them. The usage block carries
``server_ttft_s``: from the request's last byte to the write of the first chunk, on the server's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST_CHUNK_S = 0.05
BATCH = 64


def framed(payload: bytes) -> bytes:
    """One server-sent event as one HTTP chunk."""
    event = b"data: " + payload + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


def token(finish_reason: str = "null") -> bytes:
    """One token as vLLM 0.32 streams it for completions."""
    return framed(
        b'{"id":"cmpl-8f3c2b1a90d7465e","object":"text_completion","created":1764000000,"model":"mock",'
        b'"choices":[{"index":0,"text":" tokens","logprobs":null,"finish_reason":'
        + finish_reason.encode()
        + b',"stop_reason":null,'
        b'"prompt_token_ids":null,"token_ids":null}]}'
    )


TOKEN = token()
LAST = token('"length"')


def tail(prompt_tokens: int, completion_tokens: int, server_ttft_s: float) -> bytes:
    usage = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "server_ttft_s": server_ttft_s,
    }
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1764000000, "model": "mock", "choices": [], "usage": usage}
    return framed(json.dumps(body, separators=(",", ":")).encode()) + framed(b"[DONE]") + b"0\r\n\r\n"


class Stream(asyncio.Protocol):
    """One connection; requests on it are served one after another."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.received = bytearray()
        self.writable = asyncio.Event()
        self.writable.set()
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, separator, body = bytes(self.received).partition(b"\r\n\r\n")
        if not separator:
            return
        length = next(
            (int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        if len(body) < length:
            return
        del self.received[: len(head) + 4 + length]
        if head.startswith(b"POST"):
            request = json.loads(body[:length])
            serve = self.paced if self.every_s else self.saturated
            self.task = asyncio.ensure_future(serve(len(request["prompt"]), request["max_tokens"]))
        else:
            answer = json.dumps({"object": "list", "data": [{"id": "mock", "root": "mock", "object": "model"}]}).encode()
            self.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer
            )

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    async def saturated(self, prompt_tokens: int, max_tokens: int) -> None:
        self.write(HEAD)
        batch = TOKEN * BATCH
        whole, rest = divmod(max_tokens - 1, BATCH)
        for _ in range(whole):
            await self.writable.wait()
            self.write(batch)
            await asyncio.sleep(0)
        self.write(TOKEN * rest + LAST + tail(prompt_tokens, max_tokens, 0.0))

    async def paced(self, prompt_tokens: int, max_tokens: int) -> None:
        loop = asyncio.get_running_loop()
        received = time.perf_counter()
        await asyncio.sleep(FIRST_CHUNK_S)
        server_ttft_s = time.perf_counter() - received
        self.write(HEAD + TOKEN)
        done = loop.create_future()
        sent, due = 1, loop.time() + self.every_s

        def send() -> None:
            nonlocal sent, due
            sent += 1
            if sent >= max_tokens or self.transport is None:
                self.write(LAST + tail(prompt_tokens, max_tokens, server_ttft_s))
                done.set_result(None)
                return
            self.write(TOKEN)
            due += self.every_s
            loop.call_at(due, send)

        loop.call_at(due, send)
        await done


async def serve(every_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stream(every_s), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=float, default=0.0)
    asyncio.run(serve(parser.parse_args().every))
