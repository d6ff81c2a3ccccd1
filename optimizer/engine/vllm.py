"""vLLM's ``AsyncLLM`` as an engine. The only module that imports vLLM, and only when an engine is built.

Everything that differs between vLLM 0.20 and 0.33 is here, each with its versions:

* ``EngineDeadError`` is an ``Exception`` up to 0.26 and a ``VLLMServerError`` later: it is known by its name.
* ``create_engine_config`` fills in the ``EngineArgs`` object and, up to 0.25, changes the caller's ``speculative_config``:
  it gets a deep copy.
* the model runner is chosen by an environment variable up to 0.21 and told by a property of the configuration later.
* ``cache_config.kv_cache_size_tokens`` exists from 0.24; before, blocks times block size (exact for dense models only).
* tensors of token ids are prompts as ``{"prompt_token_ids": [...]}`` in every version.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vopt.objectives.records import CounterSample, RequestFailure, RequestFailureKind, RequestRecord
from vopt.optimizer.engine.resolved import flatten
from vopt.optimizer.load.plan import Request
from vopt.optimizer.trial import Started

FULL_STEP = 0.9
"""A step counts as filling the token budget from this share on: the scheduler cannot always split the last prompt to fit."""

COUNTERS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_queries",
    "vllm:prefix_cache_hits": "prefix_hits",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "generation_tokens",
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}
"""vLLM's metric names (unchanged from 0.20 to 0.33) to the fields of ``CounterSample``; summed over engines."""


def usage_context() -> Any:
    """The context whose defaults ``vllm serve`` has. ``AsyncLLM``'s own default gives 128 sequences instead of 1024."""
    from vllm.usage.usage_lib import UsageContext

    return UsageContext.OPENAI_API_SERVER


