"""What an answer says of limits: who broke them, what lies beyond them, and what is left within them. Pure."""

from __future__ import annotations

import math

from vopt.objectives.goals import is_guard
from vopt.optimizer.breach import possible
from vopt.optimizer.command import flags_text
from vopt.optimizer.history import Stage
from vopt.optimizer.hopeless import nothing_to_gain
from vopt.optimizer.judge import Judged, of_stage
from vopt.optimizer.progress import Progress, finalists
from vopt.optimizer.verdict import Confirmation

SURE_LEAD = 3.0
"""Times the restart noise: a single start of the search that lies so far above the baseline's is no luck."""


def doubted_breach(progress: Progress, seen: Confirmation) -> list[str]:
    """Says it when the baseline that stays the answer broke a limit by its mean, but no further than chance goes."""
    goal, baseline = progress.setup.goal, seen.baseline
    words = possible(goal, baseline.starts, baseline.metrics)
    if not words:
        return []
    tells = "more --rounds or a longer --window would tell"
    return [f"the baseline itself may break its limits: {words}. Chance may have done that; {tells}"]


def unjudged(progress: Progress, seen: Confirmation) -> list[str]:
    """Says it when limits relative to the baseline had nothing to refer to."""
    relative = [limit.text for limit in progress.setup.goal.limits if limit.relative_to_baseline]
    if seen.baseline.metrics is not None or not relative:
        return []
    return [f"{', '.join(relative)}: not judged, since no start of the baseline in the confirmation came to its end"]


def next_choice(progress: Progress) -> list[str]:
    """Which screened configuration is left when the finalist was refused: nobody confirmed it, but its command can be had."""
    tried = {judged.record.config for judged in progress.history if judged.record.stage is Stage.CONFIRMATION}
    left = next((config for config in finalists(progress) if config not in tried), None)
    first = progress.first(left) if left is not None else None
    if first is None:
        return []
    return [
        f"trial {first.record.label} is the next best of the search and kept the limits there; nobody confirmed it. "
        f"vopt export --trial {first.record.label} gives its command, vopt bench measures it"
    ]


def none_above(progress: Progress) -> str:
    """Why there was nothing to confirm: nothing came out above the baseline, or what did broke a limit."""
    found, baseline = _nearest_above(progress), progress.baseline
    if baseline is not None and (kept := nothing_to_gain(baseline, progress.setup.goal)):
        return f"no measurable gain: {kept}"
    if found is None or baseline is None:
        return "no measurable gain: no configuration came out above the baseline in the search"
    best, way_out = found
    return (
        f"no measurable gain within the limits: what came out above the baseline in the search broke one. The nearest, "
        f"trial {best.record.label} ({progress.setup.goal.metric} {_plain(best.value)}, "
        f"the baseline's {_plain(baseline.value)}): {best.reason}{way_out}"
    )


def beyond_the_limits(progress: Progress) -> list[str]:
    """Names what is surely above the baseline and broke a limit: no answer, but what the limit costs."""
    found, baseline = _nearest_above(progress), progress.baseline
    if found is None or baseline is None or baseline.merit is None or found[0].merit is None:
        return []
    best, way_out = found
    lead = found[0].merit - baseline.merit
    if lead <= SURE_LEAD * progress.setup.restart_noise:
        return []
    return [
        f"beyond the limits there is more: trial {best.record.label} ({flags_text(best.record.config)}) was "
        f"{math.exp(lead) - 1:.1%} better than the baseline in the search, but {best.reason}{way_out}"
    ]


def _nearest_above(progress: Progress) -> tuple[Judged, str] | None:
    """What was above the baseline and broke the fewest limits, and what to type where those are built in."""
    baseline, limits = progress.baseline, progress.setup.goal.limits
    merit = baseline.merit if baseline is not None else None
    measured = of_stage(progress.charged, Stage.SEARCH, Stage.SCREENING)
    above = [one for one in measured if one.merit is not None and merit is not None and one.merit > merit and not one.feasible]
    if not above:
        return None
    broken_by = {id(one): [limit for limit in limits if one.violations.get(limit.text, 0.0) > 0] for one in above}
    best = min(above, key=lambda one: (len(broken_by[id(one)]), -(one.merit or 0.0)))
    broken = broken_by[id(best)]
    guarded = bool(broken) and all(is_guard(progress.setup.goal, limit) for limit in broken)
    return best, "; --no-guard leaves that limit out" if guarded else ""


def _plain(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
