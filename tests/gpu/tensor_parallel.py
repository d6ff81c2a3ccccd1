"""One model on one GPU and split over two (`tensor_parallel_size`): what the second GPU buys, at several levels of load.

    python tests/gpu/tensor_parallel.py --models MODELS --gpus 0,1 [--model qwen3-8b] [--pairs 2] [--levels 32,256]

Fresh starts, in pairs whose order alternates, on the same GPUs: the first of them, or both. Run it again until it says that
nothing remains (exit code 10). Prints two GPUs / one GPU for each figure (two engines of one GPU each would double the
throughput and leave the latencies as they are), then the room for the KV cache and the times of the starts.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pairs
import starts

ONE, TWO = "one GPU", "two GPUs"

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""Set here unless the environment says otherwise: where tenants share the NVLink switches of a host, multicast can take the
GPUs of all of them out of service. vLLM 0.22.1 uses it for two GPUs of an H200 only through NCCL, if at all (its own
communicator asks for 4, 6 or 8 of them: ``distributed/device_communicators/symm_mem.py``), but allocates for it."""


def side_of(entry: pairs.Entry) -> str:
    return TWO if entry["config"]["tensor_parallel_size"] == 2 else ONE


@starts.reported
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    starts.add_options(parser, out="gpu-results/tensor-parallel.jsonl")
    parser.set_defaults(window=10.0, gpus="0,1")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--levels", default="32,256", help="requests in flight of the loads of a start")
    typed = parser.parse_args(arguments)
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    levels = [int(level) for level in typed.levels.split(",")]
    plans = [starts.closed(level, typed.window, typed.seed) for level in levels]
    sides = (pairs.Side(ONE, {"tensor_parallel_size": 1}), pairs.Side(TWO, {"tensor_parallel_size": 2}))
    stand = starts.stand_of(typed, typed.model)
    if stand.subject.machine.count != 2:
        raise ValueError(f"--gpus {typed.gpus}: two GPUs are compared with one: --gpus 0,1")
    out = typed.out.with_name(f"{typed.out.stem}-{Path(typed.model).name}{typed.out.suffix}")
    switched = {name: os.environ[name] for name in NO_MULTICAST}
    facts = {"levels": levels, "window_s": typed.window, "switched": switched}
    journal = starts.Journal(out, stand.header("tensor-parallel", **facts))
    with starts.reserved(stand, "tensor parallel"):
        remaining = pairs.measure(stand, journal, starts.Patience(typed.budget), sides, side_of, pairs=typed.pairs, plans=plans)
    print(pairs.compared_words(journal.entries, levels, TWO, ONE, side_of))
    print(capacity_words(journal.entries))
    print(f"{remaining} starts remain")
    return starts.WORK_REMAINS if remaining else 0


def capacity_words(entries: Sequence[pairs.Entry]) -> str:
    """What decides the choice beside the figures above: room for the KV cache, and the time of a start."""
    lines = []
    for name in (ONE, TWO):
        of_side = [entry for entry in entries if side_of(entry) == name]
        tokens = sorted({entry["started"]["kv_cache_tokens"] or 0 for entry in of_side})
        room = " or ".join(f"{count:,}" for count in tokens)
        seconds = ", ".join(f"{entry['phase_s']['start']:.0f}" for entry in of_side)
        lines.append(f"  {name:<9} KV cache {room} tokens; starts {seconds} s")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
