"""A soak runs the workload's longest requests: only a dead or hung engine, or failed requests, refuse its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from landscapes import Landscape, MemoryStudy, small_landscape

from vopt.objectives.goals import Limit, built_in_goal
from vopt.objectives.metrics import Metrics
from vopt.objectives.records import LoadResult, LoadStatus, LoadWindow, RequestRecord
from vopt.objectives.score import violation_keys
from vopt.optimizer.engine.base import OnPhase, OnTick
from vopt.optimizer.evaluate import Bench, Evaluator
from vopt.optimizer.events import Event, TrialEnded
from vopt.optimizer.history import FailureSummary, Stage, TrialRecord, TrialRequest
from vopt.optimizer.launch import launch
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.measurement import Asked, Measurement
from vopt.optimizer.options import SearchOptions
from vopt.optimizer.recommend import Recommendation, Verdict
from vopt.optimizer.report import wording
from vopt.optimizer.report.live import Progress
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.optimizer.soak import peak_in_flight, soak_plan
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase, StartClass, Started, TrialSpec

GUARDS = (
    Limit("p95_ttft_s", "<=", 1.5, relative_to_baseline=True),
    Limit("p95_tpot_s", "<=", 0.1),
)
GOAL = built_in_goal("throughput", limits=GUARDS, guard=False)
QUIET = {"p95_ttft_s": 0.2, "p95_tpot_s": 0.02}
SLOW = {"p95_ttft_s": 90.0, "p95_tpot_s": 3.0}

Change = Callable[[TrialRecord], TrialRecord]


def figures(record: TrialRecord, values: dict[str, float], failed: int = 0, n: int = 1204) -> TrialRecord:
    assert record.metrics is not None
    success = {"success_rate": 1 - failed / n} if n else {}
    made = Metrics(values={**record.metrics.values, **values, **success}, succeeded=n - failed, failed=failed)
    return replace(record, metrics=made)


@lru_cache
def before_the_soak() -> tuple[TrialRecord, ...]:
    """A whole search in which every start is calm, up to its soak."""
    landscape = landscape_of_all()
    plain = landscape.evaluator(1)

    def evaluate(request: TrialRequest) -> TrialRecord:
        record = plain(request)
        return record if record.metrics is None else figures(record, QUIET)

    study = MemoryStudy()
    search(setup_of(landscape), study, evaluate, lambda event: None)
    return study.records()


@lru_cache
def landscape_of_all() -> Landscape:
    return small_landscape()


def setup_of(landscape: Landscape) -> SearchSetup:
    return SearchSetup(goal=GOAL, space=landscape.space, budget=Budget(trials=12, rounds=2, time_s=None, soak_s=60))


def searched(soaked: Change, events: list[Event] | None = None) -> Recommendation:
    """The answer when the soak's record is as ``soaked`` makes it."""
    study = MemoryStudy()
    for record in before_the_soak():
        if record.stage is not Stage.SOAK:
            study.begin(TrialRequest(record.label, record.config, record.stage), None)
            study.tell(record, (), {}, charged=True)
    calm = next(record for record in before_the_soak() if record.stage is Stage.SOAK)

    def evaluate(request: TrialRequest) -> TrialRecord:
        assert (request.stage, request.config) == (calm.stage, calm.config)
        return soaked(calm)

    heard = [] if events is None else events
    return search(setup_of(landscape_of_all()), study, evaluate, heard.append)


def slow(record: TrialRecord) -> TrialRecord:
    return figures(record, {**SLOW, GOAL.metric: 6.2 * (record.metrics or Metrics({}))[GOAL.metric]}, failed=1)


HARMLESS: dict[str, Change] = {
    "slow": slow,
    "overloaded": lambda record: replace(slow(record), status=LoadStatus.OVERLOADED),
    "unsteady": lambda record: replace(slow(record), status=LoadStatus.UNSTEADY),
    "deadline": lambda record: replace(slow(record), status=LoadStatus.DEADLINE),
    "no request ended": lambda record: replace(
        figures(record, SLOW, n=0), metrics=Metrics(values={GOAL.metric: 9.0}), status=LoadStatus.DEADLINE
    ),
}


