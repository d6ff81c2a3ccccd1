"""What to do next in a search, from what was measured so far. Pure: no Optuna, no engine, no clock.

``next_step`` is a function of the setup and the history alone, so a search that was killed goes on by asking it again.
Order: baseline (repaired if it must be), pinned configurations, seeds, proposals; then screening, confirmation, soak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vopt.objectives.records import LoadStatus
from vopt.optimizer import schedule
from vopt.optimizer.arms import Arms, series_suffix
from vopt.optimizer.breach import LOST_FOR_CERTAIN
from vopt.optimizer.command import flags_text
from vopt.optimizer.explain import next_explained
from vopt.optimizer.history import Arm, Stage
from vopt.optimizer.hopeless import beyond_reach, nothing_to_gain
from vopt.optimizer.judge import ARTEFACT, STOPPED_EARLY, Judged, margins, of_stage
from vopt.optimizer.moves import Observation
from vopt.optimizer.progress import SCREENED, Progress, candidates, objective_merits
from vopt.optimizer.setup import SHORT_SEARCH, SearchSetup
from vopt.optimizer.trial import EngineConfig, Phase
from vopt.optimizer.verdict import provisional_winner, settled, soak_of
from vopt.search_spaces.learned import OUT_OF_MEMORY
from vopt.search_spaces.space import Point

MOST_LOST = 0.2  # share of failed requests beyond which a rate says nothing of the arguments
SEEDS = 4  # of the space's seeds that are measured before the model proposes


@dataclass(frozen=True, slots=True)
class Run:
    """Start this configuration. ``label`` is empty for starts that the study numbers itself."""

    config: EngineConfig
    stage: Stage
    reason: str
    label: str = ""
    arm: Arm | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Ask the sampler for a configuration that was not measured yet; ``next_step`` again when it has none left."""

    number: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left to measure: recommend. ``infeasible`` names why no baseline came up."""

    reason: str
    infeasible: bool = False


Step = Run | Sample | Finish


def next_step(progress: Progress) -> Step:
    """The next engine start, or the end."""
    for stage in (_baseline, _midway, _search, _drift, _screening, _confirmation, _soak, _explain):
        step = stage(progress)
        if step is not None:
            return step
    return Finish("every planned engine start was made")


def _baseline(progress: Progress) -> Step | None:
    config = progress.baseline_config
    tried = progress.first(config)
    if tried is None:
        repairs = len(progress.attempts) - 1
        reason = "baseline" if not repairs else f"repaired baseline: {_difference(progress.attempts[-2], config)}"
        return Run(config, Stage.SEARCH, reason)
    if tried.record.failure is not None:
        return Finish(f"the baseline fails: {tried.reason}", infeasible=True)
    beyond = beyond_reach(tried, progress.setup.rate, progress.setup.request_tokens)
    if beyond is not None:
        return Finish(beyond, infeasible=True)
    kept = nothing_to_gain(tried, progress.setup.goal)
    return None if kept is None else Finish(kept)


def _search(progress: Progress) -> Step | None:
    if _later_stage_began(progress):
        return None
    setup, left = progress.effective, trials_left(progress)
    if left <= 0 or not _time_for_one_more(progress):
        return None
    for run in queue(progress):
        return run
    if progress.exhausted or out_of_patience(progress):
        return None
    return Sample(len(progress.searched) + len(progress.given_up) + setup.seed * 1009)


def _later_stage_began(progress: Progress) -> bool:
    return any(judged.record.stage is not Stage.SEARCH and judged.record.label != MIDWAY for judged in progress.later)


def trials_left(progress: Progress) -> int:
    """Configurations that the trial budget still allows. Repairs of the baseline are not charged, nor what vLLM refused
    before an engine was started (as many as there are trials: a space that is refused throughout has an end)."""
    repairs, budget = len(progress.attempts) - 1, progress.setup.budget.searched
    refused = sum(_refused(judged) for judged in progress.searched)
    return budget - (len(progress.searched) - repairs - min(refused, budget))


def _refused(judged: Judged) -> bool:
    """Whether vLLM refused the configuration before an engine was started."""
    failure = judged.record.failure
    return failure is not None and failure.phase is Phase.PREFLIGHT


def _time_for_one_more(progress: Progress) -> bool:
    budget = progress.setup.budget.time_s
    if budget is None:
        return True
    records = [judged.record for judged in progress.history]
    timing = schedule.learned(progress.setup.timing, records)
    needed = schedule.trial_s(timing, known_key=False) + schedule.reserve_s(progress.setup, timing)
    return schedule.spent_s(records) + needed <= budget


def queue(progress: Progress) -> Iterator[Run]:
    """Pinned configurations and seeds that are not measured yet, those that share a compile key next to each other."""
    setup = progress.effective
    wanted = [(setup.relieved(EngineConfig({**setup.fixed, **pin.config})), pin.reason) for pin in setup.pinned]
    seeds = [(setup.config(seed.point), seed.reason) for seed in setup.space.seeds if allowed(progress, seed.point)]
    measured = sum(judged.record.config in {config for config, _ in seeds} for judged in progress.searched)
    fresh = [(config, reason) for config, reason in seeds if config not in progress.seen]
    room = max(0, min(SEEDS, setup.budget.searched // 3) - _seeds_measured(progress))
    wanted += by_compile_key(progress, fresh[:room]) if measured <= SEEDS else []
    for config, reason in wanted:
        if config not in progress.seen:
            yield Run(config, Stage.SEARCH, reason)


def _seeds_measured(progress: Progress) -> int:
    setup = progress.effective
    seeds = {setup.config(seed.point) for seed in setup.space.seeds}
    pinned = {setup.relieved(EngineConfig({**setup.fixed, **pin.config})) for pin in setup.pinned}
    skipped = pinned | {progress.baseline_config}
    return len({judged.record.config for judged in progress.searched} & (seeds - skipped))


def by_compile_key(progress: Progress, runs: list[tuple[EngineConfig, str]]) -> list[tuple[EngineConfig, str]]:
    """The same runs, those of one compile key together: first those of the start that was just made, then the others in the
    order in which their keys appear."""
    setup, last = progress.effective, progress.history[-1:]
    keyed = [(compile_key(setup, config), config, reason) for config, reason in runs]
    order = dict.fromkeys([*(compile_key(setup, judged.record.config) for judged in last), *(key for key, _, _ in keyed)])
    return [(config, reason) for wanted in order for key, config, reason in keyed if key == wanted]


def compile_key(setup: SearchSetup, config: EngineConfig) -> str:
    """What decides whether torch.compile's cache can serve a configuration; off-grid configurations share none."""
    point = setup.point(config)
    return str(setup.space.compile_key(point)) if point is not None else config.digest


