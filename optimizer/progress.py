"""A search so far: what was measured, what it taught about the space, and which configurations may still win. Pure.

Everything here follows from the setup and the history alone, so a search that was killed stands where it stood.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, TypeVar

from vopt.objectives.confidence import levels
from vopt.objectives.front import front, knee_order
from vopt.objectives.goals import Goal
from vopt.optimizer.arms import MOST_ROUNDS, Arms, arms_of, series_of
from vopt.optimizer.history import Arm, Stage
from vopt.optimizer.judge import Judged, of_stage
from vopt.optimizer.lite import lite_config
from vopt.optimizer.opening import Change, Opening, opening, switched_off
from vopt.optimizer.repair import repair
from vopt.optimizer.setup import REPAIRS, SearchSetup
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.learned import OUT_OF_MEMORY
from vopt.search_spaces.memory import Possible
from vopt.search_spaces.parameter import Point, same
from vopt.search_spaces.relief import Fit
from vopt.search_spaces.space import SearchSpace

SCREENED = 3  # configurations that get a second start
_CONFIRMATION_TRIES = 2  # finalists that may be tried when one fails in its confirmation


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
        """The baseline as given, then each repair of it, the last one being the baseline in use (or to try).

        A repair that was started stays what it was: later starts teach more about memory, and would choose another.
        """
        tried = [self.setup.baseline]
        started = list(dict.fromkeys(judged.record.config for judged in self.searched))
        while len(tried) <= REPAIRS:
            last = self.first(tried[-1])
            if last is None or last.record.failure is None:
                break
            begun = started[len(tried)] if len(started) > len(tried) else None
            repaired = begun if begun is not None else repair(self.setup, tried[-1], last, self._fit)
            if repaired is None or repaired in tried:
                break
            tried.append(repaired)
        return tuple(tried)

    @property
    def _fit(self) -> Fit | None:
        """Whether memory surely suffices for a configuration, from the starts so far."""
        return self.setup.fits([judged.record for judged in self.searched]) if self.setup.fits is not None else None

    @cached_property
    def repaired(self) -> EngineConfig:
        """What the repairs of the baseline changed; empty where it came up as given."""
        given = self.setup.baseline
        return EngineConfig({name: value for name, value in self.baseline_config.items() if given.get(name) != value})

    @cached_property
    def arms(self) -> Arms | None:
        """The confirmation in course: the first finalist whose confirmation has not failed; ``None`` when there is none.
        Finding its lite fits the model, so once for each state of the search."""
        return _arms(self)

    @cached_property
    def before(self) -> frozenset[str]:
        """Labels of what was measured before the search was last reopened; none where it never was."""
        return next((budget.starts for budget in reversed(self.setup.earlier) if budget.reopened), frozenset())

    @cached_property
    def later(self) -> tuple[Judged, ...]:
        """The starts since the search was last reopened; all of them where it never was."""
        return tuple(judged for judged in self.history if judged.record.label not in self.before)

    @property
    def searched_before(self) -> int:
        """How many configurations had been searched when more trials were asked for; 0 where they never were."""
        fewer = [earlier.starts for earlier in self.setup.earlier if earlier.trials < self.setup.budget.trials]
        return sum(judged.record.label in fewer[-1] for judged in self.searched) if fewer else 0

    @cached_property
    def earlier_arms(self) -> tuple[Arms, ...]:
        """The confirmations from before the search was last reopened, in order, without those whose finalist failed."""
        found = arms_of(
            start.record for start in of_stage(self.charged, Stage.CONFIRMATION) if start.record.label in self.before
        )
        return tuple(arms for arms in found if arms.finalist not in self.failed_finalists)

    @cached_property
    def failed_finalists(self) -> frozenset[EngineConfig]:
        """The finalists of the confirmations that a start ended: the finalist's own, or the soak of what won."""
        return frozenset(self.falls)

    @cached_property
    def falls(self) -> dict[EngineConfig, Judged]:
        """Of every finalist that failed, the start that failed, in the order in which they were tried. A refused soak ends a
        search, so it lets another finalist be tried only in a search that was reopened after it."""
        confirmed = arms_of(start.record for start in of_stage(self.charged, Stage.CONFIRMATION))
        first: dict[EngineConfig, Judged] = {}
        for start in self.charged:
            record = start.record
            if record.stage is Stage.CONFIRMATION and record.arm is Arm.FINALIST and record.failure is not None:
                first.setdefault(record.config, start)
            elif record.stage is Stage.SOAK and start.kind and record.label in self.before:
                for arms in confirmed:
                    if record.config in (arms.finalist, arms.lite):
                        first.setdefault(arms.finalist, start)
        return first

    @property
    def fallen_arms(self) -> Arms | None:
        """The last confirmation whose finalist failed; ``None`` where none did."""
        found = arms_of(start.record for start in of_stage(self.charged, Stage.CONFIRMATION))
        return next((arms for arms in reversed(found) if arms.finalist in self.failed_finalists), None)

    def rounds_of(self, arms: Arms) -> int:
        """How many rounds a confirmation has: as many as are asked for, and never fewer than were begun."""
        asked = self.setup.budget.rounds
        return max((n for n in range(asked + 1, MOST_ROUNDS + 1) if any(map(self.labelled, arms.labels(n)))), default=asked)

    def levels_of(self, arms: Arms) -> dict[int, float]:
        """The rounds after which a confirmation looks, with their levels: by its first plan and what was asked for after it."""
        lost = frozenset(start.record.label for start in self.charged if start.record.failure is not None)
        earlier = [(budget.rounds, arms.measured(budget.starts, lost)) for budget in self.setup.earlier]
        return levels(earlier, self.rounds_of(arms))

    @property
    def baseline_config(self) -> EngineConfig:
        return self.attempts[-1]

    @cached_property
    def baseline(self) -> Judged | None:
        """Trial 0, or the repaired one; ``None`` until one came up."""
        start = self.first(self.baseline_config)
        return start if start is not None and start.record.failure is None else None

    @cached_property
    def opening(self) -> Opening:
        """The space as the counters of this study's own starts opened it."""
        baseline, space = self.baseline, self.setup.space
        for name in self.repaired:
            space = space.reopen(name, "the baseline does not start without it")
        return opening(
            space,
            baseline.record if baseline is not None else None,
            (judged.record for judged in self.searched if judged.record.failure is None),
            starved=any(str(failure.kind) in OUT_OF_MEMORY for judged in self.searched if (failure := judged.record.failure)),
        )

    @property
    def changes(self) -> tuple[Change, ...]:
        """What evidence and failures changed of what is searched, each with its reason."""
        return (*self.opening.changes, *switched_off(self.effective.space, self.space.learned))

    @cached_property
    def effective(self) -> SearchSetup:
        """The setup with the dimensions that evidence reopened, and with what a repair had to change: every configuration
        carries it that would not start without, and no other. Dimensions among it are the seeds' and the pinned ones' alone;
        proposals depart from what ran."""
        setup = replace(self.setup, space=self.opening.space)
        if not self.repaired:
            return setup
        fit, given = self._fit, self.setup.space.facts.get("set", {})
        failed = {judged.record.config for judged in self.searched if judged.record.failure is not None}

        def starts(config: EngineConfig) -> bool:
            return config not in failed and fit is not None and fit({**given, **config}) is Possible.CAN

        inside = [name for name in self.repaired if name in setup.space]
        setup = replace(setup, relief=self.repaired.without(*inside), starts=starts)
        # Where the command in use named the value that failed, vLLM's own is not known to fail.
        within = {name: self.repaired[name] for name in inside if name not in self.setup.baseline}
        pinned = (replace(pin, config=_with_missing(pin.config, within, starts)) for pin in setup.pinned)
        seeds = (replace(seed, point=self._relieved(setup, seed.point, within)) for seed in setup.space.seeds)
        return replace(setup, pinned=tuple(pinned), space=replace(setup.space, seeds=tuple(seeds)))

    def _relieved(self, setup: SearchSetup, point: Point, within: Mapping[str, Any]) -> Point:
        """A seed's point, with the repaired dimensions where it leaves them alone, would not start and breaks nothing by it."""
        default = setup.space.default_point()
        moved = {**point, **{name: value for name, value in within.items() if same(point[name], default[name])}}
        needed = not (
            setup.starts is not None and setup.starts(EngineConfig({**setup.fixed, **setup.space.full_config(point)}))
        )
        return moved if needed and not setup.space.violations(moved) else point

    @cached_property
    def space(self) -> SearchSpace:
        """The space without what failed so far: hungrier points than one that ran out of memory, values that never work;
        and without what the counters showed to be of no use. Its domain stays that of the study."""
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

    def first(self, config: EngineConfig) -> Judged | None:
        return next((judged for judged in self.searched if judged.record.config == config), None)

    def starts_of(self, config: EngineConfig, *stages: Stage) -> list[Judged]:
        return [judged for judged in of_stage(self.charged, *stages) if judged.record.config == config]

    def tries(self, label: str) -> int:
        return sum(judged.record.label == label for judged in self.history)

    def labelled(self, label: str) -> Judged | None:
        return next((judged for judged in reversed(self.charged) if judged.record.label == label), None)

    def made(self, label: str, config: EngineConfig) -> Judged | None:
        """The start of this label, if it was this configuration that was started."""
        start = self.labelled(label)
        return start if start is not None and start.record.config == config else None


