"""How figures, configurations and verdicts are said to people, one rule each, so that script, page and terminal agree. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from vopt.objectives.records import LoadStatus
from vopt.optimizer.recommend import Gain, Verdict

_PERCENTAGES = frozenset(
    {"success_rate", "kv_peak", "prefix_hit_rate", "acceptance_rate", "queued_share", "front_end_share", "full_budget_share"}
)
_FOR_USERS = frozenset({"tokens_per_s", "output_tokens_per_s", "requests_per_s", "goodput_per_s", "balance", "success_rate"})
"""Beside the times, the metrics of which users have more or less; all others are gauges that say how it came about."""
_COUNTS = frozenset({"preemptions"})
_NAMES = {
    "tokens_per_s": "Throughput",
    "output_tokens_per_s": "Output throughput",
    "requests_per_s": "Request rate",
    "goodput_per_s": "Goodput",
    "balance": "Balance of the goals",
    "success_rate": "Success rate",
    "kv_peak": "KV cache peak",
    "preemptions": "Preemptions",
    "acceptance_length": "Acceptance length",
    "acceptance_rate": "Acceptance rate",
    "prefix_hit_rate": "Prefix hit rate",
    "queued_share": "Window with requests waiting",
    "front_end_share": "In flight outside the engine",
    "full_budget_share": "Steps with a full token budget",
    "peak_running": "Most sequences running",
}
_UNITS = {
    "tokens_per_s": "tokens/s",
    "output_tokens_per_s": "tokens/s",
    "requests_per_s": "requests/s",
    "goodput_per_s": "requests/s",
}
_KINDS = {
    "invalid_config": "Refused by vLLM",
    "oom_start": "Out of memory at start",
    "oom_load": "Out of memory under load",
    "kv_too_small": "KV cache too small",
    "mamba_blocks": "Too few Mamba blocks",
    "graph_capture": "CUDA graph capture failed",
    "unsupported": "Not supported here",
    "engine_died": "Engine died",
    "hang": "Hung",
    "low_success": "Too many failed requests",
    "too_long": "Request longer than the model takes",
    "bad_request": "Request refused",
    "port": "Port was taken",
    "memory_held": "GPU memory was held",
    "gpu_lost": "GPU was lost",
    "disk_full": "Disk full",
    "storage": "Storage failed",
    "download": "Download failed",
    "driver": "Driver failed",
    "disturbed": "Disturbed from outside",
    "stopped_early": "Stopped early",
    "unsteady": "Unsteady",
    "overloaded": "Overloaded",
}
STATUS_REASONS = {
    LoadStatus.STOPPED_EARLY: "clearly worse than the best so far; the load was ended early",
    LoadStatus.OVERLOADED: "requests piled up through the window: the rate is above what this engine sustains",
    LoadStatus.UNSTEADY: "the two halves of the window disagree, also after it was doubled",
    LoadStatus.ENGINE_DIED: "the engine died under load",
    LoadStatus.REPEATED_ERRORS: "one request after the other failed",
    LoadStatus.DEADLINE: "the load did not end within its deadline",
}
"""Why a start of this status cannot be the answer."""
_VERDICTS = {
    Verdict.BETTER: "Better",
    Verdict.NO_GAIN: "No measurable gain",
    Verdict.NOTHING_FEASIBLE: "Nothing feasible",
    Verdict.UNCONFIRMED: "Unconfirmed",
}
TOGETHER = " + "
"""Between the names of parameters that changed in the same starts: no analysis can tell their shares apart."""
NONE = "–"
"""Stands where a figure is undefined: never 0."""


def metric_label(name: str) -> str:
    """``p95_ttft_s`` -> ``p95 TTFT``; names that are not in the table are given back unchanged."""
    if name in _NAMES:
        return _NAMES[name]
    parts = name.removesuffix("_s").split("_")
    if parts in (["ttft"], ["tpot"], ["e2e"]):
        return parts[0].upper()
    if parts[-1] not in ("ttft", "tpot", "e2e", "itl"):
        return name
    if len(parts) == 2:
        return f"{parts[0]} {parts[1].upper()}"
    # Of an open loop the plain names count from the scheduled send.
    return f"{parts[0]} {parts[2].upper()} from the real send" if len(parts) == 3 and parts[1] == "sent" else name


def metric_word(name: str) -> str:
    """The label inside a sentence: ``throughput``, ``p95 TTFT``, ``KV cache peak``."""
    label = metric_label(name)
    return label if label[:2].isupper() else label[:1].lower() + label[1:]


def is_time(name: str) -> bool:
    """Whether a metric is a time in seconds (shown in milliseconds)."""
    return name.endswith("_s") and not name.endswith("_per_s")


def metric_kind(name: str) -> str:
    """What a metric is a figure of: ``ttft`` for all its percentiles, ``rate`` for all that is counted by the second."""
    if not is_time(name):
        return "rate" if name.endswith("_per_s") else name
    return name.removesuffix("_s").rsplit("_", 1)[-1]


def lower_is_better(name: str) -> bool:
    return is_time(name) or name in ("kv_peak", "preemptions")


def is_cost(name: str) -> bool:
    """Whether a change for the worse of this metric is a cost; gauges are information."""
    return is_time(name) or name in _FOR_USERS


def metric_unit(name: str) -> str:
    if is_time(name):
        return "ms"
    return "%" if name in _PERCENTAGES else _UNITS.get(name, "")


def shown(name: str, value: float) -> float:
    """The number in the unit of ``metric_unit``."""
    if is_time(name):
        return value * 1000
    return value * 100 if name in _PERCENTAGES else value


def metric_text(name: str, value: float | None, *, unit: bool = True) -> str:
    """``24,120 tokens/s``, ``500 ms``, ``99.5 %``; a dash when undefined."""
    if value is None:
        return NONE
    number = shown(name, value)
    if name in _COUNTS:
        text = f"{number:,.0f}"
    elif name in _PERCENTAGES:
        text = f"{number:.2f}".rstrip("0").rstrip(".") if 99 < number < 100 else f"{number:.1f}".removesuffix(".0")
    else:
        text = f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
    suffix = metric_unit(name)
    return f"{text} {suffix}" if unit and suffix else text


def change_text(ratio: float) -> str:
    """A ratio as a signed percentage: 1.139 -> ``+13.9 %``. A change that rounds to nothing has no sign."""
    text = f"{(ratio - 1) * 100:+.1f}"
    return f"{'0.0' if text in ('+0.0', '-0.0') else text.replace('-', '−')} %"


def gain_text(gain: Gain | None, *, maximize: bool = True) -> str:
    """``+13.9 % (interval +12.1 % to +15.7 %)``: the change of the metric itself, so a latency that is 1.25 times better
    reads ``−20.0 %``. Says so when there is no interval."""
    if gain is None:
        return NONE
    turned = change_text if maximize else _change_of_inverse
    if gain.low is None or gain.high is None:
        return f"{turned(gain.ratio)} (no interval)"
    ends = (gain.low, gain.high) if maximize else (gain.high, gain.low)
    return f"{turned(gain.ratio)} (interval {turned(ends[0])} to {turned(ends[1])})"


def visible_text(ratio: float, *, maximize: bool = True) -> str:
    """The smallest gain that a study could have seen, as the size of the metric's own change: ``1.7 %``."""
    return change_text(ratio if maximize else 1 / ratio).lstrip("+−")


