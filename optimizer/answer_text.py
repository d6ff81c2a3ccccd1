"""What an answer says beside its figures: what decided, what drifted, what vanished, what was left out. Pure."""

from __future__ import annotations

import math
from statistics import fmean

from vopt.objectives.goals import too_few_for_p99
from vopt.objectives.metrics import Direction
from vopt.optimizer.breach import ended_well
from vopt.optimizer.compile_watch import COMPILED
from vopt.optimizer.history import Arm, Stage, TrialRecord
from vopt.optimizer.judge import Judged, change_text
from vopt.optimizer.measurement import CLIENT_LIMITED, FRONT_END_LIMITED, SCALE_OUT
from vopt.optimizer.progress import Progress
from vopt.optimizer.recommend import Gain
from vopt.optimizer.trial import EngineConfig
from vopt.optimizer.verdict import ArmResult, Confirmation, against_baseline, drift
from vopt.search_spaces.evidence import NOTHING_STATED_HYBRID

DRIFT_BAND = 3.0  # times the restart noise
VANISHED_BAND = 2.0  # standard deviations
FEW_AT_RATE = 200  # requests, with ten above their p95
LITTLE_REUSE = 0.01  # of the prompt tokens
OTHER_PATH = 0.05  # of the goal's figure, between the engine alone and the command


def vanished_gain(progress: Progress, seen: Confirmation) -> list[str]:
    """Says it when the engine alone was faster beyond its noise, and the served command shows nothing of it.

    The finalist was chosen because its starts of the search were good, so some of that lead is luck; the threshold is two
    standard deviations of the difference under the assumed noise of a start.
    """
    if not any(start.record.served for start in seen.finalist.starts) or progress.baseline is None:
        return []
    found = progress.starts_of(seen.finalist.config, Stage.SEARCH, Stage.SCREENING)
    alone = [start.merit for start in found if start.merit is not None and not start.record.served]
    before = progress.baseline.merit
    if not alone or before is None:
        return []
    lead = fmean(alone) - before
    if lead <= VANISHED_BAND * progress.setup.restart_noise * math.sqrt(1 + 1 / len(alone)):
        return []
    return [
        f"in the search, in-process, the finalist had {change_text(lead, progress.setup.goal)} against the baseline; launched "
        "as served commands the two cannot be told apart: the gain vanishes behind the API server (or was luck of the choice)"
    ]


def why(progress: Progress, seen: Confirmation, arm: ArmResult) -> str:
    """What decided between an arm and the baseline, in words; the figures stand in the gain."""
    found = against_baseline(progress, seen, arm)
    if found is None:
        return "the gain is not known"
    who = "of the finalist" if arm.arm is Arm.FINALIST else "of the finalist without what earns less than the noise"
    starts = f"fresh starts, {len(arm.values)} {who} and {len(seen.baseline.values)} of the baseline"
    how = "as served commands" if any(start.record.served for start in arm.starts) else "in-process"
    if progress.setup.no_serve is False and how == "in-process":
        how = "as simulated engines"
    if found.low is None:
        return f"{starts}, {how}, are too few for an interval"
    if found.better:
        return f"{starts}, {how}, differ by more than starts of one configuration do"
    if found.high is not None and found.high < 1:
        return f"{starts}, {how}: it is worse, by more than starts of one configuration differ"
    return f"{starts}, {how}, differ by no more than starts of one configuration do"


def by_limits(progress: Progress, seen: Confirmation, arm: ArmResult, breaks: str) -> str:
    """Why an arm is recommended over a baseline that breaks a limit, and what that costs in the goal."""
    goal, found = progress.setup.goal, against_baseline(progress, seen, arm)
    said = f"better: the baseline breaks its limits, and not by chance ({breaks}), the recommended configuration keeps them"
    if found is None:
        return f"{said}; no start of the baseline has a figure to compare its {goal.metric} with"
    if found.better:
        return f"{said}, and its gain is real: {why(progress, seen, arm)}"
    ratios = (found.ratio, found.low or found.ratio, found.high or found.ratio)
    ratio, *ends = ratios if goal.direction is Direction.MAXIMIZE else [1 / ratio for ratio in ratios]
    change = f"{goal.metric} {ratio - 1:+.1%}"
    if found.high is None:
        return f"{said}. What that costs: {change}, of too few starts for an interval"
    interval = f"{min(ends) - 1:+.1%} to {max(ends) - 1:+.1%}"
    if found.high < 1:
        return f"{said}. That has its price: {change} ({interval})"
    return f"{said}. Its gain is not beyond the noise: {change} ({interval})"


