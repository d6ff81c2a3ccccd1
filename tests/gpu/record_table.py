"""Records a table of engine starts of one model: at least 60 configurations, three load levels on each start, two starts.

    python tests/gpu/record_table.py --models MODELS [--model qwen3-8b] [--budget 540] [--rows 72] [--window 6]

Run it again until it says that nothing remains: what is in the file is not measured again. Exit code 10: starts remain.
The file (``--out``) is what the regret replay and the simulator's benchmark read; `README.md` here describes its lines.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import starts
from table_rows import LEVELS, ROWS, SPACE, rows
from table_rows import starts as order

from vopt.optimizer.errors import VoptError
from vopt.optimizer.trial import EngineFailure

WORKLOAD = Path(__file__).resolve().parent / "chat-with-reuse.json"
"""The table's workload: chat prompts that begin with one of eight system prompts of 128 tokens, so that prefix caching shows,
and answers half as long as those of ``chat``, so that a load levels sooner."""

MOST_FAULTS = 3
"""Failures of the machine in a row that end a run: it will not mend itself."""

START_S = 60.0
"""What a start is taken to need before the first of a run is known."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    starts.add_options(parser, out="tests/assets/h200/qwen3-8b-table.jsonl")
    parser.set_defaults(window=6.0, workload=str(WORKLOAD))
    parser.add_argument("--model", default="qwen3-8b", help="one that the GPU bounds, not the thread that feeds it (qwen3-8b)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"how many configurations ({ROWS})")
    parser.add_argument("--levels", default=",".join(map(str, LEVELS)), help="requests in flight of the loads of a start")
    parser.add_argument(
        "--part", type=part, default=(0, 1), metavar="I/N", help="each Nth row from the Ith on, to a file of its own"
    )
    typed = parser.parse_args(arguments)
    levels = [int(level) for level in typed.levels.split(",")]
    try:
        stand = starts.stand_of(typed, typed.model)
        facts = {"levels": levels, "window_s": typed.window, "space": {name: list(v[1:]) for name, v in SPACE.items()}}
        journal = starts.Journal(part_file(typed), stand.header("recorded-table", **facts))
        with starts.reserved(stand, "a recorded table"):
            return record(stand, journal, starts.Patience(typed.budget), levels, typed)
    except (VoptError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def part(word: str) -> tuple[int, int]:
    """``0/2`` and ``1/2`` are recorded on two GPUs at once."""
    place, _, count = word.partition("/")
    if not 0 <= int(place) < int(count):
        raise ValueError(word)
    return int(place), int(count)


def part_file(typed: argparse.Namespace) -> Path:
    """Where a part is kept. Its header is the whole table's, so the lines below it can be added to another part's."""
    place, count = typed.part
    out: Path = typed.out
    return out if count == 1 else out.with_name(f"{out.stem}-{place}-of-{count}{out.suffix}")


def record(
    stand: starts.Stand, journal: starts.Journal, patience: starts.Patience, levels: list[int], typed: argparse.Namespace
) -> int:
    """Measure what the journal lacks, in order, while the budget lasts."""
    configs = rows(typed.rows)
    done = {(entry["row"], entry["start"]) for entry in journal.entries}
    place, count = typed.part
    left = [(row, start) for row, start in order(typed.rows) if row % count == place and (row, start) not in done]
    plans = [starts.closed(level, typed.window, typed.seed) for level in levels]
    took = [entry["wall_s"] for entry in journal.entries] or [START_S + len(plans) * 2 * typed.window]
    faults = 0
    while left and patience.covers(max(took[-6:])):
        row, start = left[0]
        try:
            # Where the defaults do not start, nothing will, and not for its own fault.
            entry = starts.measured_start(stand, configs[row], plans, label=f"{row}-{start}", must=not configs[row])
        except EngineFailure as failure:
            print(f"{row}-{start} not recorded, the machine failed: {failure}", file=sys.stderr)
            left.append(left.pop(0))  # again at the end, so that one odd configuration does not keep the others waiting
            faults += 1
            if faults == MOST_FAULTS or not journal.entries:
                return 3
            continue
        faults = 0
        journal.add({"row": row, "start": start, **entry})
        took.append(entry["wall_s"])
        left.pop(0)
        print(f"{starts.row_words(entry)} ({took[-1]:.0f} s; {len(left)} starts remain)", flush=True)
    distinct = len({entry["row"] for entry in journal.entries})
    print(f"{journal.path}: {distinct} of {typed.rows} configurations, {len(journal.entries)} starts, {len(left)} remain")
    return starts.WORK_REMAINS if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
