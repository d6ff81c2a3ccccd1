"""A cheap completions server for measuring clients: it streams ready-made chunks in the shape that vLLM sends.

    python stream_server.py [--every SECONDS] [--bundle TOKENS]

It binds 127.0.0.1, prints its port, and serves until its standard input closes. Without ``--every`` it sends as fast as the
client reads; with it each stream gets one chunk every SECONDS, counted from the stream's own first chunk, so that streams
are spread over the interval. Behind the first, each of those holds TOKENS tokens, which only the usage block tells. Each chunk
is an HTTP chunk of its own, as uvicorn sends them. ``GET /ttft`` tells, by prompt, the seconds from a request's last byte to
the write of its first chunk, on the server's own clock.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import gc
import json
import os
import resource
import sys
import time

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST_CHUNK_S = 0.05
BATCH = 64


def framed(payload: bytes) -> bytes:
    """One server-sent event as one HTTP chunk."""
    event = b"data: " + payload + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


def token(text: str, finish_reason: str = "null") -> bytes:
    """One token as vLLM 0.32 streams it for completions."""
    return framed(
        b'{"id":"cmpl-8f3c2b1a90d7465e","object":"text_completion","created":1764000000,"model":"mock",'
        b'"choices":[{"index":0,"text":"'
        + text.encode()
        + b'","logprobs":null,"finish_reason":'
        + finish_reason.encode()
        + b',"stop_reason":null,'
        b'"prompt_token_ids":null,"token_ids":null}]}'
    )


# Texts of many lengths, as a vocabulary has them: JSON and frames differ from token to token.
TEXTS = [" " * (number % 3 > 0) + "abcdefghijklmnopqrstuvwxyz"[: 1 + number % 11] + str(number) for number in range(500)]
TOKENS = [token(text) for text in TEXTS]
BATCHES = [b"".join(TOKENS[at : at + BATCH]) for at in range(0, len(TOKENS) - BATCH, BATCH)]
LAST = token(" end", '"length"')


TTFT: dict[str, float] = {}


def tail(prompt_tokens: int, completion_tokens: int) -> bytes:
    total = prompt_tokens + completion_tokens
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1764000000, "model": "mock", "choices": [], "usage": usage}
    return framed(json.dumps(body, separators=(",", ":")).encode()) + framed(b"[DONE]") + b"0\r\n\r\n"


class Stream(asyncio.Protocol):
    """One connection; requests on it are served one after another."""

    def __init__(self, every_s: float, bundle: int) -> None:
        self.every_s, self.bundle = every_s, bundle
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
            self.task = asyncio.ensure_future(serve(request["prompt"], request["max_tokens"]))
        else:
            models = {"object": "list", "data": [{"id": "mock", "root": "mock", "object": "model"}]}
            answer = json.dumps(TTFT if head.startswith(b"GET /ttft ") else models).encode()
            self.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer
            )

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    async def saturated(self, prompt: list[int], max_tokens: int) -> None:
        self.write(HEAD)
        whole, rest = divmod(max_tokens - 1, BATCH)
        for number in range(whole):
            await self.writable.wait()
            self.write(BATCHES[number % len(BATCHES)])
            await asyncio.sleep(0)
        self.write(b"".join(TOKENS[:rest]) + LAST + tail(len(prompt), max_tokens))

    async def paced(self, prompt: list[int], max_tokens: int) -> None:
        received = time.perf_counter()
        await asyncio.sleep(FIRST_CHUNK_S)
        self.write(HEAD + TOKENS[0])
        TTFT[",".join(map(str, prompt))] = time.perf_counter() - received
        WHEEL.join(Paced(self, -(-(max_tokens - 1) // self.bundle), tail(len(prompt), max_tokens)), self.every_s)


class Paced:
    """A stream under way: the chunks that are left to send of it."""

    def __init__(self, stream: Stream, left: int, end: bytes) -> None:
        self.stream, self.left, self.end = stream, left, end

    def send(self) -> bool:
        """One chunk; whether there are more."""
        self.left -= 1
        if self.left <= 0 or self.stream.transport is None:
            self.stream.write(LAST + self.end)
            return False
        self.stream.transport.write(TOKENS[self.left % len(TOKENS)])
        return True


class Wheel:
    """One timer for all streams: each millisecond it serves those whose turn it is."""

    def __init__(self) -> None:
        self.slots: list[list[Paced]] = []
        self.turn = 0
        self.due = 0.0

    def join(self, paced: Paced, every_s: float) -> None:
        loop = asyncio.get_running_loop()
        if not self.slots:
            self.slots = [[] for _ in range(max(1, round(every_s * 1000)))]
            self.due = loop.time()
            self.spin()
        self.slots[(self.turn - 1) % len(self.slots)].append(paced)  # the slot just served: its turn is one interval away

    def spin(self) -> None:
        loop = asyncio.get_running_loop()
        while self.due <= loop.time():
            slot = self.turn % len(self.slots)
            self.slots[slot] = [paced for paced in self.slots[slot] if paced.send()]
            self.turn += 1
            self.due += 0.001
        loop.call_at(self.due, self.spin)


WHEEL = Wheel()


async def serve(every_s: float, bundle: int) -> None:
    gc.freeze()
    gc.disable()  # a full collection is up to 20 ms in which a client would seem late; little here is in cycles
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stream(every_s, bundle), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    with open(os.devnull, "rb") as some:  # room for descriptors now: later the kernel stops a process to make it
        os.close(fcntl.fcntl(some.fileno(), fcntl.F_DUPFD, min(4095, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)))
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=float, default=0.0)
    parser.add_argument("--bundle", type=int, default=1)
    options = parser.parse_args()
    asyncio.run(serve(options.every, options.bundle))
