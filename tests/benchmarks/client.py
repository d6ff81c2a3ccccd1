"""What a chunk costs the client: ours beside that of ``vllm bench serve``, on one mock server, in one run.

    python tests/benchmarks/client.py [--repeats 3]

Two regimes. Saturated: 64 streams, the server sends as fast as it is read. Paced: 512 streams that begin evenly over a second
and then get one chunk each every 20 ms, which is 25,600 chunks a second. Every measurement runs in a fresh process, ours and
theirs in turn. CPU time is that of the client's process from the first request to the last, imports not counted. Ours is the
whole of ``drive`` over ``HttpEngine``; theirs is vLLM's request function on a session set up as ``benchmarks/serve.py`` does,
without its progress bar and its metrics. TTFT error is the client's TTFT minus what the server itself measured for the request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVER = ROOT / "tests" / "support" / "stream_server.py"
sys.path.insert(0, str(ROOT / "build" / "names"))


@dataclass(frozen=True)
class Regime:
    name: str
    streams: int
    chunks: int
    every_s: float


REGIMES = {
    regime.name: regime for regime in (Regime("saturated", 64, 8000, 0.0), Regime("paced", 512, 400, 0.02))
}  # fmt: skip


def prompt_of(index: int) -> list[int]:
    return [index, *range(9)]


async def ours(regime: Regime, url: str) -> tuple[float, list[tuple[str, float]]]:
    """CPU seconds, and (prompt, TTFT) of each stream, of our client."""
    from vopt.optimizer.load.client import HttpEngine
    from vopt.optimizer.load.drive import drive
    from vopt.optimizer.load.plan import Arrivals, LoadPlan
    from vopt.optimizer.load.source import RequestSource
    from vopt.optimizer.load.target import parse_target

    source = RequestSource(lengths=((18, regime.chunks),), bodies=(tuple(range(10)),), digit_ids=tuple(range(10)))
    plan = LoadPlan(
        Arrivals.CONSTANT,
        window_s=300.0,
        rate=float(regime.streams),
        max_requests=regime.streams,
        warmup_s=0.0,
        deadline_s=300.0,
    )
    async with HttpEngine(parse_target(url, "mock")) as engine:
        cpu = time.process_time()
        load = await drive(engine, source, plan)
        cpu = time.process_time() - cpu
    assert sum(record.succeeded for record in load.records) == regime.streams, load.detail
    ttfts = []
    for record in load.records:
        assert record.ttft_s is not None
        ttfts.append((",".join(map(str, source.request(record.index).prompt_token_ids)), record.ttft_s))
    return cpu, ttfts


async def theirs(regime: Regime, url: str) -> tuple[float, list[tuple[str, float]]]:
    """The same of vLLM's."""
    import aiohttp
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions

    connector = aiohttp.TCPConnector(
        limit=0, limit_per_host=0, ttl_dns_cache=300, use_dns_cache=True, keepalive_timeout=60, force_close=False, ssl=False
    )
    timeout = aiohttp.ClientTimeout(total=6 * 60 * 60)

    async def one(index: int, http: Any) -> tuple[str, float]:
        await asyncio.sleep(index / regime.streams)
        prompt = prompt_of(index)
        request = RequestFuncInput(
            prompt=prompt,
            api_url=f"{url}/v1/completions",
            prompt_len=len(prompt),
            output_len=regime.chunks,
            model="mock",
            ignore_eos=True,
        )
        output = await async_request_openai_completions(request, http)
        assert output.success, output.error
        assert output.output_tokens == regime.chunks
        return ",".join(map(str, prompt)), output.ttft

    async with aiohttp.ClientSession(connector=connector, trust_env=True, timeout=timeout) as http:
        cpu = time.process_time()
        ttfts = await asyncio.gather(*(one(index, http) for index in range(regime.streams)))
        cpu = time.process_time() - cpu
    return cpu, list(ttfts)


CLIENTS: dict[str, Callable[[Regime, str], Awaitable[tuple[float, list[tuple[str, float]]]]]] = {"ours": ours, "theirs": theirs}


def child(client: str, regime: Regime, url: str) -> None:
    """One measurement in this process; the result is the last line of standard output."""

    async def measure() -> tuple[float, float, list[tuple[str, float]]]:
        began = time.perf_counter()
        cpu, ttfts = await CLIENTS[client](regime, url)
        return cpu, time.perf_counter() - began, ttfts

    cpu, wall, ttfts = asyncio.run(measure())
    errors = [0.0]
    if regime.every_s:
        with urllib.request.urlopen(f"{url}/ttft") as answer:
            server = json.load(answer)
        errors = sorted(ttft - server[prompt] for prompt, ttft in ttfts)
    chunks = regime.streams * regime.chunks
    figures = {
        "cpu_per_million": cpu / chunks * 1e6,
        "per_core": chunks / cpu,
        "wall": wall,
        "error_p50": errors[len(errors) // 2],
        "error_p95": errors[int(len(errors) * 0.95)],
    }
    print(json.dumps(figures))


@contextmanager
def server(regime: Regime) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER), "--every", str(regime.every_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait(10)


def measure(client: str, regime: Regime) -> dict[str, float]:
    with server(regime) as url:
        words = [sys.executable, __file__, "--child", client, "--regime", regime.name, "--url", url]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--regime", choices=REGIMES)
    parser.add_argument("--child", choices=CLIENTS)
    parser.add_argument("--url")
    asked = parser.parse_args()
    if asked.child:
        child(asked.child, REGIMES[asked.regime], asked.url)
        return
    titles = ("CPU s per 1e6 chunks", "chunks/s per core", "wall s", "TTFT error p50, p95")
    print(f"{'regime':<10}{'client':<18}{titles[0]:>22}{titles[1]:>19}{titles[2]:>8}{titles[3]:>23}")
    for regime in REGIMES.values():
        if asked.regime not in (None, regime.name):
            continue
        runs: dict[str, list[dict[str, float]]] = {client: [] for client in CLIENTS}
        for _ in range(asked.repeats):
            for client, found in runs.items():
                found.append(measure(client, regime))
        medians = {}
        for client, found in runs.items():
            cpu = sorted(run["cpu_per_million"] for run in found)
            middle = {name: statistics.median(run[name] for run in found) for name in found[0]}
            medians[client] = middle["cpu_per_million"]
            label = "vllm bench serve" if client == "theirs" else "vopt"
            spread = f"{middle['cpu_per_million']:.2f} ({cpu[0]:.2f} to {cpu[-1]:.2f})"
            error = f"{middle['error_p50'] * 1000:.2f}, {middle['error_p95'] * 1000:.2f} ms" if regime.every_s else "-"
            print(f"{regime.name:<10}{label:<18}{spread:>22}{middle['per_core']:>19,.0f}{middle['wall']:>8.1f}{error:>23}")
        print(f"{regime.name:<10}ratio: {medians['ours'] / medians['theirs']:.2f} (target: at most 0.33)")


if __name__ == "__main__":
    main()