def drift_notes(progress: Progress, gain: Gain | None) -> tuple[Gain | None, list[str]]:
    """A drift beyond the noise is named and widens the interval by its size."""
    moved = drift(progress)
    if moved is None or abs(moved[0] - 1) <= DRIFT_BAND * progress.setup.restart_noise:
        return gain, []
    ratio, changed = moved
    what = (
        "; ".join(f"{name}: {before} -> {after}" for name, (before, after) in changed.items())
        or "no recorded condition changed"
    )
    note = (
        f"the baseline drifted by {ratio - 1:+.1%} between its first and its last start ({what}); the interval is widened by it"
    )
    if gain is None or gain.low is None or gain.high is None:
        return gain, [note]
    wide = max(ratio, 1 / ratio)
    if gain.low > 1 >= gain.low / wide:
        note += (
            ". The confirmation takes its arms in turn, so that a drift meets them alike: its starts, between "
            f"{gain.low - 1:+.1%} and {gain.high - 1:+.1%} better, decide the verdict"
        )
    return Gain(gain.ratio, gain.low / wide, gain.high * wide, gain.smallest_visible), [note]


def soak_text(progress: Progress, soak: Judged | None) -> str:
    """What the soak was, and that nothing crashed: how many requests were in flight is what its own plan says."""
    if soak is None:
        return "no soak was run"
    minutes = f"{progress.setup.budget.soak_s / 60:g}"
    plan = soak.record.environment.get("load_plan") or {}
    longest = "the workload's longest requests"
    load = f"{plan['concurrency']} of {longest} in flight" if plan.get("concurrency") else longest
    if plan.get("rate"):
        load = f"{plan['rate']:.3g} of {longest} a second"
    metrics = soak.record.metrics
    requests = f": {metrics.succeeded + metrics.failed:,} requests, {metrics.failed:,} failed" if metrics else ""
    preempted = metrics.get("preemptions") if metrics else None
    shown = f", {preempted:.0f} preemptions" if preempted is not None else ""
    return f"no crash in {minutes} minute{'s' * (minutes != '1')} with {load}{requests}{shown}"


def meaning_notes(progress: Progress, config: EngineConfig) -> list[str]:
    """What of a recommended configuration changes the model's outputs, or what clients may ask for."""
    notes = []
    for parameter in progress.setup.space.parameters:
        name = "speculative_config" if parameter.name == "speculation" else parameter.name.partition(".")[0]
        if name not in config:
            continue
        if parameter.changes_outputs:
            notes.append(f"{name} changes the outputs: compare the quality of answers before you serve it")
        if parameter.changes_contract:
            notes.append(f"{name} changes what the service offers: see that no client needs what it takes away")
    return notes


def caveats(progress: Progress, config: EngineConfig) -> list[str]:
    """What the figures of a recommended configuration rest on: the workload's reuse, and what a simulation assumes."""
    return [*_without_caching(progress, config), *progress.setup.assumed(config)]


def _without_caching(progress: Progress, config: EngineConfig) -> list[str]:
    """Says it when the recommendation turns prefix caching off: what decided that is the workload's reuse and nothing else."""
    if config.get("enable_prefix_caching") is not False or progress.baseline_config.get("enable_prefix_caching") is False:
        return []
    metrics = progress.baseline.record.metrics if progress.baseline is not None else None
    hit = metrics.get("prefix_hit_rate") if metrics is not None else None
    if hit is None or hit < LITTLE_REUSE:
        shown = "the measured workload declared no reuse, so its prompts share no beginnings that a cache could find"
    else:
        shown = f"of the measured workload's prompt tokens, {hit:.0%} were found in the cache while it was on"
    return [
        f"prefix caching is off in this command: {shown}. With traffic that shares beginnings (system prompts, conversations) "
        "it must be measured again: vopt workload --from-metrics URL writes a workload file of a running server"
    ]


def served_note(progress: Progress) -> list[str]:
    """Says it when the baseline does not do behind the API server what it did in-process, where the search ranked by it.

    Seen with vLLM 0.22.1 on an H200: Qwen3.5-9B, 256 in flight, 9,524 tokens/s in-process, 12,206 and 14,123 served. A busy
    API server hands new requests over in groups, in-process each enters the next step, and a step with a prompt in it takes a
    hybrid model four times as long as one without.
    """
    first, metric = progress.baseline, progress.setup.goal.metric
    if first is None or first.value is None or first.record.served:
        return []
    starts = _served_baselines(progress)
    served = [start.value for start in starts if start.value is not None]
    if not served or _rate_of(starts[0].record) != _rate_of(first.record):  # at another rate it is another figure
        return []
    ratio = fmean(served) / first.value
    if abs(math.log(ratio)) <= max(OTHER_PATH, DRIFT_BAND * progress.setup.restart_noise):
        return []
    return [
        f"served, the baseline's {metric} is {ratio - 1:+.0%} from what it was in-process, which is what the search ranked by: "
        "as served, another configuration may be the best; vopt search --engine server measures every trial so (longer starts)"
    ]


def _served_baselines(progress: Progress) -> list[Judged]:
    """Its measured starts behind the API server. One that failed has settled no rate: it may have been sent too many."""
    starts = progress.starts_of(progress.baseline_config, Stage.CONFIRMATION)
    return [start for start in starts if start.record.served and start.record.failure is None]


def _rate_of(record: TrialRecord) -> float | None:
    rate: float | None = (record.environment.get("load_plan") or {}).get("rate")
    return rate


