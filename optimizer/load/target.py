"""Which server is loaded, and what one request to it says. Pure, but for reading the API key's file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.plan import Request
from vopt.optimizer.typed_files import read_typed

API_KEY_VARIABLES = ("VLLM_API_KEY", "OPENAI_API_KEY")
_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1")

NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""vLLM's neutral sampling values (``SamplingParams``; ``top_k`` 0 is off). They are sent, because ``vllm serve`` puts the
model's generation config in the place of whatever a request leaves out."""

_OPENAI_FIELDS = frozenset(
    {
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "logprobs",
        "top_logprobs",
        "response_format",
    }
)


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"


class Dialect(StrEnum):
    """``vllm`` servers take ``ignore_eos`` and vLLM's sampling fields; ``openai`` ones may refuse what OpenAI lacks."""

    VLLM = "vllm"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class Target:
    """One server. ``root`` is the path before ``/v1``. The API key is never shown and never stored."""

    scheme: str
    host: str
    port: int
    model: str
    root: str = ""
    endpoint: Endpoint = Endpoint.COMPLETIONS
    dialect: Dialect = Dialect.VLLM
    api_key: str | None = field(default=None, repr=False, compare=False)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.root}"

    @property
    def route(self) -> str:
        return "/v1/chat/completions" if self.endpoint is Endpoint.CHAT else "/v1/completions"

    @property
    def authorization(self) -> Mapping[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a Target may hold an API key and is never stored")


def parse_target(
    url: str,
    model: str,
    *,
    endpoint: Endpoint = Endpoint.COMPLETIONS,
    dialect: Dialect = Dialect.VLLM,
    api_key: str | None = None,
) -> Target:
    """The server at ``url`` (with or without ``/v1`` or a route behind it). Raises ``UsageError``."""
    hint = "write it as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is not a URL: {error}", hint=hint) from error
    if parts.scheme not in ("http", "https"):
        raise UsageError(f"{url!r}: a URL begins with http:// or https://", hint=hint)
    if not parts.hostname:
        raise UsageError(f"{url!r} names no host", hint=hint)
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            "a URL with a user or password in it would be stored with the results",
            hint=f"set {API_KEY_VARIABLES[0]} or use --api-key-file",
        )
    if parts.query or parts.fragment:
        raise UsageError(f"{url!r}: a base URL has no query and no fragment", hint=hint)
    if port == 0:
        raise UsageError(f"{url!r}: port 0 is no server's port", hint=hint)
    root = parts.path.rstrip("/")
    for route in _ROUTES:
        if root.endswith(route):
            root = root.removesuffix(route)
            break
    default_port = 443 if parts.scheme == "https" else 80
    return Target(parts.scheme, parts.hostname, port or default_port, model, root, endpoint, dialect, api_key)


def read_api_key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The key from ``--api-key-file``, else from ``VLLM_API_KEY`` or ``OPENAI_API_KEY``. Raises ``UsageError``."""
    if file is None:
        return next((environment[name] for name in API_KEY_VARIABLES if environment.get(name)), None)
    key = read_typed(file, "--api-key-file", hint="name a text file that holds the key alone").strip()
    if not key or not key.isprintable() or " " in key:
        raise UsageError(f"--api-key-file {file} does not hold one key on one line", hint="put the key alone into it")
    return key


def request_fields(target: Target, request: Request) -> dict[str, Any]:
    """The JSON object of one request: the same request that the in-process engine gets."""
    body: dict[str, Any] = {"model": target.model}
    if target.endpoint is Endpoint.CHAT:
        body["messages"] = [dict(message) for message in request.messages]
    else:
        body["prompt"] = list(request.prompt_token_ids)
    body["max_tokens"] = request.max_tokens
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    if target.dialect is Dialect.VLLM:
        body |= {**NEUTRAL, **request.sampling}
        body["ignore_eos"] = request.ignore_eos
    else:
        body |= {name: value for name, value in request.sampling.items() if name in _OPENAI_FIELDS}
    return body


def request_bytes(target: Target, request: Request) -> bytes:
    """One HTTP/1.1 request, head and body."""
    body = json.dumps(request_fields(target, request), separators=(",", ":"), default=_plain).encode()
    lines = [
        f"POST {target.root}{target.route} HTTP/1.1",
        f"host: {target.authority}",
        "accept: text/event-stream",
        "accept-encoding: identity",  # compressing a token at a time costs the server more than it saves
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in target.authorization.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} in sampling parameters is no JSON value")


def checked_rate(rate: float) -> float:
    """A request rate per second. Raises ``UsageError`` for 0, negative, NaN or infinite ones."""
    if not math.isfinite(rate) or rate <= 0:
        raise UsageError(f"--rate {rate}: a rate is a finite number of requests per second above 0", hint="--rate 8")
    return rate
