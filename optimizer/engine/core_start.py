"""How what vLLM spawns begins in a trial: with its imports done, and tuning its kernels side by side.

vLLM forks its engine core from the trial process, which has imported vLLM, unless CUDA is initialised there: the module of the
gated delta net asks for the GPU's name, so hybrid models (Qwen3.5) are spawned and import everything again (15 of the 40 s of
a start with a known key; H200, vLLM 0.22.1). ``begin_server`` has ``multiprocessing``'s own fork server import beside the trial
process, ``lend`` lets what vLLM spawns come from it.

What is forked there is the process that would have been spawned, with one difference: its environment would be the server's.
So what vLLM changed since (``HANDED_OVER``) is handed over; where anything else changed, which libraries may have read when
they were loaded (``LD_PRELOAD``), or another executable was set (``numa_bind``), vLLM's own spawn is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import signal
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
HANDED_OVER = ("VLLM_", "AITER_", "NCCL_")
"""Read by vLLM when they are needed, by ROCm's kernels (a module of vLLM's sets theirs everywhere, 0.28 and later), and by NCCL
when a communicator is made."""
THREADS, THREADS_ARE_VLLMS = "OMP_NUM_THREADS", "VLLM_OMP_NUM_THREADS_SET_BY_VLLM"
"""Set while a core of one worker is started on a GPU (0.32 and later, ``v1/engine/utils.py``): a spawned one reads the first
when it imports torch, a forked one has torch's setting instead, and so have ours."""
AT_EXEC = ("LD_PRELOAD", "PYTHON", "GLIBC_", "MALLOC_")
"""Read by the loader, the C library and the interpreter when a program begins. ``LD_LIBRARY_PATH`` is another matter: OpenCV
sets it whenever it is imported."""
COMPATIBILITY = "VLLM_ENABLE_CUDA_COMPATIBILITY"
"""Has vLLM put CUDA's compatibility libraries into ``LD_LIBRARY_PATH``, where only a new program finds them
(``env_override.py``, 0.20 to 0.33)."""
PATIENCE_S = 20.0
"""For a server that imports the same as this process, at the same time."""
INSPECTION_S = 60.0
"""For a model's class: seconds where vLLM is imported already."""
ENDING_S = 5.0


def note() -> Path:
    """Where the server says what its imports left: in the trial's private folder for temporary files."""
    return Path(tempfile.gettempdir()) / "core-imports"


_begun_in: dict[str, str] = {}
_server: int | None = None
_forked: list[str] = []


def begin_server() -> bool:
    """Starts the fork server, which imports while this process does; whether it could be. Before anything else is imported."""
    global _server
    if os.environ.get(COMPATIBILITY, "0").strip().lower() in ("1", "true"):
        return False
    _begun_in.update(os.environ)
    try:
        note().write_text("")  # an order; the server's imports answer it
        multiprocessing.set_forkserver_preload([IMPORTS])
        forkserver.ensure_running()
    except OSError as error:
        say(f"there is no fork server: {error}")
        return False
    _server = getattr(forkserver._forkserver, "_forkserver_pid", None)  # the same in 3.10 to 3.14
    return _server is not None


