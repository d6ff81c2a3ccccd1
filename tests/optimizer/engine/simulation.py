"""What the tests of the simulation share: models by name, sources, sessions."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vopt.objectives.records import LoadResult
from vopt.optimizer.engine.hardware import hardware
from vopt.optimizer.engine.simulated import Noise, SimulatedCaches, SimulatedSession
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.trial import EngineConfig, TrialSpec
from vopt.search_spaces.model import ModelShape, known_model

HYBRID, MOE, DENSE = "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B-FP8", "Qwen/Qwen3-8B"
MEASURED = {"max_model_len": 32768, "enable_prefix_caching": False, "load_format": "dummy"}
MEASURED_HYBRID = {**MEASURED, "language_model_only": True}

NO_NOISE = Noise(0.0, 0.0)


def model(name: str) -> ModelShape:
    found = known_model(name)
    assert found is not None
    return found


def chat_lengths(number: int, seed: int = 1, prompt: float = 342, output: float = 281) -> tuple[tuple[int, int], ...]:
    """Log-normal lengths, scaled so that the means are exact before rounding."""
    generator = random.Random(seed)

    def draw(mean: float, most: int) -> list[int]:
        raw = [min(most, generator.lognormvariate(math.log(mean) - 0.9**2 / 2, 0.9)) for _ in range(number)]
        return [max(4, min(most, round(length * mean * number / sum(raw)))) for length in raw]

    return tuple(zip(draw(prompt, 4000), draw(output, 2000), strict=True))


CHAT = RequestSource(lengths=chat_lengths(64 * 8, seed=3))


def spec(arguments: Mapping[str, Any], name: str = DENSE, label: str = "trial-0", seed: int = 0) -> TrialSpec:
    return TrialSpec(
        label=label, model=name, arguments=EngineConfig(arguments), directory=Path("unused"), python="python", seed=seed
    )


def session(
    name: str,
    arguments: Mapping[str, Any],
    *,
    label: str = "trial-0",
    noise: Noise = NO_NOISE,
    version: str = "0.22.1",
    device: str = "h200",
    seed: int = 0,
    caches: SimulatedCaches | None = None,
    gpus: int = 1,
    unaided: bool = False,
) -> SimulatedSession:
    return SimulatedSession(
        spec(arguments, name, label, seed),
        model(name),
        hardware(device),
        version=version,
        noise=noise,
        caches=caches,
        gpus=gpus,
        unaided=unaided,
    )


def run_load(
    name: str, arguments: Mapping[str, Any], plan: LoadPlan, source: RequestSource = CHAT, **options: Any
) -> LoadResult:
    one = session(name, arguments, **options)
    one.start(lambda phase, words: None)
    try:
        return one.load(source, plan, lambda tick: True)
    finally:
        one.close()


def closed(concurrency: int, window_s: float = 30.0, **options: Any) -> LoadPlan:
    return LoadPlan(Arrivals.CLOSED, window_s, concurrency=concurrency, **options)


def tokens_per_s(result: LoadResult) -> float:
    """Output tokens in the window and prompts whose first token fell into it, per second."""
    window = result.window
    assert window is not None
    tokens = 0
    for record in result.records:
        if record.failure is None and record.chunk_times_s:
            inside = zip(record.chunk_times_s, record.chunk_tokens, strict=True)
            tokens += sum(count for at_s, count in inside if window.opened_s <= at_s < window.closed_s)
            if window.opened_s <= record.chunk_times_s[0] < window.closed_s:
                tokens += record.prompt_tokens
    return tokens / window.length_s
