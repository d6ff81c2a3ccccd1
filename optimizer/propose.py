"""What to do next in a search, from what was measured so far. Pure: no Optuna, no engine, no clock.

``next_step`` is a function of the setup and the history alone, so a search that was killed goes on by asking it again.
Order: baseline (repaired if it must be), pinned configurations, seeds, proposals; then screening, confirmation, soak.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from vopt.objectives.confidence import looks
from vopt.optimizer import schedule
from vopt.optimizer.history import Arm, Stage
from vopt.optimizer.judge import Judged, of_stage
from vopt.optimizer.lite import lite_config
from vopt.optimizer.moves import Observation
from vopt.optimizer.opening import Change, Opening, opening, switched_off
from vopt.optimizer.setup import REPAIRS, SearchSetup
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase
from vopt.search_spaces.space import Point, SearchSpace

SEEDS = 4  # of the space's seeds that are measured before the model proposes
SCREENED = 3  # configurations that get a second start
_CONFIRMATION_TRIES = 2  # finalists that may be tried when one fails in its confirmation


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


@dataclass(frozen=True)
class Progress:
    """A search so far: every judged start in order, and what the loop alone knows."""

    setup: SearchSetup
    history: tuple[Judged, ...]
    exhausted: bool = False
    given_up: frozenset[EngineConfig] = frozenset()

    @cached_property
    def charged(self) -> tuple[Judged, ...]:
        """Starts that say something about their configuration."""
        return tuple(judged for judged in self.history if judged.charged)

    @cached_property
    def searched(self) -> tuple[Judged, ...]:
        return tuple(of_stage(self.charged, Stage.SEARCH))

    @cached_property
    def attempts(self) -> tuple[EngineConfig, ...]:
        """The baseline as given, then each repair of it, the last one being the baseline in use (or to try)."""
        tried = [self.setup.baseline]
        while len(tried) <= REPAIRS:
            last = self._first(tried[-1])
            if last is None or last.record.failure is None:
                break
            repaired = repair(self.setup, tried[-1], last)
            if repaired is None or repaired in tried:
                break
            tried.append(repaired)
        return tuple(tried)

    @cached_property
    def arms(self) -> Arms | None:
        """The confirmation in course; finding its lite fits the model, so once for each state of the search."""
        return _arms(self)

    @property
    def baseline_config(self) -> EngineConfig:
        return self.attempts[-1]

    @cached_property
    def baseline(self) -> Judged | None:
        """Trial 0, or the repaired one; ``None`` until one came up."""
        start = self._first(self.baseline_config)
        return start if start is not None and start.record.failure is None else None

    @cached_property
    def opening(self) -> Opening:
        """The space as the counters of this study's own starts opened it."""
        baseline = self.baseline
        return opening(
            self.setup.space,
            baseline.record if baseline is not None else None,
            (judged.record for judged in self.searched if judged.record.failure is None),
        )

    @property
    def changes(self) -> tuple[Change, ...]:
        """What evidence and failures changed of what is searched, each with its reason."""
        return (*self.opening.changes, *switched_off(self.effective.space, self.space.learned))

    @cached_property
    def effective(self) -> SearchSetup:
        """The setup with the dimensions that evidence reopened, and with what a repair had to change outside the space:
        every configuration carries it."""
        setup = replace(self.setup, space=self.opening.space)
        repaired = self.baseline_config
        changed = {
            name: value
            for name, value in repaired.items()
            if self.setup.baseline.get(name) != value and name not in self.setup.space.names
        }
        return replace(setup, fixed=setup.fixed | changed) if changed else setup

    @cached_property
    def space(self) -> SearchSpace:
        """The space without what failed so far: hungrier points than one that ran out of memory, values that never work;
        and without what the counters showed to be of no use."""
        space, default = self.effective.space, self.effective.space.default_point()
        learned = space.learned
        learned = replace(learned, lessons=(*learned.lessons, *self.opening.lessons))
        for judged in self.searched:
            point, failure = self.effective.point(judged.record.config), judged.record.failure
            if point is None:
                continue
            if failure is None:
                learned = learned.succeeded(point, default)
            else:
                learned = learned.failed(point, default, kind=str(failure.kind), detail=failure.detail, hint=failure.hint)
        checks = self.setup.checks
        if checks is not None:
            space = space.with_checks(*checks([judged.record for judged in self.searched]))
        return replace(space, learned=learned)

    @cached_property
    def seen(self) -> frozenset[EngineConfig]:
        return frozenset(judged.record.config for judged in self.charged) | self.given_up

    def _first(self, config: EngineConfig) -> Judged | None:
        return next((judged for judged in self.searched if judged.record.config == config), None)

    def starts_of(self, config: EngineConfig, *stages: Stage) -> list[Judged]:
        return [judged for judged in of_stage(self.charged, *stages) if judged.record.config == config]

    def labelled(self, label: str) -> Judged | None:
        return next((judged for judged in reversed(self.charged) if judged.record.label == label), None)


