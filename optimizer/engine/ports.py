"""Ports of this host: a free one, and who listens on one."""

from __future__ import annotations

import contextlib
import os
import socket

from vopt.optimizer.engine.kin import descendants

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe_socket:
        probe_socket.bind((LOOPBACK, 0))
        port: int = probe_socket.getsockname()[1]
        return port


def listens(leader: int, port: int) -> bool:
    """Whether ``port`` is listened on, by ``leader`` and processes below it alone (``/proc/net/tcp``, state 0A).

    vLLM opens its socket with ``SO_REUSEPORT``, so a second server could share the port and get half of the requests.
    """
    inodes = listened(port)
    family = (leader, *(entry.identity.pid for entry in descendants(leader)))
    return bool(inodes) and inodes <= set().union(*map(_sockets, family))


def listened(port: int) -> set[str]:
    """The sockets that listen on ``port`` on this host, as the links under ``/proc/PID/fd`` name them."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            for line in list(lines)[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{words[9]}]")
    return inodes


def _sockets(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry.path))
    return found
