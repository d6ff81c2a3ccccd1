"""One engine config -> one outcome: start, load, stop, whatever engine it is. Failures become values here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vopt.objectives.metrics import Metrics, compute_metrics, token_curve
from vopt.objectives.records import LoadResult, LoadStatus
from vopt.optimizer.compile_watch import WatchedLoads
from vopt.optimizer.early_end import early_end
from vopt.optimizer.engine.base import Session
from vopt.optimizer.events import Listener, LoadTicked, Note
from vopt.optimizer.first_load import NumberedLoads, first_load
from vopt.optimizer.history import SAMPLED_STAGES, FailureSummary, Stage, TrialRecord, TrialRequest
from vopt.optimizer.interruption import Interruption
from vopt.optimizer.load.plan import LoadPlan, Tick
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.measurement import CLIENT_LIMITED, FRONT_END_LIMITED, Asked, Measurement, front_end_limited
from vopt.optimizer.phase_clock import PhaseClock
from vopt.optimizer.raw_records import RECORDS, SECOND_RECORDS, SIMULATED_CHUNKS, drop_last_raw, write_records
from vopt.optimizer.second_load import PLAN, found_plan, joined, second_source, worse_status
from vopt.optimizer.served_load import ServedLoad
from vopt.optimizer.soak import soak_plan
from vopt.optimizer.trial import EngineFailure, Failed, FailureKind, Measured, Outcome, Phase, Started, TrialSpec

OpenSession = Callable[[TrialSpec, bool], Session]
"""Brings up nothing yet: ``(spec, served)`` -> the session that will. ``served``: as the very command, over HTTP."""

LOG = "engine.log"
"""In a trial's directory, where its engine's output goes; a simulated engine has none."""

SERVED_STAGES = (Stage.CONFIRMATION, Stage.SOAK)
"""Measured as the very command, over HTTP, where a search serves at all."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What every trial of a study shares."""

    spec_for: Callable[[TrialRequest], TrialSpec]
    argv_for: Callable[[TrialRequest], tuple[str, ...]]
    open_session: OpenSession
    source: RequestSource
    soak_source: RequestSource
    asked: Asked
    slos: Mapping[str, float]
    listener: Listener
    served_confirmation: bool
    served_trials: bool
    soak_s: float
    simulated: bool
    dummy_weights: bool
    conditions: Callable[[], Mapping[str, Any]]
    refusal: Callable[[TrialRequest], str | None] = lambda request: None
    """Why vLLM itself would not take a configuration, asked without an engine; ``None`` when it would."""
    second: Asked | None = None
    """The open loop after the closed one, where two goals need either."""
    balance: Callable[[Mapping[str, float]], float | None] = lambda values: None
    """The joint figure of several goals; ``None`` for one goal."""


