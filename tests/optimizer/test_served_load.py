"""Served starts of a study whose trials are not served: at a rate that the command sustains, the same for all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.sample_study import study

from vopt.objectives.metrics import Metrics
from vopt.objectives.records import LoadResult, LoadStatus, LoadWindow
from vopt.optimizer.engine.base import OnPhase, OnTick
from vopt.optimizer.evaluate import Bench, Evaluator
from vopt.optimizer.events import Event, Note
from vopt.optimizer.history import Arm, FailureSummary, Stage, TrialRecord, TrialRequest
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.measurement import Asked, Measurement
from vopt.optimizer.second_load import PLAN, stored_plan
from vopt.optimizer.served_load import ServedLoad
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase, StartClass, Started, TrialSpec

ASKED = Asked(Arrivals.POISSON)
MEASURED = LoadPlan(Arrivals.POISSON, 60.0, rate=8.0, stall_after_s=3.0)


class Command:
    """Its queue grows above ``sustains`` requests per second; remembers the plans of its loads."""

    def __init__(self, sustains: float) -> None:
        self.sustains, self.plans = sustains, list[LoadPlan]()

    def __call__(self, plan: LoadPlan) -> LoadResult:
        self.plans.append(plan)
        over = plan.rate is not None and plan.rate > self.sustains
        return LoadResult((), LoadWindow(0, 60), LoadStatus.OVERLOADED if over else LoadStatus.COMPLETE, rate=plan.rate)


def served(rate: float | None, arm: Arm | None = Arm.BASELINE, p99_s: float = 2.0) -> TrialRecord:
    start = next(trial for trial in study().trials if trial.arm is Arm.BASELINE)
    environment = {"load_plan": {"rate": rate}}
    return replace(start, arm=arm, metrics=Metrics({"p99_e2e_s": p99_s}), served=True, environment=environment)


@pytest.mark.parametrize(("sustains", "tried"), [(9.0, [8.0]), (7.0, [8.0, 6.0]), (5.0, [8.0, 6.0, 4.5])])
def test_the_served_baseline_settles_the_rate_of_all_arms(sustains: float, tried: list[float]) -> None:
    load, said, command = ServedLoad(), list[str](), Command(sustains)
    found, aside = load.load(MEASURED, Arm.BASELINE, ASKED, command, said.append)
    assert [plan.rate for plan in command.plans] == tried
    assert (found.status, found.rate, len(aside)) == (LoadStatus.COMPLETE, tried[-1], len(tried) - 1)
    assert len(said) == len(aside)
    finalist = Command(0.1)
    over, none = load.load(MEASURED, Arm.FINALIST, ASKED, finalist, said.append)
    assert [plan.rate for plan in finalist.plans] == tried[-1:], "what cannot keep the rate is overloaded, not asked for less"
    assert (over.status, none) == (LoadStatus.OVERLOADED, ())
    again = Command(0.1)
    load.load(MEASURED, Arm.BASELINE, ASKED, again, said.append)
    assert [plan.rate for plan in again.plans] == tried[-1:], "settled once"


def test_a_command_that_sustains_nothing_of_it_stays_overloaded() -> None:
    found, aside = ServedLoad().load(MEASURED, Arm.BASELINE, ASKED, Command(0.1), lambda text: None)
    assert (found.status, len(aside)) == (LoadStatus.OVERLOADED, 2)


def test_a_typed_rate_is_the_users() -> None:
    command = Command(1.0)
    ServedLoad().load(MEASURED, Arm.BASELINE, replace(ASKED, rate=8.0), command, lambda text: None)
    assert [plan.rate for plan in command.plans] == [8.0]


def test_a_closed_loop_has_no_rate_to_settle() -> None:
    command, load = Command(1.0), ServedLoad()
    load.load(LoadPlan(Arrivals.CLOSED, 60.0, concurrency=8), Arm.BASELINE, ASKED, command, lambda text: None)
    assert (len(command.plans), load.rate) == (1, None)


def test_a_study_that_goes_on_keeps_what_was_settled() -> None:
    found = ServedLoad.of([served(6.0), served(6.0, Arm.FINALIST, p99_s=9.0)])
    assert (found.rate, found.stall_s) == (6.0, 6.0), "the stall limit is the baseline's"
    plan = found.plan(MEASURED)
    assert (plan.rate, plan.stall_after_s) == (6.0, 6.0)
    fresh = ServedLoad.of([replace(served(8.0, None), served=False)])
    assert (fresh.rate, fresh.stall_s) == (None, None), "in-process starts say nothing of it"


def test_of_two_loads_the_latencies_are_the_second_ones() -> None:
    """Three times the p99 at 0.6 of what is sustained is less than what a request of a full closed loop takes."""
    both = replace(served(None), environment={"load_plan": {"rate": None}, PLAN: {"rate": 6.0}})
    first, second = ServedLoad.of([both]), ServedLoad.of([both], PLAN)
    assert (first.stall_s, first.rate) == (None, None)
    assert (second.stall_s, second.rate) == (6.0, 6.0)
    cut_off = served(None)  # its first load did not come to an end, so there was no second one
    assert ServedLoad.of([cut_off], PLAN).stall_s is None
    assert ServedLoad.of([cut_off]).stall_s == 6.0


def test_a_start_that_failed_has_settled_no_rate() -> None:
    """Its engine died before the rate was lowered, and the next baseline may still lower it."""
    died = replace(served(8.0, None), failure=FailureSummary(Phase.LOAD, FailureKind.ENGINE_DIED, "died"))
    assert ServedLoad.of([died]).rate is None
    assert ServedLoad.of([died, served(6.0)]).rate == 6.0


class Slow(Command):
    """The session of an engine that sustains 7 requests per second."""

    def __init__(self) -> None:
        super().__init__(7.0)

    def start(self, on_phase: OnPhase) -> Started:
        return Started("0.0", {}, 1000, 1000, 10, StartClass.KNOWN_KEY, {}, ())

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick | None) -> LoadResult:
        return self(plan)

    def close(self) -> tuple[str, ...]:
        return ()


def bench_of(tmp_path: Path, session: Slow, notes: list[str], **other: Any) -> Bench:
    def listener(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    def spec_for(request: TrialRequest) -> TrialSpec:
        return TrialSpec(request.label, "m", request.config, tmp_path / request.label, "python3")

    parts: dict[str, Any] = {
        "spec_for": spec_for,
        "argv_for": lambda request: (),
        "open_session": lambda spec, served: session,
        "source": RequestSource(((100, 100),)),
        "soak_source": RequestSource(((600, 400),)),
        "asked": ASKED,
        "slos": {},
        "listener": listener,
        "served_confirmation": True,
        "served_trials": False,
        "soak_s": 600.0,
        "simulated": True,
        "dummy_weights": False,
        "conditions": dict,
    }
    return Bench(**{**parts, **other})


def test_the_second_of_two_loads_gets_a_rate_of_its_own(tmp_path: Path) -> None:
    closed = LoadPlan(Arrivals.CLOSED, 60.0, concurrency=8)
    session = Slow()
    bench = bench_of(tmp_path, session, [], asked=Asked(Arrivals.CLOSED), second=ASKED)
    evaluator = Evaluator(bench, Measurement(closed, {}), MEASURED)
    baseline = evaluator(TrialRequest("confirm-1-baseline", EngineConfig(), Stage.CONFIRMATION, Arm.BASELINE))
    finalist = evaluator(TrialRequest("confirm-1-finalist", EngineConfig(), Stage.CONFIRMATION, Arm.FINALIST))
    assert [plan.rate for plan in session.plans] == [None, 8.0, 6.0, None, 6.0]
    assert [one.environment[PLAN]["rate"] for one in (baseline, finalist)] == [6.0, 6.0]
    assert baseline.status is LoadStatus.COMPLETE
    assert ServedLoad.of([baseline, finalist], PLAN).rate == 6.0
    assert stored_plan([baseline]) == replace(MEASURED, rate=6.0), "nothing else of the plan is another"


def test_records_hold_the_rate_that_they_were_loaded_with(tmp_path: Path) -> None:
    session, notes = Slow(), list[str]()
    evaluator = Evaluator(bench_of(tmp_path, session, notes), Measurement(MEASURED, {}))
    searched = evaluator(TrialRequest("1", EngineConfig(), Stage.SEARCH))
    baseline = evaluator(TrialRequest("confirm-1-baseline", EngineConfig(), Stage.CONFIRMATION, Arm.BASELINE))
    finalist = evaluator(TrialRequest("confirm-1-finalist", EngineConfig(), Stage.CONFIRMATION, Arm.FINALIST))
    rates = [one.environment["load_plan"]["rate"] for one in (searched, baseline, finalist)]
    assert rates == [8.0, 6.0, 6.0]
    assert [plan.rate for plan in session.plans] == [8.0, 8.0, 6.0, 6.0]
    assert (searched.status, baseline.status, finalist.status) == (LoadStatus.OVERLOADED, *[LoadStatus.COMPLETE] * 2)
    assert any("6 requests/s for all served commands" in text for text in notes)
    assert ServedLoad.of([searched, baseline, finalist]).rate == 6.0
    going_on = Evaluator(bench_of(tmp_path, session, notes, served_trials=True), Measurement(MEASURED, {}))
    assert going_on(TrialRequest("2", EngineConfig(), Stage.CONFIRMATION, Arm.BASELINE)).status is LoadStatus.OVERLOADED
    assert session.plans[-1].rate == 8.0, "a search of served trials found its rate on a served engine"
