"""Stands in for ``vllm serve``: the same routes and streams, and endings on order (``STUB_SERVE``).

``good``; ``exit`` (at once, with an error in the log); ``silent`` (never listens); ``other`` (serves another model);
``dies`` (after 30 completions); ``broken`` (every page is an HTTP error).
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MANNER = os.environ.get("STUB_SERVE", "good")
WORDS = sys.argv[1:]
COMPLETIONS = [0]


def option(name: str) -> str:
    return WORDS[WORDS.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def answer(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        name = option("--served-model-name") if "--served-model-name" in WORDS else WORDS[1]
        if MANNER == "broken":
            print("AttributeError: module 'framework' has no attribute 'Router'", flush=True)
            self.answer(500, {"error": "Internal Server Error"})
        elif self.path == "/v1/models":
            self.answer(200, {"data": [{"id": "other" if MANNER == "other" else name}]})
        else:
            self.answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        COMPLETIONS[0] += 1
        if MANNER == "dies" and COMPLETIONS[0] > 30:
            print("ERROR EngineCore encountered a fatal error.", flush=True)
            os._exit(3)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        n = request["max_tokens"]
        for i in range(n):
            self.event({"choices": [{"index": 0, "text": "a", "finish_reason": "length" if i == n - 1 else None}]})
        counts = {"prompt_tokens": len(request["prompt"]), "completion_tokens": n}
        self.event({"choices": [], "usage": counts})
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, document: Any) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    print("stub", " ".join(WORDS), flush=True)
    if MANNER == "exit":
        print("ValueError: max_num_batched_tokens (16) is smaller than max_num_seqs (256)", flush=True)
        raise SystemExit(1)
    if MANNER == "silent":
        time.sleep(600)
    Server((option("--host"), int(option("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
