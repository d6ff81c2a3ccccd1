"""The one categorical ``speculation``: ``off``, ``ngram:K``, ``mtp:K``, ``eagle3:MODEL:K``, ``draft:MODEL:K``, ``suffix``
<-> vLLM's ``speculative_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OFF = "off"
WITHOUT_MODEL = ("ngram", "ngram_gpu", "mtp", "suffix")
WITH_MODEL = {"eagle": "eagle", "eagle3": "eagle3", "draft": "draft_model", "dflash": "dflash", "dspark": "dspark"}
SUFFIX_TOKENS = 24  # vLLM's default depth of the suffix tree: the most tokens that suffix decoding drafts


class SpeculationError(ValueError):
    """Text that is no way to speculate."""


def expand(value: str, acceptance_length: float | None = None) -> dict[str, Any] | None:
    """The ``speculative_config`` of a value, ``None`` for ``off``.

    ``acceptance_length`` (mean tokens per step, bonus token included) makes vLLM accept synthetically, for weights that
    mean nothing (0.20 and later); it is cut to what the draft length allows, [1, k + 1].
    """
    if value == OFF:
        return None
    method, _, rest = value.partition(":")
    config: dict[str, Any]
    if method in WITH_MODEL:
        model, _, count = rest.rpartition(":")
        if not model:
            raise SpeculationError(f"{value!r}: write {method}:MODEL:TOKENS")
        config = {"method": WITH_MODEL[method], "model": model, "num_speculative_tokens": _count(value, count)}
    elif method == "suffix":
        config = {"method": "suffix"}
        if rest:
            config["num_speculative_tokens"] = _count(value, rest)
    elif method in WITHOUT_MODEL:
        config = {"method": method, "num_speculative_tokens": _count(value, rest)}
    else:
        known = ", ".join((*WITHOUT_MODEL, *(f"{name}:MODEL" for name in WITH_MODEL)))
        raise SpeculationError(f"{value!r}: not one of off, {known}")
    if acceptance_length is not None:
        most = config.get("num_speculative_tokens", SUFFIX_TOKENS) + 1
        config["rejection_sample_method"] = "synthetic"
        config["synthetic_acceptance_length"] = min(max(acceptance_length, 1.0), float(most))
    return config


SYNTHETIC = ("rejection_sample_method", "synthetic_acceptance_length", "synthetic_acceptance_rates")
"""Entries of a ``speculative_config`` that state how many drafts are accepted, whatever they say."""


def stated_acceptance(config: Mapping[str, Any] | None) -> float | None:
    """Mean tokens a step that a ``speculative_config`` states instead of comparing drafts with what the model says; ``None``
    where it compares. Its answers are then whatever was drafted: figures of it mean "if so many are accepted"."""
    if not config or config.get("rejection_sample_method") != "synthetic":
        return None
    length, rates = config.get("synthetic_acceptance_length"), config.get("synthetic_acceptance_rates")
    return float(length) if length is not None else 1.0 + sum(rates) if rates else None


def without_stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same speculation with drafts that are compared: what is served."""
    return {key: value for key, value in config.items() if key not in SYNTHETIC}


def collapse(config: Mapping[str, Any] | None) -> str:
    """The value that expands to this config; ``SpeculationError`` when it holds more than a value can say."""
    if config is None:
        return OFF
    rest = {key: value for key, value in config.items() if key not in SYNTHETIC[:2]}
    method, count, model = rest.pop("method", None), rest.pop("num_speculative_tokens", None), rest.pop("model", None)
    if rest:
        raise SpeculationError(f"{', '.join(sorted(rest))} in speculative_config cannot be said in one word")
    method = "mtp" if isinstance(method, str) and method.endswith("_mtp") else method
    by_vllm = {vllm: name for name, vllm in WITH_MODEL.items()}
    if method in by_vllm and model and count:
        return f"{by_vllm[method]}:{model}:{count}"
    if method == "suffix" and model is None:
        return "suffix" if count is None else f"suffix:{count}"
    if method in WITHOUT_MODEL and count and model is None:
        return f"{method}:{count}"
    raise SpeculationError(f"speculative_config {dict(config)!r} cannot be said in one word")


def tokens(value: str) -> int:
    """Tokens drafted per step: 0 for ``off``."""
    config = expand(value)
    return 0 if config is None else int(config.get("num_speculative_tokens", SUFFIX_TOKENS))


def method(value: str) -> str:
    return value.partition(":")[0]


def _count(value: str, text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise SpeculationError(f"{value!r}: the number of tokens after the last colon is a positive integer")
    return int(text)
