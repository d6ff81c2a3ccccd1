"""The quantization that a ``config.json`` declares: bytes of a stored weight, and which components keep their dtype."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from vopt.search_spaces.reading import Config, count, entries, section
from vopt.search_spaces.shape import DTYPE_BYTES, Quantization, ShapeError

COMPONENT_NAMES = {
    "attention": ("self_attn", "attention"),
    "linear_attention": ("linear_attn",),
    "mlp": ("mlp", "feed_forward"),
    "experts": ("experts",),
    "shared_experts": ("shared_expert", "shared_experts"),
    "mtp": ("mtp",),
}
EXCLUSIONS = ("modules_to_not_convert", "ignore", "exclude_modules")
NEVER_QUANTIZED = frozenset({"embeddings", "head", "router", "vision"})


def read_quantization(config: Config | None, dtype: str) -> Quantization | None:
    if not config:
        return None
    method = str(config.get("quant_method") or config.get("quant_algo") or "")
    bits, overhead = _bits(config, method)
    skipped = [str(entry) for key in EXCLUSIONS for entry in entries(config, key)]
    kept = NEVER_QUANTIZED | {part for part, names in COMPONENT_NAMES.items() if _covers(skipped, names)}
    if method == "mxfp4":  # gpt-oss quantizes its experts alone
        kept |= {"attention", "mlp", "shared_experts"}
    return Quantization(method, bits, min(bits / 8 + overhead, DTYPE_BYTES[dtype]), frozenset(kept))


def _bits(config: Config, method: str) -> tuple[float, float]:
    """(bits of a weight, bytes of scales and zero points per weight)."""
    match method.lower():
        case "fp8" | "fbgemm_fp8":
            block = entries(config, "weight_block_size")
            if block and not all(isinstance(side, int) and side > 0 for side in block):
                raise ShapeError("the weights' size", f"weight_block_size = {list(block)!r} is not a list of positive integers")
            return 8, 4 / math.prod(block) if block else 0.0
        case "awq" | "gptq" | "auto-round" | "intel/auto-round":
            bits = count(config, "bits", "w_bit") or 4
            group = _group(config, "group_size", "q_group_size", default=128)
            return bits, (2 + bits / 8) / group if group else 0.0
        case "mxfp4":
            return 4, 1 / 32
        case "modelopt" | "nvfp4" | "modelopt_fp4":
            four = "4" in str(config.get("quant_algo") or config.get("quant_method"))
            return (4, 1 / 16) if four else (8, 0.0)
        case "bitsandbytes":
            return (4, 4 / 64) if config.get("load_in_4bit") else (8, 0.0)
        case "compressed-tensors":
            groups = section(config, "config_groups")
            if groups:  # the first stands for all
                weights = section(section(groups, next(iter(groups))), "weights")
                group = _group(weights, "group_size", default=0)
                return count(weights, "num_bits") or 8, 2 / group if group else 0.0
        case _:
            pass
    raise ShapeError("the weights' size", f"quantization method {method!r} is not known here")


def _group(config: Config, *keys: str, default: int) -> int:
    """Weights that share a scale; 0 where a whole channel does, which is stated as -1."""
    if any(config.get(key) == -1 for key in keys):
        return 0
    return count(config, *keys) or default


def _covers(skipped: Iterable[str], names: tuple[str, ...]) -> bool:
    """Whether an exclusion covers a whole component: its pattern ends with the component's own name (``in_proj_a`` alone
    does not exempt ``linear_attn``, ``mlp.gate`` not ``mlp``)."""
    for entry in skipped:
        words = [word for word in re.split(r"[^a-z0-9_]+", entry.removeprefix("re:").lower()) if word and not word.isdigit()]
        if words and words[-1] in names and (words[-1] != "mlp" or "shared_expert" not in words):
            return True
    return False
