"""Triton's tuning with its candidates compiled side by side, then timed one after another as before.

The first start of a hybrid model tunes six kernels of the gated delta net, 87 s of it (Qwen3.5-9B, H200, vLLM 0.22.1), nearly
all of which is compiling some 80 candidates one by one. Compiling leaves the interpreter's lock free (two threads on two cores
took half of one's time, 3.6.0), and Triton has a mode for it. Which candidate wins is measured by Triton's own benchmark, which
finds each of them compiled.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MOST = 16
KNOWN = ["self", "tuning_key", "configs", "bench_fn"]
"""The parameters of ``Autotuner.check_disk_cache``, which is Triton's own affair (these from 3.6.0 to 3.9.0)."""


def say(text: str) -> None:
    """Into the engine's log, as one line: none of ours is a cause of what happens to the engine (``failures.NOISE``)."""
    with contextlib.suppress(OSError):  # no room for the log
        sys.stderr.write(f"vopt: {' '.join(text.split())}\n")
        sys.stderr.flush()


def compile_side_by_side() -> None:
    """Once in a process, for the tuning of all its kernels; a Triton without that mode (up to 3.4), one that tunes in another
    way, or none, stays as it is."""
    try:
        from triton import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except Exception:  # noqa: BLE001 - a Triton that cannot be imported is vLLM's to report
        return
    known = getattr(Autotuner, "check_disk_cache", None)
    if getattr(Autotuner.run, "side_by_side", False) or known is None or [*inspect.signature(known).parameters] != KNOWN:
        return
    run, check_disk_cache = Autotuner.run, Autotuner.check_disk_cache
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def remembering(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[id(self)] = args, kwargs
        try:
            return run(self, *args, **kwargs)
        finally:
            calls.pop(id(self), None)

    def compiling(self: Any, tuning_key: Any, configs: Any, bench_fn: Any) -> Any:
        def compile_then_bench() -> None:
            if (call := calls.get(id(self))) is not None and not any(config.pre_hook for config in configs):
                compile_all(self, AsyncCompileMode, *call)
            bench_fn()

        return check_disk_cache(self, tuning_key, configs, compile_then_bench)

    remembering.side_by_side = True  # type: ignore[attr-defined]  # the mark that this was done
    Autotuner.run, Autotuner.check_disk_cache = remembering, compiling


def compile_all(autotuner: Any, mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compiles what ``autotuner`` is about to time for this call; what does not compile fails again, as it should, when timed.

    A candidate with a hook of its own never comes here: that changes the arguments, hence what is compiled."""
    named = autotuner.nargs
    kwargs = {name: value for name, value in kwargs.items() if name != "warmup"}
    try:
        with ThreadPoolExecutor(min(MOST, len(os.sched_getaffinity(0)))) as threads, mode(threads, ignore_errors=True):
            autotuner.warmup(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - then they are compiled one by one
        say(f"kernels are compiled one by one: {type(error).__name__}: {error}")
    finally:
        autotuner.nargs = named
