"""What stands between a browser and optuna-dashboard: reading from this machine passes, the rest is refused. Pure WSGI."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

Start = Callable[..., Any]
WsgiApp = Callable[[dict[str, Any], Start], Iterable[bytes]]

_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
_READING = frozenset({"GET", "HEAD"})
_STUDY = re.compile(r"/api/studies/\d+/?")


class Guard:
    """Refuses every method but GET and HEAD, and every request whose Host is not this machine: otherwise any page that is open
    in a browser could reach the dashboard through a name of its own that resolves to 127.0.0.1."""

    def __init__(self, app: WsgiApp) -> None:
        self._app = app

    def __call__(self, environ: dict[str, Any], start_response: Start) -> Iterable[bytes]:
        if not local_host(str(environ.get("HTTP_HOST", ""))):
            return _refuse(start_response, "This dashboard answers to 127.0.0.1 and localhost only.")
        if environ.get("REQUEST_METHOD") not in _READING:
            return _refuse(start_response, "This dashboard shows a copy: studies cannot be changed here.")
        environ.setdefault("HTTP_ACCEPT_ENCODING", "identity")  # optuna-dashboard fails without one
        if _STUDY.fullmatch(str(environ.get("PATH_INFO", ""))):
            return self._study(environ, start_response)
        return self._app(environ, _shut(start_response))

    def _study(self, environ: dict[str, Any], start_response: Start) -> Iterable[bytes]:
        """A study without infeasible trials among its best ones: where none is feasible, there is no best trial."""
        kept: list[Any] = []

        def hold(status: str, headers: list[tuple[str, str]], *more: Any) -> None:
            kept[:] = [status, headers]

        body = b"".join(self._app(environ, hold))
        status, headers = kept
        if status.startswith("200"):
            study = json.loads(body)
            study["best_trials"] = [trial for trial in study["best_trials"] if all(v <= 0 for v in trial["constraints"])]
            body = json.dumps(study).encode()
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        _shut(start_response)(status, [*headers, ("Content-Length", str(len(body)))])
        return [body]


def local_host(host: str) -> bool:
    """Whether a Host header names this machine's loopback."""
    return re.sub(r":\d+$", "", host).lower() in _HOSTS


def _shut(start_response: Start) -> Start:
    """Artifacts come with leave for every site to read them; it is taken back."""

    def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
        kept = [(name, value) for name, value in headers if not name.lower().startswith("access-control-")]
        return start_response(status, [*kept, ("X-Frame-Options", "DENY"), ("X-Content-Type-Options", "nosniff")], *more)

    return start


def answer_json(start_response: Start, data: Any) -> list[bytes]:
    """An answer of the API that is made here."""
    body = json.dumps(data).encode()
    start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]


def _refuse(start_response: Start, reason: str) -> list[bytes]:
    body = json.dumps({"reason": reason}).encode()
    start_response("403 Forbidden", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]