def dies(record: TrialRecord) -> TrialRecord:
    failure = FailureSummary(Phase.LOAD, FailureKind.ENGINE_DIED, "illegal memory access")
    return replace(record, failure=failure, status=LoadStatus.ENGINE_DIED)


REFUSED: dict[str, tuple[Change, str]] = {
    "died": (dies, "engine_died"),
    "hung": (lambda r: replace(r, failure=FailureSummary(Phase.LOAD, FailureKind.HANG, "no token"), metrics=None), "hang"),
    "died in its load": (lambda r: replace(slow(r), status=LoadStatus.ENGINE_DIED), "engine_died"),
    "errors alone": (lambda r: replace(slow(r), status=LoadStatus.REPEATED_ERRORS), "repeated_errors"),
    "failed requests": (lambda r: figures(r, SLOW, failed=60), "limit:success_rate"),
    "too many to be sure": (lambda r: figures(r, SLOW, failed=1190, n=120_000), "limit:success_rate"),
}


@pytest.mark.parametrize("how", HARMLESS)
def test_what_the_longest_requests_cost_refuses_nothing(how: str) -> None:
    calm = searched(lambda record: record)
    assert calm.verdict is Verdict.BETTER
    answer = searched(HARMLESS[how])
    assert (answer.verdict, answer.winner_config, answer.argv) == (calm.verdict, calm.winner_config, calm.argv)
    assert [row.label for row in answer.rejected] == [row.label for row in calm.rejected]
    assert answer.soak.startswith("no crash in 1 minute with the workload's longest requests: ")


@pytest.mark.parametrize("how", REFUSED)
def test_death_hang_and_failed_requests_refuse_the_winner(how: str) -> None:
    change, kind = REFUSED[how]
    answer = searched(change)
    assert answer.verdict is Verdict.NO_GAIN
    assert "soak" in answer.reason
    assert [row.kind for row in answer.rejected if row.label == "soak"] == [kind]
    assert len({row.config for row in answer.rejected}) == len(answer.rejected)


def test_no_soak_is_compared_with_the_baseline_in_progress() -> None:
    events: list[Event] = []
    searched(slow, events)
    ended = next(e for e in events if isinstance(e, TrialEnded) and e.record.stage is Stage.SOAK)
    progress = Progress(metric=GOAL.metric)
    for event in events:
        progress.hear(event, 0.0)
    assert progress.ended_line(ended) == "soak: no crash in 1:30, 1,204 requests, 1 failed"
    _, value, against, _, result, _ = next(row for row in progress.table().rows if row[0] == "soak")
    assert (value, against, result) == (wording.NONE, wording.NONE, "no crash")


def test_a_refused_soak_says_why_in_progress() -> None:
    said = "60 failed, cannot win: success_rate"
    for change, words in ((dies, "illegal memory access"), (REFUSED["failed requests"][0], said)):
        events: list[Event] = []
        searched(change, events)
        ended = next(e for e in events if isinstance(e, TrialEnded) and e.record.stage is Stage.SOAK)
        assert words in Progress(metric=GOAL.metric).ended_line(ended)


def test_a_soak_has_every_constraint_of_the_study_in_order() -> None:
    from vopt.optimizer.judge import judge

    record = small_landscape().evaluator(1)(TrialRequest("soak", EngineConfig(), Stage.SOAK))
    judged = judge(slow(record), GOAL, Metrics(values=QUIET))
    assert tuple(judged.violations) == violation_keys(GOAL)
    assert judged.value is None
    assert judged.kind == ""


class Recorder:
    """A session that keeps the plan it was given."""

    def __init__(self) -> None:
        self.plans: list[LoadPlan] = []

    def start(self, on_phase: OnPhase) -> Started:
        return Started("0.0", {}, 1000, 1000, 10, StartClass.KNOWN_KEY, {}, ())

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick | None) -> LoadResult:
        self.plans.append(plan)
        return LoadResult((), LoadWindow(0.0, plan.window_s), LoadStatus.COMPLETE, rate=plan.rate)

    def close(self) -> tuple[str, ...]:
        return ()


