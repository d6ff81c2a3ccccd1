"""``vopt doctor``: what is here, what is wrong with it, and the line to type about each."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from vopt.optimizer import caches, gpus
from vopt.optimizer.engine.interpreter import Interpreter, probe
from vopt.optimizer.engine.leftovers import Manifest, dead_trials
from vopt.optimizer.engine.package import trial_package
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.gpus import Gpu
from vopt.optimizer.locks import Owner, held_gpu_locks, owner_of
from vopt.optimizer.options import DoctorOptions
from vopt.optimizer.way_on import with_storage

FINE = 0
OLDEST, NEWEST = (0, 20), (0, 33)
LEAST_FREE_BYTES = 10 * 2**30
LEAST_SHARED_BYTES = 1 * 2**30
IMPORT_PATIENCE_S = 180.0


class State(StrEnum):
    OK = "ok"
    NOTE = "note"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Row:
    """One finding; ``fix`` is the line to type about it."""

    area: str
    state: State
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    rows: tuple[Row, ...]

    @property
    def document(self) -> dict[str, Any]:
        return {"format_version": 1, "healthy": self.healthy, "findings": [asdict(row) for row in self.rows]}

    @property
    def healthy(self) -> bool:
        return all(row.state is not State.FAULT for row in self.rows)

    @property
    def exit_code(self) -> int:
        """That of a search which ends over such a fault; notes alone are fine, so ``vopt doctor && vopt search …`` goes on."""
        return FINE if self.healthy else EnvironmentLacks.exit_code

    @property
    def text(self) -> str:
        marks = {State.OK: "ok   ", State.NOTE: "note ", State.FAULT: "FAULT"}
        lines = []
        for row in self.rows:
            lines.append(f"{marks[row.state]}  {row.area:<12} {row.text}")
            if row.fix:
                lines.append(f"{'':<20} -> {row.fix}")
        return "\n".join(lines)


def examine(options: DoctorOptions) -> Report:
    """Everything that a search would trip over. Starts no engine and changes nothing."""
    python = options.python or sys.executable
    found = gpus.inventory()
    rows: list[Row] = []
    try:
        interpreter = probe(python)
    except EnvironmentLacks as error:
        rows.append(Row("interpreter", State.FAULT, error.message, error.hint))
    else:
        rows += interpreter_rows(interpreter)
        if interpreter.vllm_version is not None:
            rows.append(import_row(interpreter))
        rows += gpu_rows(found, dict(held_gpu_locks()), cpu_build=interpreter.cpu_build)
    rows += leftover_rows()
    try:
        rows += disk_rows(caches.cache_root(), Path.cwd())
    except EnvironmentLacks as error:
        rows.append(Row("disk", State.FAULT, error.message, error.hint))
    rows.append(storage_row(options.storage))
    rows += study_rows(options.storage)
    return Report(tuple(rows))


def interpreter_rows(interpreter: Interpreter) -> list[Row]:
    """The interpreter and vLLM's installation in it, its known packaging faults included."""
    version, packages = interpreter.vllm_version, interpreter.packages
    name = f"{interpreter.path} (Python {'.'.join(map(str, interpreter.python))})"
    if version is None:
        fix = "pip install 'vopt[vllm]', or name one that has it with --python PATH, or search with --simulate h200"
        return [Row("vLLM", State.FAULT, f"{name} has no vLLM", fix)]
    rows = [Row("vLLM", State.OK, f"{version} in {name}")]
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= release <= NEWEST:
        rows.append(
            Row("vLLM", State.NOTE, f"{version} is outside 0.20 to 0.33, which vopt knows", "pip install 'vllm>=0.20,<0.34'")
        )
    if not interpreter.bytecode:
        text = "lies there without bytecode: its first start compiles it, later ones find that in vopt's own cache"
        rows.append(Row("vLLM", State.NOTE, text))
    if interpreter.cpu_build:
        rows += cpu_build_rows(interpreter, packages)
    elif "+cpu" in packages.get("torch", ""):
        text = f"torch {packages['torch']} is a CPU build, vLLM {version} is not: no engine can start"
        rows.append(Row("vLLM", State.FAULT, text, "pip install --force-reinstall vllm"))
    return rows


