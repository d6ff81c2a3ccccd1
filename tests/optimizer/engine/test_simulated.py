"""The simulated session: vLLM's failures in vLLM's words, determinism, noise, counters, timeouts, several loads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from simulation import CHAT, DENSE, HYBRID, MEASURED, MOE, chat_lengths, closed, run_load, session, tokens_per_s

import vopt.optimizer.engine.simulated_scheduler as scheduler_module
from vopt.objectives.records import LoadStatus, RequestFailureKind
from vopt.optimizer.engine.base import Engine, Session
from vopt.optimizer.engine.simulated import Noise
from vopt.optimizer.engine.simulated_engine import SimulatedEngine
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Tick
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.virtual_time import run_virtual
from vopt.optimizer.trial import EngineFailure, Failed, FailureKind, Phase

LATEST = "0.33.0"
AT_MOST_ALL = {"at_most": 40960}


def failure(action: Callable[[], object]) -> Failed:
    with pytest.raises(EngineFailure) as caught:
        action()
    return caught.value.failed


def start(name: str, arguments: dict[str, Any], **options: Any) -> Any:
    return session(name, arguments, version=LATEST, **options).start(lambda phase, words: None)


@pytest.mark.parametrize(
    "name, arguments, device, kind, words, hint",
    [
        (MOE, {"max_num_seqs": 1024, "max_num_batched_tokens": 512}, "h200", "invalid_config", "max_num_batched_tokens", None),
        (DENSE, {"gpu_memory_utilization": 1.2}, "h200", "invalid_config", "GPU memory utilization", None),
        (
            DENSE,
            {"max_model_len": 100_000},
            "h200",
            "invalid_config",
            "derived max_model_len",
            {"max_model_len": {"at_most": 40960}},
        ),
        (DENSE, {"tensor_parallel_size": 2}, "h200", "invalid_config", "number of available GPUs (1)", None),
        (
            DENSE,
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192},
            "h200",
            "invalid_config",
            "smaller than max_model_len",
            {"max_num_batched_tokens": {"at_least": 40960}},
        ),
        (DENSE, {"spec_method": "mtp", "spec_tokens": 1}, "h200", "unsupported", "Unsupported speculative method: 'mtp'", None),
        (DENSE, {"spec_method": "suffix"}, "h200", "unsupported", "Arctic Inference", None),
        (DENSE, {"gpu_memory_utilization": 0.999}, "h200", "oom_start", "Free memory on device cuda:0", None),
        ("meta-llama/Llama-3.1-70B-Instruct", {}, "h100", "oom_start", "CUDA out of memory", None),
        ("meta-llama/Llama-3.1-70B-Instruct", {}, "h200", "kv_too_small", "No available memory for the cache blocks", None),
        (DENSE, {"gpu_memory_utilization": 0.44}, "l40s", "kv_too_small", "To serve at least one request", None),
        (DENSE, {"gpu_memory_utilization": 0.36}, "l40s", "kv_too_small", "No available memory for the cache blocks", None),
        (
            "Qwen/Qwen3.5-35B-A3B",
            {"performance_mode": "throughput", "gpu_memory_utilization": 0.75},
            "h200",
            "mamba_blocks",
            "exceeds available Mamba cache blocks",
            {"max_num_seqs": {"at_most": 1763}},
        ),
    ],
)
def test_an_engine_that_cannot_start_fails_as_vllm_does(
    name: str, arguments: dict[str, Any], device: str, kind: str, words: str, hint: dict[str, Any] | None
) -> None:
    failed = failure(lambda: start(name, arguments, device=device))
    assert (failed.phase, failed.kind) == (Phase.START, FailureKind(kind))
    assert words in failed.detail
    assert failed.phase_s[Phase.START] > 10
    if hint is not None:
        assert failed.hint == hint


def test_the_hints_of_failures_lead_to_a_start() -> None:
    arguments = {"performance_mode": "throughput", "gpu_memory_utilization": 0.75}
    failed = failure(lambda: start("Qwen/Qwen3.5-35B-A3B", arguments))
    repaired = {**arguments, "max_num_seqs": failed.hint["max_num_seqs"]["at_most"]}
    assert start("Qwen/Qwen3.5-35B-A3B", repaired).num_gpu_blocks >= repaired["max_num_seqs"]
    failed = failure(lambda: start(DENSE, {"gpu_memory_utilization": 0.44}, device="l40s"))
    length = failed.hint["max_model_len"]["at_most"]
    assert 0 < length < 40960
    start(DENSE, {"gpu_memory_utilization": 0.44, "max_model_len": length}, device="l40s")


def test_a_start_that_outlasts_its_deadline_is_a_hang() -> None:
    one = session(HYBRID, {})
    one._spec = replace(one._spec, deadlines=replace(one._spec.deadlines, start_s=60.0))
    failed = failure(lambda: one.start(lambda phase, words: None))
    assert (failed.kind, failed.phase_s[Phase.START]) == (FailureKind.HANG, 60.0)


def test_too_little_memory_left_outside_runs_out_under_load() -> None:
    failed = failure(lambda: run_load(DENSE, {"gpu_memory_utilization": 0.995}, closed(64)))
    assert (failed.phase, failed.kind) == (Phase.LOAD, FailureKind.OOM_LOAD)
    assert "CUDA out of memory" in failed.detail
    assert failed.started is not None


def test_what_started_says_is_marked_and_names_vllms_own_defaults() -> None:
    said: list[str] = []
    started = session(MOE, {}, version=LATEST).start(lambda phase, words: said.append(words))
    assert started.resolved["simulated"] == "h200"
    assert "simulated" in started.messages[0]
    assert "simulated" in said[0]
    assert (started.resolved["max_num_seqs"], started.resolved["max_num_batched_tokens"]) == (1024, 8192)
    assert len(started.resolved["cudagraph_capture_sizes"]) == 51


def test_it_is_a_session_and_an_engine() -> None:
    one: Session = session(DENSE, {})
    one.start(lambda phase, words: None)
    assert isinstance(one._engine, SimulatedEngine)  # type: ignore[attr-defined]  # the protocol has no such member
    assert isinstance(one._engine, Engine)  # type: ignore[attr-defined]
    assert one.close() == one.close() == ()


def test_equal_seeds_give_equal_records_and_others_scatter_by_the_restart_noise() -> None:
    noise = Noise()
    plan = closed(64, window_s=20.0)
    first, again = (run_load(MOE, {}, plan, noise=noise) for _ in range(2))
    assert first == again
    rates = [tokens_per_s(run_load(MOE, {}, plan, noise=noise, label=f"trial-{i}")) for i in range(6)]
    spread = (max(rates) - min(rates)) / min(rates)
    assert 0.001 < spread < 0.05
    assert tokens_per_s(run_load(MOE, {}, plan, noise=noise, seed=1)) != rates[0]


def test_some_engines_can_be_slow_for_their_whole_life() -> None:
    noise = Noise(restart=0.001, step=0.0, slow_share=0.5, slow_factor=1.25)
    rates = sorted(tokens_per_s(run_load(MOE, {}, closed(32, 10.0), noise=noise, label=f"trial-{i}")) for i in range(8))
    gaps = [after / before for before, after in pairwise(rates)]
    assert max(gaps) > 1.12
    assert sorted(gaps)[-2] < 1.02


@pytest.mark.parametrize("name, concurrency", [(MOE, 256), (DENSE, 16)])
def test_chunks_count_the_window_as_exact_token_times_do(name: str, concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    coarse = run_load(name, {}, closed(concurrency))
    monkeypatch.setattr(scheduler_module, "CHUNK_STEPS", 1)
    exact = run_load(name, {}, closed(concurrency))
    assert coarse.window == exact.window
    assert max(exact.records[0].chunk_tokens) == 1
    assert max(coarse.records[0].chunk_tokens) > 4
    assert tokens_per_s(coarse) == pytest.approx(tokens_per_s(exact), rel=0.001)
    for mine, theirs in zip(coarse.records, exact.records, strict=True):
        if not mine.censored:
            assert (mine.ttft_s, mine.e2e_s, mine.output_tokens) == (theirs.ttft_s, theirs.e2e_s, theirs.output_tokens)


def test_every_record_is_whole() -> None:
    result = run_load(DENSE, {"kv_cache_memory_bytes": 12 * 2**30}, closed(256))
    assert result.samples[-1].preemptions
    assert result.samples[-1].kv_usage == pytest.approx(1, abs=0.05)
    for record in result.records:
        times = record.chunk_times_s
        assert list(times) == sorted(times)
        assert all(count > 0 for count in record.chunk_tokens)
        if record.succeeded:
            assert sum(record.chunk_tokens) == record.output_tokens == record.requested_output_tokens
            assert times[-1] == record.ended_s
            assert record.sent_s < times[0]


def test_a_small_cache_costs_throughput_by_preemption() -> None:
    small = run_load(DENSE, {"kv_cache_memory_bytes": 12 * 2**30}, closed(256))
    assert tokens_per_s(small) < 0.9 * tokens_per_s(run_load(DENSE, {}, closed(256)))


def test_shared_prefixes_are_hit_only_with_caching_and_in_whole_blocks() -> None:
    shared = RequestSource(lengths=chat_lengths(64, prompt=1500), shared_prefixes=(tuple(range(1000)),) * 2)
    plan = closed(32, 20.0)
    on = run_load(DENSE, {"enable_prefix_caching": True}, plan, shared)
    off = run_load(DENSE, {"enable_prefix_caching": False}, plan, shared)
    sample = on.samples[-1]
    assert sample.prefix_hits is not None
    assert sample.prefix_queries is not None
    assert 0.4 < sample.prefix_hits / sample.prefix_queries < 0.8
    assert off.samples[-1].prefix_hits is None
    assert tokens_per_s(on) > 1.1 * tokens_per_s(off)
    hits = {record.cached_prompt_tokens for record in on.records}
    assert max(hit for hit in hits if hit is not None) == 1000 // 16 * 16
    hybrid = run_load(MOE, {"enable_prefix_caching": True}, plan, shared, version=LATEST)
    assert hybrid.samples[-1].prefix_hits == 0  # 1000 tokens are less than one block of 1056


def test_speculation_is_counted_as_vllm_counts_it() -> None:
    arguments = {
        "speculative_config": {
            "method": "mtp",
            "num_speculative_tokens": 2,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 2.1,
        }
    }
    sample = run_load(HYBRID, arguments, closed(64), version=LATEST).samples[-1]
    assert sample.drafts
    assert sample.accepted_tokens is not None
    assert sample.draft_tokens == 2 * sample.drafts
    assert 1 + sample.accepted_tokens / sample.drafts == pytest.approx(2.1, rel=0.03)


def test_requests_too_long_for_the_model_are_refused_and_the_rest_go_on() -> None:
    source = RequestSource(lengths=((100, 50), (4000, 200)))
    result = run_load(DENSE, {"max_model_len": 4096}, closed(8, 10.0), source)
    failures = [record.failure for record in result.records if record.failure is not None]
    assert failures
    assert {one.kind for one in failures} == {RequestFailureKind.HTTP_STATUS}
    assert "maximum context length is 4096" in failures[0].message
    assert any(record.succeeded for record in result.records)


def test_waiting_without_a_token_times_out() -> None:
    source = RequestSource(lengths=((2000, 1500),))
    result = run_load(DENSE, {"max_num_seqs": 4}, closed(64, 20.0, idle_timeout_s=5.0, repeated_errors=1000), source)
    kinds = {record.failure.kind for record in result.records if record.failure is not None}
    assert kinds == {RequestFailureKind.TIMEOUT_IDLE}


def test_more_sequences_than_allowed_wait() -> None:
    result = run_load(DENSE, {"max_num_seqs": 16}, closed(64))
    assert {sample.running for sample in result.samples[1:]} == {16}
    assert result.samples[-1].waiting == 48


def test_filled_budgets_are_counted_while_prompts_queue() -> None:
    source = RequestSource(lengths=((8000, 20),))
    small = run_load(DENSE, {"max_num_batched_tokens": 2048}, closed(32), source).samples[-1]
    large = run_load(DENSE, {"max_num_batched_tokens": 32768, "max_num_seqs": 256}, closed(4), source).samples[-1]
    assert small.full_budget_steps
    assert small.engine_steps
    assert small.full_budget_steps > 0.9 * small.engine_steps
    assert large.full_budget_steps == 0


def test_a_session_serves_several_loads_on_one_clock() -> None:
    one = session(DENSE, MEASURED)
    one.start(lambda phase, words: None)
    plan = closed(32, 10.0)
    first, second = (one.load(CHAT, plan, lambda tick: True) for _ in range(2))
    assert first.status is second.status is LoadStatus.COMPLETE
    assert tokens_per_s(second) == pytest.approx(tokens_per_s(first), rel=0.02)
    assert second.records[0].sent_s == 0
    assert one.phase_s[Phase.LOAD] == pytest.approx(first.samples[-1].at_s + second.samples[-1].at_s, abs=8)


def test_a_load_is_stopped_early_by_its_watcher() -> None:
    one = session(DENSE, {})
    one.start(lambda phase, words: None)
    ticks: list[Tick] = []

    def watch(tick: Tick) -> bool:
        ticks.append(tick)
        return len(ticks) < 5

    assert one.load(CHAT, closed(32), watch).status is LoadStatus.STOPPED_EARLY
    assert len(ticks) == 5


def test_an_open_loop_above_capacity_is_overloaded_and_below_it_is_not() -> None:
    def status(rate: float) -> LoadStatus:
        return run_load(DENSE, {}, LoadPlan(Arrivals.POISSON, 30.0, rate=rate), device="a100").status

    assert status(4.0) is LoadStatus.COMPLETE
    assert status(60.0) is LoadStatus.OVERLOADED


def test_latency_of_a_quiet_engine_is_that_of_its_steps_whenever_requests_come() -> None:
    """An arrival in the middle of a long run of equal steps joins at the next step, not at the run's end."""
    result = run_load(DENSE, {}, LoadPlan(Arrivals.POISSON, 60.0, rate=3.0))
    ttfts = sorted(record.ttft_s for record in result.records if record.ttft_s is not None)
    assert ttfts[int(0.95 * len(ttfts))] < 0.1


def test_cancelling_frees_what_a_request_held() -> None:
    one = session(DENSE, {})
    one.start(lambda phase, words: None)
    engine = one._engine
    assert engine is not None

    async def cancelled() -> tuple[int | None, float | None]:
        engine.attach(asyncio.get_running_loop(), CHAT)
        running = [
            asyncio.create_task(engine.run(CHAT.request(i), origin_s=0.0, scheduled_s=0.0, idle_timeout_s=60.0))
            for i in range(8)
        ]
        await asyncio.sleep(0.2)
        assert engine.partial(3) is not None
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        assert engine.partial(3) is None
        sample = await engine.counters(origin_s=0.0)
        engine.detach()
        return sample.running, sample.kv_usage

    assert run_virtual(cancelled()) == (0, 0.0)