def _change_of_inverse(ratio: float) -> str:
    return change_text(1 / ratio)


def duration(seconds: float | None) -> str:
    """``42 s``, ``3 min 05 s``, ``1 h 12 min``."""
    if seconds is None:
        return NONE
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if seconds >= 1 or seconds == 0 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def about(seconds: float | None) -> str:
    """An estimate, without more digits than it deserves: ``50 s``, ``43 min``, ``1 h 10 min``."""
    if seconds is None:
        return NONE
    if seconds < 90:
        return f"{max(10, round(seconds, -1)):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60 // 5 * 5:02d} min"


def clock(seconds: float) -> str:
    """``0:42``, ``12:05``, ``1:02:09``: elapsed time in a live display."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def value_text(value: Any) -> str:
    """A configuration value: JSON, but bare text without quotes."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def config_text(config: Mapping[str, Any]) -> str:
    """``max_num_seqs=768 max_num_batched_tokens=16384``; the bare defaults are called that."""
    return " ".join(f"{name}={value_text(value)}" for name, value in config.items()) or "vLLM's defaults"


def kind_text(kind: str) -> str:
    """A failure kind, a load status or ``limit:<metric>`` in words."""
    if kind.startswith("limit:"):
        return f"Limit on {metric_word(kind.removeprefix('limit:'))}"
    return _KINDS.get(kind, kind.replace("_", " "))


def loaded_over(served: bool, simulated: bool) -> str:
    """How the requests of a start reached its engine: a simulated one was not asked over either way."""
    return "simulated" if simulated else "HTTP, as the served command" if served else "in-process"


def verdict_text(verdict: Verdict) -> str:
    return _VERDICTS[verdict]


def one_line(text: str, width: int | None = None) -> str:
    """Without line breaks and control characters, cut at ``width`` characters."""
    flat = " ".join("".join(" " if ch.isspace() or not ch.isprintable() else ch for ch in text).split())
    return flat if width is None or len(flat) <= width else flat[: width - 1].rstrip() + "…"


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def command_text(argv: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """A command for a shell with the variables that belong to it, on one line unless a value holds a line break."""
    return " ".join([*_assignments(variables), shlex.join(argv)])


def _assignments(variables: Mapping[str, str] | None) -> list[str]:
    return [f"{name}={shlex.quote(value)}" for name, value in (variables or {}).items()]


def command_lines(argv: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """The same command with one variable and one option per line."""
    lines: list[list[str]] = [*([one] for one in _assignments(variables)), []]
    for word in argv:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n  ".join(" ".join(line) for line in lines)


def load_words(plan: Mapping[str, Any]) -> str:
    """``256 in flight`` or ``8 requests/s``; empty where a plan has neither."""
    if plan.get("concurrency"):
        return f"{plan['concurrency']} in flight"
    return f"{plan['rate']:.3g} requests/s" if plan.get("rate") else ""


def gpu_name(gpu: Any) -> str:
    """A stored GPU is its name, or (older studies) a mapping that holds it."""
    return str(gpu.get("name", "GPU")) if isinstance(gpu, Mapping) else str(gpu)


def limit_text(limit: Any) -> str:
    """``p95 TTFT <= 500 ms`` of a stored limit."""
    if not isinstance(limit, Mapping):
        return str(limit)
    metric, sign, value = str(limit.get("metric", "")), str(limit.get("op", "<=")), float(limit.get("value", 0.0))
    label = metric_word(metric)
    if limit.get("relative_to_baseline"):
        return f"{label} {sign} {value:g} x baseline"
    return f"{label} {sign} {metric_text(metric, value)}"
