"""Installations without bytecode beside the sources: engines get a cache for it, others are left alone."""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vopt.optimizer.engine.interpreter import probe
from vopt.optimizer.engine.process import engine_environment
from vopt.optimizer.trial import EngineConfig, TrialSpec


@pytest.mark.parametrize("compiled", [False, True])
def test_engines_keep_the_bytecode_that_an_installation_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("print(__cached__)")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {os.path.realpath(sys.executable)} -S -s "$@"\n')
    python.chmod(0o755)
    if compiled:
        compileall.compile_dir(package, quiet=1)
    assert probe(str(python)).bytecode is compiled
    spec = TrialSpec("0", "some/model", EngineConfig(), tmp_path, str(python), cache_root=tmp_path / "cache")
    environment, cache = engine_environment(spec)
    assert ("PYTHONPYCACHEPREFIX" in environment) is not compiled
    if not compiled:
        environment.pop("PYTHONPATH", None)
        where = Path(subprocess.check_output([python, "-c", "import vllm"], env=environment, text=True).strip())
        assert where.is_relative_to(cache)
        assert where.exists(), "kept, although images often say PYTHONDONTWRITEBYTECODE"
