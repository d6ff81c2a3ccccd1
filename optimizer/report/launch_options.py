"""The words of a launch command as options with long names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vopt.optimizer.errors import UsageError

ENTRY = ("vllm", "serve")
# vLLM's short options (engine/arg_utils.py of 0.32); its YAML reader knows long names only.
_SHORT = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-O": "--optimization-level",
}


def options_of(argv: Sequence[str]) -> tuple[str | None, list[tuple[str, list[str]]]]:
    """``vllm serve MODEL --a 1 --b`` -> the model, and (option, values) in order, with long option names."""
    words = list(argv[2:] if tuple(argv[:2]) == ENTRY else argv)
    model = words.pop(0) if words and not words[0].startswith("-") else None
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if _is_option(word):
            name, equals, value = word.partition("=")
            name = _SHORT.get(name, name)
            if re.fullmatch(r"-O\d", name):
                name, equals, value = "--optimization-level", "=", name[2:]
            options.append((name, [value] if equals else []))
        elif not options:
            raise UsageError(f"{word!r} in the launch command belongs to no option.", hint="--name value, or --name=value")
        else:
            options[-1][1].append(word)
    return model, options


def _is_option(word: str) -> bool:
    """Negative numbers and JSON are values."""
    return word.startswith("--") or (word.split("=")[0] in _SHORT or bool(re.fullmatch(r"-O\d", word)))
