"""Latencies of one real server as our client and as ``vllm bench serve`` see them, side by side, in one run.

    PYTHONPATH=build/names:tests python tests/benchmarks/served.py [--concurrency 4] [--requests 96] [--rounds 3]

Starts ``vllm serve`` of the CPU build with a tiny model of random weights. Both clients send requests of the same lengths, one
after another at the same concurrency, in turns (ABBA...); prompts differ by their number, so none finds another's blocks in the
prefix cache. Theirs is vLLM's own request function.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.sessions import source, spec
from support.tiny_models import write_tiny_models

from vopt.optimizer.engine.server import ServerSession
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.target import Target

WORDS = ("--load-format", "dummy", "--enforce-eager", "--max-model-len", "2048", "--gpu-memory-utilization", "0.08")
Figures = dict[str, float]


def figures(ttfts: list[float], e2es: list[float], tokens: list[int]) -> Figures:
    tpots = [(e2e - ttft) / (n - 1) for ttft, e2e, n in zip(ttfts, e2es, tokens, strict=True)]
    return {
        "mean TTFT ms": statistics.mean(ttfts) * 1000,
        "median TTFT ms": statistics.median(ttfts) * 1000,
        "mean TPOT ms": statistics.mean(tpots) * 1000,
        "mean E2E ms": statistics.mean(e2es) * 1000,
        "median E2E ms": statistics.median(e2es) * 1000,
    }


def ours(session: ServerSession, requests: RequestSource, concurrency: int, n: int) -> Figures:
    plan = LoadPlan(Arrivals.CLOSED, window_s=300.0, concurrency=concurrency, max_requests=n, deadline_s=300.0)
    load = session.load(requests, plan, lambda tick: True)
    assert sum(record.succeeded for record in load.records) == n
    ttfts = [record.ttft_s for record in load.records if record.ttft_s is not None]
    return figures(ttfts, [record.e2e_s for record in load.records], [record.output_tokens for record in load.records])


def theirs(target: Target, requests: RequestSource, concurrency: int, n: int) -> Figures:
    import aiohttp
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions

    async def run() -> list[Any]:
        turn = asyncio.Semaphore(concurrency)
        connector = aiohttp.TCPConnector(limit=concurrency, limit_per_host=concurrency, keepalive_timeout=60, ssl=False)

        async def one(index: int, http: aiohttp.ClientSession) -> Any:
            request = requests.request(index)
            asked = RequestFuncInput(
                prompt=list(request.prompt_token_ids),
                api_url=target.base_url + target.route,
                prompt_len=request.prompt_tokens,
                output_len=request.max_tokens,
                model=target.model,
                ignore_eos=True,
            )
            async with turn:
                return await async_request_openai_completions(asked, http)

        timeout = aiohttp.ClientTimeout(total=6 * 60 * 60)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            return await asyncio.gather(*(one(index, http) for index in range(n)))

    outputs = asyncio.run(run())
    assert all(output.success for output in outputs)
    return figures(
        [output.ttft for output in outputs],
        [output.latency for output in outputs],
        [output.output_tokens for output in outputs],
    )


def show(found: Mapping[str, list[Figures]]) -> None:
    print(f"{'':<18}{'vopt':>12}{'vllm bench':>12}{'difference':>12}")
    for name in found["ours"][0]:
        mine, other = (statistics.mean(run[name] for run in found[client]) for client in ("ours", "theirs"))
        print(f"{name:<18}{mine:>12.2f}{other:>12.2f}{mine / other - 1:>+12.1%}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dense, _ = write_tiny_models(Path(folder))
        trial = spec(Path(folder) / "trial", dense, sys.executable, Path(folder) / "cache")
        session = ServerSession(trial, ("vllm", "serve", str(dense), *WORDS), clients=1)
        try:
            session.start(lambda phase, words: None)
            number, found = 0, {"ours": list[Figures](), "theirs": list[Figures]()}
            for turn in range(asked.rounds + 1):
                for client in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
                    number += 1
                    requests = replace(source(200, 32), first_number=number * 100_000)
                    if client == "ours":
                        run = ours(session, requests, asked.concurrency, asked.requests)
                    else:
                        run = theirs(session.target, requests, asked.concurrency, asked.requests)
                    if turn:  # the first turn of both is warm-up
                        found[client].append(run)
            show(found)
        finally:
            session.close()


if __name__ == "__main__":
    main()