def _ended() -> Any:
    """``None`` while the server lives. In a process that vLLM forked from this one it is no child, and counts as ended. Its end
    stays to be collected: ``multiprocessing`` asks for it as well."""
    if _server is None:
        return True
    try:
        return os.waitid(os.P_PID, _server, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True


def server_is_ready(patience_s: float = PATIENCE_S) -> bool:
    """Whether its imports are done, all of them, and left the GPU alone; waits for them at most so long."""
    until = time.monotonic() + patience_s
    said = ""
    while not said and time.monotonic() < until and _ended() is None:
        with contextlib.suppress(OSError):
            said = note().read_text()
        time.sleep(0.0 if said else 0.02)
    if said != CLEAN:
        say(f"the fork server is not used: {said or ('its imports take long' if _ended() is None else 'it ended')}")
    return said == CLEAN


def end_server() -> None:
    """Kills a server that nothing comes from any more; one that a process was forked from stays.

    It would end by itself when nobody has the other end of its pipe: an engine core that vLLM forked from this process has."""
    if _forked:
        return
    if _server is not None and _ended() is None:
        os.kill(_server, signal.SIGKILL)  # a child that nobody has waited for: no other process can have its number
    with contextlib.suppress(Exception):  # CPython's own tests call this, which also waits for the end and unlinks the socket
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # private: no stub has it


def lost() -> str | None:
    """How the server ended that a process was forked from, if it did: to vLLM each of those ended with it, whatever they do."""
    ended = _ended()
    if not _forked or ended is None:
        return None
    how = "ended"
    if ended is not True:
        killed = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        how = f"was killed by signal {ended.si_status}" if killed else f"ended with exit status {ended.si_status}"
    return f"the fork server that {', '.join(_forked)} came from {how}"


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """What changed between two environments, by name; ``None``: is gone."""
    return {name: now.get(name) for name in sorted({*before, *now}) if before.get(name) != now.get(name)}


def served() -> bool:
    """Whether a process that vLLM would have spawned was forked from the server."""
    return bool(_forked)


def prepare(environment: Mapping[str, str] | None) -> None:
    """For this process, from which vLLM forks what it does not spawn, and for what it spawns.

    ``environment`` is the one after the imports, here as in the server; ``None``: there is no server that can be used.
    """
    compile_side_by_side()
    lend(environment)
    if environment is not None:
        inspect_in_fork(environment)


def _changed(environment: Mapping[str, str]) -> tuple[dict[str, str | None], list[str]]:
    """(what to hand over to a process that is forked now, names of what cannot be): ``environment`` is the server's.

    Among the last are those that the imports set, there as here, and only a new program heeds."""
    changed = difference(environment, os.environ)
    given = (*HANDED_OVER, THREADS) if os.environ.get(THREADS_ARE_VLLMS) == "1" else HANDED_OVER
    others = [name for name in changed if not name.startswith(given)]
    others += [name for name in difference(_begun_in, os.environ) if name.startswith(AT_EXEC) and name not in others]
    return changed, others


def inspect_in_fork(environment: Mapping[str, str]) -> None:
    """vLLM inspects a model's class in a process of its own, since a model's module may initialise CUDA. That process, which
    imports vLLM first (8 of 13 s, an H200 host, 0.22.1), comes from the server too. Where it fails, vLLM's own has the word."""
    registry = sys.modules.get("vllm.model_executor.models.registry")
    own = getattr(registry, "_run_in_subprocess", None)  # the same in 0.20 to 0.33
    if registry is None or own is None:
        return

    def inspect(function: Callable[[], Any]) -> Any:
        changed, others = _changed(environment)
        if others or _ended() is not None:
            return own(function)
        try:
            answer = _in_fork(changed, function)
        except Exception as error:  # noqa: BLE001 - what is wrong with the model is told by vLLM's own inspection
            say(f"the model's class is inspected again: {type(error).__name__}: {error}")
            return own(function)
        say("the model's class was inspected in a forked process")
        return answer

    registry._run_in_subprocess = inspect  # type: ignore[attr-defined]  # a module known by its name alone


def _in_fork(environment: Mapping[str, str | None], function: Callable[[], Any]) -> Any:
    import cloudpickle  # vLLM's, for the same purpose

    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=begin, args=(environment, _server, _answer, cloudpickle.dumps(function), sender))
    try:
        process.start()
        sender.close()
        if not receiver.poll(INSPECTION_S):  # true as well when the process ends
            process.kill()
            raise TimeoutError(f"no answer for {INSPECTION_S:g} s")
        answer, error = pickle.loads(receiver.recv_bytes())
        if error is not None:
            raise RuntimeError(error)
        return answer
    finally:
        sender.close()
        receiver.close()
        if process.pid is not None:
            process.join(ENDING_S)


def _answer(function: bytes, sender: Any) -> None:
    """As ``registry._run`` does it; what goes wrong is told, not printed: that log is searched for what an engine died of."""
    try:
        importlib.import_module("vllm.plugins").load_general_plugins()
        answer = pickle.dumps((pickle.loads(function)(), None))
    except Exception as error:  # noqa: BLE001 - for the process that asked
        answer = pickle.dumps((None, f"{type(error).__name__}: {error}"))
    sender.send_bytes(answer)


def lend(environment: Mapping[str, str] | None) -> None:
    """From now on, what this process spawns with ``multiprocessing`` runs ``begin``, forked from the server if it can be."""
    executable = spawn.get_executable()

    def popen(process: Any) -> Any:
        if process._target is None:  # a class with a ``run`` of its own
            return popen_spawn_posix.Popen(process)
        changed, others = ({}, []) if environment is None else _changed(environment)
        forked = environment is not None and not others and spawn.get_executable() == executable and _ended() is None
        target = process._target
        if forked:
            process._target = functools.partial(begin, changed, _server, target)
            say(f"{process.name} is forked, its imports are done")
            try:
                started = popen_forkserver.Popen(process)
            except (OSError, EOFError) as error:  # the server was killed, or has no memory for a fork
                say(f"{process.name} is spawned after all: {type(error).__name__}: {error}")
            else:
                _forked.append(process.name)
                return started
        if others:
            say(f"{process.name} is spawned and imports again, since {', '.join(others)} changed")
        process._target = functools.partial(begin, {}, None, target)
        return popen_spawn_posix.Popen(process)

    # multiprocessing has no other place to say how a process is made, and vLLM asks for its spawn context.
    SpawnProcess._Popen = staticmethod(popen)  # type: ignore[assignment, method-assign]


def begin(
    environment: Mapping[str, str | None], server: int | None, target: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """What a spawned process runs first; ``target`` is what vLLM wants of it. A worker that a core spawns imports again.

    ``server``: what it was forked from. If that is gone by now, it may not have told of the fork, and another was spawned."""
    if server not in (None, os.getppid()):
        sys.exit("vopt: the fork server ended")
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if (threads := environment.get(THREADS)) is not None:
        sys.modules["torch"].set_num_threads(int(threads))
    lend(None)
    compile_side_by_side()
    return target(*args, **kwargs)