def candidates(progress: Progress) -> list[Judged]:
    """Configurations that may be the finalist, best first by their first start: not the baseline, steady unless nothing is,
    not clearly worse than the baseline, and no finalist that failed before the search was reopened."""
    baseline = progress.baseline
    out = {config for config, start in progress.falls.items() if start.record.label in progress.before}.union(progress.attempts)
    mine = [judged for judged in progress.searched if judged.may_win and judged.record.config not in out]
    steady = [judged for judged in mine if judged.record.status is not None and judged.record.status.value == "complete"]
    mine = steady or mine
    if baseline is not None and baseline.feasible and baseline.merit is not None:
        floor = baseline.merit - 3 * progress.setup.restart_noise
        mine = [judged for judged in mine if judged.merit is not None and judged.merit >= floor]
    mine = sorted(mine, key=lambda judged: -(judged.merit or 0.0))
    return _by_knee(progress, [(judged, [judged]) for judged in mine]) if progress.setup.goal.objectives else mine


def _with_missing(config: EngineConfig, within: Mapping[str, Any], starts: Callable[[EngineConfig], bool]) -> EngineConfig:
    """A pinned configuration with the repaired dimensions that it does not name itself, where it would not start."""
    missing = {name: value for name, value in within.items() if name not in config}
    return config if starts(config) else config | missing


