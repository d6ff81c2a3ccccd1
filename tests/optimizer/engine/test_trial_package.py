"""The zip that travels into trials: complete, bare, and the same for the same content."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from vopt.optimizer.engine.package import MODULES, trial_package


def bare(code: str, package: Path) -> subprocess.CompletedProcess[str]:
    """Run code on the bare interpreter: no site-packages, nothing of ours but the zip."""
    return subprocess.run(
        [os.path.realpath(sys.executable), "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(package)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


def test_every_module_imports_from_the_zip_on_a_bare_interpreter(tmp_path: Path) -> None:
    package = trial_package(tmp_path)
    names = [f"vopt.{name.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}" for name in MODULES]
    code = (
        f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "outside = [m for n, m in sys.modules.items() if n.startswith('vopt.') and '.zip/' not in (m.__spec__.origin or '')]\n"
        "print(outside, 'vllm' in sys.modules)"
    )
    done = bare(code, package)
    assert done.stderr == ""
    assert done.stdout == "[] False\n"


def test_it_holds_nothing_but_what_it_names(tmp_path: Path) -> None:
    with zipfile.ZipFile(trial_package(tmp_path)) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
        folders = {name for name in archive.namelist() if name.endswith("/")}
    assert files == {f"vopt/{name}" for name in MODULES}
    assert "vopt/" in folders, "without its folder entry zipimport does not see the namespace"


def test_equal_content_gives_equal_bytes_and_one_file(tmp_path: Path) -> None:
    first = trial_package(tmp_path / "a").read_bytes()
    assert trial_package(tmp_path / "b").read_bytes() == first
    assert trial_package(tmp_path / "a") == trial_package(tmp_path / "a")
    assert len(list((tmp_path / "a").iterdir())) == 1


def test_spawned_children_find_it_through_the_environment(tmp_path: Path) -> None:
    """vLLM spawns its engine core with multiprocessing, which imports the trial's main module again."""
    script = tmp_path / "main.py"
    script.write_text(
        "import multiprocessing\n"
        "from vopt.optimizer.trial import EngineConfig\n"
        "def digest(values): return EngineConfig(values).digest\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(digest, ({'a': 1},)))\n"
    )
    done = subprocess.run(
        [os.path.realpath(sys.executable), "-S", "-s", str(script)],
        env={"PYTHONPATH": str(trial_package(tmp_path)), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stdout.strip()) == 12
