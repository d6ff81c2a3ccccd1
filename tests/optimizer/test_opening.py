"""What a study's own counters open and close of its space, and what its failures switch off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from landscapes import THROUGHPUT, Landscape, MemoryStudy, Truth, parameter, space

from vopt.objectives.metrics import Metrics
from vopt.optimizer.events import Event, Note
from vopt.optimizer.history import FailureSummary, Stage, TrialRecord, TrialRequest
from vopt.optimizer.opening import opening, switched_off
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase
from vopt.search_spaces.learned import Learned
from vopt.search_spaces.space import Inactive, SearchSpace

UTILIZATION = parameter("gpu_memory_utilization", (0.9, 0.92, 0.95), 0.92)


def made() -> Any:
    body = space(
        parameter("max_num_seqs", (128, 256, 512), 256),
        parameter("max_num_batched_tokens", (2048, 8192, 16384), 8192),
    )
    asleep = Inactive("gpu_memory_utilization", "no sign that the KV cache will fill (80 %)", "kv_pressure")
    return replace(body, dormant=(UTILIZATION,), inactive=(asleep,))


def landscape() -> Landscape:
    return Landscape("counters", made(), lambda p: Truth(10_000 + p["max_num_seqs"]), THROUGHPUT, noise=0.001)


def with_counters(counters: dict[str, dict[str, float]], config: dict[str, Any], label: str) -> TrialRecord:
    request = TrialRequest(label, EngineConfig(config), Stage.SEARCH)
    record = replace(landscape(), space=made().whole).evaluator(0)(request)
    assert record.metrics is not None
    return replace(record, metrics=Metrics(values={**record.metrics.values, **counters.get(label, {})}))


IDLE = {"queued_share": 0.0, "full_budget_share": 0.01, "kv_peak": 0.3, "peak_running": 64}


def test_what_the_baseline_shows_to_be_idle_is_put_aside_with_its_reason() -> None:
    found = opening(made(), with_counters({"0": IDLE}, {}, "0"), ())
    assert [(change.name, change.what) for change in found.changes] == [
        ("max_num_seqs", "put aside above its default"),
        ("max_num_batched_tokens", "put aside above its default"),
    ]
    assert "never queued" in found.changes[0].reason
    default = found.space.default_point()
    assert found.lessons[0].covers({**default, "max_num_seqs": 512})
    assert not found.lessons[0].covers(default)
    assert found.space.digest == made().digest


def test_pressure_at_the_baseline_opens_at_once() -> None:
    busy = {"queued_share": 0.5, "full_budget_share": 0.4, "kv_peak": 0.93}
    found = opening(made(), with_counters({"0": busy}, {}, "0"), ())
    assert "gpu_memory_utilization" in found.space
    assert [dict(lesson.at_most) for lesson in found.lessons] == [{"gpu_memory_utilization": 0.9}]
    assert found.changes[0].text == "gpu_memory_utilization reopened: the KV cache was 93% full (trial 0)"
    assert found.space.digest == made().digest


def test_a_later_trial_reopens_what_its_counters_show() -> None:
    baseline = with_counters({"0": IDLE}, {}, "0")
    later = with_counters({"3": {"kv_peak": 0.9, "queued_share": 0.2}}, {"max_num_batched_tokens": 16384}, "3")
    found = opening(made(), baseline, (baseline, later))
    assert "gpu_memory_utilization" in found.space
    reopened = {change.name: change for change in found.changes if change.what == "reopened"}
    assert set(reopened) == {"gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens"}
    assert reopened["max_num_seqs"].trial == "3"
    assert not any(lesson.at_least for lesson in found.lessons)


def test_a_full_cache_opens_its_share_of_memory_upwards_alone() -> None:
    """Less memory never served more requests; only an engine that ran out of it may need less."""
    busy = with_counters({"0": {"kv_peak": 0.93, "queued_share": 0.5}}, {}, "0")

    def refused(found: Any) -> list[float]:
        default = found.space.default_point()
        points = [{**default, "gpu_memory_utilization": value} for value in UTILIZATION.values]
        return [p["gpu_memory_utilization"] for p in points if any(lesson.covers(p) for lesson in found.lessons)]

    assert refused(opening(made(), busy, ())) == [0.9]
    assert refused(opening(made(), busy, (), starved=True)) == []
    asked = replace(made(), facts={**made().facts, "asked": ["gpu_memory_utilization"]})
    assert refused(opening(asked, busy, ())) == []
    lower = with_counters({"0": {"kv_peak": 0.93}}, {"gpu_memory_utilization": 0.9}, "0")
    assert refused(opening(made(), lower, ())) == [], "what the command in use has may stay"


def test_requests_in_flight_that_fit_bound_the_sequences_whatever_waits() -> None:
    """Seen in simulations: 512 requests in flight, room for 1,024, and a queue all the same, for a step of prompts was full."""
    busy = with_counters({"0": {"queued_share": 0.8, "full_budget_share": 0.001}}, {}, "0")
    busy = replace(busy, environment={"load_plan": {"concurrency": 64}})
    found = opening(made(), busy, ())
    assert [change.name for change in found.changes] == ["max_num_seqs"]
    assert "never more than 64 requests in flight" in found.changes[0].reason


def test_a_queue_that_a_trial_made_itself_opens_nothing() -> None:
    baseline = with_counters({"0": IDLE}, {}, "0")
    narrow = with_counters({"2": {"queued_share": 0.9}}, {"max_num_seqs": 128}, "2")
    found = opening(made(), baseline, (narrow,))
    assert all(change.what != "reopened" for change in found.changes)


@pytest.mark.parametrize("pressed", [False, True])
def test_the_search_follows_and_says_so(pressed: bool) -> None:
    """Idle: nothing above the defaults is started. Under pressure of a later trial the closed dimension is searched too."""

    def evaluate(request: TrialRequest) -> TrialRecord:
        counters = dict(IDLE)
        if pressed and request.config.get("max_num_seqs") == 128:
            counters["kv_peak"] = 0.95
        told = with_counters({request.label: counters}, request.config.to_json(), request.label)
        return replace(told, stage=request.stage)

    study, events = MemoryStudy(), list[Event]()
    setup = SearchSetup(goal=THROUGHPUT, space=made(), budget=Budget(trials=30, rounds=0, time_s=None, soak_s=0))
    search(setup, study, evaluate, events.append)
    configs = [record.config for record in study.records()]
    assert all(config.get("max_num_seqs", 0) <= 256 for config in configs)
    assert all(config.get("max_num_batched_tokens", 0) <= 8192 for config in configs)
    assert any("gpu_memory_utilization" in config for config in configs) is pressed
    said = [event.text for event in events if isinstance(event, Note)]
    assert any(text.startswith("max_num_seqs put aside above its default") for text in said)
    assert any(text.startswith("gpu_memory_utilization reopened: the KV cache was 95% full") for text in said) is pressed
    assert len(study.changes) == 2 + pressed
    assert len(said) == len(set(said))


def test_a_dimension_that_is_always_refused_is_switched_off() -> None:
    backends = parameter("moe_backend", ("auto", "triton", "cutlass", "marlin"), "auto", ordered=False)
    body: SearchSpace = space(backends)
    learned, home = Learned(), {"moe_backend": "auto"}
    for name in ("triton", "cutlass"):
        learned = learned.failed({"moe_backend": name}, home, kind="unsupported", detail="no module named flashinfer")
    (change,) = switched_off(body, learned)
    assert (change.name, change.what) == ("moe_backend", "switched off")
    assert "flashinfer" in change.reason
    assert learned.violations({"moe_backend": "marlin"}, home)
    assert not learned.violations(home, home)
    worked = learned.succeeded({"moe_backend": "marlin"}, home)
    assert not worked.violations({"moe_backend": "marlin"}, home)


def test_crashes_die_out_and_no_configuration_fails_twice() -> None:
    """60 % of the configurations crash: memory that runs out beyond a sum of sizes, and backends that are not installed."""
    body = space(
        parameter("max_num_seqs", (128, 256, 512, 1024), 256),
        parameter("max_num_batched_tokens", (2048, 4096, 8192, 16384), 4096),
        parameter("gpu_memory_utilization", (0.88, 0.9, 0.92, 0.94), 0.9),
        parameter("moe_backend", ("auto", "triton", "marlin", "cutlass"), "auto", ordered=False),
        parameter("async_scheduling", (False, True), True, ordered=False),
        parameter("stream_interval", (1, 2, 4), 1),
        seeds=({"max_num_seqs": 1024}, {"moe_backend": "triton"}, {"max_num_batched_tokens": 16384}, {"max_num_seqs": 512}),
    )

    def truth(point: Any) -> Truth:
        if point["moe_backend"] == "cutlass":
            return Truth(0.0, 0.0, FailureKind.UNSUPPORTED)
        load = sum(p.index(point[p.name]) for p in body.parameters[:3])
        if load > 4:
            return Truth(0.0, 0.0, FailureKind.OOM_START)
        value = 10_000 - 400 * abs(load - 3) - 300 * (not point["async_scheduling"])
        return Truth(value + 50 * (point["moe_backend"] == "triton"))

    crashing = [truth(point).crash is not None for point in Landscape("", body, truth).points()]
    assert 0.55 <= sum(crashing) / len(crashing) <= 0.65
    landscape = Landscape("crashes", body, truth, noise=0.005)
    budget = Budget(trials=33, rounds=0, time_s=None, soak_s=0, patience=99)
    first = last = 0
    for seed in range(3):  # together: one crash of ten would be a tenth
        study, setup = MemoryStudy(), SearchSetup(goal=THROUGHPUT, space=body, budget=budget, seed=seed)
        search(setup, study, landscape.evaluator(seed), lambda _: None)
        searched = [record for record in study.records() if record.stage is Stage.SEARCH]
        assert len(searched) == 30
        failed = [record.failure is not None for record in searched]
        first, last = first + sum(failed[:10]), last + sum(failed[20:])
        lost = [record.config for record in study.records() if record.failure is not None]
        assert len(lost) == len(set(lost))
    assert first > 0
    assert last < first / 4


def test_what_vllm_refuses_before_a_start_costs_no_trial_and_teaches() -> None:
    backends = parameter("moe_backend", ("auto", "triton", "cutlass", "marlin"), "auto", ordered=False)
    body = space(backends, parameter("max_num_seqs", (64, 128, 256, 512, 1024), 256))
    landscape = Landscape("refusing", body, lambda p: Truth(10_000 + p["max_num_seqs"]), noise=0.001)
    plain = landscape.evaluator(0)

    def evaluate(request: TrialRequest) -> TrialRecord:
        if "moe_backend" not in request.config:
            return plain(request)
        failure = FailureSummary(Phase.PREFLIGHT, FailureKind.INVALID_CONFIG, "no such backend here")
        return replace(plain(request), metrics=None, status=None, failure=failure)

    study = MemoryStudy()
    budget = Budget(trials=5, rounds=0, time_s=None, soak_s=0)
    search(SearchSetup(goal=THROUGHPUT, space=body, budget=budget), study, evaluate, lambda _: None)
    searched = [record for record in study.records() if record.stage is Stage.SEARCH]
    assert sum(record.failure is None for record in searched) == budget.searched
    assert sum(record.failure is not None for record in searched) <= budget.searched
    assert study.changes
    assert all(change["what"] == "switched off" for change in study.changes)