T = TypeVar("T")


def _by_knee(progress: Progress, rows: list[tuple[T, list[Judged]]]) -> list[T]:
    """Of several objectives: the knee of the front first, then by how near the others come to it; each by the mean of its
    starts."""
    points, known = [], []
    for row, starts in rows:
        merits = [found for start in starts if (found := objective_merits(progress.setup.goal, start)) is not None]
        if merits:
            points.append([fmean(values) for values in zip(*merits, strict=True)])
            known.append(row)
    return [known[i] for i in knee_order(points)]


def objective_merits(goal: Goal, judged: Judged) -> tuple[float, ...] | None:
    """A start's merit in each of several objectives; ``None`` when one was not measured."""
    return goal.merits(judged.record.metrics.values) if judged.record.metrics is not None else None


def front_of(progress: Progress) -> list[Judged]:
    """Of several objectives: the configurations that no other one beats by more than the noise, the baseline among those that
    may be, by the mean of their starts and in the order of the first objective, best first; empty for one goal. A
    configuration with a start that may not win is no member."""
    goal = progress.setup.goal
    rows = []
    for judged in progress.searched if goal.objectives else ():
        starts = progress.starts_of(judged.record.config, Stage.SEARCH, Stage.SCREENING)
        merits = [found for start in starts if (found := objective_merits(goal, start)) is not None]
        if merits and judged is starts[0] and all(start.may_win for start in starts):
            rows.append((tuple(fmean(values) for values in zip(*merits, strict=True)), judged))
    members = [rows[i] for i in front([merits for merits, _ in rows], noise=progress.setup.restart_noise)]
    return [judged for _, judged in sorted(members, key=lambda row: -row[0][0])]


def finalists(progress: Progress) -> list[EngineConfig]:
    """Screened configurations, best first by the mean log value of their starts; those that failed or broke a limit in
    their second start are out."""
    budget = progress.setup.budget
    ranked = []
    for judged in candidates(progress)[: max(1, min(SCREENED, budget.screening))]:
        starts = progress.starts_of(judged.record.config, Stage.SEARCH, Stage.SCREENING)
        if all(start.may_win for start in starts):
            merits = [start.merit for start in starts if start.merit is not None]
            ranked.append((sum(merits) / len(merits), judged.record.config, starts))
    ranked.sort(key=lambda row: -row[0])
    if progress.setup.goal.objectives:
        return _by_knee(progress, [(config, starts) for _, config, starts in ranked])
    return [config for _, config, _ in ranked]


def _arms(progress: Progress) -> Arms | None:
    """The confirmation of the best finalist that has not failed in one: the one that it has, else a new one, whose every start
    is a fresh one (those of before the search was reopened belong to another finalist)."""
    numbers = [series_of(start.record.label) for start in progress.charged if start.record.label in progress.before]
    for attempt, finalist in enumerate(finalists(progress)[:_CONFIRMATION_TRIES], start=1):
        if finalist in progress.failed_finalists:
            continue
        for known in progress.earlier_arms:
            if known.finalist == finalist:
                return known
        lite = lite_config(progress.effective, finalist, progress.baseline_config, progress.searched)
        out = progress.failed_finalists.union(start.record.config for start in progress.falls.values())
        return Arms(finalist, None if lite in out else lite, attempt, 1 + max(numbers, default=0))
    return None
