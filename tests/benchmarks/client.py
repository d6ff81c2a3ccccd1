"""What a chunk costs the client: ours beside that of ``vllm bench serve``, on one mock server, in one run.

    python tests/benchmarks/client.py [--repeats 3] [--regime saturated|paced] [--streams 512]

Two regimes. Saturated: 64 streams, the server sends as fast as it is read. Paced: 512 streams that begin evenly over a second
and then get one chunk each every 20 ms, which is 25,600 chunks a second. Every measurement runs in a fresh process, ours and
theirs in turn (ABBA), the client on one core and the server on another: on one core the server would be late whenever the
client computes, and reads would hold several chunks. CPU time is that of the client's process from the first request to the
last, imports not counted. Ours is the whole of ``drive`` over ``HttpEngine``; theirs is vLLM's request function on a session
set up as ``benchmarks/serve.py`` does, without its progress bar and its metrics. TTFT error is the client's TTFT minus what
the server itself measured for the request, from its last byte to the write of the first chunk: it holds the way there and
back, the wait for the server's accept, and how late the client looked. Tokens have different texts, as a model's have.
Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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


TARGET_RATIO = 1 / 3
TARGET_ERROR_S = 0.002


@dataclass(frozen=True)
class Costs:
    """CPU and wall seconds of a load, imports not counted, and (prompt, TTFT) of each stream."""

    cpu: float
    wall: float
    ttfts: list[tuple[str, float]]


def prompt_of(index: int) -> list[int]:
    return [index, *range(9)]


async def ours(regime: Regime, url: str) -> Costs:
    """The load by our client."""
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
        cpu, wall = time.process_time(), time.perf_counter()
        load = await drive(engine, source, plan)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert sum(record.succeeded for record in load.records) == regime.streams, load.detail
    ttfts = []
    for record in load.records:
        assert record.ttft_s is not None
        ttfts.append((",".join(map(str, source.request(record.index).prompt_token_ids)), record.ttft_s))
    return Costs(cpu, wall, ttfts)


async def theirs(regime: Regime, url: str) -> Costs:
    """The load by vLLM's."""
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
        cpu, wall = time.process_time(), time.perf_counter()
        ttfts = await asyncio.gather(*(one(index, http) for index in range(regime.streams)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Costs(cpu, wall, list(ttfts))


CLIENTS: dict[str, Callable[[Regime, str], Awaitable[Costs]]] = {"ours": ours, "theirs": theirs}


def child(client: str, regime: Regime, url: str) -> None:
    """One measurement in this process; the result is the last line of standard output."""

    async def measure() -> Costs:
        return await CLIENTS[client](regime, url)

    costs = asyncio.run(measure())
    chunks = regime.streams * regime.chunks
    figures = {
        "cpu_per_million": costs.cpu / chunks * 1e6,
        "per_core": chunks / costs.cpu,
        "wall": costs.wall,
        "preempted": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw / costs.wall,
    }
    if regime.every_s:
        with urllib.request.urlopen(f"{url}/ttft") as answer:
            server = json.load(answer)
        errors = sorted(ttft - server[prompt] for prompt, ttft in costs.ttfts)
        figures |= {f"error_p{share}": errors[min(len(errors) - 1, len(errors) * share // 100)] for share in (50, 95, 99)}
    print(json.dumps(figures))


def cores() -> tuple[set[int], set[int]]:
    """Where the server runs, and where the client runs."""
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        raise SystemExit("this needs two cores: one for the server, one for the client")
    return {mine[0]}, {mine[1]}


@contextmanager
def server(regime: Regime, core: set[int]) -> Iterator[str]:
    words = [sys.executable, str(SERVER), "--every", str(regime.every_s)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    os.sched_setaffinity(process.pid, core)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait(10)


def measure(client: str, regime: Regime) -> dict[str, float]:
    for_server, for_client = cores()
    with server(regime, for_server) as url:
        words = [sys.executable, __file__, "--child", client, "--regime", regime.name, "--url", url]
        words += ["--streams", str(regime.streams)] if regime.every_s else []
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(words, **pipes)
        os.sched_setaffinity(process.pid, for_client)
        out, words_of_error = process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit(words_of_error[-3000:])
    figures: dict[str, float] = json.loads(out.splitlines()[-1])
    return figures


def compare(regime: Regime, repeats: int) -> bool:
    """Measure both clients in turn and print their medians; whether the targets are met."""
    runs: dict[str, list[dict[str, float]]] = {client: [] for client in CLIENTS}
    for repeat in range(repeats):
        for client in sorted(runs, reverse=bool(repeat % 2)):
            runs[client].append(measure(client, regime))
    medians = {
        client: {name: statistics.median(run[name] for run in found) for name in found[0]} for client, found in runs.items()
    }
    for client, middle in medians.items():
        cpu = sorted(run["cpu_per_million"] for run in runs[client])
        label = "vllm bench serve" if client == "theirs" else "vopt"
        spread = f"{middle['cpu_per_million']:.2f} ({cpu[0]:.2f} to {cpu[-1]:.2f})"
        error = ", ".join(f"{middle[f'error_p{share}'] * 1000:.2f}" for share in (50, 95, 99)) if regime.every_s else "-"
        row = f"{regime.name:<10}{label:<18}{spread:>24}{middle['per_core']:>19,.0f}{middle['wall']:>8.1f}"
        row += f"{middle['preempted']:>13,.0f}{error:>28}"
        late = regime.every_s and middle["wall"] > 1.1 * (1.0 + regime.chunks * regime.every_s)
        print(row + ("  did not keep up: its reads hold several chunks, which makes each cheaper" if late else ""), flush=True)
    ratio = medians["ours"]["cpu_per_million"] / medians["theirs"]["cpu_per_million"]
    met = ratio <= TARGET_RATIO
    words = f"ratio {ratio:.3f} (target: at most {TARGET_RATIO:.3f})"
    if regime.every_s:
        error_s = medians["ours"]["error_p95"]
        met = met and error_s < TARGET_ERROR_S
        words += f", TTFT error p95 {error_s * 1000:.2f} ms (target: under {TARGET_ERROR_S * 1000:g} ms)"
    print(f"{regime.name:<10}{words}: {'met' if met else 'MISSED'}", flush=True)
    return met


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--regime", choices=REGIMES)
    parser.add_argument("--streams", type=int, help="of the paced regime; a client that cannot keep up is no longer paced")
    parser.add_argument("--child", choices=CLIENTS)
    parser.add_argument("--url")
    asked = parser.parse_args()
    if asked.streams:
        REGIMES["paced"] = replace(REGIMES["paced"], streams=asked.streams)
    if asked.child:
        child(asked.child, REGIMES[asked.regime], asked.url)
        return
    titles = ("CPU s per 1e6 chunks", "chunks/s per core", "wall s", "preempted/s", "TTFT error p50, p95, p99 ms")
    print(f"{'regime':<10}{'client':<18}{titles[0]:>24}{titles[1]:>19}{titles[2]:>8}{titles[3]:>13}{titles[4]:>28}", flush=True)
    regimes = [regime for regime in REGIMES.values() if asked.regime in (None, regime.name)]
    met = [compare(regime, asked.repeats) for regime in regimes]
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
