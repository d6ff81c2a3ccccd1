"""How one load is dealt out to several client processes, and how many it is. Standard library only.

Visits are dealt out like cards (visit *v* belongs to client ``v % n``), so that the requests are the same ones as from one
client. Poisson arrivals at a share of the rate add up to Poisson arrivals at the whole rate; even arrivals are shifted
against each other by one gap.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource

STREAMS_PER_CLIENT = 256
"""One client process used 17 % of a core for 256 streams of an 8B model (9,450 chunks and 40 requests a second, on an H200
host with vLLM 0.22.1): streams three times as fast still leave it half of its core."""
RATE_PER_CLIENT = 64.0
"""The same for an open loop, whose streams are not known beforehand: 40 requests a second were those 17 %."""
MOST_CLIENTS = 4
CLIENT_PROCESSES = "client_processes_"
"""Flag of a load by several clients; their number follows."""
CORES_BESIDE = 2
"""Cores left to the server: its HTTP front end and its engine core each keep one busy."""


def client_processes(plan: LoadPlan, cpus: int | None = None) -> int:
    """How many client processes load a server by ``plan``: settled before the load, from the plan and the cores alone.

    Not by how a first load went: loads by one client and by several do not compare, so that all starts of a study need the
    same number. ``cpus``: the cores that this process may use (``None``: ask).
    """
    available = len(os.sched_getaffinity(0)) if cpus is None else cpus
    if plan.arrivals is Arrivals.CLOSED:
        wanted = -(-(plan.concurrency or 1) // STREAMS_PER_CLIENT)
    else:
        wanted = int(-(-(plan.rate or 0.0) // RATE_PER_CLIENT))
    return max(1, min(wanted, MOST_CLIENTS, available - CORES_BESIDE))


@dataclass(frozen=True, slots=True)
class Share(RequestSource):
    """The visits of one client of ``of``."""

    client: int = 0
    of: int = 1

    @property
    def phase(self) -> float:
        return self.client / self.of

    def visit(self, number: int) -> range:
        return RequestSource.visit(self, number * self.of + self.client)


def possible_clients(plan: LoadPlan, clients: int) -> int:
    """``clients``, or fewer where there are not as many users or requests."""
    return max(1, min(clients, plan.concurrency or clients, plan.max_requests or clients))


def share_of(source: RequestSource, plan: LoadPlan, client: int, of: int) -> tuple[Share, LoadPlan]:
    """What client number ``client`` of ``of`` sends, and how."""
    values = {entry.name: getattr(source, entry.name) for entry in fields(source)}
    if plan.arrivals is Arrivals.REPLAY:
        values["scheduled_s"] = tuple(sorted(source.scheduled_s)[client::of])
    share = Share(**values, client=client, of=of)

    def dealt(total: int | None) -> int | None:
        return None if total is None else total // of + (client < total % of)

    return share, replace(
        plan,
        concurrency=dealt(plan.concurrency),
        rate=None if plan.rate is None else plan.rate / of,
        max_requests=dealt(plan.max_requests),
        seed=plan.seed * of + client,
    )
