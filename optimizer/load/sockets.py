"""Connections for a load client: many sockets, few wake-ups.

Plain connections are read through one ``epoll`` object that the event loop watches as a single reader. asyncio's own
transports cost a handle, a context switch and a fresh 256 KiB buffer for each read, which at 25,600 chunks a second (512
streams, one chunk each every 20 ms) is most of a core. TLS connections go through asyncio's transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

READ_BYTES = 64 * 1024
"""Below the size from which the C library would map fresh pages for each read."""
EVENTS_PER_WAKE = 256
BUSY_WAKES, BUSY_SPAN_S = 40, 0.02
"""From 2,000 wake-ups a second on, sockets are looked at by a timer instead of being woken for: a wake-up costs more than
the chunk that it brings. Arrival times are then up to two milliseconds late, those of first tokens excepted."""
OPEN_FILES = 65_536
TABLE_DESCRIPTORS = 8_191
"""Room made beforehand: 64 KiB of kernel memory."""
CLOSING = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
TICK_S = 0.002
QUIET_TICKS = 20
IDLE_REUSE_S = 0.0
"""A connection idle for longer is not used again, so each request gets its own: uvicorn closes idle ones after 5 s, and when
the host is short of CPU a request can meet that close however soon it was sent. It would fail for no fault of the engine
(there are no retries), and a connection costs a fraction of a millisecond."""


class Receiver(Protocol):
    """Whoever waits for the bytes of a connection."""

    @property
    def begun(self) -> bool:
        """Whether its first token has come: from then on a millisecond matters less."""
        ...

    def received(self, data: bytes, now: float) -> None: ...

    def lost(self, error: Exception | None, now: float) -> None:
        """The connection is gone, as was noticed at ``now``: ``None`` when the peer closed it in order."""
        ...


class Connection:
    """One open connection; at most one receiver at a time."""

    __slots__ = ("_close", "_send", "closed", "idle_since", "receiver")

    def __init__(self, send: Callable[[bytes], asyncio.Future[None] | None], close: Callable[[], None]) -> None:
        self._send, self._close = send, close
        self.receiver: Receiver | None = None
        self.closed = False
        self.idle_since = 0.0

    def send(self, data: bytes) -> asyncio.Future[None] | None:
        """Start to send; the future that waits for the peer to read, or ``None`` when everything is in the kernel."""
        return self._send(data)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.receiver = None
            self._close()

    def lost(self, error: Exception | None, now: float) -> None:
        receiver = self.receiver
        self.close()
        if receiver is not None:
            receiver.lost(error, now)


def allow_many_sockets() -> None:
    """Raise this process's soft limit of open files, often 1024, as far as the hard limit lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    _grow_descriptor_table(wanted - 1)


def _grow_descriptor_table(highest: int) -> None:
    """Let the kernel make room for descriptors now. It doubles a process's table as it fills, and with more than one thread it
    waits 5 to 20 ms for all cores each time (``synchronize_rcu`` in Linux's ``fs/file.c``): sockets 256, 512, 1024, ... of a
    load would be opened that late, and whatever arrives meanwhile be read that late."""
    with contextlib.suppress(OSError), open(os.devnull, "rb") as some:
        os.close(fcntl.fcntl(some.fileno(), fcntl.F_DUPFD_CLOEXEC, min(highest, TABLE_DESCRIPTORS)))