def cpu_build_rows(interpreter: Interpreter, packages: dict[str, str]) -> list[Row]:
    """Known faults of the CPU build as it comes from the package index."""
    repair = f"{interpreter.path} -m vopt.optimizer.engine.cpu_build"
    rows = []
    for name in ("torchaudio", "torchcodec"):
        if name in packages and "+cpu" not in packages[name]:
            text = f"{name} {packages[name]} is a CUDA build beside a CPU torch: it breaks the import of transformers"
            rows.append(Row("vLLM", State.FAULT, text, repair))
    if "vllm" not in packages:
        text = "the CPU build has no distribution called vllm: the command vllm cannot find its version and serves nothing"
        rows.append(Row("vLLM", State.FAULT, text, repair))
    return rows


def import_row(interpreter: Interpreter) -> Row:
    """Whether vLLM imports at all: the one sure test of an installation."""
    script = "import vllm.engine.arg_utils, vllm.v1.engine.async_llm"
    try:
        done = subprocess.run(
            [interpreter.path, "-c", script],
            capture_output=True,
            text=True,
            timeout=IMPORT_PATIENCE_S,
            check=False,
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        )
    except subprocess.TimeoutExpired:
        return Row(
            "vLLM",
            State.FAULT,
            f"its import did not end in {IMPORT_PATIENCE_S:g} s",
            f'{interpreter.path} -X importtime -c "{script}"',
        )
    if done.returncode == 0:
        return Row("vLLM", State.OK, "imports")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    missing = re.search(r"No module named '([\w.]+)'", last)
    fix = (
        f"{interpreter.path} -m pip install {missing[1].partition('.')[0]}" if missing else f'{interpreter.path} -c "{script}"'
    )
    return Row("vLLM", State.FAULT, f"its import fails: {last[:300]}", fix)


def gpu_rows(found: Iterable[Gpu], locks: dict[str, Owner], *, cpu_build: bool) -> list[Row]:
    """The GPUs, what holds them, and which search has locked them."""
    rows = []
    for gpu in found:
        name = f"{gpu.index}: {gpu.name}, {gpu.total_bytes / 2**30:.0f} GiB"
        holders = ", ".join(f"{holder.name or 'process'} {holder.pid}" for holder in gpu.holders)
        if gpu.ecc_errors:
            rows.append(
                Row(
                    "GPU",
                    State.FAULT,
                    f"{name}: {gpu.ecc_errors} uncorrected memory errors",
                    f"nvidia-smi -q -i {gpu.index} -d ECC",
                )
            )
        elif gpu.uuid in locks:
            rows.append(
                Row("GPU", State.NOTE, f"{name}: in use by {locks[gpu.uuid].words()}", "wait, or choose others with --gpus")
            )
        elif gpu.free:
            rows.append(Row("GPU", State.OK, f"{name}, free"))
        else:
            held = f"{gpu.used_bytes / 2**30:.1f} GiB held by {holders or 'a process that this user may not see'}"
            fix = f"nvidia-smi -i {gpu.index}   # then end them, or choose other GPUs with --gpus"
            rows.append(Row("GPU", State.FAULT, f"{name}: {held}", fix))
    if not rows and not cpu_build:
        rows.append(
            Row("GPU", State.FAULT, "none that the NVIDIA driver shows", "nvidia-smi   # or search with --simulate h200")
        )
    return rows


def leftover_rows() -> list[Row]:
    """Trials whose search and supervisor are both gone."""
    try:
        dead = dead_trials()
    except OSError as error:
        place = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
        return [Row("leftovers", State.FAULT, f"no trial can write down what it owns: {error}", f"ls -ld {place}")]
    if not dead:
        return [Row("leftovers", State.OK, "none of dead searches")]
    return [Row("leftovers", State.FAULT, _left(trial), "vopt clean") for trial in dead]


