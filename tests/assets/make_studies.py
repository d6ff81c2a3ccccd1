"""Makes ``studies-format-N.db``: a small simulated study as this version stores it. Run once for each new format version.

python tests/assets/make_studies.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from vopt.optimizer.history import FORMAT_VERSION

WORDS = (
    *("search", "--goal", "throughput", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--concurrency", "64"),
    *("--window", "3", "--soak", "0", "--rounds", "1", "--trials", "4", "--seed", "1", "--quiet"),
)


def main() -> None:
    target = Path(__file__).with_name(f"studies-format-{FORMAT_VERSION}.db")
    if target.exists():
        sys.exit(f"{target} exists: it shows what that format was when it was new, so it is never made again")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "vopt.optimizer", *WORDS], cwd=folder, check=True)
        shutil.copy(Path(folder) / "studies.db", target)


if __name__ == "__main__":
    main()