def tls_context(*, verify: bool = True) -> ssl.SSLContext:
    """TLS as this interpreter has it: the system's authorities, or those that ``SSL_CERT_FILE`` names."""
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _PlainReader:
    """All plain connections of one event loop. Those that wait for their first token always wake the loop (``_fresh``)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        allow_many_sockets()
        self._clock = clock
        self._epoll, self._fresh = select.epoll(), select.epoll()
        self._open: dict[int, tuple[socket.socket, Callable[[int], bytes], Connection]] = {}
        self._unread: list[int] = []  # sockets that may have more: no edge will tell of it
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._woken)
        self._loop.add_reader(self._fresh.fileno(), self._first)
        self._timer: asyncio.TimerHandle | None = None
        self._wakes = self._quiet = 0
        self._span_began = 0.0

    def adopt(self, sock: socket.socket) -> Connection:
        number = sock.fileno()
        connection = Connection(lambda data: self._send(sock, data), lambda: self._forget(number))
        self._open[number] = (sock, sock.recv, connection)
        self._fresh.register(number, select.EPOLLIN)
        return connection

    def close(self) -> None:
        for *_, connection in list(self._open.values()):
            connection.close()
        if not self._epoll.closed:
            for epoll in (self._epoll, self._fresh):
                self._loop.remove_reader(epoll.fileno())
                epoll.close()
        if self._timer is not None:
            self._timer.cancel()

    def _first(self) -> None:
        """Read from connections without a token so far; those that have one now go over to the others."""
        ready = self._fresh.poll(0, EVENTS_PER_WAKE)
        self._serve(ready)
        for number, _ in ready:
            entry = self._open.get(number)
            if entry is not None and not self._epoll.closed and entry[2].receiver is not None and entry[2].receiver.begun:
                with contextlib.suppress(FileNotFoundError):  # a new connection under the number of one that was closed
                    self._fresh.unregister(number)
                    # Edge-triggered: else the kernel asks each socket twice, once more when it is looked for again.
                    self._epoll.register(number, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def _more(self) -> None:
        """Read on where a read was full, one round at a time so that everything else gets its turn."""
        if not self._epoll.closed and self._read() and self._unread and self._timer is None:
            self._loop.call_soon(self._more)

    def _woken(self) -> None:
        self._read()
        self._wakes += 1
        if self._epoll.closed:
            return
        if self._unread:
            self._loop.call_soon(self._more)
        if self._wakes < BUSY_WAKES:
            return
        now = self._loop.time()
        if now - self._span_began < BUSY_SPAN_S:
            self._loop.remove_reader(self._epoll.fileno())
            self._timer = self._loop.call_later(TICK_S, self._ticked)
        self._wakes, self._span_began = 0, now

    def _ticked(self) -> None:
        self._timer = None
        self._quiet = 0 if self._read() > 1 else self._quiet + 1
        if self._epoll.closed:
            return
        if self._quiet < QUIET_TICKS:
            self._timer = self._loop.call_later(TICK_S, self._ticked)
        else:
            self._quiet = 0
            self._loop.add_reader(self._epoll.fileno(), self._woken)

    def _read(self) -> int:
        """Read once from every socket that has something; how many had."""
        ready = self._epoll.poll(0, EVENTS_PER_WAKE)
        if self._unread:
            told = {number for number, _ in ready}
            ready += [(number, 0) for number in self._unread if number not in told]
            self._unread = []
        self._serve(ready)
        return len(ready)

    def _serve(self, ready: list[tuple[int, int]]) -> None:
        known, clock = self._open.get, self._clock
        for number, events in ready:
            entry = known(number)
            if entry is None:
                continue  # closed by an event before this one
            _, receive, connection = entry
            try:
                data = receive(READ_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                connection.lost(error, clock())
                continue
            receiver = connection.receiver
            if data and receiver is not None:
                receiver.received(data, clock())
                if (len(data) == READ_BYTES or events & CLOSING) and number in self._open:
                    self._unread.append(number)
            else:
                connection.lost(None, clock())  # closed, or bytes that nobody asked for

    def _send(self, sock: socket.socket, data: bytes) -> asyncio.Future[None] | None:
        try:
            sent = sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent == len(data):
            return None
        return asyncio.ensure_future(self._loop.sock_sendall(sock, memoryview(data)[sent:]))

    def _forget(self, number: int) -> None:
        sock, *_ = self._open.pop(number)
        for epoll in (self._fresh, self._epoll):
            with contextlib.suppress(OSError, ValueError):
                epoll.unregister(number)
        sock.close()


class _TlsProtocol(asyncio.Protocol):
    """A connection on asyncio's transport."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._writable: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.connection = Connection(self._send, self._close)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self.connection.receiver is not None:
            self.connection.receiver.received(data, self._clock())
        else:
            self.connection.lost(None, self._clock())

    def connection_lost(self, exc: Exception | None) -> None:
        self.resume_writing()
        self.connection.lost(exc, self._clock())

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def _send(self, data: bytes) -> asyncio.Future[None] | None:
        assert self._transport is not None
        self._transport.write(data)
        return self._writable

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Pool:
    """Connections to one host and port: reused when idle, as many as there are requests in flight."""

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._host, self._port, self._tls, self._clock = host, port, tls, clock
        self._plain: _PlainReader | None = None
        self._idle: deque[Connection] = deque()
        self._addresses: list[tuple[int, tuple[object, ...]]] = []

    async def connection(self) -> Connection:
        """An open connection. Raises ``OSError`` (TLS errors included); the caller bounds the time."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and self._clock() - connection.idle_since < IDLE_REUSE_S:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        if self._tls is not None:
            tls = self._tls
            _, protocol = await loop.create_connection(lambda: _TlsProtocol(self._clock), self._host, self._port, ssl=tls)
            return protocol.connection
        if self._plain is None:
            self._plain = _PlainReader(self._clock)
        return self._plain.adopt(await self._connect())

    async def _connect(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        if not self._addresses:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._addresses = [(family, address) for family, _, _, _, address in found]
        problem: OSError | None = None
        for position, (family, address) in enumerate(self._addresses):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(sock, address)
            except OSError as error:
                sock.close()
                problem = error
            except BaseException:
                sock.close()
                raise
            else:
                self._addresses.insert(0, self._addresses.pop(position))  # "localhost" may list ::1, where nobody listens
                return sock
        raise problem if problem is not None else OSError(f"no address for {self._host}")

    def give_back(self, connection: Connection) -> None:
        """The request on it is over and its answer was read to the end."""
        connection.receiver = None
        connection.idle_since = self._clock()
        self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        if self._plain is not None:
            self._plain.close()
            self._plain = None
