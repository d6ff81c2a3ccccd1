"""Requests that one client sends to a server of a script."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.fault_server import (
    Script,
    good,
    serving,
)

from vopt.objectives.consistency import contradictions
from vopt.objectives.records import RequestFailureKind as Kind
from vopt.objectives.records import RequestRecord
from vopt.optimizer.load.client import HttpEngine
from vopt.optimizer.load.plan import Request
from vopt.optimizer.load.target import Endpoint, parse_target

REQUEST = Request(index=0, prompt_token_ids=(5, 6, 7), prompt_tokens=3, max_tokens=4, sampling={"temperature": 0.0})
NATURAL = replace(REQUEST, ignore_eos=False)
CHAT = replace(REQUEST, prompt_token_ids=(), messages=({"role": "user", "content": "hi"},))
OK = good(4)
JSON = "content-type: application/json"


async def ask(
    script: Script, request: Request = REQUEST, *, idle_s: float = 5.0, chat: bool = False, **options: Any
) -> RequestRecord:
    async with serving(script) as server:
        target = parse_target(server.url, "m", endpoint=Endpoint.CHAT if chat else Endpoint.COMPLETIONS)
        async with HttpEngine(target, **options) as engine:
            origin = engine.now()
            record = await engine.run(request, origin_s=origin, scheduled_s=0.0, idle_timeout_s=idle_s)
        posts = [entry for entry in server.requests if entry[0] == "POST"]
        assert len(posts) <= 1, "a load client never tries again"
    assert not contradictions(record)
    return record


def failed(record: RequestRecord, kind: Kind, words: str = "") -> None:
    assert record.failure is not None
    assert (record.failure.kind, words in record.failure.message) == (kind, True), record.failure
    assert (record.output_tokens, sum(record.chunk_tokens)) == (0, 0)
    assert not record.succeeded
