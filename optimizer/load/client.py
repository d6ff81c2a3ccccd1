"""The load client: an ``Engine`` behind any OpenAI-compatible HTTP server.

Streams run over connections of our own (``sockets``, ``http1``, ``sse``, ``chunks``): at 25,600 chunks a second a general
HTTP client would be what is measured. Everything else (``/metrics``, ``/v1/models``, ``/health``) goes through aiohttp, which
is imported here only. There are no retries and no redirects, and connections are direct: proxy settings are not read.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

from vopt.objectives.records import CounterSample, RequestFailure, RequestFailureKind, RequestRecord
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.load.counts import ChunkCounts
from vopt.optimizer.load.exchange import Exchange, Unsent
from vopt.optimizer.load.ledger import Progress
from vopt.optimizer.load.plan import Request
from vopt.optimizer.load.scrape import counter_sample
from vopt.optimizer.load.sockets import Connection, Pool, tls_context
from vopt.optimizer.load.target import Endpoint, Target, request_bytes

CONNECT_TIMEOUT_S = 30.0
"""Enough for 2048 connections at once against a server that accepts them while it computes."""
CONTROL_TIMEOUT_S = 10.0
COUNTERS_EVERY_S = 1.0
WATCH_S = 0.25
_ENGINE_MAY_BE_DEAD = frozenset(
    {
        RequestFailureKind.CONNECTION,
        RequestFailureKind.TRUNCATED,
        RequestFailureKind.STREAM_ERROR,
        RequestFailureKind.HTTP_STATUS,
        RequestFailureKind.TIMEOUT_CONNECT,
    }
)
REFUSAL_CHARS = 300
"""Of the body of an HTTP error, how much is told."""


class RefusedByServer(ValueError):
    """An HTTP error where an answer was due; says the status and the beginning of the body."""


class TlsProblem(OSError):
    """The server was reached, but there is no TLS connection to it that may be trusted. ``hint`` says what to type."""

    def __init__(self, words: str, hint: str) -> None:
        super().__init__(words)
        self.hint = hint


class HttpEngine:
    """One server as an engine (``vopt.optimizer.engine.base.Engine``). Use as an async context manager.

    ``chunk_tokens`` of its records come from the chunks themselves where they declare a count (``token_ids``, log
    probabilities, running usage); otherwise the usage block's count is spread over the chunks (``chunks.spread_tokens``), and
    when a load is summed up, all that was assumed is ``recounted`` together.
    ``owned`` says that the server was started by us, so that its ``/health`` speaks for the engine behind it: 503 there means
    that the engine is dead, and so is a connection refused.
    """

    def __init__(
        self,
        target: Target,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        total_timeout_s: float | None = None,
        owned: bool = False,
        verify_tls: bool = True,
    ) -> None:
        self._target = target
        self._connect_timeout_s, self._total_timeout_s = connect_timeout_s, total_timeout_s
        self._owned = owned
        self._tls = tls_context(verify=verify_tls) if target.scheme == "https" else None
        self._pool = Pool(target.host, target.port, self._tls)
        self._control: aiohttp.ClientSession | None = None
        self._active: dict[int, Exchange] = {}
        self._counts = ChunkCounts()
        self._watch: asyncio.TimerHandle | None = None
        self._dead: str | None = None
        self._last_sample: CounterSample | None = None
        self._last_sample_at = float("-inf")
        self._no_metrics = False
        self._health_check: asyncio.Task[str | None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection. Requests in flight fail."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for exchange in list(self._active.values()):
            exchange.fail(RequestFailureKind.CONNECTION, "the client was closed", self.now())
        self._pool.close()
        if self._control is not None:
            await self._control.close()
            self._control = None

    @property
    def dead(self) -> str | None:
        return self._dead

    def mark_dead(self, reason: str) -> None:
        """The server's process is gone: requests in flight fail, and none is sent any more."""
        if self._dead is None:
            self._dead = reason
            for exchange in list(self._active.values()):
                exchange.fail(RequestFailureKind.ENGINE_DIED, reason, self.now())

    def now(self) -> float:
        return time.perf_counter()

    async def run(self, request: Request, *, origin_s: float, scheduled_s: float, idle_timeout_s: float) -> RequestRecord:
        """Send one request and follow its stream to the end; see the protocol. Cancelling closes the connection, which
        aborts the request in vLLM."""
        sent_at = self.now()
        if (refusal := self._refusal(request)) is not None:
            return Unsent(sent_at, sent_at, refusal).record(request, origin_s=origin_s, scheduled_s=scheduled_s)
        chat = self._target.endpoint is Endpoint.CHAT
        exchange = Exchange(chat=chat, sent_at=sent_at, idle_timeout_s=idle_timeout_s, origin_s=origin_s)
        self._active[request.index] = exchange
        try:
            connection = await self._connect(exchange)
            if connection is not None:
                await self._converse(connection, exchange, request_bytes(self._target, request))
        finally:
            del self._active[request.index]
        failure = exchange.verdict(request)
        if failure is not None and failure.kind in _ENGINE_MAY_BE_DEAD and await self._engine_is_dead():
            failure = RequestFailure(RequestFailureKind.ENGINE_DIED, f"{self._dead} ({failure.message})")
        record = exchange.record(request, origin_s=origin_s, scheduled_s=scheduled_s, failure=failure)
        self._counts.ended(record, exchange)
        return record

    def partial(self, index: int) -> tuple[float, tuple[float, ...], tuple[int, ...]] | None:
        """(sent, chunk times, chunk tokens) so far, in seconds since the request's ``origin_s``; a chunk that declares no
        count has one token until ``recounted``."""
        exchange = self._active.get(index)
        return None if exchange is None else self._counts.partial(index, exchange)

    def progress(self, index: int, since_s: float) -> Progress | None:
        """As ``partial``, summed up, and recounted roughly."""
        exchange = self._active.get(index)
        return None if exchange is None else self._counts.scaled(exchange.progress(since_s), exchange)

    def recounted(self, records: Sequence[RequestRecord]) -> list[RequestRecord]:
        """``records`` of this engine's requests with the tokens that their chunks held, as those that finished tell."""
        return self._counts.recounted(records)

    async def counters(self, *, origin_s: float) -> CounterSample:
        """The engine's counters from ``/metrics``, read at most once a second; an empty sample where there is no such page."""
        now = self.now()
        if self._last_sample is not None and now - self._last_sample_at < 0.9 * COUNTERS_EVERY_S:
            return self._last_sample
        sample = CounterSample(at_s=now - origin_s)
        if not self._no_metrics and self._dead is None:
            try:
                status, text = await self.get("/metrics")
            except (aiohttp.ClientError, TimeoutError, OSError):
                if self._owned:
                    await self._engine_is_dead()
            else:
                self._no_metrics = status in (401, 403, 404, 405)
                if status == 200:
                    sample = counter_sample(text, self.now() - origin_s)
        self._last_sample, self._last_sample_at = sample, now
        return sample

    async def models(self) -> tuple[str, ...]:
        """The names that ``/v1/models`` lists.

        Raises ``OSError`` (``TlsProblem`` among them), ``TimeoutError``, ``RefusedByServer`` (an HTTP error) or ``ValueError``
        (no such list).
        """
        try:
            status, text = await self.get("/v1/models")
        except aiohttp.ClientError as error:
            raise _plainly(error) from error
        if status != 200:
            raise RefusedByServer(f"/v1/models answers HTTP {status}: {' '.join(text.split())[:REFUSAL_CHARS]}")
        document = json.loads(text)
        entries = document.get("data") if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise ValueError("/v1/models does not list models")
        return tuple(str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry)

    async def get_json(self, route: str) -> Any:
        """The JSON document of a GET, ``None`` where there is none."""
        try:
            status, text = await self.get(route)
            return json.loads(text) if status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    async def get(self, route: str, timeout_s: float = CONTROL_TIMEOUT_S) -> tuple[int, str]:
        """Status and text of a GET on the server. Raises ``aiohttp.ClientError``, ``TimeoutError`` or ``OSError``."""
        if self._control is None:
            # A connection for each request, like the streams; over TLS its farewell would outlive the event loop, so there
            # the connections stay until `close`, which cuts them.
            tls = self._tls
            connector = aiohttp.TCPConnector(limit=4, ssl=True if tls is None else tls, force_close=tls is None)
            self._control = aiohttp.ClientSession(connector=connector)
        url = f"{self._target.base_url}{route}"
        options: dict[str, Any] = {"allow_redirects": False, "timeout": aiohttp.ClientTimeout(total=timeout_s)}
        async with self._control.get(url, headers=self._target.authorization, **options) as response:
            return response.status, await response.text(encoding="utf-8", errors="replace")

    # One request

    def _refusal(self, request: Request) -> RequestFailure | None:
        if self._dead is not None:
            return RequestFailure(RequestFailureKind.ENGINE_DIED, self._dead)
        chat = self._target.endpoint is Endpoint.CHAT
        if not (request.messages if chat else request.prompt_token_ids):
            lacks = "chat messages" if chat else "prompt token ids"
            return RequestFailure(RequestFailureKind.NOT_SENT, f"the workload's requests have no {lacks} for this endpoint")
        return None

    async def _connect(self, exchange: Exchange) -> Connection | None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await self._pool.connection()
        except TimeoutError:
            words = f"no connection to {self._target.authority} within {self._connect_timeout_s:g} s"
            exchange.fail(RequestFailureKind.TIMEOUT_CONNECT, words, self.now())
        except OSError as error:  # TLS errors are OSErrors too
            exchange.fail(RequestFailureKind.CONNECTION, f"cannot connect to {self._target.authority}: {error}", self.now())
        return None

    async def _converse(self, connection: Connection, exchange: Exchange, data: bytes) -> None:
        """Send ``data`` and wait for the end of the answer, which may come before everything is sent (a refusal)."""
        connection.receiver = exchange
        sending: asyncio.Future[None] | None = None
        exchange.last_at = self.now()
        try:
            if exchange.finished.done():
                return  # closed, or the engine died, while connecting
            try:
                sending = connection.send(data)
            except OSError as error:
                exchange.lost(error, self.now())
            else:
                if sending is not None:
                    sending.add_done_callback(lambda future: self._sent(future, exchange))
            self._ensure_watch()
            await exchange.finished
        finally:
            if sending is not None:
                sending.cancel()
            if exchange.finished.done() and exchange.reusable and (sending is None or sending.done()) and not connection.closed:
                self._pool.give_back(connection)
            else:
                connection.close()

    def _sent(self, future: asyncio.Future[None], exchange: Exchange) -> None:
        if not future.cancelled() and (error := future.exception()) is not None and isinstance(error, OSError):
            # A server that refuses early closes before it has read everything; its answer may still be on the way.
            asyncio.get_running_loop().call_later(WATCH_S, lambda: exchange.lost(error, self.now()))

    def _ensure_watch(self) -> None:
        if self._watch is None:
            shortest = min((exchange.idle_timeout_s for exchange in self._active.values()), default=WATCH_S)
            shortest = min(shortest, self._total_timeout_s or shortest)
            interval = min(WATCH_S, max(0.01, shortest / 10))
            self._watch = asyncio.get_running_loop().call_later(interval, self._look_for_timeouts)

    def _look_for_timeouts(self) -> None:
        """One timer for all streams: a timer for each would be set and cancelled with every chunk."""
        self._watch = None
        now, total = self.now(), self._total_timeout_s
        for exchange in list(self._active.values()):
            if now - exchange.last_at > exchange.idle_timeout_s:
                what = "no answer" if exchange.waiting_for_headers else "nothing more"
                exchange.fail(RequestFailureKind.TIMEOUT_IDLE, f"{what} for {exchange.idle_timeout_s:g} s", now)
            elif total is not None and now - exchange.sent_at > total:
                exchange.fail(RequestFailureKind.TIMEOUT_TOTAL, f"not finished after {total:g} s", now)
        if self._active:
            self._ensure_watch()

    # Is the engine behind the server alive?

    async def _engine_is_dead(self) -> bool:
        """After a suspicious failure of a server of ours: ask ``/health``, one question for all who ask meanwhile."""
        if self._dead is not None:
            return True
        if not self._owned:
            return False
        if self._health_check is None or self._health_check.done():
            self._health_check = asyncio.ensure_future(self._ask_health())
        reason = await asyncio.shield(self._health_check)
        if reason is not None:
            self.mark_dead(reason)
        return self._dead is not None

    async def _ask_health(self) -> str | None:
        try:
            status, _ = await self.get("/health")
        except (aiohttp.ClientConnectionError, ConnectionError) as error:
            return f"the server does not answer any more: {error}"
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None  # busy is not dead; the idle timeout decides
        return "the server reports that its engine is dead (/health: 503)" if status == 503 else None


