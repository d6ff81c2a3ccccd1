"""What no configuration can be faster than: the physical floor of a latency metric. Pure.

A token of one sequence needs at least one pass over the weights that it uses, read at the full memory bandwidth of every
GPU together; a pass yields at most one token and those that were drafted for it. Caches, arithmetic, launches, queues and
prompts come on top in reality, so a limit below this floor cannot be kept (the roofline of Williams, Waterman and Patterson,
Communications of the ACM 52, 2009).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vopt.objectives.goals import Goal
from vopt.optimizer.engine.hardware import Hardware
from vopt.optimizer.errors import UsageError
from vopt.search_spaces.shape import ModelShape

_QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
_ALWAYS = ("attention", "linear_attention", "mlp", "shared_experts", "router")


@dataclass(frozen=True, slots=True)
class Floor:
    """``pass_s`` is one pass over ``pass_bytes`` of weights on ``gpus`` GPUs, ``per_pass`` the most tokens that it yields;
    ``metrics`` are the least seconds by metric, ``requests`` those of the quickest request by its bound (``ttft_s``, ...)."""

    pass_s: float
    pass_bytes: float
    gpus: int
    device: str
    per_pass: int
    metrics: Mapping[str, float]
    requests: Mapping[str, float]

    @property
    def why(self) -> str:
        """The arithmetic in a sentence."""
        drafted = f", and a pass yields at most {self.per_pass} tokens" if self.per_pass > 1 else ""
        devices = f"{self.gpus} x {self.device}" if self.gpus > 1 else self.device
        return (
            f"each token reads {self.pass_bytes / 1e9:.1f} GB of weights, {self.pass_s * 1e3:.2g} ms at the full memory "
            f"bandwidth of {devices}{drafted}"
        )


def floor(shape: ModelShape, hardware: Hardware, gpus: int, lengths: Sequence[tuple[int, int]], per_pass: int = 1) -> Floor:
    """The floor of a model on ``gpus`` GPUs for requests of ``lengths`` (prompt, output) tokens.

    ``per_pass``: tokens that one pass can yield, 1 without speculation. Weights that are quantized further than the model's
    own would lower it.
    """
    parts = shape.params
    needed = sum(parts[part] * shape.bytes_per_weight(part) for part in _ALWAYS)
    head = "head" if parts["head"] else "embeddings"
    needed += parts[head] * shape.bytes_per_weight(head)
    if shape.experts is not None:
        needed += parts["experts"] * shape.bytes_per_weight("experts") * shape.experts.per_token / shape.experts.number
    pass_s = needed / (hardware.bandwidth_bytes_per_s * gpus)
    outputs = sorted(max(1, output) for _, output in lengths)
    whole = [pass_s * (1 + (output - 1) / per_pass) for output in outputs]
    metrics = {"mean_e2e_s": sum(whole) / len(whole), "mean_ttft_s": pass_s, "mean_tpot_s": pass_s / per_pass}
    for name, share in _QUANTILES.items():
        metrics[f"{name}_e2e_s"] = whole[int(share * (len(whole) - 1))]
        metrics[f"{name}_ttft_s"], metrics[f"{name}_tpot_s"] = pass_s, pass_s / per_pass
    requests = {"ttft_s": pass_s, "tpot_s": pass_s / per_pass, "e2e_s": whole[0]}
    return Floor(pass_s, needed, gpus, hardware.driver_name, per_pass, metrics, requests)


def check_limits(goal: Goal, least: Floor) -> None:
    """``UsageError`` for a limit, or a bound on every request, that no configuration can keep."""
    bounds = [
        (limit.text, limit.metric, limit.value) for limit in goal.limits if limit.op == "<=" and not limit.relative_to_baseline
    ]
    bounds += [(f"{name}<={value:g}", name, value) for name, value in goal.slos.items()]
    for text, name, value in bounds:
        lowest = least.metrics.get(name, least.requests.get(name))
        if lowest is not None and value < lowest:
            raise UsageError(
                f"--limit '{text}' is below the physical floor of {lowest:.3g} s: {least.why}"
                + ("; times the output tokens of this workload" if "e2e" in name else ""),
                hint=f"--limit '{name}<={_above(lowest)}', or a shorter workload, or more GPUs",
            )


def _above(seconds: float) -> str:
    """Twice the floor, short enough to type."""
    return f"{2 * seconds:.2g}s" if seconds >= 0.05 else f"{2000 * seconds:.2g}ms"
