"""A finished study as a person would get it, made of plain values: the renderers' tests and golden files rest on it.

The figures are invented, in the range of a 35B mixture-of-experts model on one 141 GB GPU. Nothing here is random: request
records are drawn from quantiles in a fixed order.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from vopt.objectives.goals import balance, joint_goal
from vopt.objectives.metrics import FailureCount, Metrics
from vopt.objectives.records import LoadStatus, RequestFailure, RequestFailureKind, RequestRecord
from vopt.optimizer.events import Event, LoadTicked, Note, PhaseBegan, StageBegan, TrialBegan, TrialEnded
from vopt.optimizer.history import Arm, FailureSummary, Stage, StudyRecord, TrialRecord, TrialRequest
from vopt.optimizer.load.plan import Tick
from vopt.optimizer.recommend import FrontMember, Gain, GoalVerdict, Override, Recommendation, Rejected, SuccessBound, Verdict
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase, StartClass

MODEL = "Qwen/Qwen3.5-35B-A3B-FP8"
SPECULATION = {"method": "mtp", "num_speculative_tokens": 4}
FINALIST = EngineConfig({"max_cudagraph_capture_size": 1024, "max_num_batched_tokens": 16384, "max_num_seqs": 768})
LITE = EngineConfig({"max_num_batched_tokens": 16384, "max_num_seqs": 768})
BEGAN = datetime(2026, 11, 28, 9, 0, tzinfo=UTC)


def argv_of(config: Mapping[str, Any], model: str = MODEL) -> tuple[str, ...]:
    words = ["vllm", "serve", model]
    for name, value in config.items():
        flag = name.replace("_", "-")
        match value:
            case True:
                words.append(f"--{flag}")
            case False:
                words.append(f"--no-{flag}")
            case dict():
                words += [f"--{flag}", json.dumps(value, separators=(",", ":"))]
            case _:
                words += [f"--{flag}", str(value)]
    return tuple(words)


def metrics_of(tokens: float, *, success: float = 1.0, ttft: float = 0.42, tpot: float = 0.031, kv: float = 0.71) -> Metrics:
    n = round(tokens / 1.1)
    failed = round(n * (1 - success) / max(success, 1e-9)) if success < 1 else 0
    e2e = ttft + 128 * tpot
    values = {
        "tokens_per_s": tokens,
        "output_tokens_per_s": tokens / 9,
        "requests_per_s": tokens / 1152,
        "success_rate": success,
        "mean_ttft_s": ttft * 0.8,
        "p50_ttft_s": ttft * 0.7,
        "p95_ttft_s": ttft,
        "p99_ttft_s": ttft * 1.3,
        "mean_tpot_s": tpot * 0.9,
        "p50_tpot_s": tpot * 0.88,
        "p95_tpot_s": tpot,
        "mean_e2e_s": e2e * 0.9,
        "p95_e2e_s": e2e,
        "kv_peak": kv,
        "preemptions": 0.0 if kv < 0.9 else 17.0,
    }
    return Metrics(
        values=values,
        intervals={"tokens_per_s": (tokens * 0.99, tokens * 1.01), "p95_ttft_s": (ttft * 0.95, ttft * 1.06)},
        succeeded=n,
        failed=failed,
        censored=256,
        failures={"engine_died": FailureCount(failed, "EngineDeadError: EngineCore encountered an issue.")} if failed else {},
    )


class _Clock:
    def __init__(self) -> None:
        self.now = BEGAN

    def take(self, seconds: float) -> str:
        began, self.now = self.now, self.now + timedelta(seconds=seconds + 2)
        return began.isoformat().replace("+00:00", "Z")


def _trial(clock: _Clock, label: str, config: EngineConfig, stage: Stage, **changes: Any) -> TrialRecord:
    failure: FailureSummary | None = changes.get("failure")
    failed_at = failure.phase if failure else None
    start = 96.0 if label == "0" else 58.0 if len(config) % 2 else 37.0
    phases: dict[Phase, float] = {Phase.PREFLIGHT: 0.4, Phase.START: start}
    if failed_at is not Phase.START:
        phases |= {Phase.WARMUP: 21.0, Phase.LOAD: 60.0 if failed_at is None else 24.0}
    phases[Phase.STOP] = 4.0
    record = TrialRecord(
        label=label,
        config=config,
        stage=stage,
        arm=None,
        attempt=1,
        status=None if failure else LoadStatus.COMPLETE,
        metrics=None,
        failure=None,
        argv=argv_of(config),
        resolved={"max_num_seqs": config.get("max_num_seqs", 1024), "max_num_batched_tokens": 8192},
        kv_cache_tokens=None if failed_at is Phase.START else 1_873_920,
        start_class=StartClass.FIRST if label == "0" else StartClass.NEW_KEY if len(config) % 2 else StartClass.KNOWN_KEY,
        phase_s=phases,
        start_parts_s={"import": 9.0, "weights": 14.0, "compile": start - 31.0, "capture": 8.0},
        began_at=clock.take(sum(phases.values())),
        directory="",
        token_curve=() if failure else tuple(24_000.0 * second for second in range(1, 61)),
        served=stage in (Stage.CONFIRMATION, Stage.SOAK),
        environment={"vllm": "0.32.0", "gpus": ["NVIDIA H200"], "driver": "580.95.05"},
    )
    return replace(record, **changes)


def _fail(phase: Phase, kind: FailureKind, detail: str, *log: str) -> FailureSummary:
    return FailureSummary(phase, kind, detail, log or (detail,))


def _search_trials(clock: _Clock) -> list[TrialRecord]:
    def at(label: int, config: Mapping[str, Any], **changes: Any) -> TrialRecord:
        return _trial(clock, str(label), EngineConfig(config), Stage.SEARCH, **changes)

    oom = _fail(
        Phase.START,
        FailureKind.OOM_START,
        "No available memory for the cache blocks. Try increasing gpu_memory_utilization",
        "(EngineCore pid=412) ERROR Traceback (most recent call last):",
        "ValueError: No available memory for the cache blocks. Try increasing gpu_memory_utilization",
    )
    mamba = _fail(Phase.START, FailureKind.MAMBA_BLOCKS, "max_num_seqs (2048) exceeds available Mamba cache blocks (1536)")
    invalid = _fail(Phase.START, FailureKind.INVALID_CONFIG, "1 validation error for ParallelConfig: <b>expert parallel</b>")
    oom_load = _fail(Phase.LOAD, FailureKind.OOM_LOAD, "CUDA out of memory. Tried to allocate 4.00 GiB")
    hang = _fail(
        Phase.LOAD, FailureKind.HANG, "no token for 120 s; No available shared memory broadcast block found in 60 seconds"
    )
    return [
        at(0, {}, metrics=metrics_of(21_380)),
        at(1, {"performance_mode": "throughput"}, metrics=metrics_of(22_610, ttft=0.45)),
        at(2, {"max_num_batched_tokens": 16384, "max_num_seqs": 512}, metrics=metrics_of(23_240, ttft=0.47, kv=0.77)),
        at(3, {"gpu_memory_utilization": 0.97, "max_num_batched_tokens": 32768, "max_num_seqs": 1024}, failure=oom),
        at(
            4,
            {"max_num_seqs": 512, "speculative_config": SPECULATION},
            metrics=metrics_of(27_830, success=0.516, ttft=0.61, kv=0.97),
        ),
        at(5, {"max_num_batched_tokens": 4096}, metrics=metrics_of(20_790, ttft=0.39)),
        at(6, {"max_num_batched_tokens": 16384, "max_num_seqs": 2048}, failure=mamba),
        at(7, LITE, metrics=metrics_of(24_120, ttft=0.49, kv=0.83)),
        at(8, FINALIST, metrics=metrics_of(24_690, ttft=0.50, kv=0.84)),
        at(9, {"enable_expert_parallel": True}, failure=invalid),
        at(10, {"max_num_batched_tokens": 65536, "max_num_seqs": 768}, failure=oom_load),
        at(11, {"async_scheduling": False, "max_num_batched_tokens": 16384}, failure=hang, metrics=metrics_of(9_400)),
        at(12, {"max_num_batched_tokens": 49152, "max_num_seqs": 768}, metrics=metrics_of(24_910, ttft=0.88, kv=0.85)),
        at(
            13,
            {"max_num_batched_tokens": 2048, "max_num_seqs": 128},
            metrics=metrics_of(17_900, ttft=0.74),
            status=LoadStatus.STOPPED_EARLY,
        ),
        at(
            14,
            {"max_num_batched_tokens": 12288, "max_num_seqs": 896},
            metrics=metrics_of(23_800, ttft=0.52),
            status=LoadStatus.UNSTEADY,
        ),
        at(15, {**FINALIST, "max_num_seqs": 896}, metrics=metrics_of(24_580, ttft=0.51, kv=0.88)),
    ]


def _confirmation_trials(clock: _Clock) -> list[TrialRecord]:
    arms = {Arm.BASELINE: (EngineConfig(), 21_050), Arm.FINALIST: (FINALIST, 24_050), Arm.LITE: (LITE, 23_970)}
    orders = ([*arms], [*reversed(arms)], [*arms])
    drift = (1.0, 1.006, 0.996)
    rows = []
    for number, order in enumerate(orders, 1):
        for arm in order:
            config, tokens = arms[arm]
            ttft = 0.43 if arm is Arm.BASELINE else 0.5
            kv = 0.71 if arm is Arm.BASELINE else 0.84
            made = metrics_of(tokens * drift[number - 1], ttft=ttft * drift[number - 1], kv=kv)
            rows.append(_trial(clock, f"confirm-{number}-{arm}", config, Stage.CONFIRMATION, arm=arm, metrics=made))
    return rows


def _recommendation(trials: Sequence[TrialRecord]) -> Recommendation:
    by_label = {trial.label: trial for trial in trials}

    def mean(arm: Arm) -> dict[str, float]:
        rows = [t.metrics.values for t in trials if t.arm is arm and t.metrics]
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}

    def rejected(label: str, kind: str, reason: str) -> Rejected:
        return Rejected(label, by_label[label].config, kind, reason)

    failures = [
        rejected(trial.label, trial.failure.kind, trial.failure.detail) for trial in trials if trial.failure is not None
    ]
    limits = [
        rejected(
            "4", "limit:success_rate", "success rate 51.6 % is below 99 %, at the highest token rate of all (27 830 tokens/s)"
        ),
        rejected("12", "limit:p95_ttft_s", "p95 TTFT 880 ms is above 645 ms (1.5x baseline)"),
    ]
    return Recommendation(
        verdict=Verdict.BETTER,
        reason="confirmed over 3 rounds of fresh starts, served over HTTP",
        argv=argv_of(LITE),
        baseline_argv=argv_of({}),
        winner_label="confirm-1-lite",
        winner_config=LITE,
        gain=Gain(1.139, 1.121, 1.157, 1.018),
        baseline_metrics=mean(Arm.BASELINE),
        winner_metrics=mean(Arm.LITE),
        overrides=(
            Override("max_num_batched_tokens", 16384, True, "earns more than the noise", Gain(1.087, 1.071, 1.103)),
            Override("max_num_seqs", 768, True, "earns more than the noise", Gain(1.038, 1.012, 1.064)),
            Override(
                "max_cudagraph_capture_size",
                1024,
                False,
                "earns less than the noise (lite loses 0.3 %)",
                Gain(1.003, 0.992, 1.014),
            ),
        ),
        rejected=(*limits, *failures),
        trials={"search": 16, "screening": 3, "confirmation": 9, "measured": 23, "failed": 5, "stopped_early": 1},
        success=SuccessBound(failed=3, n=81_240, upper_failure_share=0.00011),
        soak="10 min at 512 in flight, longest requests: no crash, least free memory 3.1 GiB, 0 preemptions",
        notes=("enable_prefix_caching was not searched: this workload reuses no prefix.",),
    )


def _setup(**changes: Any) -> dict[str, Any]:
    setup: dict[str, Any] = {
        "model": MODEL,
        "model_revision": "8f3c1a7d0e5b4c2a9d6f1e0b7a8c9d2e3f405162",
        "model_shape": {"layers": 40, "experts": 256, "kind": "hybrid mixture of experts"},
        "gpus": ["NVIDIA H200"],
        "vllm_version": "0.32.0",
        "engine": "vllm",
        "simulated": False,
        "goal": {
            "name": "throughput",
            "metric": "tokens_per_s",
            "direction": "maximize",
            "limits": [
                {"metric": "success_rate", "op": ">=", "value": 0.99, "relative_to_baseline": False},
                {"metric": "p95_ttft_s", "op": "<=", "value": 1.5, "relative_to_baseline": True},
            ],
            "slos": {},
        },
        "workload": {"name": "throughput", "prompt_tokens": 1024, "output_tokens": 128},
        "workload_digest": "b5d1e6f0a9c3",
        "space": {},
        "space_digest": "0c7e2f51d8aa",
        "mode": "throughput",
        "load_plan": {"arrivals": "closed", "concurrency": 512, "window_s": 60.0},
        "options": {"goal": "throughput", "model": MODEL, "trials": 16, "rounds": 3, "soak": 600.0, "set": []},
        "seed": 7,
        "environment": {
            "vopt_version": "0.1.0",
            "python": "3.12.11",
            "vllm": "0.32.0",
            "torch": "2.11.0+cu130",
            "driver": "580.95.05",
            "gpus": ["NVIDIA H200"],
            "variables": {
                "VLLM_USE_DEEP_GEMM": "1",
                "VLLM_CACHE_ROOT": "/of/this/machine",
                "VLLM_HOST_IP": "10.0.0.7",
                "LMCACHE_NOTE": "it's $HOME\nand more",
            },
            "variables_of_command": ["LMCACHE_NOTE"],
        },
        "baseline_argv": list(argv_of({})),
    }
    return setup | changes


def study(**setup: Any) -> StudyRecord:
    """The rich study: sixteen search trials, three screenings, three rounds of three arms, a soak, verdict ``better``."""
    clock = _Clock()
    trials = _search_trials(clock)
    screened = (
        ("screen-8", FINALIST, 24_420),
        ("screen-15", EngineConfig({**FINALIST, "max_num_seqs": 896}), 24_010),
        ("screen-7", LITE, 24_150),
    )
    for label, config, tokens in screened:
        trials.append(_trial(clock, label, config, Stage.SCREENING, metrics=metrics_of(tokens, ttft=0.5, kv=0.84)))
    trials += _confirmation_trials(clock)
    trials.append(_trial(clock, "soak", LITE, Stage.SOAK, metrics=metrics_of(23_300, ttft=0.7, kv=0.98, success=0.9999)))
    return StudyRecord(
        name="qwen3.5-35b-a3b-fp8-throughput-1",
        created_at="2026-11-28T09:00:00Z",
        setup=_setup(**setup),
        trials=tuple(trials),
        recommendation=_recommendation(trials),
    )


def no_gain() -> StudyRecord:
    made = study()
    answer = made.recommendation
    assert answer is not None
    return replace(
        made,
        name="qwen3-8b-throughput-2",
        recommendation=replace(
            answer,
            verdict=Verdict.NO_GAIN,
            reason="the lower bound of the gain is not above zero",
            argv=answer.baseline_argv,
            winner_label=None,
            winner_config=None,
            gain=Gain(1.006, 0.991, 1.021, 1.018),
            winner_metrics={},
            overrides=(),
        ),
    )


def nothing_feasible() -> StudyRecord:
    made = study()
    answer = made.recommendation
    assert answer is not None
    trials = tuple(trial for trial in made.trials if trial.label in ("3", "4", "6"))
    return replace(
        made,
        name="qwen3.5-35b-a3b-fp8-throughput-3",
        trials=trials,
        recommendation=Recommendation(
            verdict=Verdict.NOTHING_FEASIBLE,
            reason="no configuration kept a success rate of 99 %",
            argv=None,
            baseline_argv=answer.baseline_argv,
            rejected=tuple(row for row in answer.rejected if row.label in ("3", "4", "6")),
            trials={"search": 3, "screening": 0, "confirmation": 0, "measured": 1, "failed": 2, "stopped_early": 0},
        ),
    )


def unconfirmed() -> StudyRecord:
    made = study(options={"goal": "throughput", "model": MODEL, "trials": 16, "rounds": 0, "soak": 0.0})
    answer = made.recommendation
    assert answer is not None
    kept = (Stage.SEARCH, Stage.SCREENING)
    return replace(
        made,
        name="qwen3.5-35b-a3b-fp8-throughput-4",
        trials=tuple(trial for trial in made.trials if trial.stage in kept),
        recommendation=replace(
            answer,
            verdict=Verdict.UNCONFIRMED,
            reason="--rounds 0: no confirmation was run, so the gain is the search's own figure",
            argv=argv_of(FINALIST),
            winner_label="8",
            winner_config=FINALIST,
            gain=Gain(24_690 / 21_380),
            winner_metrics=metrics_of(24_690, ttft=0.5, kv=0.84).values,
            baseline_metrics=metrics_of(21_380).values,
            overrides=(),
            success=None,
            soak="",
            trials={"search": 16, "screening": 3, "confirmation": 0, "measured": 14, "failed": 5, "stopped_early": 1},
        ),
    )


def simulated() -> StudyRecord:
    return replace(study(simulated=True, engine="simulated"), name="qwen3.5-35b-a3b-fp8-throughput-5")


def two_goals() -> StudyRecord:
    """Throughput and latency at once: a front of three, its knee confirmed, each goal with a verdict of its own."""
    goal = joint_goal(["throughput", "latency"])
    made = study(goal=goal.to_json(), options={"goal": ["throughput", "latency"], "model": MODEL, "trials": 16, "rounds": 3})

    def weighed(trial: TrialRecord) -> TrialRecord:
        if trial.metrics is None:
            return trial
        joint = balance(goal, trial.metrics.values)
        return replace(trial, metrics=replace(trial.metrics, values={**trial.metrics.values, "balance": joint or 0.0}))

    answer = made.recommendation
    assert answer is not None
    values = [(24_690, 4.11), (24_200, 3.62), (21_380, 3.55)]
    members = [("8", FINALIST), ("7", LITE), ("0", EngineConfig())]
    front = tuple(
        FrontMember(label, config, {"tokens_per_s": tokens, "mean_e2e_s": e2e}, label == "7", label == "0")
        for (label, config), (tokens, e2e) in zip(members, values, strict=True)
    )
    goals = (
        GoalVerdict("throughput", "tokens_per_s", "better", Gain(1.131, 1.108, 1.155)),
        GoalVerdict("latency", "mean_e2e_s", "no measurable difference", Gain(0.981, 0.958, 1.004)),
    )
    return replace(
        made,
        name="qwen3.5-35b-a3b-fp8-throughput-latency-1",
        trials=tuple(weighed(trial) for trial in made.trials),
        recommendation=replace(answer, gain=Gain(1.053, 1.031, 1.077, 1.02), front=front, goals=goals),
    )


def running() -> StudyRecord:
    """A search that has not ended: five trials, no answer yet."""
    made = study()
    return replace(made, name="qwen3.5-35b-a3b-fp8-throughput-6", trials=made.trials[:5], recommendation=None)


VARIANTS = {
    "better": study,
    "no_gain": no_gain,
    "nothing_feasible": nothing_feasible,
    "unconfirmed": unconfirmed,
    "simulated": simulated,
    "two_goals": two_goals,
}


def request_records(trial: TrialRecord, n: int = 600) -> tuple[RequestRecord, ...]:
    """Requests of one trial: latencies spread as the trial's percentiles say, a few failures and censored ones."""
    if trial.metrics is None:
        return ()
    ttft95, tpot95 = trial.metrics["p95_ttft_s"], trial.metrics["p95_tpot_s"]
    success = trial.metrics["success_rate"]
    rows = []
    for index in range(n):
        spread = ((index * 379) % n + 0.5) / n
        ttft = ttft95 * (0.35 + 0.65 * spread**2 / 0.9)
        tpot = tpot95 * (0.7 + 0.3 * ((index * 211) % n) / n / 0.95)
        tokens = 64 + (index * 37) % 128
        sent = index * 80.0 / n
        ended = sent + ttft + tpot * (tokens - 1)
        failed = (index * 617) % n >= n * success
        rows.append(
            RequestRecord(
                index=index,
                scheduled_s=sent,
                sent_s=sent,
                ended_s=ended,
                prompt_tokens=1024,
                requested_output_tokens=tokens,
                output_tokens=tokens,
                chunk_times_s=(round(sent + ttft, 6), round(ended, 6)),
                chunk_tokens=(1, tokens - 1),
                finish_reason=None if failed else "length",
                failure=RequestFailure(RequestFailureKind.ENGINE_DIED, "EngineDeadError") if failed else None,
                censored=not failed and ended > 84.0,
            )
        )
    return tuple(rows)


