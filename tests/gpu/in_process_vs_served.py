"""One configuration through the in-process engine and as `vllm serve` over HTTP: what the way of measuring changes.

    python tests/gpu/in_process_vs_served.py --models MODELS [--model qwen3-8b] [--config '{"max_num_seqs": 512}'] [--pairs 3]

Fresh starts, in pairs whose order alternates, the same requests and windows on both. Run it again until it says that nothing
remains (exit code 10). Prints served / in-process for each figure, with a 95 % interval of the mean of the logarithms over the
pairs (Student's t).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import starts
from scipy import stats

from vopt.optimizer.errors import VoptError
from vopt.optimizer.trial import EngineConfig, EngineFailure

SHOWN = ("tokens_per_s", "output_tokens_per_s", "mean_ttft_s", "p95_ttft_s", "mean_tpot_s", "p95_tpot_s", "mean_e2e_s")
FIRST_START_S = 250.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    starts.add_options(parser, out="gpu-results/served.jsonl")
    parser.set_defaults(window=15.0)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--config", type=json.loads, default={}, help="engine arguments of both, JSON")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--levels", default="64,256", help="requests in flight of the loads of a start")
    typed = parser.parse_args(arguments)
    levels = [int(level) for level in typed.levels.split(",")]
    try:
        stand = starts.stand_of(typed, typed.model)
        own = EngineConfig(typed.config).digest
        out = typed.out.with_name(f"{typed.out.stem}-{Path(typed.model).name}-{own}{typed.out.suffix}")
        facts = {"config": typed.config, "levels": levels, "window_s": typed.window}
        journal = starts.Journal(out, stand.header("in-process-and-served", **facts))
        remaining = measure(stand, journal, starts.Patience(typed.budget), levels, typed)
    except EngineFailure as failure:
        print(f"the machine failed: {failure}", file=sys.stderr)
        return 3
    except (VoptError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(compared_words(journal.entries, levels))
    print(f"{remaining} starts remain")
    return starts.WORK_REMAINS if remaining else 0


def measure(
    stand: starts.Stand, journal: starts.Journal, patience: starts.Patience, levels: list[int], typed: argparse.Namespace
) -> int:
    """The missing starts, as far as the budget reaches; how many remain."""
    wanted = [(pair, served) for pair in range(typed.pairs) for served in ((False, True) if pair % 2 == 0 else (True, False))]
    done = {(entry["pair"], entry["served"]) for entry in journal.entries}
    left = [one for one in wanted if one not in done]
    plans = [starts.closed(level, typed.window, typed.seed) for level in levels]
    need_s = max([entry["wall_s"] for entry in journal.entries] or [FIRST_START_S + len(plans) * 2 * typed.window])
    while left and patience.covers(need_s):
        pair, served = left[0]
        label = f"{pair + 1}-{'served' if served else 'in-process'}"
        entry = starts.measured_start(stand, typed.config, plans, label=label, served=served, must=True)
        journal.add({"pair": pair, **entry})
        left.pop(0)
        need_s = max(entry["wall_s"] for entry in journal.entries)
        print(f"{starts.row_words(entry)} ({entry['wall_s']:.0f} s)", flush=True)
    return len(left)


def compared_words(entries: Sequence[dict[str, Any]], levels: Sequence[int]) -> str:
    """Served / in-process by level and figure, over the pairs of which both are there."""
    by_pair: dict[int, dict[bool, dict[str, Any]]] = {}
    for entry in entries:
        by_pair.setdefault(entry["pair"], {})[entry["served"]] = entry
    pairs = [sides for sides in by_pair.values() if len(sides) == 2]
    lines = [f"served / in-process over {len(pairs)} pairs"]
    for place, level in enumerate(levels):
        for name in SHOWN:
            both = [
                (p[True]["loads"][place]["metrics"].get(name), p[False]["loads"][place]["metrics"].get(name)) for p in pairs
            ]
            logs = [math.log(served / inside) for served, inside in both if served and inside]
            if logs:
                lines.append(f"  {level:>4} in flight  {name:<20} {ratio_words(logs)}")
    return "\n".join(lines)


def ratio_words(logs: Sequence[float]) -> str:
    mean = fmean(logs)
    if len(logs) < 2:
        return f"{math.exp(mean):.3f} (one pair)"
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.3f} ({math.exp(mean - half):.3f} to {math.exp(mean + half):.3f})"


if __name__ == "__main__":
    raise SystemExit(main())