def rate_note(progress: Progress) -> list[str]:
    """Says it when the served commands were measured at a lower rate than the engine alone."""
    served = next((rate for start in _served_baselines(progress) if (rate := _rate_of(start.record))), None)
    before = _rate_of(progress.baseline.record) if progress.baseline is not None else None
    if served is None or before is None or served == before:
        return []
    return [
        f"confirmed at {served:.3g} requests/s: at the {before:.3g} of the search the baseline's queue grew behind the API "
        f"server. {SCALE_OUT}"
    ]


def machine_note(progress: Progress) -> list[str]:
    """Says it when the confirmation ran on more than one machine: a study can be gone on with elsewhere."""
    starts = [judged.record.environment for judged in progress.history if judged.record.stage is Stage.CONFIRMATION]
    seen = {environment["gpu_uuids"] for environment in starts if "gpu_uuids" in environment}
    if len(seen) <= 1:
        return []
    return [
        f"the confirmation ran on {len(seen)} different sets of GPUs: their difference is in the interval; "
        "a study confirmed on one machine alone would see smaller gains"
    ]


def front_end_note(progress: Progress) -> list[str]:
    """Says it when the starts that decide, or the baseline where none do, were bounded by what feeds the engine.

    Seen with vLLM 0.22.1 on an H200: Qwen3-8B, 256 in flight, one API server: half of the requests waited before the engine,
    and two starts of the same command gave 19,596 and 24,895 tokens/s.
    """
    deciding = [judged.record for judged in progress.history if judged.record.stage is Stage.CONFIRMATION]
    if not deciding and progress.baseline is not None:
        deciding = [progress.baseline.record]
    bounded = [record for record in deciding if FRONT_END_LIMITED in record.flags and record.metrics is not None]
    if not bounded:
        return []
    shares = [record.metrics["front_end_share"] for record in bounded if record.metrics is not None]
    starts = (
        f"in {', '.join(record.label for record in bounded)}, {min(shares):.0%} to {max(shares):.0%} of the requests in flight"
    )
    if not bounded[0].served:
        return [f"{starts} were outside the engine: one Python thread feeds it, and no engine argument makes that faster"]
    return [
        f"{starts} were in the API server, not in the engine: no engine argument makes that faster, and starts differ more by "
        f"it. {SCALE_OUT}; vopt search … --engine server --set api_server_count=2 searches beside it"
    ]


def few_note(progress: Progress) -> list[str]:
    """Says it when so few requests were due in the windows that decide that a p95 is a handful of them."""
    deciding = [judged.record for judged in progress.history if judged.record.stage is Stage.CONFIRMATION] or [
        judged.record for judged in progress.searched
    ]
    at_rate = [record for record in deciding if (record.environment.get("load_plan") or {}).get("rate")]
    counted = [record.metrics.succeeded for record in at_rate if record.metrics is not None and ended_well(record)]
    fewest = min(counted, default=FEW_AT_RATE)
    if fewest >= FEW_AT_RATE:
        return []
    return [
        f"a start's figures rest on as few as {fewest} requests: a p95 is {max(1, round(0.05 * fewest))} of them, and small "
        "gains cannot be seen. A longer --window has more"
    ]


def unsearched_note(progress: Progress) -> list[str]:
    """Names what was left alone because the workload is silent about it, where it may matter much."""
    silent = [entry.name for entry in progress.setup.space.inactive if entry.reason == NOTHING_STATED_HYBRID]
    return [f"{name} was not searched: {NOTHING_STATED_HYBRID}" for name in silent]


def general_notes(progress: Progress) -> list[str]:
    budget = progress.setup.budget
    notes = [
        *progress.setup.notes,
        *unsearched_note(progress),
        *served_note(progress),
        *rate_note(progress),
        *machine_note(progress),
        *front_end_note(progress),
        *few_note(progress),
    ]
    if progress.setup.no_serve and budget.rounds:
        notes.append("confirmed in-process (--no-serve): what the API server costs is not in these figures")
    limited = [
        judged.record.label
        for judged in progress.history
        if judged.record.stage is Stage.CONFIRMATION and CLIENT_LIMITED in judged.record.flags
    ]
    if limited:
        notes.append(
            f"the load client, not the engine, was the limit in {', '.join(limited)}: gains may be larger than they look; "
            "free more cores for the client"
        )
    few = [
        judged.record.metrics.succeeded
        for judged in progress.history
        if judged.record.stage is Stage.CONFIRMATION
        and judged.record.metrics is not None
        and too_few_for_p99(progress.setup.goal.metric, judged.record.metrics.succeeded)
    ]
    if few:
        notes.append(f"{progress.setup.goal.metric} rests on {min(few)} requests a start: mostly chance")
    compiled = [
        judged.record.label
        for judged in progress.history
        if judged.record.stage is Stage.CONFIRMATION and COMPILED in judged.record.flags
    ]
    if compiled:
        notes.append(f"kernels were compiled while {', '.join(compiled)} was measured, also when it was measured again")
    return notes