def on_disk(made: StudyRecord, root: Path, requests: int = 120) -> StudyRecord:
    """The same study with its raw request records and engine logs beside it, as a search leaves them."""
    trials = []
    for trial in made.trials:
        directory = root / made.name / trial.label
        directory.mkdir(parents=True)
        with gzip.open(directory / "records.jsonl.gz", "wt", encoding="utf-8") as lines:
            for record in request_records(trial, requests):
                lines.write(json.dumps(record.to_json()) + "\n")
        log = trial.failure.log_tail if trial.failure else ("INFO Application startup complete.",)
        (directory / "engine.log").write_text("\n".join(log) + "\n", encoding="utf-8")
        trials.append(replace(trial, directory=str(directory)))
    return replace(made, trials=tuple(trials), directory=str(root / made.name))


def events(made: StudyRecord | None = None) -> list[Event]:
    """What a listener hears while the first trials of the study run."""
    made = made or study()
    rows: list[Event] = [
        Note("Space: 5 parameters vary, 3 are inactive for this workload (enable_prefix_caching, ...)."),
        StageBegan("search", 16, 2_640.0),
    ]
    best: float | None = None
    for trial in made.trials[:5]:
        request = TrialRequest(trial.label, trial.config, trial.stage)
        reason = "untouched defaults" if trial.label == "0" else "a seed of the throughput mode"
        rows += [
            TrialBegan(request, reason, 165.0),
            PhaseBegan(trial.label, Phase.START, "building the engine", trial.phase_s[Phase.START]),
        ]
        if Phase.LOAD in trial.phase_s:
            rows.append(PhaseBegan(trial.label, Phase.LOAD, "512 in flight, window 60 s", 81.0))
            rows.append(LoadTicked(trial.label, Tick(40.0, 21.0, 2_310, 1_790, 8, 512, 410_000.0, 19.0, 0.66)))
        value = trial.metrics["tokens_per_s"] if trial.metrics else None
        reason = trial.failure.detail if trial.failure else "success rate 51.6 % is below 99 %" if trial.label == "4" else ""
        if value is not None and not reason:
            best = max(best or 0.0, value)
        rows.append(TrialEnded(trial, value, best, 21_380.0, reason, 21_380.0))
    return rows
