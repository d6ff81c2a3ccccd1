"""A fault server on a thread of its own, for commands that run an event loop themselves."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.fault_server import FaultServer, Script, good, serving, status

Answer = Callable[[str, dict[str, Any]], Script]


@contextmanager
def threaded(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[FaultServer]:
    """``serving(answer, tls)`` until the block ends."""
    ready, found = threading.Event(), []
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def run() -> None:
        async with serving(answer, tls) as server:
            found.append(server)
            ready.set()
            await over.wait()

    def main() -> None:
        loop.run_until_complete(run())
        loop.close()

    thread = threading.Thread(target=main)
    thread.start()
    assert ready.wait(10)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)


def document(value: Any) -> Script:
    return [status("200 OK", json.dumps(value), "content-type: application/json")]


def model_server(
    completion: Callable[[dict[str, Any]], Script] | None = None,
    *,
    models: tuple[str, ...] = ("tiny",),
    version: str | None = "0.32.0",
    owner: str = "vllm",
    pages: Iterator[str] | None = None,
) -> Answer:
    """An OpenAI-compatible server: ``completion`` scripts its answers, ``pages`` are what ``/metrics`` shows one by one."""

    def answer(path: str, body: dict[str, Any]) -> Script:
        if path == "/v1/models":
            return document({"data": [{"id": name, "owned_by": owner, "max_model_len": 8192} for name in models]})
        if path == "/version" and version is not None:
            return document({"version": version})
        if path == "/metrics" and pages is not None:
            return [status("200 OK", next(pages))]
        if path in ("/v1/completions", "/v1/chat/completions") and body:
            return completion(body) if completion else good(body["max_tokens"], prompt_tokens=len(body.get("prompt", "hi")))
        return [status("404 Not Found", "")]

    return answer
