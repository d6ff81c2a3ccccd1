"""The session of a simulated engine: start, load and stop without a GPU, on a virtual clock.

Everything it says is marked as simulated: ``Started.resolved["simulated"]`` names the device, and so do its messages. Two
sessions with equal seed, configuration, label and caches behave alike to the last digit.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vopt.objectives.records import LoadResult
from vopt.optimizer.engine.base import OnPhase, OnTick
from vopt.optimizer.engine.hardware import Hardware
from vopt.optimizer.engine.roofline import StepTime
from vopt.optimizer.engine.simulated_draws import NORMALS, normals, speculative_steps
from vopt.optimizer.engine.simulated_engine import SimulatedEngine
from vopt.optimizer.engine.simulated_failures import CRASH_REGIONS, CrashRegion, most_decoding, start_failure
from vopt.optimizer.engine.simulated_scheduler import Scheduler
from vopt.optimizer.engine.simulated_startup import SimulatedCaches, compile_key, start_parts
from vopt.optimizer.load.drive import drive
from vopt.optimizer.load.plan import LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.virtual_time import run_virtual
from vopt.optimizer.trial import EngineFailure, Failed, FailureKind, Phase, StartClass, Started, TrialSpec
from vopt.search_spaces.defaults import LATEST_VERSION, Resolved, capture_sizes, resolve
from vopt.search_spaces.memory import MemoryPlan, memory_plan
from vopt.search_spaces.on_load import loaded
from vopt.search_spaces.shape import ModelShape

__all__ = ["MODELLED", "Noise", "SimulatedCaches", "SimulatedSession"]

MODELLED = frozenset(
    {
        "async_scheduling",
        "block_size",
        "data_parallel_size",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "language_model_only",
        "long_prefill_token_threshold",
        "mamba_ssm_cache_dtype",
        "max_cudagraph_capture_size",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "num_gpu_blocks_override",
        "performance_mode",
        "pipeline_parallel_size",
        "quantization",
        "speculative_config",
        "stream_interval",
        "tensor_parallel_size",
    }
)
"""``EngineArgs`` names whose values make a simulated engine faster, slower, larger or smaller.

