"""What an answer says of its baseline: how it was repaired, what of it the winner leaves out. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from vopt.optimizer.command import flags_text
from vopt.optimizer.judge import Judged
from vopt.optimizer.progress import Progress
from vopt.optimizer.recommend import Gain, Override, Repair
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.evidence import KV_PEAK
from vopt.search_spaces.parse import base_declarations
from vopt.search_spaces.relief import service_arguments

MOST_CAUSE = 200


def repair_of(progress: Progress) -> Repair | None:
    """How the baseline in use differs from the one that was given; ``None`` where that one came up."""
    failed = progress.first(progress.setup.baseline)
    if not progress.repaired or failed is None:
        return None
    return Repair(progress.repaired, failed.reason)


def repair_notes(progress: Progress, winner: EngineConfig | None) -> list[str]:
    """Says that the baseline as given does not start here, what gains are against, and what that does to them."""
    repair = repair_of(progress)
    if repair is None:
        return []
    flags = flags_text(repair.changes)
    notes = [
        f"the baseline as given does not start here: {_cause(repair)}; gains are against the repaired baseline, with {flags}"
    ]
    served = progress.baseline_config if winner is None else winner
    notes += [
        f"{flags_text({name: served[name]})} takes something from clients, and nothing else was found with which it starts "
        "here: see that none needs it"
        for name in sorted(service_arguments(base_declarations()) & repair.changes.keys())
        if served.get(name) == repair.changes[name]
    ]
    return notes + _chosen_load(progress)


def _cause(repair: Repair) -> str:
    """The reason without the engine's advice, which is long."""
    return textwrap.shorten(repair.reason, MOST_CAUSE, placeholder=" …")


def _chosen_load(progress: Progress) -> list[str]:
    """An automatic load is what fills the baseline: a starved one is full at a load that says little of another engine."""
    start = progress.baseline
    plan = start.record.environment.get("load_plan") or {} if start is not None else {}
    if not progress.setup.auto_load or not plan.get("concurrency"):
        return []
    return [
        f"the load of {plan['concurrency']} in flight was found on the repaired baseline{_fullness(start)}: at another load "
        "the gain is another one; --concurrency N states yours"
    ]


def _fullness(start: Judged | None) -> str:
    peak = start.record.metrics.get("kv_peak") if start is not None and start.record.metrics is not None else None
    return f", whose KV cache was {peak:.0%} full" if peak is not None and peak >= KV_PEAK else ""


def left_out(
    progress: Progress, winner: EngineConfig, worth: Callable[[str], Gain | None] = lambda name: None
) -> tuple[Override, ...]:
    """What the baseline says and the winner leaves to vLLM."""
    rows = []
    for name, value in progress.baseline_config.items():
        if name not in winner:
            rows.append(Override(name, value, False, f"left out of the baseline: {_instead(progress, name)}", worth(name)))
    return tuple(rows)


def left_out_notes(progress: Progress, winner: EngineConfig) -> list[str]:
    """The same in words: a flag that vanishes from a command has to be named."""
    return [
        f"{flags_text({row.name: row.value})} of {_origin(progress, row.name)} is left out: {_instead(progress, row.name)}"
        for row in left_out(progress, winner)
    ]


def _origin(progress: Progress, name: str) -> str:
    return "the repaired baseline" if name in progress.repaired else "the command in use"


def _instead(progress: Progress, name: str) -> str:
    own = "speculation" if name == "speculative_config" else name
    space = progress.effective.space
    usual = f" ({space[own].default})" if own in space else ""
    return f"the answer was measured with vLLM's own value{usual}"