def test_bounds_of_the_measured_load_do_not_apply_to_heavier_requests(tmp_path: Path) -> None:
    session = Recorder()
    specs: list[TrialSpec] = []

    def open_session(spec: TrialSpec, served: bool) -> Recorder:
        specs.append(spec)
        return session

    def spec_for(request: TrialRequest) -> TrialSpec:
        return TrialSpec(request.label, "m", request.config, tmp_path / request.label, "python3")

    parts: dict[str, Any] = {
        "argv_for": lambda request: (),
        "open_session": open_session,
        "source": RequestSource(((100, 100),)),
        "soak_source": RequestSource(((600, 400),)),
        "asked": Asked(Arrivals.POISSON),
        "slos": {},
        "listener": lambda event: None,
        "served_confirmation": False,
        "served_trials": False,
        "soak_s": 600.0,
        "simulated": True,
        "dummy_weights": False,
        "conditions": dict,
    }
    plan = LoadPlan(Arrivals.POISSON, 60.0, rate=10.0, stall_after_s=9.0, max_requests=50)
    measurement = Measurement(plan, {}, client_processes=3, peak_in_flight=37)
    assert Measurement.from_json(measurement.to_json(), {}) == measurement
    record = Evaluator(Bench(spec_for=spec_for, **parts), measurement)(TrialRequest("soak", EngineConfig(), Stage.SOAK))
    assert [spec.client_processes for spec in specs] == [3], "as many for every start as the measurement has settled"
    soaked = session.plans[0]
    assert soaked.window_s == 600
    assert soaked.stall_after_s is None
    assert soaked.max_requests is None, "a soak is as long as it says"
    assert (soaked.arrivals, soaked.concurrency, soaked.rate) == (Arrivals.CLOSED, 37, None)
    assert record.environment["load_plan"] == asdict(soaked), "the record holds the plan of the soak, not the measured load's"
    assert soaked.idle_timeout_s == pytest.approx(5 * plan.idle_timeout_s)


def test_the_peak_is_the_most_requests_at_once() -> None:
    def request(sent: float, ended: float) -> RequestRecord:
        return RequestRecord(0, sent, sent, ended, 10, 5, 5)

    assert peak_in_flight([request(0, 2), request(1, 3), request(1.5, 1.8), request(2, 4)]) == 3
    assert peak_in_flight([]) is None


@pytest.mark.parametrize("peak", [64, None])
def test_a_closed_load_is_soaked_at_its_own_concurrency(peak: int | None) -> None:
    measured = LoadPlan(Arrivals.CLOSED, 60.0, concurrency=64)
    assert soak_plan(measured, peak, 600.0, 3.0).concurrency == 64


def test_where_the_peak_is_not_known_the_tokens_of_the_measured_load_are_sent_and_the_words_say_so() -> None:
    plan = soak_plan(LoadPlan(Arrivals.POISSON, 60.0, rate=9.0), None, 600.0, 3.0)
    assert (plan.arrivals, plan.rate) == (Arrivals.POISSON, pytest.approx(3.0))
    answer = searched(lambda record: replace(record, environment={"load_plan": asdict(plan)}))
    assert answer.soak.startswith("no crash in 1 minute with 3 of the workload's longest requests a second: 1,204 requests")
    plan = soak_plan(LoadPlan(Arrivals.POISSON, 60.0, rate=9.0), 40, 600.0, 3.0)
    answer = searched(lambda record: replace(record, environment={"load_plan": asdict(plan)}))
    assert "with 40 of the workload's longest requests in flight" in answer.soak


def test_a_latency_studys_soak_puts_at_least_the_measured_load_on_the_engine(tmp_path: Path) -> None:
    """At the rate of the measured load over the requests' length it did not: 6 sequences where 19 had been measured."""
    options = SearchOptions(
        goal=["latency"],
        model="Qwen/Qwen3.5-9B",
        simulate="h200",
        trials=4,
        rounds=0,
        rate=8.0,
        storage=f"sqlite:///{tmp_path}/studies.db",
    )
    study = launch(options, lambda event: None)
    baseline, soak = study.trials[0], next(trial for trial in study.trials if trial.stage is Stage.SOAK)
    assert baseline.metrics is not None
    assert soak.metrics is not None
    for name in ("peak_running", "kv_peak"):
        assert soak.metrics[name] >= 0.9 * baseline.metrics[name], name
    assert soak.environment["load_plan"]["concurrency"] == baseline.environment["load_plan"]["peak_in_flight"]
    assert StudyView.of(study).load_plan["rate"] == 8