def next_step(progress: Progress) -> Step:
    """The next engine start, or the end."""
    for stage in (_baseline, _search, _drift, _screening, _confirmation, _soak, _explain):
        step = stage(progress)
        if step is not None:
            return step
    return Finish("every planned engine start was made")


def _baseline(progress: Progress) -> Step | None:
    config = progress.baseline_config
    tried = progress._first(config)
    if tried is None:
        repairs = len(progress.attempts) - 1
        reason = "baseline" if not repairs else f"repaired baseline: {_difference(progress.attempts[-2], config)}"
        return Run(config, Stage.SEARCH, reason)
    if tried.record.failure is not None:
        return Finish(f"the baseline cannot be started: {tried.reason}", infeasible=True)
    return None


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
    return any(judged.record.stage is not Stage.SEARCH for judged in progress.history)


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
    wanted = [(EngineConfig({**setup.fixed, **pin.config}), pin.reason) for pin in setup.pinned]
    seeds = [(setup.config(seed.point), seed.reason) for seed in setup.space.seeds if allowed(progress, seed.point)]
    measured = sum(judged.record.config in {config for config, _ in seeds} for judged in progress.searched)
    fresh = [(config, reason) for config, reason in seeds if config not in progress.seen]
    room = max(0, min(SEEDS, setup.budget.searched // 3) - _seeds_measured(progress))
    wanted += by_compile_key(setup, fresh[:room]) if measured <= SEEDS else []
    for config, reason in wanted:
        if config not in progress.seen:
            yield Run(config, Stage.SEARCH, reason)


def _seeds_measured(progress: Progress) -> int:
    seeds = {progress.effective.config(seed.point) for seed in progress.setup.space.seeds}
    pinned = {EngineConfig({**progress.effective.fixed, **pin.config}) for pin in progress.setup.pinned}
    skipped = pinned | {progress.baseline_config}
    return len({judged.record.config for judged in progress.searched} & (seeds - skipped))


def by_compile_key(setup: SearchSetup, runs: list[tuple[EngineConfig, str]]) -> list[tuple[EngineConfig, str]]:
    """The same runs, those of one compile key together, in the order in which the keys appear."""
    keyed = [(compile_key(setup, config), config, reason) for config, reason in runs]
    order = list(dict.fromkeys(key for key, _, _ in keyed))
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
    seen = []
    for judged in of_stage(progress.charged, Stage.SEARCH, Stage.SCREENING):
        point = progress.effective.point(judged.record.config)
        if point is None:
            continue
        worst = max(judged.violations.values(), default=-1.0)
        code = 1.0 if judged.feasible else -min(1.0, max(0.3, 10 * worst))
        seen.append(Observation(point, judged.merit if judged.feasible else None, code, judged.kind == "stopped_early"))
    return seen


def out_of_patience(progress: Progress) -> bool:
    """Whether the last ``patience`` proposals brought nothing above the noise over the best before them."""
    patience, noise = progress.setup.budget.patient_for, progress.setup.restart_noise
    first = 1 + len(progress.setup.pinned) + min(SEEDS, len(progress.setup.space.seeds))
    merits = [judged.merit if judged.may_win and judged.merit is not None else None for judged in progress.searched]
    best, since = None, 0
    for position, (judged, merit) in enumerate(zip(progress.searched, merits, strict=True)):
        since += position >= first and not _refused(judged)
        if merit is not None and (best is None or merit > best):
            since = since if best is not None and merit <= best + noise else 0
            best = merit
    return since >= patience


def repair(setup: SearchSetup, config: EngineConfig, failed: Judged) -> EngineConfig | None:
    """The smallest change of a configuration that its failure names: the engine's own hint first, then the rules of the
    space, then the step that a kind of failure asks for. ``None`` when nothing is known to help."""
    failure = failed.record.failure
    if failure is None:
        return None
    changes = {name: value for name, bound in failure.hint.items() if (value := _within(bound)) is not None}
    if changes:
        return config | {name: _on_grid(setup, name, value, failure.hint[name]) for name, value in changes.items()}
    point = setup.point(config)
    if point is not None and setup.space.violations(point):
        mended, _ = setup.space.repair(point)
        return setup.config(mended) if not setup.space.violations(mended) else None
    return _one_step(setup, config, failure.kind, failed.record.resolved)


def _within(bound: Mapping[str, Any]) -> Any:
    for key in ("equals", "at_most", "at_least"):
        if key in bound:
            return bound[key]
    return None


def _on_grid(setup: SearchSetup, name: str, value: Any, bound: Mapping[str, Any]) -> Any:
    """The value of the domain nearest to the bound from the allowed side; the bound itself outside the space."""
    if name not in setup.space.names:
        return value
    domain = setup.space[name].values
    if "at_most" in bound:
        return max((member for member in domain if isinstance(member, int | float) and member <= value), default=value)
    if "at_least" in bound:
        return min((member for member in domain if isinstance(member, int | float) and member >= value), default=value)
    return value


# Which argument a failure is mended by when the engine gives no figure, and in which direction its value moves.
_STEPS: Mapping[FailureKind, tuple[tuple[str, int], ...]] = {
    FailureKind.OOM_START: (("gpu_memory_utilization", -1), ("max_num_batched_tokens", -1), ("max_num_seqs", -1)),
    FailureKind.OOM_LOAD: (("gpu_memory_utilization", -1), ("max_num_seqs", -1), ("max_num_batched_tokens", -1)),
    FailureKind.GRAPH_CAPTURE: (("max_num_seqs", -1), ("gpu_memory_utilization", -1)),
    FailureKind.MAMBA_BLOCKS: (("max_num_seqs", -1),),
    FailureKind.KV_TOO_SMALL: (("gpu_memory_utilization", 1), ("max_num_seqs", -1)),
}


def _one_step(setup: SearchSetup, config: EngineConfig, kind: FailureKind, resolved: Mapping[str, Any]) -> EngineConfig | None:
    for name, direction in _STEPS.get(kind, ()):
        current = config.get(name, resolved.get(name))
        if name in setup.space.names:
            parameter = setup.space[name]
            current = parameter.default if current is None else current
            numbers = [member for member in parameter.values if isinstance(member, int | float)]
            beyond = [member for member in numbers if isinstance(current, int | float) and (member - current) * direction > 0]
            if beyond:
                return config | {name: max(beyond) if direction < 0 else min(beyond)}
        elif isinstance(current, int) and current > 1 and direction < 0:
            return config | {name: current // 2}
        elif isinstance(current, float) and 0 < current <= 1:
            return config | {name: round(min(0.97, current + 0.03 * direction), 2)}
    return None


def _difference(before: EngineConfig, after: EngineConfig) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in after.items() if before.get(name) != value)


def _drift(progress: Progress) -> Step | None:
    """One more start of the baseline after the search, where the confirmation does not measure it under like conditions."""
    done = of_stage(progress.history, Stage.DRIFT)
    if not progress.setup.drift_check or done or of_stage(progress.history, Stage.CONFIRMATION) or len(progress.searched) < 6:
        return None
    return Run(progress.baseline_config, Stage.DRIFT, "the baseline again: has the machine changed?", "drift")


def candidates(progress: Progress) -> list[Judged]:
    """Configurations that may be the finalist, best first by their first start: not the baseline, steady unless nothing is,
    and not clearly worse than the baseline."""
    baseline = progress.baseline
    mine = [judged for judged in progress.searched if judged.may_win and judged.record.config not in progress.attempts]
    steady = [judged for judged in mine if judged.record.status is not None and judged.record.status.value == "complete"]
    mine = steady or mine
    if baseline is not None and baseline.feasible and baseline.merit is not None:
        floor = baseline.merit - 3 * progress.setup.restart_noise
        mine = [judged for judged in mine if judged.merit is not None and judged.merit >= floor]
    return sorted(mine, key=lambda judged: -(judged.merit or 0.0))


def _screening(progress: Progress) -> Step | None:
    budget = progress.setup.budget
    if of_stage(progress.history, Stage.CONFIRMATION, Stage.SOAK, Stage.EXPLAIN):
        return None
    top = candidates(progress)[: min(SCREENED, budget.screening)]
    if len(top) < 2 and budget.rounds:
        return None  # one candidate needs no choosing
    for config, _ in by_compile_key(progress.effective, [(judged.record.config, "") for judged in top]):
        if not progress.starts_of(config, Stage.SCREENING) and config not in progress.given_up:
            return Run(config, Stage.SCREENING, "screening: one more start of a top configuration")
    return None


def finalists(progress: Progress) -> list[EngineConfig]:
    """Screened configurations, best first by the mean log value of their starts; those that failed or broke a limit in
    their second start are out."""
    budget = progress.setup.budget
    ranked = []
    for judged in candidates(progress)[: max(1, min(SCREENED, budget.screening))]:
        starts = progress.starts_of(judged.record.config, Stage.SEARCH, Stage.SCREENING)
        if all(start.may_win for start in starts):
            merits = [start.merit for start in starts if start.merit is not None]
            ranked.append((sum(merits) / len(merits), judged.record.config))
    return [config for _, config in sorted(ranked, key=lambda pair: -pair[0])]


@dataclass(frozen=True, slots=True)
class Arms:
    """The arms of one confirmation. ``lite`` is ``None`` where it would equal the finalist or the baseline."""

    finalist: EngineConfig
    lite: EngineConfig | None
    attempt: int

    def label(self, round_: int, arm: Arm) -> str:
        again = f"-{self.attempt}" if self.attempt > 1 and arm is not Arm.BASELINE else ""
        return f"confirm-{round_}-{arm}{again}"


def arms(progress: Progress) -> Arms | None:
    """The confirmation in course: the first finalist whose confirmation has not failed; ``None`` when there is none."""
    return progress.arms


def _arms(progress: Progress) -> Arms | None:
    failed: list[EngineConfig] = []
    for attempt, finalist in enumerate(finalists(progress)[:_CONFIRMATION_TRIES], start=1):
        lite = lite_config(progress.effective, finalist, progress.baseline_config, progress.searched)
        tried = Arms(finalist, None if lite in failed else lite, attempt)
        starts = [progress.labelled(tried.label(n, Arm.FINALIST)) for n in range(1, progress.setup.budget.rounds + 1)]
        if not any(start is not None and start.record.failure is not None for start in starts):
            return tried
        failed.append(finalist)
    return None


def _confirmation(progress: Progress) -> Step | None:
    from vopt.optimizer.verdict import settled

    rounds = progress.setup.budget.rounds
    tried = arms(progress) if rounds else None
    if tried is None:
        return None
    for round_ in range(1, rounds + 1):
        order = [Arm.BASELINE, Arm.FINALIST, Arm.LITE]
        for arm in order if round_ % 2 else reversed(order):
            config = {Arm.BASELINE: progress.baseline_config, Arm.FINALIST: tried.finalist, Arm.LITE: tried.lite}[arm]
            label = tried.label(round_, arm)
            if config is None or progress.labelled(label) is not None or _dead(progress, tried, arm, label):
                continue
            return Run(config, Stage.CONFIRMATION, f"confirmation round {round_} of {rounds}: {arm}", label, arm)
        if round_ in looks(rounds) and settled(progress, round_):
            return None
    return None


def _dead(progress: Progress, tried: Arms, arm: Arm, label: str) -> bool:
    """Whether an arm is out: one of its starts failed for its own fault, or infrastructure failed this start too often."""
    failed = any(
        start is not None and start.record.failure is not None
        for start in (progress.labelled(tried.label(n, arm)) for n in range(1, progress.setup.budget.rounds + 1))
    )
    tries = sum(judged.record.label == label for judged in progress.history)
    return failed or tries >= 2


def _soak(progress: Progress) -> Step | None:
    from vopt.optimizer.verdict import provisional_winner

    if not progress.setup.budget.soak_s or of_stage(progress.charged, Stage.SOAK) or _tries(progress, "soak") >= 2:
        return None
    winner = provisional_winner(progress)
    if winner is None:
        return None
    return Run(winner, Stage.SOAK, "soak: the winner at peak load", "soak")


def _tries(progress: Progress, label: str) -> int:
    return sum(judged.record.label == label for judged in progress.history)


EXPLAIN_STARTS = 2  # of each flag left out


def explain_label(name: str, start: int) -> str:
    return f"explain-{name.replace(':', '-')}-{start}"


def _explain(progress: Progress) -> Step | None:
    """Each override of the winner left out, one at a time, for those who want to pay for it."""
    from vopt.optimizer.verdict import provisional_winner

    winner = provisional_winner(progress) if progress.setup.explain else None
    if winner is None:
        return None
    for start in range(1, EXPLAIN_STARTS + 1):
        for name in dropped_one_by_one(progress, winner):
            label = explain_label(name, start)
            if not _tries(progress, label):
                return Run(winner.without(name), Stage.EXPLAIN, f"explain: the winner without {name}", label)
    return None


def dropped_one_by_one(progress: Progress, winner: EngineConfig) -> Sequence[str]:
    """Names of the winner's overrides that the baseline does not carry."""
    return [name for name, value in winner.items() if progress.baseline_config.get(name) != value]
