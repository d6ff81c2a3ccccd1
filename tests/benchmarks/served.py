"""Times of our client beside those of ``vllm bench serve``: the same requests, one real ``vllm serve``, in one run.

    python tests/benchmarks/served.py [--rounds 60] [--requests 4] [--concurrency 1] [--prompt 700] [--output 40]

A tiny model with random weights is served by the vLLM for the CPU that this interpreter has. The server has one core and the
clients another: on shared cores a client that computes slows the server down, which then is what both measure. Prefix caching
is off, so that both clients can send the very same prompts. Each client is one process that lives through the whole run; the
two take short turns (ABBA...), since a server's own speed drifts by more than 5 % within a minute, and their first round warms
up and is dropped. A ratio is the median of those of two blocks that were measured next to each other. Ours is ``drive`` over
``HttpEngine``; theirs is ``vllm.benchmarks.serve.benchmark``, the function behind the command, with the sampling parameters
that ours sends. Both figures have one definition (TTFT, TPOT and E2E over all requests), and both are set against the server's
own histograms of the same requests. Ours opens a connection for each request, theirs keeps its own: that cost is in our TTFT
and is printed.
Targets: means of TTFT and E2E within 5 % of each other, and as many requests and tokens as the server counted. Exit status 1
when one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "build" / "names"), str(ROOT / "tests")]

NAMES = ("mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "median_e2el_ms")
JUDGED = ("mean_ttft_ms", "mean_e2el_ms")
TARGET = 0.05
LABELS = {"ours": "vopt", "theirs": "vllm bench serve"}
WORDS = ("--load-format", "dummy", "--enforce-eager", "--max-model-len", "2048", "--gpu-memory-utilization", "0.08")
HISTOGRAMS = {"mean_ttft_ms": "vllm:time_to_first_token_seconds", "mean_e2el_ms": "vllm:e2e_request_latency_seconds"}

Figures = dict[str, float]


def source_of(asked: argparse.Namespace) -> Any:
    from support.sessions import source

    return source(prompt=asked.prompt, output=asked.output)


async def ours(asked: argparse.Namespace) -> Figures:
    from vopt.objectives.whole_run import whole_run_figures
    from vopt.optimizer.load.client import HttpEngine
    from vopt.optimizer.load.drive import drive
    from vopt.optimizer.load.plan import Arrivals, LoadPlan
    from vopt.optimizer.load.target import parse_target

    plan = LoadPlan(
        Arrivals.CLOSED, window_s=300.0, concurrency=asked.concurrency, max_requests=asked.requests, deadline_s=600.0
    )
    async with HttpEngine(parse_target(asked.url, asked.model)) as engine:
        load = await drive(engine, source_of(asked), plan)
    return whole_run_figures(load)


async def theirs(asked: argparse.Namespace) -> Figures:
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark
    from vllm.tokenizers import get_tokenizer

    from vopt.optimizer.load.target import NEUTRAL

    source = source_of(asked)
    requests = [source.request(index) for index in range(asked.requests)]
    samples = [
        SampleRequest(
            prompt=list(request.prompt_token_ids),
            prompt_len=request.prompt_tokens,
            expected_output_len=request.max_tokens,
            request_id=str(request.index),
        )
        for request in requests
    ]
    found: Figures = await benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="openai",
        api_url=f"{asked.url}/v1/completions",
        base_url=asked.url,
        model_id=asked.model,
        model_name=asked.model,
        tokenizer=get_tokenizer(asked.model),  # without one it leaves TTFT and TPOT out
        input_requests=samples,
        logprobs=None,
        request_rate=float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=0,
        ready_check_timeout_sec=0,  # or each of its blocks would begin on a server that has just answered a request, ours not
        profile=False,
        selected_percentile_metrics=["ttft", "tpot", "itl", "e2el"],
        selected_percentiles=[99.0],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=asked.concurrency,
        lora_modules=None,
        extra_headers=None,
        extra_body=dict(NEUTRAL),
    )
    return found


CLIENTS = {"ours": ours, "theirs": theirs}


def child(asked: argparse.Namespace) -> None:
    """One client: a block of requests for each line of standard input, its figures as one line of standard output."""
    if asked.child == "theirs":
        import vllm.benchmarks.serve  # noqa: F401 - imported before the first block, as ours is
    import vopt.optimizer.load.drive  # noqa: F401 - likewise, for ours

    answers = os.fdopen(os.dup(1), "w")  # vLLM prints its own table
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        figures = asyncio.run(CLIENTS[asked.child](asked))
        kept = {name: figures[name] for name in ("completed", "total_output_tokens", *NAMES)}
        print(json.dumps(kept), file=answers, flush=True)


@dataclass(frozen=True)
class Block:
    """What one client saw of its requests, and what the server did."""

    client: Figures
    server: Figures


def counted(url: str) -> Figures:
    """The server's own sums and counts."""
    from vopt.optimizer.load.metrics_text import parse

    with urllib.request.urlopen(f"{url}/metrics") as answer:
        page = parse(answer.read().decode())
    names = [f"{name}_{part}" for name in HISTOGRAMS.values() for part in ("sum", "count")]
    return {name: sum(page[name].values()) for name in (*names, "vllm:generation_tokens_total")}


def start_client(client: str, url: str, model: str, asked: argparse.Namespace) -> Any:
    words = ["--child", client, "--url", url, "--model", model]
    words += [f"--{name}={getattr(asked, name)}" for name in ("requests", "concurrency", "prompt", "output")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, __file__, *words], text=True, **pipes)
    if process.stdout.readline().strip() != "ready":
        raise SystemExit(f"the client {client} did not start")
    return process


