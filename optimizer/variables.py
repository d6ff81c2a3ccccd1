"""Which of the stored environment variables were in force in a study's engines, and which say how an engine computes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vopt.optimizer.caches import KEPT_OUT, MISLEADING, engine_environment

OURS: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "--gpus says which GPUs an engine gets",
    "HIP_VISIBLE_DEVICES": "--gpus says which GPUs an engine gets",
    "ROCR_VISIBLE_DEVICES": "--gpus says which GPUs an engine gets",
    "VLLM_PORT": "every engine start gets ports of its own",
    "VLLM_ENABLE_STARTUP_PLAN": "a start would get the size of another one's KV cache",
}
"""Variables of a command that a search decides for each engine start."""

PLACES = re.compile(
    r"VLLM_(API_KEY|(?:CONFIGURE_)?LOGGING(?:_\w+)?|LOG_STATS_INTERVAL|NO_USAGE_STATS|DO_NOT_TRACK|USAGE_\w+|CACHE_ROOT|CONFIG_ROOT"
    r"|ASSETS_CACHE|XLA_CACHE_PATH|MEDIA_CACHE|RPC_BASE_PATH|DEBUG_DUMP_PATH|HOST_IP|PORT)"
    r"|HF_\w+|HUGGING\w+|XDG_\w+|(?:CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER"
)
"""Variables that say where things lie, which of equal devices is used and what is logged, not how an engine computes: vLLM
itself leaves them out of its compile keys for that reason (``vllm/envs.py``, ``compile_factors``, 0.32). The model's revision
and the kind of GPU are compared themselves."""

SHELL_PREFIX = "VLLM_"
"""What is stored of the variables of the shell that searched: vLLM's own."""


def stored(setup: Mapping[str, Any]) -> dict[str, str]:
    """Every variable that is stored with a study: vLLM's of the shell that searched, and the command's own."""
    return {name: str(value) for name, value in ((setup.get("environment") or {}).get("variables") or {}).items()}


def computing(setup: Mapping[str, Any]) -> dict[str, str]:
    """Those that every engine start had and that say how an engine computes, whoever set them: no place, and nothing that a
    search sets itself over the shell's."""
    ours = _ours(setup)
    return {name: value for name, value in stored(setup).items() if name not in ours and not PLACES.fullmatch(name)}


def handed_on(setup: Mapping[str, Any]) -> dict[str, str]:
    """Those that belong to the command which was measured: ``computing``, and the places that the command in use itself named,
    since these are the user's and not those of the shell that searched."""
    environment = setup.get("environment") or {}
    found = computing(setup)
    if "variables_of_command" in environment:
        named = set(environment["variables_of_command"])
    else:  # of an earlier version: what is no variable of vLLM's can only have come with the command
        named = {name for name in stored(setup) if not name.startswith(SHELL_PREFIX)}
    return {name: value for name, value in stored(setup).items() if name in found or (name in named and name not in OURS)}


def _ours(setup: Mapping[str, Any]) -> frozenset[str]:
    """What an engine start is given or refused whatever the shell has: its value there was in force nowhere."""
    cpu_build = all(name == "cpu" for name in setup.get("gpus") or ())
    return frozenset({*OURS, *KEPT_OUT, *MISLEADING, *engine_environment(Path(), cpu_build=cpu_build, offline=True)})
