"""The zip that travels into trials: just the modules that a trial process needs, importable by any interpreter.

``--python PATH`` may name an environment that has vLLM and none of our dependencies. The zip stands first on its
``PYTHONPATH``, so vLLM's own spawned children find it too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import BinaryIO

MODULES = (
    "objectives/__init__.py",
    "objectives/records.py",
    "objectives/steadiness.py",
    "optimizer/__init__.py",
    "optimizer/errors.py",
    "optimizer/secrecy.py",
    "optimizer/trial.py",
    "optimizer/engine/__init__.py",
    "optimizer/engine/base.py",
    "optimizer/engine/core_imports.py",
    "optimizer/engine/core_start.py",
    "optimizer/engine/drain.py",
    "optimizer/engine/held.py",
    "optimizer/engine/kernel_tuning.py",
    "optimizer/engine/kin.py",
    "optimizer/engine/leftovers.py",
    "optimizer/engine/resolved.py",
    "optimizer/engine/supervisor.py",
    "optimizer/engine/trial_process.py",
    "optimizer/engine/vllm.py",
    "optimizer/engine/wire.py",
    "optimizer/load/__init__.py",
    "optimizer/load/arrivals.py",
    "optimizer/load/drive.py",
    "optimizer/load/health.py",
    "optimizer/load/ledger.py",
    "optimizer/load/lengths.py",
    "optimizer/load/plan.py",
    "optimizer/load/source.py",
    "optimizer/load/window.py",
)
"""Everything a trial process imports of ours. Standard library and vLLM only; a test imports each from the zip, bare."""

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the zip format's own; a fixed date makes equal contents equal bytes


def source_root() -> Path:
    """The folder that holds ``objectives`` and ``optimizer``: the checkout, or ``site-packages/vopt``."""
    return Path(__file__).resolve().parents[2]


@cache
def trial_package(directory: Path | None = None) -> Path:
    """The zip, written once for each content under ``directory`` (by default a private folder of this user)."""
    root = source_root()
    contents = {f"vopt/{name}": (root / name).read_bytes() for name in MODULES}
    digest = hashlib.sha256(b"".join(name.encode() + b"\0" + data for name, data in sorted(contents.items()))).hexdigest()[:16]
    where = directory or _default_directory()
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = where / f"vopt-trial-{digest}.zip"
    if not target.exists():
        fd, draft = tempfile.mkstemp(dir=where, suffix=".draft")
        with os.fdopen(fd, "wb") as file:
            _write_zip(file, contents)
        os.replace(draft, target)  # atomic: a second search may write the same file at the same time
    else:
        with contextlib.suppress(OSError):
            os.utime(target)  # in use: `vopt clean` goes by age
    return target


def _write_zip(file: BinaryIO, contents: dict[str, bytes]) -> None:
    folders = sorted({f"{parent}/" for name in contents for parent in map(str, Path(name).parents) if parent != "."})
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for folder in folders:  # zipimport takes `vopt`, which has no __init__, for a namespace only if its folder is listed
            archive.writestr(zipfile.ZipInfo(folder, _EPOCH), b"")
        for name, data in sorted(contents.items()):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)


def _default_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "vopt" / "packages"