def _left(trial: Manifest) -> str:
    files = [path for path in (*(held.path for held in trial.held), trial.private_directory) if path and os.path.exists(path)]
    return f"{len(trial.living())} processes and {len(files)} files of the trial that logged to {trial.log}"


def disk_rows(cache: Path, working: Path) -> list[Row]:
    """Caches, and room for more of them, for logs and records, and for shared memory."""
    size = sum(entry[1] for entry in caches.engine_caches(cache))
    rows = [Row("caches", State.OK, f"{size / 2**30:.1f} GiB in {cache}")]
    for what, place, least in (
        ("caches", cache, LEAST_FREE_BYTES),
        ("results", working, LEAST_FREE_BYTES),
        ("shared memory", Path("/dev/shm"), LEAST_SHARED_BYTES),
    ):
        existing = next(path for path in (place, *place.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if free < least:
            text = f"{free / 2**30:.1f} GiB free for {what} in {existing}, {least / 2**30:.0f} GiB are wanted"
            rows.append(
                Row("disk", State.FAULT, text, "vopt clean --disk-budget 1G" if what == "caches" else f"df -h {existing}")
            )
    rows.append(temporary_row())
    try:
        trial_package()
    except OSError as error:
        rows.append(Row("disk", State.FAULT, f"the package for trials cannot be written: {error}", f"ls -ld {cache}"))
    return rows


def temporary_row() -> Row:
    """Where the trials' own temporary directories are made."""
    try:
        with tempfile.TemporaryDirectory(prefix="vopt-") as made:
            place = os.path.dirname(made)
    except OSError as error:
        return Row("disk", State.FAULT, f"no temporary directory can be made: {error}", "TMPDIR=/a/place/with/room vopt …")
    return Row("disk", State.OK, f"temporary files go to {place}")


def study_rows(url: str) -> list[Row]:
    """Studies that a search works on now, and those whose search ended before it had released them."""
    rows = []
    path = Path(unquote(url.removeprefix("sqlite:///").partition("?")[0]))
    for lock in sorted((path.absolute().parent / "studies").glob("*/lock")) if url.startswith("sqlite:///") else ():
        owner, name = owner_of(lock), lock.parent.name
        if owner is not None and not owner.dead:
            rows.append(Row("locks", State.NOTE, f"study {name} is in use by {owner.words()}", "wait, or stop it with Ctrl-C"))
        elif owner is not None:
            text = f"the search of {name} (process {owner.pid}) died; what it measured is kept"
            rows.append(Row("locks", State.NOTE, text, with_storage(f"vopt resume {name}", url)))
    return rows


def storage_row(url: str) -> Row:
    """The study database: SQLite is opened and checked read-only, anything else is named and left alone."""
    if not url.startswith("sqlite:///"):
        return Row("storage", State.NOTE, f"{url.partition('://')[0]}: not looked into", "vopt show --storage URL")
    path = Path(unquote(url.removeprefix("sqlite:///").partition("?")[0]))
    if not path.exists():
        folder = path.absolute().parent
        if os.access(folder, os.W_OK):
            return Row("storage", State.OK, f"{path} will be made by the first search")
        return Row(
            "storage", State.FAULT, f"{folder} cannot be written", "vopt search --storage sqlite:////path/to/studies.db …"
        )
    try:
        with sqlite3.connect(f"file:{path.absolute()}?mode=ro", uri=True, timeout=2.0) as connection:
            answer = connection.execute("PRAGMA quick_check").fetchone()[0]
        connection.close()
    except sqlite3.Error as error:
        if "locked" in str(error):
            return Row("storage", State.NOTE, f"{path} is locked by another program", f"fuser -v {path}")
        answer = str(error)
    if answer != "ok":
        return Row("storage", State.FAULT, f"{path}: {answer}", f"sqlite3 {path} .recover | sqlite3 recovered.db")
    if not os.access(path, os.W_OK):
        return Row("storage", State.FAULT, f"{path} cannot be written", f"ls -l {path}")
    return Row("storage", State.OK, f"{path}, {path.stat().st_size / 2**20:.1f} MiB, sound")
