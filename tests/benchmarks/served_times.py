"""Times of our client beside those of ``vllm bench serve``: the same requests, one real ``vllm serve``, in one run.

    python tests/benchmarks/served_times.py [--rounds 4] [--requests 96] [--concurrency 2]

A tiny model with random weights is served by the vLLM for the CPU that this interpreter has. Prefix caching is off, so that
both clients can send the very same prompts, and both send them at the same time, each from a fresh process at its own
concurrency: what else the machine does then meets both alike (in turn, one client alone differed by 10 to 20 % from run to run
on two shared cores). The first round warms up and is dropped. Ours is ``drive`` over ``HttpEngine``; theirs is
``vllm.benchmarks.serve.benchmark``, the function behind the command, with the sampling parameters that ours sends. Both figures
have one definition (TTFT, TPOT and E2E over the whole run).
Target: means of TTFT and E2E within 5 % of each other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "build" / "names"), str(ROOT / "tests")]

NAMES = ("mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "median_e2el_ms", "output_throughput")
JUDGED = ("mean_ttft_ms", "mean_e2el_ms")
TARGET = 0.05
WORDS = ("--load-format", "dummy", "--enforce-eager", "--max-model-len", "2048", "--gpu-memory-utilization", "0.08")


def requests_of(count: int) -> Any:
    from support.sessions import source

    made = source(prompt=200, output=40)
    return made, [made.request(index) for index in range(count)]


async def ours(url: str, model: str, count: int, concurrency: int) -> dict[str, float]:
    from vopt.objectives.whole_run import whole_run_figures
    from vopt.optimizer.load.client import HttpEngine
    from vopt.optimizer.load.drive import drive
    from vopt.optimizer.load.plan import Arrivals, LoadPlan
    from vopt.optimizer.load.target import parse_target

    source, _ = requests_of(count)
    plan = LoadPlan(Arrivals.CLOSED, window_s=300.0, concurrency=concurrency, max_requests=count, deadline_s=600.0)
    async with HttpEngine(parse_target(url, model)) as engine:
        load = await drive(engine, source, plan)
    return whole_run_figures(load)


async def theirs(url: str, model: str, count: int, concurrency: int) -> dict[str, float]:
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark
    from vllm.tokenizers import get_tokenizer

    from vopt.optimizer.load.target import NEUTRAL

    _, requests = requests_of(count)
    samples = [
        SampleRequest(
            prompt=list(request.prompt_token_ids),
            prompt_len=request.prompt_tokens,
            expected_output_len=request.max_tokens,
            request_id=str(request.index),
        )
        for request in requests
    ]
    found: dict[str, float] = await benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="openai",
        api_url=f"{url}/v1/completions",
        base_url=url,
        model_id=model,
        model_name=model,
        tokenizer=get_tokenizer(model),  # without one it leaves TTFT and TPOT out
        input_requests=samples,
        logprobs=None,
        request_rate=float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=0,
        profile=False,
        selected_percentile_metrics=["ttft", "tpot", "itl", "e2el"],
        selected_percentiles=[99.0],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=concurrency,
        lora_modules=None,
        extra_headers=None,
        extra_body=dict(NEUTRAL),
    )
    return found


CLIENTS = {"ours": ours, "theirs": theirs}


def side_by_side(url: str, model: str, asked: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Both clients at the same time, each in a fresh process, begun together once both have imported what they need."""
    running = {}
    for client in CLIENTS:
        words = ["--child", client, "--url", url, "--model", model]
        words += ["--requests", str(asked.requests), "--concurrency", str(asked.concurrency)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        running[client] = subprocess.Popen([sys.executable, __file__, *words], text=True, **pipes)
    for process in running.values():
        while (line := process.stdout.readline().strip()) != "ready":
            assert process.poll() is None, line
    for process in running.values():
        process.stdin.write("go\n")
        process.stdin.flush()
    found = {client: json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for client, process in running.items()}
    assert all(figures["completed"] == asked.requests for figures in found.values()), found
    return found


def compare(asked: argparse.Namespace, directory: Path) -> dict[str, list[dict[str, float]]]:
    """Figures of every round but the first, by client."""
    from support.sessions import spec
    from support.tiny_models import write_tiny_models

    from vopt.optimizer.engine.server import ServerSession

    model = write_tiny_models(directory)[0]
    argv = ("vllm", "serve", str(model), *WORDS, "--no-enable-prefix-caching")
    server = ServerSession(spec(directory / "trial", model, sys.executable), argv, clients=1)
    runs: dict[str, list[dict[str, float]]] = {client: [] for client in CLIENTS}
    try:
        server.start(lambda phase, words: None)
        target = server.target
        for number in range(asked.rounds + 1):
            for client, figures in side_by_side(target.base_url, target.model, asked).items():
                if number:
                    runs[client].append(figures)
    finally:
        server.close()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--child", choices=CLIENTS)
    parser.add_argument("--url")
    parser.add_argument("--model")
    asked = parser.parse_args()
    if asked.child:
        if asked.child == "theirs":
            import vllm.benchmarks.serve  # noqa: F401 - imported before the start is given, as ours is
        import vopt.optimizer.load.drive  # noqa: F401

        print("ready", flush=True)
        sys.stdin.readline()
        figures = asyncio.run(CLIENTS[asked.child](asked.url, asked.model, asked.requests, asked.concurrency))
        print(json.dumps({name: figures[name] for name in ("completed", *NAMES)}))
        return
    with tempfile.TemporaryDirectory() as place:
        runs = compare(asked, Path(place))
    print(f"{asked.requests} requests and {asked.concurrency} in flight each, at the same time;", end=" ")
    print(f"medians of {asked.rounds} rounds (lowest to highest)")
    print(f"{'':<20}{'vopt':>28}{'vllm bench serve':>28}{'difference':>12}")
    for name in NAMES:
        cells, middles = [], []
        for client in CLIENTS:
            values = sorted(run[name] for run in runs[client])
            middles.append(statistics.median(values))
            cells.append(f"{middles[-1]:.2f} ({values[0]:.2f} to {values[-1]:.2f})")
        verdict = f"   target {TARGET:.0%}" if name in JUDGED else ""
        print(f"{name:<20}{cells[0]:>28}{cells[1]:>28}{middles[0] / middles[1] - 1:>+12.1%}{verdict}")


if __name__ == "__main__":
    main()