class Evaluator:
    """Evaluates trial requests, one at a time. The first successful baseline freezes the measurement for all others."""

    def __init__(
        self,
        bench: Bench,
        measurement: Measurement | None = None,
        second: LoadPlan | None = None,
        interruption: Interruption | None = None,
        earlier: Sequence[TrialRecord] = (),
    ) -> None:
        """``earlier``: the starts of a study that goes on or is measured again; they settled how served ones are loaded."""
        self.bench = bench
        self.interruption = interruption or Interruption()  # one that hears no signals
        self.measurement, self.second_plan = measurement, second
        self._second: LoadResult | None = None
        self.served_load, self.served_second = ServedLoad.of(earlier), ServedLoad.of(earlier, PLAN)
        self._conditions: Mapping[str, Any] = {}

    def __call__(self, request: TrialRequest) -> TrialRecord:
        """Never raises for what an engine does wrong: that is in the record's ``failure``.

        Raises ``KeyboardInterrupt`` when a signal came before there was anything to keep.
        """
        spec = self.bench.spec_for(request)
        if self.measurement is not None:
            spec = replace(spec, client_processes=self.measurement.client_processes)
        spec.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        began_at = datetime.now(UTC).isoformat(timespec="seconds")
        served = self._served(request)
        self._conditions, self._second = {}, None
        refused = self._refusal(request)
        if refused is not None:
            outcome: Outcome = Failed(Phase.PREFLIGHT, FailureKind.INVALID_CONFIG, refused)
        else:
            outcome = self._run(request, spec, served)
        record = self._record(request, spec, outcome, began_at, served)
        self.served_load.learn(record)
        self.served_second.learn(record)
        return record

    def _run(self, request: TrialRequest, spec: TrialSpec, served: bool) -> Outcome:
        session = self.bench.open_session(spec, served)
        clock = PhaseClock(request.label, self.bench.listener)
        try:
            with self.interruption.waiting():
                started = session.start(clock.begin)
                load, probes = self._load(request, spec, session, clock)
                self._second = self._second_load(request, session, load)
                outcome: Outcome = Measured(started, load, {}, probes)
        except EngineFailure as failure:
            outcome = failure.failed
        finally:
            clock.begin(Phase.STOP, "stopping the engine")
            leftovers = self._closed(session)
            clock.end()
            if leftovers:
                self.bench.listener(Note(f"trial {request.label} left behind: {', '.join(leftovers)}", important=True))
        # A simulation knows what its phases would have taken; the clock saw only what simulating them took.
        phase_s = {**clock.phase_s, **getattr(session, "phase_s", {})}
        return replace(outcome, phase_s=phase_s)

    def _refusal(self, request: TrialRequest) -> str | None:
        if request.stage not in SAMPLED_STAGES:
            return None
        with self.interruption.waiting():  # vLLM's imports, the first time
            return self.bench.refusal(request)

    def _closed(self, session: Session) -> tuple[str, ...]:
        """Close it; whatever breaks into that, nothing of the trial is left when this returns or raises."""
        try:
            with self.interruption.stopping():
                return session.close()
        except KeyboardInterrupt:  # what was measured is kept: the search ends at its next checkpoint
            return session.close()
        except BaseException:
            session.close()
            raise

    def _load(
        self, request: TrialRequest, spec: TrialSpec, session: Session, clock: PhaseClock
    ) -> tuple[LoadResult, tuple[LoadResult, ...]]:
        clock.begin(Phase.LOAD, "sending requests")
        if request.stage is Stage.SOAK:
            return self._soak(request, session), ()
        log = spec.directory / LOG
        loads = WatchedLoads(session.load, log, lambda text: self.bench.listener(Note(f"trial {request.label}: {text}")))
        if self.measurement is None:
            return self._first_load(request, loads)
        source = self.bench.source.with_observed(self.measurement.observed_output_tokens)
        if not self._served(request):
            return loads.load(source, self.measurement.plan, self._on_tick(request)), tuple(loads.set_aside)
        once = NumberedLoads(source, self._on_tick(request)).on(loads.load)
        plan, asked = self.measurement.plan, self._settled(self.bench.asked, self.measurement.plan)
        load, aside = self.served_load.load(plan, request.arm, asked, once, self._noted)
        return load, (*aside, *loads.set_aside)

    def _settled(self, asked: Asked, plan: LoadPlan) -> Asked:
        """What was asked; where all trials are served, with the rate that the first of them has found."""
        return replace(asked, rate=plan.rate) if self.bench.served_trials else asked

    def _noted(self, text: str) -> None:
        self.bench.listener(Note(text))

    def _second_load(self, request: TrialRequest, session: Session, first: LoadResult) -> LoadResult | None:
        """The open loop at the rate that the baseline's found, with the same requests; only after a first load that counts."""
        asked, measurement = self.bench.second, self.measurement
        if asked is None or measurement is None or request.stage is Stage.SOAK or first.status not in MEASURED_STATUSES:
            return None

        def told(tick: Tick) -> bool:
            self.bench.listener(LoadTicked(request.label, tick))
            return True

        loads = NumberedLoads(second_source(self.bench.source.with_observed(measurement.observed_output_tokens)), told)
        once = loads.on(session.load)
        if self.second_plan is None:
            load, self.second_plan = found_plan(asked, first, once, self._noted)
            return load
        plan = self.second_plan
        if not self._served(request):
            return once(plan)
        return self.served_second.load(plan, request.arm, self._settled(asked, plan), once, self._noted)[0]

    def _served(self, request: TrialRequest) -> bool:
        return self.bench.served_trials or (self.bench.served_confirmation and request.stage in SERVED_STAGES)

    def _soak(self, request: TrialRequest, session: Session) -> LoadResult:
        """The longest requests for ``soak_s``, as many in flight as the measured load had."""
        return session.load(self.bench.soak_source, self._soak_plan(), self._on_tick(request))

    def _soak_plan(self) -> LoadPlan:
        assert self.measurement is not None, "a soak follows the baseline"
        heavier = max(1.0, self.bench.soak_source.mean_tokens / self.bench.source.mean_tokens)
        return soak_plan(self.measurement.plan, self.measurement.peak_in_flight, self.bench.soak_s, heavier)

    def _first_load(self, request: TrialRequest, watched: WatchedLoads) -> tuple[LoadResult, tuple[LoadResult, ...]]:
        """Find what the user left open (concurrency, rate, window) on the baseline's engine, then freeze it."""
        loads = NumberedLoads(self.bench.source, self._on_tick(request))
        found = first_load(self.bench.asked, loads.on(watched.load), self._noted)
        self.measurement = found.measurement
        return found.load, (*found.probes, *watched.set_aside)

    def _on_tick(self, request: TrialRequest) -> Callable[[Tick], bool]:
        curve: list[float] = [0.0]  # at each full second of the window, whatever the ticks' distance
        may_end = request.stage is Stage.SEARCH and self.measurement is not None

        def on_tick(tick: Tick) -> bool:
            self.bench.listener(LoadTicked(request.label, tick))
            if tick.window_open_s is not None:
                if len(curve) == 1:  # once and under load: clocks and temperatures of an idle GPU explain nothing
                    self._conditions = self.bench.conditions()
                if tick.window_s < len(curve) - 1:
                    del curve[1:]  # another load, of the same engine: it was measured again
                _extend(curve, tick.window_s, tick.window_tokens)
            return not may_end or self._may_go_on(request, tick, curve[1:])

        return on_tick

    def _may_go_on(self, request: TrialRequest, tick: Tick, curve: list[float]) -> bool:
        assert self.measurement is not None, "only trials after the baseline end early"
        ended = early_end(
            curve,
            request.incumbent_curve,
            failed=tick.failed,
            planned=self.measurement.expected_requests,
            min_success=self.bench.asked.min_success,
        )
        if ended is not None:
            self.bench.listener(Note(f"trial {request.label} ends early: {ended.reason}"))
        return ended is None

    def _record(self, request: TrialRequest, spec: TrialSpec, outcome: Outcome, began_at: str, served: bool) -> TrialRecord:
        started: Started | None
        load: LoadResult | None
        failure: FailureSummary | None = None
        match outcome:
            case Measured(started, load):
                pass
            case Failed(started=started, load=load) as failed:
                failure = FailureSummary(failed.phase, failed.kind, failed.detail, failed.log_tail, failed.hint)
        metrics = None
        if load is not None:
            write_records(spec.directory / RECORDS, load, most_chunks=SIMULATED_CHUNKS if self.bench.simulated else None)
            drop_last_raw(spec.directory)
            metrics = self._metrics(load, spec.directory)
        environment = dict(self._conditions or self.bench.conditions())
        if started is not None:
            environment["vllm_version"] = started.vllm_version
        if self.measurement is not None:
            soak = request.stage is Stage.SOAK
            of = self.measurement
            kept = replace(of, plan=self.served_load.at_its_rate(of.plan)) if served else of
            environment["load_plan"] = asdict(self._soak_plan()) if soak else kept.to_json()
        if self._second is not None and self.second_plan is not None:
            environment[PLAN] = asdict(self.served_second.at_its_rate(self.second_plan) if served else self.second_plan)
        return TrialRecord(
            label=request.label,
            config=request.config,
            stage=request.stage,
            arm=request.arm,
            attempt=request.attempt,
            status=None if load is None else worse_status(load.status, self._second.status) if self._second else load.status,
            metrics=metrics,
            failure=failure,
            argv=self.bench.argv_for(request),
            resolved=dict(started.resolved) if started else {},
            kv_cache_tokens=started.kv_cache_tokens if started else None,
            kv_cache_bytes=started.kv_cache_bytes if started else None,
            start_class=started.start_class if started else None,
            phase_s=dict(outcome.phase_s),
            start_parts_s=dict(started.start_parts_s) if started else {},
            began_at=began_at,
            directory=str(spec.directory),
            token_curve=token_curve(load) if load else (),
            flags=(*(load.flags if load else ()), *self._flags(metrics, load)),
            served=served,
            environment=environment,
        )

    def _metrics(self, load: LoadResult, directory: Path) -> Metrics:
        """The figures of a start: of its one load, or of both as one with their joint figure."""
        metrics = compute_metrics(load, slos=self.bench.slos)
        if self._second is None:
            return metrics
        write_records(directory / SECOND_RECORDS, self._second, most_chunks=SIMULATED_CHUNKS if self.bench.simulated else None)
        drop_last_raw(directory)
        metrics = joined(metrics, compute_metrics(self._second, slos=self.bench.slos))
        joint = self.bench.balance(metrics.values)
        return metrics if joint is None else replace(metrics, values={**metrics.values, "balance": joint})

    def _flags(self, metrics: Metrics | None, load: LoadResult | None) -> tuple[str, ...]:
        flags = []
        acceptance = _acceptance_rate(load)
        if self.bench.dummy_weights and acceptance is not None and acceptance > ARTEFACT_ACCEPTANCE:
            flags.append("artefact_acceptance")
        if metrics and not self.bench.source.reuses and (metrics.get("prefix_hit_rate") or 0.0) >= UNEXPECTED_HIT_RATE:
            flags.append("unexpected_prefix_hits")
        if load is not None and load.client.limited:
            flags.append(CLIENT_LIMITED)
        if metrics and front_end_limited(metrics.values):
            flags.append(FRONT_END_LIMITED)
        return tuple(flags)


MEASURED_STATUSES = (LoadStatus.COMPLETE, LoadStatus.UNSTEADY)
ARTEFACT_ACCEPTANCE = 0.95
"""Dummy weights repeat themselves, so drafts are accepted as no real text would be."""

UNEXPECTED_HIT_RATE = 0.01


def _extend(curve: list[float], at_s: float, tokens: float) -> None:
    """Carry ``curve`` (cumulative tokens at 0, 1, 2, ... s) on to ``at_s``, in a straight line from its last point."""
    last = len(curve) - 1
    missing = int(at_s) - last
    for step in range(1, missing + 1):
        curve.append(curve[last] + (tokens - curve[last]) * step / max(at_s - last, 1.0))


def _acceptance_rate(load: LoadResult | None) -> float | None:
    """Accepted share of drafted tokens over the load's samples."""
    if load is None:
        return None
    drafted = [s for s in load.samples if s.draft_tokens is not None and s.accepted_tokens is not None]
    if not drafted or not drafted[-1].draft_tokens:
        return None
    return (drafted[-1].accepted_tokens or 0) / drafted[-1].draft_tokens