def _plainly(error: aiohttp.ClientError) -> OSError:
    """What kept a connection from being made, in words for a person."""
    match error:
        case aiohttp.ClientConnectorCertificateError():
            reason = getattr(error.certificate_error, "verify_message", None) or error.certificate_error
            hint = (
                "SSL_CERT_FILE=/path/to/authority.pem, with the authority that signed it; the URL's host must be one it names"
            )
            return TlsProblem(f"the server's certificate is not trusted: {reason}", hint)
        case aiohttp.ClientConnectorSSLError():
            return TlsProblem(f"the server does not speak TLS there: {error.os_error}", "write the URL with http://")
        case _:
            return OSError(str(error))


def read_metrics(target: Target) -> str:
    """The text of ``/metrics``, for use outside an event loop. ``EnvironmentLacks`` when the server gives none."""

    async def ask() -> tuple[int, str]:
        async with HttpEngine(target) as engine:
            return await engine.get("/metrics")

    hint = "vLLM has the page on its own port; a gateway before it may not pass it on"
    try:
        status, text = asyncio.run(ask())
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        problem = _plainly(error) if isinstance(error, aiohttp.ClientError) else error
        hint = problem.hint if isinstance(problem, TlsProblem) else hint
        raise EnvironmentLacks(f"{target.base_url}/metrics: {str(problem) or 'no answer in time'}", hint=hint) from error
    if status != 200:
        raise EnvironmentLacks(f"{target.base_url}/metrics answers HTTP {status}", hint=hint)
    return text