def allowed(progress: Progress, point: Point) -> bool:
    """Whether a point may be measured: it breaks no rule and was not measured before."""
    return not progress.space.violations(point) and progress.effective.config(point) not in progress.seen


def observations(progress: Progress) -> list[Observation]:
    """What the model learns from: every charged in-search start that lies on the grid."""
    seen, weights = [], _weights(progress)
    for judged in of_stage(progress.charged, Stage.SEARCH, Stage.SCREENING):
        point = progress.effective.point(judged.record.config)
        if point is None:
            continue
        kept = margins(judged, progress.setup.goal)
        worst = max(value for key, value in judged.violations.items() if key not in kept)
        code = 1.0 if worst <= 0 else -min(1.0, max(0.3, 10 * worst))
        doubt = _doubt(judged, min((margin for margin in kept.values() if margin is not None), default=0.0))
        merit = judged.merit if doubt is not None else None
        if weights and doubt is not None:
            parts = objective_merits(progress.setup.goal, judged)
            merit = None if parts is None else sum(w * part for w, part in zip(weights, parts, strict=True))
        seen.append(Observation(point, merit, code, doubt or 1.0, _starved(judged), tuple(kept.values())))
    return seen


_WEIGHTS = ((0.5, 0.5), (0.8, 0.2), (0.2, 0.8))
"""How two objectives are weighed in one proposal after the other, so that a front is found and not one point of it: ParEGO
(Knowles, IEEE Transactions on Evolutionary Computation 10, 2006) with three fixed weights instead of random ones."""


def _weights(progress: Progress) -> tuple[float, ...]:
    return _WEIGHTS[len(progress.searched) % len(_WEIGHTS)] if progress.setup.goal.objectives else ()


def _starved(judged: Judged) -> bool | None:
    """Whether the start ran out of memory; ``None`` where it failed before, or otherwise."""
    failure = judged.record.failure
    if failure is None:
        return False
    return True if str(failure.kind) in OUT_OF_MEMORY else None


def _doubt(judged: Judged, margin: float) -> float | None:
    """By how much the variance of a value's noise is larger than that of a start within the limits; ``None``: no value.

    A start that broke a limit on latency by a little still shows what its arguments do to the goal's metric. One whose
    ``margin`` is far below 0 shows what its queue does, which goes where another argument makes room. One that failed a share
    f of its requests shows it to about f, in whichever direction.
    """
    if judged.kind == STOPPED_EARLY:
        return 25.0
    if judged.feasible:
        return 1.0
    metrics = judged.record.metrics
    if judged.merit is None or metrics is None or judged.record.status not in (LoadStatus.COMPLETE, LoadStatus.UNSTEADY):
        return None
    lost = metrics.failed / max(1, metrics.failed + metrics.succeeded)
    doubt = 1.0 + (lost / 0.01) ** 2 + (min(0.0, margin) / 0.3) ** 2
    return doubt if lost < MOST_LOST and ARTEFACT not in judged.record.flags else None