All others are accepted and change nothing but, some of them, how long a start takes: their values would differ by noise
alone. Of ``optimization_level`` and ``cudagraph_mode`` only "no graphs at all" shows, of ``cudagraph_capture_sizes`` only
the largest, of ``cpu_offload_gb`` only the memory: too little to search them by.
"""

TICK_S = 5.0
TICKS = 120
"""A simulated load is looked at every 5 virtual seconds, and 120 times in a long window: looking is most of what it costs."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How measurements scatter: standard deviations of the logarithm, and a second mode of engine starts.

    ``restart`` is drawn once per engine start (0.2 to 1 % measured and published), ``step`` once per step. ``slow_share`` of
    all starts are ``slow_factor`` times slower for their whole life (published: 33 against 26 tokens/s, ROCm#6347).
    """

    restart: float = 0.005
    step: float = 0.03
    slow_share: float = 0.0
    slow_factor: float = 1.25

    def jitter(self, seed: str) -> Callable[[int], float]:
        """Factor of the time of step *n*."""
        generator = random.Random(f"restart {seed}")
        factor = math.exp(generator.gauss(0.0, self.restart))
        if generator.random() < self.slow_share:
            factor *= self.slow_factor
        if not self.step:
            return lambda step: factor
        table = [factor * math.exp(self.step * deviate - self.step**2 / 2) for deviate in normals(f"step {seed}")]
        return lambda step: table[step % NORMALS]


class SimulatedSession:
    """Implements ``Session``. ``phase_s`` holds the virtual seconds of each phase: what they would have been on a GPU.

    ``caches`` is shared by the sessions of a study and decides the start class; ``gpus`` is how many devices there are
    (default: those of the trial, at least one).
    """

    def __init__(
        self,
        spec: TrialSpec,
        shape: ModelShape,
        hardware: Hardware,
        *,
        version: str = LATEST_VERSION,
        caches: SimulatedCaches | None = None,
        noise: Noise = Noise(),
        gpus: int | None = None,
        crash_regions: tuple[CrashRegion, ...] = CRASH_REGIONS,
        unaided: bool = False,
    ) -> None:
        self._spec, self._shape, self._hardware, self._version = spec, shape, hardware, version
        self._caches = caches if caches is not None else SimulatedCaches()
        self._noise, self._regions, self._unaided = noise, crash_regions, unaided
        self._gpus = max(1, len(spec.gpus)) if gpus is None else gpus
        self._engine: SimulatedEngine | None = None
        self._started: Started | None = None
        self.phase_s: dict[Phase, float] = {}

    def start(self, on_phase: OnPhase) -> Started:
        spec, shape = self._spec, self._shape
        on_phase(Phase.START, f"simulated {self._hardware.driver_name}: starting {spec.model}")
        resolved = resolve(shape, self._hardware.gpu, spec.arguments, self._version)
        key = compile_key(shape, spec.arguments, resolved, self._version)
        start_class = self._caches.start_class(shape, key)
        compiled = start_class is StartClass.KNOWN_KEY
        plan = memory_plan(shape, self._hardware.gpu, spec.arguments, self._version, compiled=compiled)
        parts = self._parts(plan, start_class)
        failed = start_failure(shape, self._hardware.gpu, spec.arguments, plan, self._gpus)
        if failed is not None:
            raise EngineFailure(self._failed_start(failed, parts))
        self._caches.fill(shape, key)
        self.phase_s[Phase.START] = sum(parts.values())
        if self.phase_s[Phase.START] > spec.deadlines.start_s:
            raise EngineFailure(self._too_slow(parts))
        self._engine = self._build(plan)
        self._started = Started(
            vllm_version=self._version,
            resolved={**resolved_arguments(resolved, plan), "simulated": self._hardware.name},
            kv_cache_tokens=plan.logged_tokens,
            kv_cache_bytes=plan.kv_bytes,
            num_gpu_blocks=plan.blocks,
            start_class=start_class,
            start_parts_s=parts,
            messages=(f"simulated {self._hardware.driver_name}, vLLM {self._version}: no GPU and no vLLM was used",),
        )
        return self._started

    def load(self, source: RequestSource, plan: LoadPlan, on_tick: OnTick) -> LoadResult:
        engine, started = self._engine, self._started
        if engine is None or started is None:
            raise RuntimeError("load needs a started session")
        began_s = engine.now()

        async def loaded() -> LoadResult:
            engine.attach(asyncio.get_running_loop(), source)
            try:
                return await drive(
                    engine, source, replace(plan, tick_s=max(plan.tick_s, TICK_S, plan.window_s / TICKS)), on_tick
                )
            finally:
                engine.detach()

        collecting = gc.isenabled()
        gc.disable()  # hundreds of thousands of live tuples and no cycles: collections would find nothing and cost a tenth
        try:
            result = run_virtual(loaded())
        finally:
            if collecting:
                gc.enable()
        self.phase_s[Phase.LOAD] = self.phase_s.get(Phase.LOAD, 0.0) + engine.now() - began_s
        if engine.dead is not None:
            raise EngineFailure(self._died(engine, result, started))
        return result

    def close(self) -> tuple[str, ...]:
        if self._engine is not None:
            self.phase_s[Phase.STOP] = 3.7 if self._shape.hybrid else 1.0
            self._engine = None
        return ()

    def _parts(self, plan: MemoryPlan, start_class: StartClass) -> dict[str, float]:
        arguments = self._spec.arguments
        parts = start_parts(
            self._shape,
            plan.resolved,
            start_class,
            weight_bytes=self._stored_bytes(plan),
            dummy=arguments.get("load_format") == "dummy",
            eager=_eager(arguments.get("enforce_eager"), arguments.get("optimization_level")),
            unaided=self._unaided,
        )
        spread = random.Random(f"start {self._seed}").gauss(0.0, 0.03) if self._noise.restart else 0.0
        return {part: seconds * math.exp(spread) for part, seconds in parts.items()}

    def _stored_bytes(self, plan: MemoryPlan) -> int:
        """What is read: weights that are quantized at load are stored larger than they are held."""
        if self._spec.arguments.get("quantization") is None:
            return plan.weight_bytes
        stored = {name: value for name, value in self._spec.arguments.items() if name != "quantization"}
        return memory_plan(self._shape, self._hardware.gpu, stored, self._version).weight_bytes

    @property
    def _seed(self) -> str:
        spec = self._spec
        return hashlib.sha256(f"{spec.seed}|{spec.model}|{spec.arguments.digest}|{spec.label}".encode()).hexdigest()

    def _build(self, plan: MemoryPlan) -> SimulatedEngine:
        resolved, arguments = plan.resolved, self._spec.arguments
        eager = _eager(arguments.get("enforce_eager"), arguments.get("optimization_level"))
        speculation = resolved.speculation
        scheduler = Scheduler(
            resolved,
            plan.layout,
            plan.blocks,
            StepTime(loaded(self._shape, arguments, self._version), self._hardware, resolved, eager=eager),
            # Drawn by request alone: the same request is as easy to predict in every trial.
            draw_steps=speculative_steps(speculation, normals("acceptance")) if speculation else None,
            jitter=self._noise.jitter(self._seed),
        )
        return SimulatedEngine(
            scheduler,
            max_model_len=resolved.max_model_len,
            crash_regions=tuple(region for region in self._regions if region.applies(resolved)),
            most_decoding=most_decoding(self._shape, self._hardware.gpu, resolved),
        )

    def _failed_start(self, failed: Failed, parts: dict[str, float]) -> Failed:
        """A failed start costs what came before the failure: the arguments' check, or everything up to the cache."""
        early = ("import", "inspect", "config") if len(failed.log_tail) == 1 else tuple(p for p in parts if p != "capture")
        self.phase_s[Phase.START] = sum(parts[part] for part in early)
        return replace(failed, phase_s=dict(self.phase_s))

    def _too_slow(self, parts: dict[str, float]) -> Failed:
        limit_s = self._spec.deadlines.start_s
        self.phase_s[Phase.START] = limit_s
        detail = f"the engine did not start within {limit_s:g} s (it would have taken {sum(parts.values()):.0f} s)"
        return Failed(Phase.START, FailureKind.HANG, detail, phase_s=dict(self.phase_s))

    def _died(self, engine: SimulatedEngine, result: LoadResult, started: Started) -> Failed:
        succeeded = sum(record.succeeded for record in result.records)
        ended = sum(not record.censored for record in result.records)
        detail = f"{engine.dead} ({succeeded} of {ended + result.not_sent} requests had succeeded)"
        return Failed(
            Phase.LOAD,
            engine.dead_kind,
            detail,
            phase_s=dict(self.phase_s),
            log_tail=("(EngineCore) ERROR EngineCore encountered a fatal error.", str(engine.dead)),
            started=started,
            load=result,
        )


def _eager(enforce: object, level: object) -> bool:
    return bool(enforce) or str(level) in ("0", "O0")


def resolved_arguments(resolved: Resolved, plan: MemoryPlan) -> dict[str, Any]:
    """vLLM's own values after its defaults, by ``EngineArgs`` name."""
    return {
        "max_num_seqs": resolved.max_num_seqs,
        "max_num_batched_tokens": resolved.max_num_batched_tokens,
        "max_model_len": resolved.max_model_len,
        "gpu_memory_utilization": resolved.gpu_memory_utilization,
        "kv_cache_dtype": resolved.kv_cache_dtype,
        "mamba_ssm_cache_dtype": resolved.state_dtype,
        "enable_prefix_caching": resolved.prefix_caching,
        "enable_chunked_prefill": resolved.chunked_prefill,
        "async_scheduling": resolved.async_scheduling,
        "max_cudagraph_capture_size": resolved.capture_size,
        "cudagraph_capture_sizes": list(capture_sizes(resolved.capture_size, resolved.performance_mode)),
        "block_size": plan.layout.block_size,
        "tensor_parallel_size": resolved.tensor,
        "pipeline_parallel_size": resolved.pipeline,
        "data_parallel_size": resolved.data,
        "performance_mode": resolved.performance_mode,
        "long_prefill_token_threshold": resolved.long_prefill_token_threshold,
        "stream_interval": resolved.stream_interval,
    }
