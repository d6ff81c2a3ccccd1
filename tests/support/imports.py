"""What an import brings along, seen by an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def foreign_imports(*modules: str) -> set[str]:
    """Top-level packages, neither the standard library's nor ours, that importing ``modules`` loads."""
    code = (
        f"import sys; before = set(sys.modules); import {', '.join(modules)}\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": paths})
    loaded = set(ran.stdout.split())
    assert "vopt" in loaded
    return loaded - {"vopt"} - sys.stdlib_module_names