def measure(process: Any, url: str) -> Block:
    before = counted(url)
    process.stdin.write("go\n")
    process.stdin.flush()
    client: Figures = json.loads(process.stdout.readline())
    time.sleep(0.2)  # the server counts a request a moment after its last byte
    after = counted(url)
    grown = {name: after[name] - before[name] for name in after}
    server = {figure: 1000 * grown[f"{name}_sum"] / grown[f"{name}_count"] for figure, name in HISTOGRAMS.items()}
    server["completed"] = grown[f"{HISTOGRAMS['mean_e2el_ms']}_count"]
    server["total_output_tokens"] = grown["vllm:generation_tokens_total"]
    return Block(client, server)


def connection_ms(url: str, tries: int = 200) -> float:
    """What a connection of one's own costs: open one and get a short answer, less the same over one that stays open."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    place = (parts.hostname, parts.port or 80)
    question = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"

    def ask(connection: socket.socket) -> None:
        connection.sendall(question)
        connection.recv(4096)

    fresh, kept = [], []
    with socket.create_connection(place) as standing:
        for _ in range(tries):
            began = time.perf_counter()
            with socket.create_connection(place) as own:
                ask(own)
                fresh.append(time.perf_counter() - began)
            began = time.perf_counter()
            ask(standing)
            kept.append(time.perf_counter() - began)
    return 1000 * (statistics.median(fresh) - statistics.median(kept))


def run(asked: argparse.Namespace, directory: Path) -> tuple[dict[str, list[Block]], float]:
    """The blocks of each client, and what a connection costs in milliseconds."""
    from support.sessions import spec
    from support.tiny_models import write_tiny_models

    from vopt.optimizer.engine.server import ServerSession

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores: one for the server, one for the clients")
    model = write_tiny_models(directory)[0]
    argv = ("vllm", "serve", str(model), *WORDS, "--no-enable-prefix-caching")
    trial = replace(spec(directory / "trial", model, sys.executable), environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    server = ServerSession(trial, argv, clients=1)
    blocks: dict[str, list[Block]] = {client: [] for client in CLIENTS}
    with suppress(PermissionError):  # before whatever else a shared machine does; everything started from here inherits it
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    with ExitStack() as stack:
        stack.callback(server.close)
        os.sched_setaffinity(0, {cores[0]})  # the server inherits it
        server.start(lambda phase, words: None)
        os.sched_setaffinity(0, {cores[1]})  # and so do the clients
        url, name = server.target.base_url, server.target.model
        clients = {client: start_client(client, url, name, asked) for client in CLIENTS}
        for process in clients.values():
            stack.callback(process.wait, 20)
            stack.callback(process.stdin.close)
        for number in range(asked.rounds + 1):
            for client in sorted(clients, reverse=bool(number % 2)):
                block = measure(clients[client], url)
                if number:
                    blocks[client].append(block)
        return blocks, connection_ms(url)


def ratio_of(blocks: Mapping[str, list[Block]], figure: Callable[[Block], float]) -> float:
    """Ours over theirs: the median over the rounds."""
    return statistics.median(figure(mine) / figure(other) for mine, other in zip(blocks["ours"], blocks["theirs"], strict=True))


def show(blocks: Mapping[str, list[Block]], asked: argparse.Namespace, connection: float) -> bool:
    """Print both side by side; whether the targets are met."""
    print(f"{asked.requests} requests of about {asked.prompt} + {asked.output} tokens, {asked.concurrency} in flight;", end=" ")
    print(f"medians of {asked.rounds} rounds (lowest to highest)")
    print(f"{'':<20}{'vopt':>28}{'vllm bench serve':>28}{'ratio':>9}")
    met = True
    for name in NAMES:
        cells = []
        for client in CLIENTS:
            values = sorted(block.client[name] for block in blocks[client])
            cells.append(f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})")
        ratio = ratio_of(blocks, lambda block, name=name: block.client[name])
        verdict = ""
        if name in JUDGED:
            met &= abs(ratio - 1) <= TARGET
            verdict = f"   target within {TARGET:.0%}: {'met' if abs(ratio - 1) <= TARGET else 'MISSED'}"
        print(f"{name:<20}{cells[0]:>28}{cells[1]:>28}{ratio:>9.3f}{verdict}")
    for name in HISTOGRAMS:
        more = [statistics.median(block.client[name] - block.server[name] for block in blocks[client]) for client in CLIENTS]
        own = [statistics.median(block.server[name] for block in blocks[client]) for client in CLIENTS]
        ratio = ratio_of(blocks, lambda block, name=name: block.server[name])
        cells = [f"{server:.2f} + {client:.2f}" for server, client in zip(own, more, strict=True)]
        print(f"{name + ' (server +)':<20}{cells[0]:>28}{cells[1]:>28}{ratio:>9.3f}")
    for client in CLIENTS:
        for name in ("completed", "total_output_tokens"):
            seen = [round(block.client[name]) for block in blocks[client]]
            told = [round(block.server[name]) for block in blocks[client]]
            if seen != told:
                met &= client != "ours"
                print(f"{LABELS[client]}: {name} {seen}, the server counted {told}")
    print(f"a connection of one's own costs {connection:.2f} ms, which vopt pays for each request")
    return met


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=700)
    parser.add_argument("--output", type=int, default=40)
    parser.add_argument("--child", choices=CLIENTS)
    parser.add_argument("--url")
    parser.add_argument("--model")
    asked = parser.parse_args()
    if asked.child:
        child(asked)
        return
    with tempfile.TemporaryDirectory() as place:
        blocks, connection = run(asked, Path(place))
    sys.exit(0 if show(blocks, asked, connection) else 1)


if __name__ == "__main__":
    main()