def engine_arguments(model: str, arguments: Mapping[str, Any], revision: str | None = None) -> Any:
    """``AsyncEngineArgs`` of exactly these arguments; ``TypeError`` names an argument that this vLLM lacks."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = copy.deepcopy(dict(arguments))
    if revision is not None:
        given.setdefault("revision", revision)
    return AsyncEngineArgs(model=model, **given)


@dataclass(slots=True)
class StepCounts:
    """Engine steps since the start, and how many of them filled the token budget."""

    budget: int
    steps: int = 0
    full: int = 0

    def add(self, tokens: int) -> None:
        self.steps += 1
        self.full += tokens >= self.budget * FULL_STEP


@dataclass(slots=True)
class _InFlight:
    sent_s: float
    chunk_times_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)


class VllmEngine:
    """An ``AsyncLLM`` that answers requests; see ``base.Engine`` for what each method promises."""

    def __init__(self, llm: Any, steps: StepCounts | None = None) -> None:
        self._llm = llm
        self._steps = steps
        self._dead: str | None = None
        self._in_flight: dict[int, _InFlight] = {}

    @classmethod
    def build(cls, model: str, arguments: Mapping[str, Any], revision: str | None = None) -> VllmEngine:
        """Start the engine: minutes on a cold cache. Raises whatever vLLM raises. Needs a running event loop."""
        from vllm.v1.engine.async_llm import AsyncLLM

        steps = StepCounts(budget=0)
        llm = AsyncLLM.from_engine_args(
            engine_arguments(model, arguments, revision),
            usage_context=usage_context(),
            stat_loggers=[_step_logger(steps)],
        )
        steps.budget = llm.vllm_config.scheduler_config.max_num_batched_tokens
        return cls(llm, steps)

    def started(self, start_parts_s: Mapping[str, float]) -> Started:
        """What the engine resolved; ``kv_cache_bytes`` and the parts of the start are in its log, for the search to read."""
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs

        config = self._llm.vllm_config
        resolved = flatten(config, (entry.name for entry in dataclasses.fields(AsyncEngineArgs)))
        blocks = resolved.get("num_gpu_blocks")
        tokens = resolved.get("kv_cache_tokens")
        if tokens is None and blocks is not None and not getattr(config.model_config, "is_hybrid", False):
            tokens = blocks * config.cache_config.block_size
        resolved["model_runner"] = model_runner(config)
        compilation_s = getattr(config.compilation_config, "compilation_time", None)
        parts = {**start_parts_s, **({"compile": float(compilation_s)} if compilation_s else {})}
        return Started(
            vllm_version=vllm.__version__,
            resolved=resolved,
            kv_cache_tokens=tokens,
            num_gpu_blocks=blocks,
            start_parts_s=parts,
        )

    @property
    def dead(self) -> str | None:
        if self._dead is None and self._llm.errored:
            self._dead = str(self._llm.dead_error)
        return self._dead

    def now(self) -> float:
        return time.monotonic()

    async def run(self, request: Request, *, origin_s: float, scheduled_s: float, idle_timeout_s: float) -> RequestRecord:
        flight = self._in_flight[request.index] = _InFlight(self.now() - origin_s)
        finish: str | None = None
        failure: RequestFailure | None = None
        cached: int | None = None
        if self.dead is not None:
            failure = RequestFailure(RequestFailureKind.ENGINE_DIED, self.dead)
        else:
            try:
                finish, cached = await self._stream(request, flight, origin_s, idle_timeout_s)
            except TimeoutError:
                failure = RequestFailure(RequestFailureKind.TIMEOUT_IDLE, f"no token for {idle_timeout_s:g} s")
            except Exception as error:  # noqa: BLE001 - whatever one request does wrong is that request's failure
                failure = self._failure_of(error)
        ended_s = self.now() - origin_s
        del self._in_flight[request.index]
        tokens = sum(flight.chunk_tokens)
        return RequestRecord(
            index=request.index,
            scheduled_s=scheduled_s,
            sent_s=flight.sent_s,
            ended_s=ended_s,
            prompt_tokens=request.prompt_tokens,
            requested_output_tokens=request.max_tokens,
            output_tokens=tokens,
            chunk_times_s=tuple(flight.chunk_times_s),
            chunk_tokens=tuple(flight.chunk_tokens),
            first_content_s=flight.chunk_times_s[0] if flight.chunk_times_s else None,
            finish_reason=finish,
            failure=failure or incomplete(request, finish, tokens),
            prompt_sha256=request.prompt_sha256,
            cached_prompt_tokens=cached,
            session=request.session,
        )

    async def _stream(
        self, request: Request, flight: _InFlight, origin_s: float, idle_timeout_s: float
    ) -> tuple[str | None, int | None]:
        """Follow one request to its end, its times written into ``flight``; (finish reason, cached prompt tokens)."""
        outputs = self._llm.generate(
            {"prompt_token_ids": list(request.prompt_token_ids)}, sampling(request), f"vopt-{request.index}"
        )
        finish: str | None = None
        cached: int | None = None
        async with asyncio.timeout(idle_timeout_s) as limit:
            moved_s = time.monotonic()
            async for output in outputs:
                at_s = self.now()
                completion = output.outputs[0]
                if completion.token_ids:
                    flight.chunk_times_s.append(at_s - origin_s)
                    flight.chunk_tokens.append(len(completion.token_ids))
                if output.finished:
                    finish = completion.finish_reason
                    cached = getattr(output, "num_cached_tokens", None)
                if at_s - moved_s > 1.0:  # moving a timer for every token would cost more than the second it may be off
                    moved_s = at_s
                    limit.reschedule(asyncio.get_running_loop().time() + idle_timeout_s)
        return finish, cached

    def _failure_of(self, error: Exception) -> RequestFailure:
        message = f"{type(error).__name__}: {error}"
        if any(base.__name__ == "EngineDeadError" for base in type(error).__mro__) or self._llm.errored:
            self._dead = self._dead or message
            return RequestFailure(RequestFailureKind.ENGINE_DIED, message)
        if isinstance(error, ValueError | TypeError):  # refused before the engine saw it: what a server answers with 400
            return RequestFailure(RequestFailureKind.HTTP_STATUS, message)
        return RequestFailure(RequestFailureKind.STREAM_ERROR, message)

    def partial(self, index: int) -> tuple[float, tuple[float, ...], tuple[int, ...]] | None:
        flight = self._in_flight.get(index)
        if flight is None:
            return None
        return flight.sent_s, tuple(flight.chunk_times_s), tuple(flight.chunk_tokens)

    async def counters(self, *, origin_s: float) -> CounterSample:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        found: dict[str, Any] = {}
        for metric in get_metrics_snapshot():
            name = COUNTERS.get(metric.name)
            if name is not None:
                found[name] = max(found.get(name, 0), metric.value) if name == "kv_usage" else found.get(name, 0) + metric.value
        values = {name: float(value) if name == "kv_usage" else int(value) for name, value in found.items()}
        if self._steps is not None:
            values |= {"engine_steps": self._steps.steps, "full_budget_steps": self._steps.full}
        return CounterSample(at_s=self.now() - origin_s, **values)  # type: ignore[arg-type]  # counts are int, usage is float


def incomplete(request: Request, finish: str | None, tokens: int) -> RequestFailure | None:
    """Why a stream that ended is no success: no normal end, no token, or fewer than ``ignore_eos`` asked for."""
    if finish is None:
        return RequestFailure(RequestFailureKind.TRUNCATED, "the stream ended without a finish reason")
    if finish not in ("stop", "length"):
        return RequestFailure(RequestFailureKind.STREAM_ERROR, f"finish reason {finish}")
    if tokens == 0:
        return RequestFailure(RequestFailureKind.TRUNCATED, "finished without a token")
    if request.ignore_eos and tokens != request.max_tokens:
        return RequestFailure(RequestFailureKind.SHORT_OUTPUT, f"{tokens} of {request.max_tokens} tokens")
    return None


def sampling(request: Request) -> Any:
    """``SamplingParams``, streamed as deltas like a server's. With ``ignore_eos`` all of ``max_tokens`` are produced."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        **{
            **request.sampling,
            "max_tokens": request.max_tokens,
            "ignore_eos": request.ignore_eos,
            "output_kind": RequestOutputKind.DELTA,
        }
    )


def model_runner(config: Any) -> str:
    """Which model runner the engine uses, ``v1`` or ``v2``, as far as the configuration tells (a property from 0.22)."""
    chosen = getattr(config, "use_v2_model_runner", None)
    if chosen is None:
        envs = sys.modules.get("vllm.envs")
        chosen = bool(getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", False))
    return "v2" if chosen else "v1"


def step_tokens(statistics: Any) -> int:
    """Tokens that one engine step worked on: prompts that it finished, and one or more for each decoding request."""
    return int(statistics.prompt_token_stats.computed + statistics.num_generation_tokens)


def _step_logger(counts: StepCounts) -> Any:
    """A statistics logger beside vLLM's own, which stay on as they are in ``vllm serve``."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM is not typed here
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if iteration_stats is not None:
                counts.add(step_tokens(iteration_stats))

        def log_engine_initialized(self) -> None: ...

    return StepLogger
