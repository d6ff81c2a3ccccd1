"""How much one configuration differs from start to start, and within one engine: fresh starts of the defaults.

    python tests/gpu/noise.py --models MODELS [--model qwen3-8b --model qwen3.5-9b] [--starts 3] [--loads 2] [--budget 540]

Run it again until it says that nothing remains (exit code 10: starts remain). Prints, for each model and figure,
relative standard deviations: of the starts' means, between starts beyond what loads within one engine differ, and within.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import starts

from vopt.objectives.confidence import start_spread
from vopt.optimizer.bench import SPREAD_METRICS

FIRST_START_S = 250.0
"""What a model's first start is taken to need: all its kernels are compiled and tuned in it (218 s with Qwen3.5-9B on an H200
with vLLM 0.22.1)."""


@starts.reported
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    starts.add_options(parser, out="gpu-results/noise.jsonl")
    parser.set_defaults(window=20.0)
    parser.add_argument("--model", action="append", default=[], help="may be repeated (qwen3-8b, qwen3.5-9b)")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--loads", type=int, default=2, help="loads on each start (2)")
    parser.add_argument("--concurrency", type=int, default=256)
    typed = parser.parse_args(arguments)
    patience, remaining = starts.Patience(typed.budget), 0
    for model in typed.model or ["qwen3-8b", "qwen3.5-9b"]:
        remaining += repeat(typed, model, patience)
    print(f"{remaining} starts remain")
    return starts.WORK_REMAINS if remaining else 0


def repeat(typed: argparse.Namespace, model: str, patience: starts.Patience) -> int:
    """The missing starts of one model, as far as the budget reaches; how many remain."""
    stand = starts.stand_of(typed, model)
    out = typed.out.with_name(f"{typed.out.stem}-{Path(model).name}{typed.out.suffix}")
    facts = {"concurrency": typed.concurrency, "loads": typed.loads, "window_s": typed.window}
    journal = starts.Journal(out, stand.header("noise", **facts))
    plans = [starts.closed(typed.concurrency, typed.window, typed.seed)] * typed.loads
    need_s = max([entry["wall_s"] for entry in journal.entries] or [FIRST_START_S + typed.loads * 2 * typed.window])
    with starts.reserved(stand, "noise"):
        while len(journal.entries) < typed.starts and patience.covers(need_s):
            label = f"{Path(model).name}-{len(journal.entries) + 1}"
            entry = starts.measured_start(stand, {}, plans, label=label, must=True)
            journal.add(entry)
            need_s = entry["wall_s"]
            print(f"{starts.row_words(entry)} ({need_s:.0f} s)", flush=True)
    print(spread_words(Path(model).name, journal.entries))
    return max(0, int(typed.starts) - len(journal.entries))


def spread_words(model: str, entries: Sequence[dict[str, Any]]) -> str:
    """The table of one model; empty before there are two starts."""
    measured = [entry["loads"] for entry in entries if entry["outcome"] == "measured"]
    if len(measured) < 2:
        return f"{model}: {len(measured)} start measured: nothing to compare yet"
    lines = [
        f"{model}: {len(measured)} starts of {len(measured[0])} loads",
        f"  {'':<22}{'starts':>9}{'between':>9}{'within':>9}",
    ]
    for name in SPREAD_METRICS:
        figures = [[load["metrics"][name] for load in loads if name in load["metrics"]] for loads in measured]
        if not all(figures):
            continue
        spread = start_spread(figures)
        shown = [f"{value:.2%}" if value is not None else "-" for value in (spread.of_starts, spread.between, spread.within)]
        lines.append(f"  {name:<22}{shown[0]:>9}{shown[1]:>9}{shown[2]:>9}")
    classes = ", ".join(f"{(entry['started'] or {}).get('start_class')} {entry['phase_s']['start']:.0f} s" for entry in entries)
    return "\n".join([*lines, f"  starts: {classes}"])


if __name__ == "__main__":
    raise SystemExit(main())
