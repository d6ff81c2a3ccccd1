"""How what vLLM spawns begins in a trial: with its imports done, and tuning its kernels side by side.

vLLM forks its engine core from the trial process, which has imported vLLM, unless CUDA is initialised there: the module of the
gated delta net asks for the GPU's name, so hybrid models (Qwen3.5) are spawned and import everything again (15 of the 40 s of
a start with a known key; H200, vLLM 0.22.1). ``begin_server`` has ``multiprocessing``'s own fork server import beside the trial
process, ``lend`` lets what vLLM spawns come from it.

What is forked there is the process that would have been spawned, with one difference: its environment would be the server's.
So what vLLM changed since (``HANDED_OVER``) is handed over; where anything else changed, which
libraries may have read when they were loaded (``OMP_NUM_THREADS``, ``LD_PRELOAD``), or another executable was set
(``numa_bind``), vLLM's own spawn is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, popen_forkserver, popen_spawn_posix, spawn
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from vopt.optimizer.engine.kernel_tuning import compile_side_by_side, say

IMPORTS = "vopt.optimizer.engine.core_imports"
CLEAN = "clean"
HANDED_OVER = ("VLLM_", "AITER_")
"""Read by vLLM, and by ROCm's kernels, when they are needed; a module of vLLM's sets the second everywhere (0.28 and later)."""
PATIENCE_S = 20.0
"""For a server that imports the same as this process, at the same time."""


def note() -> Path:
    """Where the server says what its imports left: in the trial's private folder for temporary files."""
    return Path(tempfile.gettempdir()) / "core-imports"


def begin_server() -> None:
    """Starts the fork server, which imports while this process does. Before anything else is imported or started."""
    note().write_text("")  # an order; the server's imports answer it
    multiprocessing.set_forkserver_preload([IMPORTS])
    forkserver.ensure_running()


def server_is_ready(patience_s: float = PATIENCE_S) -> bool:
    """Whether its imports are done and left the GPU alone; waits for them at most so long."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if said := note().read_text():
                return said == CLEAN
        time.sleep(0.02)
    return False


def end_server() -> None:
    """Ends a server that nothing comes from any more, and waits for its end; not one that a process was forked from."""
    with contextlib.suppress(
        Exception
    ):  # CPython's own tests call this; without it the server waits, idle, for the trial's end
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """What changed between two environments, by name; ``None``: is gone."""
    return {name: now.get(name) for name in sorted({*before, *now}) if before.get(name) != now.get(name)}


_spawned: list[str] = []


def spawned() -> bool:
    """Whether this process had an engine core spawned, or forked from the server instead; not by itself, as vLLM prefers."""
    return bool(_spawned)


def prepare(environment: Mapping[str, str] | None) -> None:
    """For this process, from which vLLM forks what it does not spawn, and for what it spawns.

    ``environment`` is the one after the imports, here as in the server; ``None``: there is no server that can be used.
    """
    compile_side_by_side()
    lend(environment)
    if environment is not None:
        inspect_in_fork(environment)


def inspect_in_fork(environment: Mapping[str, str]) -> None:
    """vLLM inspects a model's class in a process of its own, since a model's module may initialise CUDA. That process, which
    imports vLLM first (8 of 13 s, an H200 host, 0.22.1), comes from the server too. Where it fails, vLLM's own has the word."""
    registry = sys.modules.get("vllm.model_executor.models.registry")
    own = getattr(registry, "_run_in_subprocess", None)  # the same in 0.20 to 0.33
    if registry is None or own is None:
        return

    def inspect(function: Callable[[], Any]) -> Any:
        changed = difference(environment, os.environ)
        if not all(name.startswith(HANDED_OVER) for name in changed):
            return own(function)
        try:
            answer = _in_fork(changed, function)
        except Exception as error:  # noqa: BLE001 - what is wrong with the model is told by vLLM's own inspection
            say(f"the model's class is inspected again: {type(error).__name__}: {error}")
            return own(function)
        say("the model's class was inspected in a forked process")
        return answer

    registry._run_in_subprocess = inspect  # type: ignore[attr-defined]


def _in_fork(environment: Mapping[str, str | None], function: Callable[[], Any]) -> Any:
    import cloudpickle  # vLLM's, for the same purpose

    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=begin, args=(environment, _answer, cloudpickle.dumps(function), sender))
    process.start()
    sender.close()
    try:
        return pickle.loads(receiver.recv_bytes())  # ends with the process, if not before
    finally:
        receiver.close()
        process.join()


def _answer(function: bytes, sender: Any) -> None:
    """As ``registry._run`` does it."""
    plugins = importlib.import_module("vllm.plugins")
    plugins.load_general_plugins()
    sender.send_bytes(pickle.dumps(pickle.loads(function)()))


def lend(environment: Mapping[str, str] | None) -> None:
    """From now on, what this process spawns with ``multiprocessing`` runs ``begin``, forked from the server if it can be."""
    executable = spawn.get_executable()

    def popen(process: Any) -> Any:
        if process._target is None:  # a class with a ``run`` of its own
            return popen_spawn_posix.Popen(process)
        changed = {} if environment is None else difference(environment, os.environ)
        others = [name for name in changed if not name.startswith(HANDED_OVER)]
        forked = environment is not None and not others and spawn.get_executable() == executable
        _spawned.append(process.name)
        process._target = functools.partial(begin, changed if forked else {}, process._target)
        if forked:
            say(f"{process.name} is forked, its imports are done")
            return popen_forkserver.Popen(process)
        if others:
            say(f"{process.name} is spawned and imports again, since {', '.join(others)} changed")
        return popen_spawn_posix.Popen(process)

    SpawnProcess._Popen = staticmethod(popen)  # type: ignore[assignment, method-assign]


def begin(environment: Mapping[str, str | None], target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a spawned process runs first; ``target`` is what vLLM wants of it. A worker that a core spawns imports again."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    lend(None)
    compile_side_by_side()
    return target(*args, **kwargs)
