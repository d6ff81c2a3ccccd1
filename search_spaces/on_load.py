"""Quantization at load: what ``--quantization METHOD`` makes of weights that are stored in 16 bits, and what vLLM refuses.

Read in vLLM 0.20, 0.22.1, 0.26, 0.28, 0.30 and 0.33: ``get_quant_config`` (``model_loader/weight_utils.py``) makes a method's
configuration from nothing where it can; ``_verify_quantization`` (``config/model.py``) compares it with the checkpoint's own;
``layers/quantization/online`` and ``fp8.py`` quantize every ``LinearBase`` and all experts, layer by layer while they are
loaded, so that the checkpoint's size is never held as a whole. Embeddings, head, routers and vision towers keep their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vopt.search_spaces.defaults import LATEST_VERSION, version_key
from vopt.search_spaces.quantized import NEVER_QUANTIZED
from vopt.search_spaces.shape import DTYPE_BYTES, ModelShape, Quantization


@dataclass(frozen=True, slots=True)
class OnLoad:
    """Bits of a weight and bytes of scales for each; ``experts_only``: linear layers stay as they are. ``weight_only``: weights
    are expanded and multiplied in 16 bits. ``since`` is the first vLLM that was seen to take it."""

    bits: float
    scales: float = 0.0
    experts_only: bool = False
    weight_only: bool = False
    since: tuple[int, int] = (0, 20)


ON_LOAD: Mapping[str, OnLoad] = {
    "fp8": OnLoad(8),  # 0.33 takes it for fp8_per_tensor and says that it is deprecated
    "fp8_per_tensor": OnLoad(8),
    "fp8_per_channel": OnLoad(8, since=(0, 26)),
    "fp8_per_block": OnLoad(8, 4 / (128 * 128)),
    "mxfp8": OnLoad(8, 1 / 32, weight_only=True),  # native on Blackwell alone
    "mxfp4": OnLoad(4, 1 / 32, weight_only=True, since=(0, 28)),
    "int8_per_channel_weight_only": OnLoad(8, experts_only=True, weight_only=True),
    "experts_int8": OnLoad(8, experts_only=True, weight_only=True),
}

NEEDS_FILE = frozenset(
    {
        *("awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "moe_wna16", "inc", "auto-round"),
        *("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"),
    }
)
"""Methods whose parameters stand in a file beside the weights, where ``config.json`` has none."""

NEEDS_CONFIG = {
    "compressed-tensors": "CompressedTensorsConfig",
    "quark": "QuarkConfig",
    "torchao": "TorchAOConfig",
    "online": "OnlineQuantizationConfig",
}
"""Methods whose configuration cannot be made from nothing, and the class that says so."""

DEPRECATED = frozenset({"fbgemm_fp8", "fp_quant"})

_SAME = (
    frozenset({"awq", "auto_awq", "awq_marlin", "cpu_awq", "moe_wna16", "inc"}),
    frozenset({"gptq", "auto_gptq", "gptq_marlin", "moe_wna16", "inc"}),
    *(
        frozenset({"auto-round", "intel/auto-round", *names})
        for names in (("inc",), ("gptq", "gptq_marlin"), ("awq", "awq_marlin"))
    ),
    frozenset({"modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "nvfp4"}),
    frozenset({"mxfp4", "gpt_oss_mxfp4"}),
    frozenset({"fp8", "deepseek_v4_fp8"}),
)
"""Names that vLLM takes for one checkpoint (``override_quantization_method`` of each)."""


def refusal(own: str | None, arguments: Mapping[str, Any]) -> str:
    """Why vLLM does not put the ``quantization`` of ``arguments`` on a checkpoint whose own method is ``own`` (``None``: 16
    bits); in its own words, empty when it does or when that is not known here."""
    asked = arguments.get("quantization")
    if asked is None or asked == "none":
        return ""
    asked = str(asked)
    if asked in DEPRECATED and not arguments.get("allow_deprecated_quantization"):
        return (
            f"The quantization method {asked} is deprecated and will be removed in future versions of vLLM. To bypass, set "
            "`--allow-deprecated-quantization`."
        )
    if own is not None:
        if asked in (own, "humming") or any(own in names and asked in names for names in _SAME):
            return ""
        return (
            f"Quantization method specified in the model config ({own}) does not match the quantization method specified in "
            f"the `quantization` argument ({asked})."
        )
    if asked in NEEDS_FILE:
        return f"Cannot find the config file for {asked}"
    if asked in NEEDS_CONFIG and not arguments.get("quantization_config"):
        return f"{NEEDS_CONFIG[asked]}.__init__() misses its arguments: the model's config.json has no quantization_config"
    return ""


def known_on_load(asked: Any, version: str = LATEST_VERSION) -> bool:
    """Whether it is known here what a method makes of 16-bit weights."""
    method = ON_LOAD.get(str(asked))
    return method is not None and version_key(version)[:2] >= method.since


def loaded(shape: ModelShape, arguments: Mapping[str, Any], version: str = LATEST_VERSION) -> ModelShape:
    """The model as an engine holds it: quantized at load where ``arguments`` say so, else as it is stored."""
    asked = arguments.get("quantization")
    if asked is None or shape.quantization is not None or not known_on_load(asked, version):
        return shape
    method = ON_LOAD[str(asked)]
    kept = NEVER_QUANTIZED
    if method.experts_only:
        if shape.experts is None:
            return shape
        kept |= {"attention", "linear_attention", "mlp", "shared_experts", "mtp"}
    size = min(method.bits / 8 + method.scales, DTYPE_BYTES[shape.dtype])
    return replace(shape, quantization=Quantization(str(asked), method.bits, size, kept, method.weight_only))
