"""One configuration through the in-process engine and as `vllm serve` over HTTP: what the way of measuring changes.

    python tests/gpu/in_process_vs_served.py --models MODELS [--model qwen3-8b] [--config '{"max_num_seqs": 512}'] [--pairs 3]

Fresh starts, in pairs whose order alternates, the same requests and windows on both. Run it again until it says that nothing
remains (exit code 10). Prints served / in-process for each figure, with a 95 % interval of the mean of the logarithms over the
pairs (Student's t).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pairs
import starts

from vopt.optimizer.trial import EngineConfig

INSIDE, SERVED = "in-process", "served"


def side_of(entry: pairs.Entry) -> str:
    return SERVED if entry["served"] else INSIDE


@starts.reported
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
    plans = [starts.closed(level, typed.window, typed.seed) for level in levels]
    sides = (pairs.Side(INSIDE, typed.config), pairs.Side(SERVED, typed.config, served=True))
    stand = starts.stand_of(typed, typed.model)
    own = EngineConfig(typed.config).digest
    out = typed.out.with_name(f"{typed.out.stem}-{Path(typed.model).name}-{own}{typed.out.suffix}")
    facts = {"config": typed.config, "levels": levels, "window_s": typed.window}
    journal = starts.Journal(out, stand.header("in-process-and-served", **facts))
    with starts.reserved(stand, "in-process and served"):
        remaining = pairs.measure(stand, journal, starts.Patience(typed.budget), sides, side_of, pairs=typed.pairs, plans=plans)
    print(pairs.compared_words(journal.entries, levels, SERVED, INSIDE, side_of))
    print(f"{remaining} starts remain")
    return starts.WORK_REMAINS if remaining else 0


if __name__ == "__main__":
    raise SystemExit(main())
