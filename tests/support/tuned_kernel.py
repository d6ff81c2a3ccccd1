"""Run by an interpreter with Triton: tunes one kernel on a GPU that is not there, and prints what happened as JSON.

    python tuned_kernel.py CACHE plain|side-by-side|broken

Compiling is Triton's own, down to the machine code of an H200. Loading and launching are not: the benchmark launches into
the void, notes whether each candidate was compiled before, and prefers the one with 4 warps and blocks of 64.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_CACHE_DIR": sys.argv[1], "TRITON_CACHE_AUTOTUNING": "1"}

import triton
import triton.compiler
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGET = GPUTarget("cuda", 90, 32)
timed: list[dict[str, Any]] = []
compiled_in: set[str] = set()
launched: list[int] = []


class Driver:
    """As much of a driver as Triton asks for before and while it launches."""

    launcher_cls = staticmethod(lambda source, metadata: lambda *arguments: launched.append(metadata.num_warps))
    utils = SimpleNamespace(
        load_binary=lambda *arguments: (object(), 1, 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        unload_module=lambda module: None,
    )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_benchmarker(self) -> Any:
        return bench


def bench(kernel_call: Any, quantiles: Any) -> list[float]:
    known = len(scale.fn.device_caches[0][0])
    kernel_call()
    kernels = scale.fn.device_caches[0][0]
    candidate = CANDIDATES[len(timed)]
    timed.append({"known_before": known, "known_after": len(kernels)})
    time = 1.0 if (candidate.num_warps, candidate.kwargs["BLOCK"]) == (4, 64) else 2.0
    return [time, time, time]


CANDIDATES = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (32, 64, 128) for warps in (2, 4)]


@triton.autotune(configs=CANDIDATES, key=["n"])
@triton.jit
def scale(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803 - as Triton's are called
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n) * 2, mask=offsets < n)


class Tensor:
    """What Triton looks at in a tensor."""

    dtype = "fp32"

    def data_ptr(self) -> int:
        return 256


def main() -> None:
    from vopt.optimizer.engine import kernel_tuning

    driver.set_active(Driver())
    compile_one = triton.compiler.compile

    def noting(*arguments: Any, **options: Any) -> Any:
        compiled_in.add(threading.current_thread().name)
        return compile_one(*arguments, **options)

    triton.compiler.compile = noting  # looked up when a kernel is first called
    if sys.argv[2] != "plain":
        kernel_tuning.compile_side_by_side()
        kernel_tuning.compile_side_by_side()
    if sys.argv[2] == "broken":
        scale.warmup = None  # what another release might do
    scale[(1,)](Tensor(), Tensor(), 1000)
    best = scale.best_config
    print(
        json.dumps(
            {
                "timed": timed,
                "best": [best.kwargs["BLOCK"], best.num_warps],
                "threads": sorted(compiled_in),
                "launched": launched[-1],
                "names": scale.nargs,
            }
        )
    )


if __name__ == "__main__":
    main()
