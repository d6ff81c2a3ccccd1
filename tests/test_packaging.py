"""The wheel holds what the source tree holds, and the command works with what it declares."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("objectives", "search_spaces", "optimizer")
DATA = (".py", ".toml", ".json", ".typed", ".html", ".css", ".js")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(built), str(source)], check=True, capture_output=True)
    (found,) = built.glob("vopt-*.whl")
    return zipfile.Path(zipfile.ZipFile(found))


@pytest.mark.slow
def test_wheel_holds_exactly_the_packages_of_the_source_tree(wheel: zipfile.Path) -> None:
    named = (name for name in wheel.root.namelist() if not name.endswith("/"))
    packed = {name for name in named if not name.split("/")[0].endswith(".dist-info")}
    tracked = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert packed == {f"vopt/{name}" for name in tracked if name.endswith(DATA)}


@pytest.mark.slow
def test_wheel_declares_the_command_and_carries_no_study(wheel: zipfile.Path) -> None:
    names = wheel.root.namelist()
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "vopt = vopt.optimizer.__main__:main" in wheel.root.read(entry_points).decode()
    assert not any("studies.db" in name for name in names)


def test_help_imports_none_of_the_heavy_packages() -> None:
    probe = (
        "import sys\n"
        "from vopt.optimizer.cli import app\n"
        "try: app(['--help'], prog_name='vopt')\n"
        "except SystemExit: pass\n"
        "heavy = ('vllm', 'optuna', 'torch', 'ray', 'plotly', 'aiohttp')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "search" in done.stdout
