"""The document of a bench, repeated loads, and the records on disk."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from records_file import read_records

from vopt.objectives.metrics import compute_metrics
from vopt.objectives.records import (
    CounterSample,
    LoadResult,
    LoadStatus,
    LoadWindow,
    RequestFailure,
    RequestFailureKind,
    RequestRecord,
)
from vopt.optimizer.bench import (
    BenchLabels,
    bench_document,
    most_in_flight,
    repeat_summary,
    run_bench,
    watch_traffic,
    write_records,
)
from vopt.optimizer.bench_load import check_descriptors
from vopt.optimizer.engine.base import OnPhase, OnTick
from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.trial import Started

SOURCE = RequestSource(lengths=((10, 4),) * 64)
PLAN = LoadPlan(Arrivals.CLOSED, 10.0, concurrency=2)


def record(index: int, sent: float, took: float = 1.0) -> RequestRecord:
    times = tuple(sent + took * part for part in (0.25, 0.5, 0.75, 1.0))
    return RequestRecord(index, sent, sent, sent + took, 10, 4, 4, times, (1, 1, 1, 1), times[0], "length")


def broken(index: int, sent: float, message: str) -> RequestRecord:
    failure = RequestFailure(RequestFailureKind.STREAM_ERROR, message)
    return RequestRecord(index, sent, sent, sent + 0.5, 10, 4, 0, (sent + 0.1,), (0,), failure=failure)


def made_load(scale: float = 1.0) -> LoadResult:
    records = [record(index, index * 0.5, scale) for index in range(24)]
    records += [broken(30, 6.0, "first"), broken(31, 7.0, "second")]
    samples = tuple(CounterSample(at, drafts=10 * at, draft_tokens=30 * at, accepted_tokens=15 * at) for at in (1, 11))
    return LoadResult(tuple(records), LoadWindow(1.0, 11.0), LoadStatus.COMPLETE, samples=samples, concurrency=2)


def test_the_document_has_the_fields_of_vllm_bench_serve() -> None:
    load = made_load()
    document = bench_document(load, compute_metrics(load), BenchLabels(model="m"))
    names = {
        *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"),
        *("max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
        *("request_throughput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
        *("max_concurrent_requests", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"),
        *("mean_itl_ms", "mean_e2el_ms", "spec_decode_acceptance_rate", "spec_decode_acceptance_length"),
        *("spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens"),
    }
    assert names <= set(document)
    assert (document["completed"], document["failed"], document["num_prompts"]) == (24, 2, 26)
    assert document["mean_ttft_ms"] == pytest.approx(250.0)
    assert document["mean_tpot_ms"] == pytest.approx(250.0)
    assert (document["request_rate"], document["max_concurrency"]) == ("inf", 2)
    assert (document["spec_decode_acceptance_rate"], document["spec_decode_acceptance_length"]) == (50.0, 2.5)
    assert document["max_output_tokens_per_s"] == 8.0


def test_everything_of_ours_is_under_one_key() -> None:
    load = made_load()
    ours = bench_document(load, compute_metrics(load), BenchLabels(model="m", workload="chat", workload_hash="ab"))["vopt"]
    assert ours["failures"] == {"stream_error": {"n": 2, "first_message": "first"}}
    assert ours["requests"]["failed"] == 2
    assert ours["window"] == {"opened_s": 1.0, "closed_s": 11.0, "doublings": 0}
    assert set(ours["intervals_95"]) <= set(ours["metrics"])
    assert ours["metrics"]["success_rate"] < 1
    assert ours["workload"] == {"name": "chat", "sha256": "ab"}


def test_the_document_is_strict_json_even_of_a_load_without_anything() -> None:
    for load in (made_load(), LoadResult((), None, LoadStatus.DEADLINE, detail="too late", not_sent=7)):
        document = bench_document(load, compute_metrics(load), BenchLabels(model="m"))
        assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_records_come_back_and_are_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl.gz"
    records = made_load().records
    write_records(records, path)
    assert read_records(path) == records
    assert path.stat().st_mode & 0o077 == 0


def test_most_in_flight() -> None:
    assert most_in_flight([record(0, 0.0), record(1, 0.5), record(2, 1.25)]) == 2
    assert most_in_flight([record(0, 0.0), record(1, 1.0)]) == 1
    assert most_in_flight([]) == 0


class FakeSession:
    """An engine whose speed depends on its start and on its load; it remembers what it was asked."""

    def __init__(self, start: int, log: list[tuple[int, int]]) -> None:
        self.number, self.log, self.loads = start, log, 0

    def start(self, on_phase: OnPhase) -> Started:
        return Started(vllm_version="0", resolved={})

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        self.log.append((self.number, source.first_number))
        self.loads += 1
        return made_load(1.0 + 0.1 * self.number + 0.01 * self.loads)

    def close(self) -> tuple[str, ...]:
        self.log.append((self.number, -1))
        return ()


def test_repeats_on_one_engine_and_on_fresh_ones() -> None:
    log: list[tuple[int, int]] = []
    result = run_bench(lambda start: FakeSession(start, log), SOURCE, PLAN, repeat=3)
    assert [len(loads) for loads in result.starts] == [3, 1, 1]
    assert [number for _, number in log if number >= 0] == [0, 1_000_000, 2_000_000, 3_000_000, 4_000_000]
    assert sum(number == -1 for _, number in log) == 3
    summary = repeat_summary(result)
    assert summary["supports_comparison"] is True
    spread = summary["metrics"]["mean_e2e_s"]
    assert 0 < spread["within_engine"] < spread["of_starts"]


def test_repeats_of_somebody_elses_server_support_no_comparison() -> None:
    result = run_bench(lambda start: FakeSession(start, []), SOURCE, PLAN, repeat=3, fresh_starts=False)
    summary = repeat_summary(result)
    assert (summary["starts"], summary["loads"], summary["supports_comparison"]) == (1, 3, False)
    assert summary["metrics"]["mean_e2e_s"]["of_starts"] is None


def test_a_session_is_closed_when_its_load_raises() -> None:
    log: list[tuple[int, int]] = []

    class Broken(FakeSession):
        def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        run_bench(lambda start: Broken(start, log), SOURCE, PLAN)
    assert log == [(0, -1)]


PAGE = """
vllm:request_prompt_tokens_bucket{{le="100"}} {a}
vllm:request_prompt_tokens_bucket{{le="+Inf"}} {a}
vllm:request_prompt_tokens_sum {b}
vllm:request_prompt_tokens_count {a}
vllm:request_generation_tokens_bucket{{le="50"}} {a}
vllm:request_generation_tokens_bucket{{le="+Inf"}} {a}
vllm:request_generation_tokens_sum {c}
vllm:request_generation_tokens_count {a}
"""


def test_traffic_is_what_happened_between_two_scrapes() -> None:
    pages = iter([PAGE.format(a=100, b=5000, c=2000), PAGE.format(a=400, b=23000, c=11000)])
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    traffic = watch_traffic(lambda: next(pages), 60.0, sleep=sleep, clock=lambda: now[0])
    assert (traffic.requests, traffic.requests_per_s) == (300, 5.0)


def test_slos_reach_the_goodput() -> None:
    load = replace(made_load(), rate=2.0)
    document = bench_document(load, compute_metrics(load, slos={"ttft_s": 0.3}), BenchLabels(model="m"))
    assert document["request_goodput"] > 0


def test_a_process_that_may_open_few_files_is_not_asked_for_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: changed.append(limits))
    with pytest.raises(UsageError, match="may open 4096 files, and each request in flight is one") as refused:
        check_descriptors(8192)
    assert "ulimit -Hn" in refused.value.hint
    assert changed == []
    check_descriptors(2048)
    ((soft, hard),) = changed
    assert 2048 < soft <= hard == 4096
