"""Where compiled code is kept between engine starts, and the environment that engines run in.

One cache for each host, GPU kind and vLLM version, and never a temporary one: with a fixed ``TRITON_CACHE_DIR`` a start
with a new compile key took 69 s instead of 157 to 170 s (Qwen3.5-9B, H200, vLLM 0.22.1), because vLLM otherwise tunes
its Triton kernels again for every key.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.trial import StartClass

BYTES_PER_COMPILE_KEY = 100_000_000
"""About what one compile key adds to the caches (458 MB for 4 keys of 2 models, H200, vLLM 0.22.1)."""

AHEAD = "torch_aot_compile"
INSPECTED = "modelinfos"
ASKED = "asked"
READY_S = 14_400
"""What vLLM is told to wait for its own engine: longer than any start is given by us."""


def cache_root() -> Path:
    """The root of all of vopt's caches: ``$XDG_CACHE_HOME/vopt``. Raises ``EnvironmentLacks`` for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "vopt"
    except RuntimeError as error:  # a container's user that no passwd file knows
        raise EnvironmentLacks(
            "there is no place for caches: this user has no home directory", hint="export XDG_CACHE_HOME=/a/directory/with/room"
        ) from error


def engine_cache(root: Path, gpu: str, vllm_version: str) -> Path:
    """The cache of one kind of engine. ``gpu`` is a product name, or ``cpu``."""
    return root / "engines" / f"{_word(gpu)}-vllm-{_word(vllm_version)}"


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") or "unknown"


def engine_environment(
    cache: Path, *, cpu_build: bool, offline: bool, start_s: float = 0.0, bytecode: bool = True
) -> dict[str, str]:
    """What is set for every engine, in trials and served alike. None of it changes how fast a started engine runs:

    ``VLLM_CACHE_ROOT``, ``TRITON_CACHE_DIR``: caches survive (see above). ``VLLM_HOST_IP``: nothing listens beyond this
    host. ``VLLM_NO_USAGE_STATS``, ``DO_NOT_TRACK``: nothing is reported. ``HF_HUB_OFFLINE``: weights are here already, so
    no start waits for a network. ``VLLM_USE_AOT_COMPILE=0``, for the CPU build only: its ahead-of-time cache fails to
    load, and every start would compile again (40 s instead of 15.7 s). ``VLLM_ENGINE_READY_TIMEOUT_S``: vLLM gives up on
    its own engine after 600 s, which a first start of a large model may need; our deadline (``start_s``) ends a start, and
    this is the same for nearly all of them, so that a process that imported ahead under one deadline serves a trial with
    another. ``PYTHONFAULTHANDLER``: a crash leaves a traceback. ``PYTHONPYCACHEPREFIX``, only without ``bytecode`` beside
    the sources: each process of an engine would compile all that it imports (18.9 s of CPU instead of 7.7 s, 0.32.0 on a
    CPU), and images often forbid to keep it.
    """
    environment = {
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if cpu_build:
        environment["VLLM_USE_AOT_COMPILE"] = "0"
    if not bytecode:
        environment |= _own_bytecode(cache)
    if offline:
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    environment["VLLM_ENGINE_READY_TIMEOUT_S"] = str(max(READY_S, round(start_s)))
    return environment


def _own_bytecode(cache: Path) -> dict[str, str]:
    return {"PYTHONPYCACHEPREFIX": str(cache / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}


def asking_environment(cache: Path, *, bytecode: bool) -> dict[str, str]:
    """What the child that is asked about arguments and models keeps, and where. It inspects the model's class as an engine
    does (a process of its own that imports the model, 17 s before the first start of Qwen3.5-9B on an H200 host), into a folder
    beside the engines', from which ``lend_inspections`` takes it."""
    return {"VLLM_CACHE_ROOT": str(cache / ASKED)} | ({} if bytecode else _own_bytecode(cache))


def lend_inspections(cache: Path) -> None:
    """Gives the engines of this cache what was learned of model classes when vLLM was asked, unless they know it by themselves.

    After ``cache_state`` and before a start, so that the first start of a model still counts as one: what else it does once
    (tuning its kernels) takes longer. vLLM reads an entry only where it carries the digest of the class's source.
    """
    asked, known = cache / ASKED / INSPECTED, cache / "vllm" / INSPECTED
    for name in _names(asked):
        if (known / name).exists():
            continue
        draft = known / f".{name}.{os.getpid()}"
        try:
            known.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(asked / name, draft)
            draft.replace(known / name)
        except OSError:  # a full disk, say: then vLLM inspects again, as it would without us
            with contextlib.suppress(OSError):
                draft.unlink()


KEPT_OUT = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN", "VLLM_API_KEY", "OPENAI_API_KEY", "WANDB_API_KEY")
"""Secrets that no engine needs once its weights are on disk."""

MISLEADING = ("VLLM_ENABLE_STARTUP_PLAN",)
"""Switches that make trials influence each other. The start-up plan (0.26 and later) keeps the size of the KV cache under a
fingerprint that holds neither ``gpu_memory_utilization`` nor (0.26, 0.28) ``max_num_seqs``, so one trial would run with the
cache of another (``vllm/v1/worker/startup_plan.py``, ``CacheConfig.compute_hash``)."""


def inherited_environment(offline: bool, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without secrets that an engine has no use for, and without what misleads trials."""
    source = os.environ if environ is None else environ
    hub = () if offline else ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN")
    left_out = {*KEPT_OUT, *MISLEADING}.difference(hub)
    return {name: value for name, value in source.items() if name not in left_out}


@dataclass(frozen=True, slots=True)
class CacheState:
    """What a cache held at one moment: compile keys, and models whose class was inspected."""

    compile_keys: frozenset[str]
    models: frozenset[str]


def cache_state(cache: Path) -> CacheState:
    """vLLM's own layout: ``torch_compile_cache/<key>``, ``torch_compile_cache/torch_aot_compile/<key>`` (0.22.1 to 0.32), and
    ``modelinfos/<model class>``. The ahead-of-time key depends on more than the other, and its entry is what saves time.
    """
    vllm = cache / "vllm"
    compiled, ahead = _names(vllm / "torch_compile_cache"), _names(vllm / "torch_compile_cache" / AHEAD)
    keys = {name for name in compiled if name != AHEAD} | {f"{AHEAD}/{name}" for name in ahead}
    return CacheState(frozenset(keys), frozenset(_names(vllm / INSPECTED)))


def _names(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith((".", "tmp"))]
    except OSError:
        return []


def start_class(before: CacheState, after: CacheState) -> StartClass:
    """What a start had to do, by what it added: everything, a compile key, or nothing."""
    if after.models - before.models or not (before.compile_keys or before.models):
        return StartClass.FIRST
    if after.compile_keys - before.compile_keys:
        return StartClass.NEW_KEY
    return StartClass.KNOWN_KEY


def size_bytes(folder: Path) -> int:
    """Disk use of everything below ``folder``; links are not followed."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(where, name))
            except OSError:
                continue
            total += found.st_blocks * 512
    return total


def engine_caches(root: Path) -> tuple[tuple[Path, int, float], ...]:
    """(folder, bytes, last change) of every engine cache, least recently used first."""
    found = [(path, size_bytes(path), path.stat().st_mtime) for path in (root / "engines").glob("*") if path.is_dir()]
    return tuple(sorted(found, key=lambda entry: entry[2]))


def remove(path: Path) -> None:
    """Remove one engine cache. A running engine that uses it compiles again at its next start, nothing worse."""
    shutil.rmtree(path, ignore_errors=True)
