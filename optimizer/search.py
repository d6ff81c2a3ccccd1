"""The loop: ask what comes next, evaluate it, keep the result, until there is an answer. Knows neither Optuna nor vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from vopt.objectives.metrics import Direction, Metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer import schedule
from vopt.optimizer.answer import recommend
from vopt.optimizer.answer_front import with_front
from vopt.optimizer.early_end import ratio_bound
from vopt.optimizer.events import Listener, Note, StageBegan, TrialBegan, TrialEnded
from vopt.optimizer.explain import explain_starts
from vopt.optimizer.history import SAMPLED_STAGES, FailureSummary, Pending, Stage, TrialRecord, TrialRequest
from vopt.optimizer.hopeless import end_if_hopeless
from vopt.optimizer.judge import Judged, judge, told_objective, told_value
from vopt.optimizer.moves import propose
from vopt.optimizer.opening import Change
from vopt.optimizer.progress import Progress
from vopt.optimizer.propose import (
    Finish,
    Run,
    Sample,
    allowed,
    compile_key,
    next_step,
    observations,
    trials_left,
)
from vopt.optimizer.recommend import Recommendation
from vopt.optimizer.setup import SearchSetup
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase
from vopt.search_spaces.space import Point

INFRASTRUCTURE_TRIES = 2

Told = tuple[Point, float, Mapping[str, float]]
"""One start as a foreign sampler learns of it: point, told value, constraints."""

OWN_SAMPLER = "auto"

Evaluate = Callable[[TrialRequest], TrialRecord]


class StudyStore(Protocol):
    """What the loop needs of a stored study; ``study.Study`` is the real one."""

    @property
    def name(self) -> str: ...
    def records(self) -> tuple[TrialRecord, ...]: ...
    def next_label(self) -> str: ...
    def begin(self, request: TrialRequest, point: Point | None) -> None: ...
    def finish(
        self, record: TrialRecord, values: Sequence[float], violations: Mapping[str, float], *, charged: bool
    ) -> None: ...
    def tell(self, record: TrialRecord, values: Sequence[float], violations: Mapping[str, float], *, charged: bool) -> None: ...
    def pending(self) -> tuple[Pending, ...]: ...
    def abandon(self, pending: Pending, why: str) -> None: ...
    def deaths(self) -> list[EngineConfig]: ...
    def suggest(self, sampler: str, told: Sequence[Told], allowed: Callable[[Point], bool], seed: int) -> Point | None: ...
    def keep_changes(self, changes: Sequence[Mapping[str, Any]]) -> None: ...
    def conclude(self, recommendation: Recommendation) -> None: ...


def search(
    setup: SearchSetup,
    study: StudyStore,
    evaluate: Evaluate,
    listener: Listener,
    checkpoint: Callable[[], None] = lambda: None,
) -> Recommendation:
    """Search to the end, from wherever ``study`` stands, and keep the answer in it.

    Our own model proposes where ``setup.sampler`` is ``auto``, else the study's sampler of that name. ``checkpoint`` is called
    where nothing has begun that has not ended. Whatever it or ``evaluate`` raises (an interruption) leaves the study resumable;
    a trial that ``KeyboardInterrupt`` ends is not held against its configuration. Raises ``UsageError`` when the workload is at
    fault, ``EnvironmentLacks`` when the machine is.
    """
    return _Loop(setup, study, evaluate, listener, checkpoint).run()


class _Loop:
    def __init__(
        self,
        setup: SearchSetup,
        study: StudyStore,
        evaluate: Evaluate,
        listener: Listener,
        checkpoint: Callable[[], None],
    ) -> None:
        self.setup, self.study, self.evaluate, self.listener, self.checkpoint = setup, study, evaluate, listener, checkpoint
        self.exhausted = False
        self.given_up: set[EngineConfig] = set()
        self.stage: Stage | None = None
        self.changes: tuple[Change, ...] = ()

    def run(self) -> Recommendation:
        self._judge_all()
        self.changes = self._progress().changes
        self._reconcile()
        while True:
            self.checkpoint()
            progress = self._progress()
            match next_step(progress):
                case Run() as run:
                    self._run(progress, run)
                case Sample(number):
                    self._sample(progress, number)
                case Finish() as finish:
                    answer = with_front(progress, recommend(progress, finish))
                    self.study.conclude(answer)
                    return answer

    # -- what is known ------------------------------------------------------------------------------------------------

    def _judge_all(self) -> None:
        """Judge what the study holds; needed once, later starts are judged as they end."""
        self.history: list[Judged] = []
        for record in self.study.records():
            self.history.append(self._judged(record))
        tries: dict[EngineConfig, int] = {}
        for judged in self.history:
            if not judged.charged and judged.record.stage in SAMPLED_STAGES:
                tries[judged.record.config] = tries.get(judged.record.config, 0) + 1
        self.given_up = {config for config, count in tries.items() if count >= INFRASTRUCTURE_TRIES}

    def _progress(self) -> Progress:
        return Progress(self.setup, tuple(self.history), self.exhausted, frozenset(self.given_up))

    def _judged(self, record: TrialRecord) -> Judged:
        early = self._early_bound(record) if record.status is LoadStatus.STOPPED_EARLY else None
        return judge(record, self.setup.goal, self._reference(record), early)

    def _reference(self, record: TrialRecord) -> Metrics | None:
        """The baseline metrics that relative limits refer to: the latest before this start under like conditions."""
        progress = self._progress()
        if record.config == progress.baseline_config and record.stage is Stage.SEARCH:
            return None
        like = [
            judged.record.metrics
            for judged in self.history
            if judged.record.config == progress.baseline_config
            and judged.record.stage is not Stage.SOAK
            and judged.record.served == record.served
            and judged.record.metrics is not None
            and judged.record.failure is None
        ]
        first = progress.baseline
        return like[-1] if like else first.record.metrics if first is not None and not record.served else None

    def _early_bound(self, record: TrialRecord) -> float | None:
        """The optimistic value of a start that was ended early: its bound over the best of before, times that one's value."""
        best = self._incumbent()
        if best is None or best.value is None:
            return None
        ratio = ratio_bound(record.token_curve, best.record.token_curve)
        return None if ratio is None else ratio * best.value

    def _incumbent(self) -> Judged | None:
        winners = [judged for judged in self.history if judged.may_win and judged.record.stage in SAMPLED_STAGES]
        return max(winners, key=lambda judged: judged.merit or 0.0, default=None)

    # -- after an interruption ----------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        """Tell what reached the disk; close what did not. A configuration with which the search died twice is marked."""
        for pending in self.study.pending():
            if pending.record is not None:
                self._take(pending.record, on_disk=True)
                self.listener(Note(f"trial {pending.request.label}: its result was on disk and is kept", important=True))
            else:
                self._bury(pending)

    def _bury(self, pending: Pending) -> None:
        config = pending.request.config
        if self.study.deaths().count(config) < 1:
            self.study.abandon(pending, "died")
            self.listener(
                Note(f"trial {pending.request.label} was interrupted: its configuration is measured again", important=True)
            )
            return
        self.listener(Note(f"trial {pending.request.label}: the search died twice with this configuration", important=True))
        failure = FailureSummary(Phase.START, FailureKind.HANG, "the search itself died twice while this configuration ran")
        self._take(_failed_record(pending.request, failure), on_disk=False)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _sample(self, progress: Progress, number: int) -> None:
        point = self._proposal(progress, number)
        if point is None:
            self.exhausted = True
            self.listener(Note("the space is exhausted: nothing new is left to measure"))
            return
        self._run(progress, Run(progress.effective.config(point), Stage.SEARCH, "proposed from what was measured so far"))

    def _proposal(self, progress: Progress, seed: int) -> Point | None:
        def may(point: Point) -> bool:
            return allowed(progress, point)

        if self.setup.sampler != OWN_SAMPLER:
            # A sampler sees the whole domain; what is not open of it stands at its default.
            found = self.study.suggest(
                self.setup.sampler, self._told(progress), lambda point: may(_open_part(progress, point)), seed
            )
            if found is not None:
                return _open_part(progress, found)
        careful = trials_left(progress) <= self.setup.budget.searched // 3
        return propose(progress.space, observations(progress), may, seed=seed, careful=careful)

    def _told(self, progress: Progress) -> list[Told]:
        told: list[Told] = []
        for position, judged in enumerate(self.history):
            point = progress.effective.point(judged.record.config)
            if judged.charged and judged.record.stage in SAMPLED_STAGES and point is not None:
                told.append((point, self._told_value(judged, self.history[:position]), judged.violations))
        return told

    def _told_value(self, judged: Judged, earlier: Sequence[Judged]) -> float:
        searched = [other for other in earlier if other.record.stage in SAMPLED_STAGES]
        return told_value(judged, searched, self.setup.goal.direction, self.setup.deadline_s)

    def _told_values(self, judged: Judged) -> list[float]:
        """What the study is told of a start: the goal's value, or one for each of several objectives."""
        goal = self.setup.goal
        if not goal.objectives:
            return [self._told_value(judged, self.history)]
        searched = [other for other in self.history if other.record.stage in SAMPLED_STAGES]
        return [told_objective(judged, searched, objective, self.setup.deadline_s) for objective in goal.objectives]

    def _run(self, progress: Progress, run: Run) -> None:
        self._announce(progress, run)
        label = run.label or self.study.next_label()
        attempt = 1 + sum(
            judged.record.config == run.config and not judged.charged and judged.record.stage is run.stage
            for judged in self.history
        )
        best = self._incumbent()
        early = self.setup.early_end and run.stage is Stage.SEARCH and progress.baseline is not None
        closed = self.setup.goal.direction is Direction.MAXIMIZE and best is not None and early
        request = TrialRequest(
            label=label,
            config=run.config,
            stage=run.stage,
            arm=run.arm,
            attempt=attempt,
            incumbent_curve=best.record.token_curve or None if closed and best is not None else None,
        )
        expected = self._expected_s(progress, run)
        self.listener(TrialBegan(request, run.reason, expected))
        self.study.begin(request, self._shown_point(progress, run.config))
        try:
            record = self.evaluate(request)
        except KeyboardInterrupt:  # the user's doing, and no death of this configuration
            for pending in self.study.pending():
                self.study.abandon(pending, "interrupted")
            raise
        self._take(replace(record, label=label), on_disk=False)
        self._tell_changes()
        end_if_hopeless(self.history, self.given_up, has_baseline=self._progress().baseline is not None, study=self.study.name)

    def _tell_changes(self) -> None:
        """Announce and keep what this start's counters or its failure changed of what is searched."""
        changes = self._progress().changes
        fresh = [change for change in changes if change not in self.changes]
        if not fresh:
            return
        for change in fresh:
            self.listener(Note(change.text))
        self.changes = changes
        self.study.keep_changes([change.to_json() for change in changes])

    def _announce(self, progress: Progress, run: Run) -> None:
        if run.stage is self.stage:
            return
        self.stage = run.stage
        planned = {phase.stage: phase for phase in schedule.plan(self.setup, [judged.record for judged in self.history]).phases}
        phase = planned.get(str(run.stage))
        starts, expected = (phase.starts, phase.expected_s) if phase else (1, None)
        if run.stage is Stage.EXPLAIN:  # known now that the winner is: the plan could not tell
            starts = explain_starts(progress)
            expected = starts * self._expected_s(progress, run)
        self.listener(StageBegan(str(run.stage), starts, expected))

    def _expected_s(self, progress: Progress, run: Run) -> float:
        timing = schedule.learned(self.setup.timing, [judged.record for judged in self.history])
        key = compile_key(progress.effective, run.config)
        known = any(compile_key(progress.effective, judged.record.config) == key for judged in self.history)
        expected = schedule.trial_s(timing, known_key=known)
        return expected - timing.load_s + self.setup.budget.soak_s if run.stage is Stage.SOAK else expected

    def _shown_point(self, progress: Progress, config: EngineConfig) -> Point | None:
        """Where a sampler sees a configuration: its point, or for one off the grid no point at all."""
        return progress.effective.point(config)

    def _take(self, record: TrialRecord, *, on_disk: bool) -> None:
        """Judge, keep and announce one result."""
        judged = self._judged(record)
        values = self._told_values(judged)
        keep = self.study.tell if on_disk else self.study.finish
        keep(record, values, judged.violations, charged=judged.charged)
        self.history.append(judged)
        if not judged.charged and record.attempt >= INFRASTRUCTURE_TRIES and record.stage in SAMPLED_STAGES:
            self.given_up.add(record.config)
        best, baseline = self._incumbent(), self._progress().baseline
        self.listener(
            TrialEnded(
                record,
                judged.value,
                best.value if best else None,
                baseline.value if baseline else None,
                judged.reason,
                self._against(record),
            )
        )

    def _against(self, record: TrialRecord) -> float | None:
        starts = self._progress().starts_of(self._progress().baseline_config, *Stage)
        like = (
            start.value for start in starts if start.record.served == record.served and start.record.stage is not Stage.SOAK
        )
        return next((value for value in like if value is not None), None)


def _open_part(progress: Progress, point: Point) -> Point:
    """A point of the whole domain without the dimensions that are not open."""
    return {name: point[name] for name in progress.space.names}


def _failed_record(request: TrialRequest, failure: FailureSummary) -> TrialRecord:
    return TrialRecord(
        label=request.label,
        config=request.config,
        stage=request.stage,
        arm=request.arm,
        attempt=request.attempt,
        status=None,
        metrics=None,
        failure=failure,
        argv=(),
        resolved={},
        kv_cache_tokens=None,
        start_class=None,
        phase_s={},
        start_parts_s={},
        began_at="",
        directory="",
    )
