"""The searches of the record, one after the other: each a `vopt search`, gone on with by `vopt resume` after a break.

    python tests/gpu/run_studies.py --models MODELS [--only 8b-throughput] [--budget 540]

A search that the budget cuts off is interrupted as by Ctrl-C: its results are kept, and the next run resumes it. What is
finished is written as `vopt show --json` beside the database (`--out`). Exit code 10: searches remain.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import starts

MTP = json.dumps(
    [
        None,
        {
            "method": "mtp",
            "num_speculative_tokens": 1,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 1.75,
        },
    ]
)
"""With dummy weights acceptance is stated, and every claim about it reads "if 1.75 tokens a step are kept"."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One search: its name, model, and what is typed beside the model. ``minutes`` is what it is expected to take."""

    name: str
    model: str
    words: tuple[str, ...]
    minutes: int


AT_256 = ("--goal", "throughput", "--rounds", "3", "--soak", "0", "--concurrency", "256")
THROUGHPUT = (*AT_256, "--trials", "6")
LATENCY = ("--goal", "latency", "--trials", "5", "--rounds", "3", "--soak", "0", "--concurrency", "256")
"""The rate is a share of what 256 in flight sustain. To find how many it takes would cost the first start of Qwen3.5-9B three
of its seven minutes (simulated)."""
PLANNED = (
    Planned("8b-throughput", "qwen3-8b", THROUGHPUT, 22),
    Planned("9b-throughput", "qwen3.5-9b", THROUGHPUT, 28),
    Planned("8b-latency", "qwen3-8b", LATENCY, 24),
    Planned("9b-latency", "qwen3.5-9b", (*LATENCY, "--vary", f"speculative_config={MTP}"), 30),
    Planned("35b-throughput", "qwen3.5-35b-a3b-fp8", (*AT_256, "--trials", "4", "--vary", f"speculative_config={MTP}"), 30),
)
"""In the order of what they tell for the time they take."""

ENDED = (0, 4, 130, -signal.SIGINT)
"""An answer, nothing feasible, interrupted, interrupted before it had begun."""

LEAST_S = 60.0
"""Less time than this starts no search: it would be interrupted in the first start."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    starts.add_options(parser, out="gpu-results/studies.db")
    parser.set_defaults(window=20.0)
    parser.add_argument("--only", action="append", default=[], choices=[planned.name for planned in PLANNED])
    parser.add_argument("--model", help="another model for all of them (to try this program)")
    parser.add_argument("--words", default="", help="further words of each search, separated by spaces; the last one wins")
    typed = parser.parse_args(arguments)
    typed.out.parent.mkdir(parents=True, exist_ok=True)
    patience = starts.Patience(typed.budget)
    wanted = [planned for planned in PLANNED if not typed.only or planned.name in typed.only]
    remaining = []
    for planned in wanted:
        done = answer_file(typed, planned)
        if not done.exists() and not remaining and patience.covers(LEAST_S):
            code = run(typed, planned, patience)
            if code not in ENDED:
                print(f"{planned.name}: vopt ended with exit code {code}; see its words above", file=sys.stderr)
                return code
        if not done.exists():
            remaining.append(planned)
    words = ", ".join(f"{planned.name} (about {planned.minutes} min from its beginning)" for planned in remaining)
    print(f"remaining: {words or 'nothing'}")
    return starts.WORK_REMAINS if remaining else 0


def answer_file(typed: argparse.Namespace, planned: Planned) -> Path:
    """Where the answer of a finished search is kept; it exists only then."""
    return Path(typed.out).with_name(f"{planned.name}.json")


def run(typed: argparse.Namespace, planned: Planned, patience: starts.Patience) -> int:
    """Begin or go on with one search until it ends or the budget does; vopt's exit code."""
    storage = ("--storage", f"sqlite:///{typed.out.resolve()}")
    shown = subprocess.run([*vopt(), "show", planned.name, "--json", *storage], capture_output=True, text=True, check=False)
    begun = shown.returncode == 0
    command = [*vopt(), "resume", planned.name, *storage] if begun else [*vopt(), *search_words(typed, planned), *storage]
    print(f"{planned.name}: {'resumed' if begun else 'begun'}, {patience.left_s:.0f} s left", flush=True)
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(max(0.0, patience.left_s))
    except subprocess.TimeoutExpired:
        code = interrupted(process)
    if code in (0, 4):
        answer = subprocess.run([*vopt(), "show", planned.name, "--json", *storage], capture_output=True, text=True, check=True)
        aside = answer_file(typed, planned).with_suffix(".part")
        aside.write_text(answer.stdout, encoding="utf-8")
        aside.replace(answer_file(typed, planned))
    return code


def interrupted(process: subprocess.Popen[bytes]) -> int:
    """Ctrl-C, and a second one for an engine that does not stop; the study is kept either way."""
    for patience_s in (45.0, 30.0):
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    return process.wait()


def vopt() -> list[str]:
    return [sys.executable, "-m", "vopt.optimizer"]


def search_words(typed: argparse.Namespace, planned: Planned) -> list[str]:
    model = typed.model or planned.model
    words = ["search", "--study", planned.name, "--model", starts.model_path(typed, model), *planned.words]
    words += ["--window", f"{typed.window}s", "--seed", str(typed.seed), "--workload", typed.workload]
    for setting in starts.settings_of(typed, model):
        words += ["--set", setting]
    for name in ("python", "gpus", "simulate"):
        if getattr(typed, name):
            words += [f"--{name}", str(getattr(typed, name))]
    return [*words, *typed.words.split()]


if __name__ == "__main__":
    raise SystemExit(main())
