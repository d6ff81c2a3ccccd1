"""``vopt bench`` against a server that speaks TLS: the certificate is checked, and each mismatch is told for what it is.

The authority and the server's key under ``tests/assets/tls`` were made for these tests and are trusted by nobody.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.fault_server import DONE, HEAD, LAST_CHUNK, End, Script, good, serving, token, usage
from support.in_thread import model_server, threaded
from typer.testing import CliRunner, Result

from vopt.objectives.records import RequestFailureKind, RequestRecord
from vopt.optimizer.cli import app
from vopt.optimizer.load.client import HttpEngine
from vopt.optimizer.load.plan import Request
from vopt.optimizer.load.target import parse_target

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "tls"
AUTHORITY = ASSETS / "authority.pem"


def server_side() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ASSETS / "server-for-tests-not-secret.pem")
    return context


def vopt(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "250"})


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("clients", [1, 2])
def test_a_server_whose_authority_is_trusted(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(AUTHORITY))
    words = ("--requests", "24", "--concurrency", "8", "--client-processes", str(clients), "--json")
    with threaded(model_server(), server_side()) as server:
        result = vopt("bench", "--url", server.url, *words)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["completed"], document["failed"]) == (24, 0)
    assert document["vopt"]["environment"]["url"].startswith("https://127.0.0.1:")


def test_an_unknown_authority_is_refused_with_what_to_type() -> None:
    with threaded(model_server(), server_side()) as server:
        result = vopt("bench", "--url", server.url, "--requests", "8")
        metrics = vopt("workload", "--from-metrics", server.url, "--for", "1s")
    for refused in (result, metrics):
        assert refused.exit_code == 3, refused.output
        assert "certificate is not trusted" in refused.stderr
        assert "SSL_CERT_FILE=" in refused.stderr
    assert server.requests == [], "nothing is sent to a server that is not trusted"


def test_a_certificate_for_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(AUTHORITY))
    with threaded(model_server(), server_side()) as server:
        result = vopt("bench", "--url", f"https://localhost:{server.port}", "--requests", "8")
    assert result.exit_code == 3
    assert "not trusted" in result.stderr
    assert "localhost" in result.stderr


@contextmanager
def plain_server() -> Iterator[int]:
    """Answers whatever comes as an HTTP server does that cannot make sense of it; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def test_tls_and_plain_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(AUTHORITY))
    with plain_server() as port:
        plain = vopt("bench", "--url", f"https://127.0.0.1:{port}", "--requests", "8")
    assert plain.exit_code == 3
    assert "does not speak TLS" in plain.stderr
    assert "http://" in plain.stderr
    with threaded(model_server(), server_side()) as server:
        encrypted = vopt("bench", "--url", f"http://127.0.0.1:{server.port}", "--requests", "8")
    assert encrypted.exit_code == 3
    assert "wants https://" in encrypted.stderr


def answered(script: Script, monkeypatch: pytest.MonkeyPatch, *, idle_s: float = 5.0, trusted: bool = True) -> RequestRecord:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(AUTHORITY))

    async def run() -> RequestRecord:
        async with serving(script, server_side()) as server, HttpEngine(parse_target(server.url, "m")) as engine:
            request = Request(index=1, prompt_tokens=3, max_tokens=4, prompt_token_ids=(5, 6, 7), ignore_eos=True)
            return await engine.run(request, origin_s=engine.now(), scheduled_s=0.0, idle_timeout_s=idle_s)

    return asyncio.run(run())


def test_a_stream_over_tls_has_all_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    record = answered(good(4), monkeypatch)
    assert record.failure is None
    assert (record.output_tokens, len(record.chunk_times_s)) == (4, 4)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([HEAD, token(), End.CLOSE], RequestFailureKind.TRUNCATED),
        ([HEAD, token(), End.RESET], RequestFailureKind.CONNECTION),
        ([HEAD, token(), End.HANG], RequestFailureKind.TIMEOUT_IDLE),
        ([HEAD, token(), token(finish_reason="length"), usage(2), DONE, LAST_CHUNK], RequestFailureKind.SHORT_OUTPUT),
    ],
    ids=["closed", "reset", "stalled", "short"],
)
def test_failures_over_tls_have_the_same_kinds(script: Any, kind: RequestFailureKind, monkeypatch: pytest.MonkeyPatch) -> None:
    record = answered(script, monkeypatch, idle_s=0.3)
    assert record.failure is not None
    assert record.failure.kind is kind
    assert record.output_tokens == 0


def test_a_request_to_an_untrusted_server_is_a_connection_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    record = answered(good(4), monkeypatch, trusted=False)
    assert record.failure is not None
    assert record.failure.kind is RequestFailureKind.CONNECTION
    assert "certificate verify failed" in record.failure.message