def out_of_patience(progress: Progress) -> bool:
    """Whether the last ``patience`` proposals brought nothing above the noise over the best before them; whoever asks for more
    trials has patience anew. Of several objectives one of them may have gained: then the whole budget is used."""
    if progress.setup.goal.objectives:
        return False
    patience, noise = progress.setup.budget.patient_for, progress.setup.restart_noise
    first = max(1 + len(progress.setup.pinned) + min(SEEDS, len(progress.setup.space.seeds)), progress.searched_before)
    merits = [judged.merit if judged.may_win and judged.merit is not None else None for judged in progress.searched]
    best, since = None, 0
    for position, (judged, merit) in enumerate(zip(progress.searched, merits, strict=True)):
        since += position >= first and not _refused(judged)
        if merit is not None and (best is None or merit > best):
            since = since if best is not None and merit <= best + noise else 0
            best = merit
    return since >= patience


def _difference(before: EngineConfig, after: EngineConfig) -> str:
    return flags_text({name: value for name, value in after.items() if before.get(name) != value})


MIDWAY = "drift-midway"


def _midway(progress: Progress) -> Step | None:
    """The baseline once more in the middle of a long search."""
    planned = progress.setup.budget.searched
    tried = {judged.record.label for judged in progress.history}
    if progress.setup.drift_starts < 2 or MIDWAY in tried or _later_stage_began(progress):
        return None
    if len(progress.searched) < planned // 2:
        return None
    return Run(progress.baseline_config, Stage.DRIFT, "the baseline again: has the machine changed?", MIDWAY)


def _drift(progress: Progress) -> Step | None:
    """One more start of the baseline after the search, where the confirmation does not measure it under like conditions."""
    done = any(judged.record.label == "drift" for judged in progress.history)
    if (
        not progress.setup.drift_check
        or done
        or of_stage(progress.history, Stage.CONFIRMATION)
        or len(progress.searched) < SHORT_SEARCH
    ):
        return None
    return Run(progress.baseline_config, Stage.DRIFT, "the baseline again: has the machine changed?", "drift")


def _screening(progress: Progress) -> Step | None:
    budget = progress.setup.budget
    if of_stage(progress.later, Stage.CONFIRMATION, Stage.SOAK, Stage.EXPLAIN):
        return None
    top = candidates(progress)[: min(SCREENED, budget.screening)]
    if len(top) < 2 and budget.rounds:
        return None  # one candidate needs no choosing
    for config, _ in by_compile_key(progress, [(judged.record.config, "") for judged in top]):
        if not progress.starts_of(config, Stage.SCREENING) and config not in progress.given_up:
            return Run(config, Stage.SCREENING, "screening: one more start of a top configuration")
    return None


def _confirmation(progress: Progress) -> Step | None:
    tried = progress.arms if progress.setup.budget.rounds else None
    if tried is None:
        return None
    rounds, levels = progress.rounds_of(tried), progress.levels_of(tried)
    for round_ in range(1, rounds + 1):
        order = [Arm.BASELINE, Arm.FINALIST, Arm.LITE]
        for arm in order if round_ % 2 else reversed(order):
            config = {Arm.BASELINE: progress.baseline_config, Arm.FINALIST: tried.finalist, Arm.LITE: tried.lite}[arm]
            label = tried.label(round_, arm)
            if config is None or progress.made(label, config) is not None or _dead(progress, tried, arm, label):
                continue
            return Run(config, Stage.CONFIRMATION, f"confirmation round {round_} of {rounds}: {arm}", label, arm)
        if round_ in levels and settled(progress, round_):
            return None
    return None


def _dead(progress: Progress, tried: Arms, arm: Arm, label: str) -> bool:
    """Whether an arm is out: starts of it failed for its own fault, or infrastructure failed this start too often. One failure
    refuses what is new; what everything is compared with gets another start, so that a single accident decides nothing."""
    starts = (progress.labelled(tried.label(n, arm)) for n in range(1, progress.rounds_of(tried) + 1))
    failed = sum(start is not None and start.record.failure is not None for start in starts)
    tries = sum(judged.record.label == label for judged in progress.history)
    return failed >= (LOST_FOR_CERTAIN if arm is Arm.BASELINE else 1) or tries >= 2


def _soak(progress: Progress) -> Step | None:
    winner = provisional_winner(progress) if progress.setup.budget.soak_s else None
    if winner is None or soak_of(progress, winner) is not None:
        return None
    earlier = {judged.record.label for judged in of_stage(progress.charged, Stage.SOAK)}  # those of other winners
    label = f"soak{series_suffix(1 + len(earlier))}"
    return None if progress.tries(label) >= 2 else Run(winner, Stage.SOAK, "soak: the winner at peak load", label)


def _explain(progress: Progress) -> Step | None:
    """Each override of the winner left out, one at a time, for those who want to pay for it."""
    missing = next_explained(progress) if progress.setup.explain else None
    return Run(missing.config, Stage.EXPLAIN, missing.reason, missing.label) if missing is not None else None
