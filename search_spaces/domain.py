"""The values of one declaration that are possible and sensible here, each narrowing with its reason."""

from __future__ import annotations

from typing import Any

from vopt.search_spaces.circumstances import Circumstances
from vopt.search_spaces.declaration import Declaration, Narrowing
from vopt.search_spaces.evidence import less_cache
from vopt.search_spaces.memory import Possible, can_start
from vopt.search_spaces.parameter import Bound, Parameter, same
from vopt.search_spaces.relief import SHARE
from vopt.search_spaces.speculation import method


class Domains:
    """Makes parameters of declarations."""

    def __init__(self, of: Circumstances) -> None:
        self.of = of

    def parameter(self, d: Declaration, narrowings: tuple[Narrowing, ...]) -> Parameter:
        default = self._default(d)
        bounds: list[Bound] = []
        values = list(d.values)
        if not any(same(v, default) for v in values):
            values.append(default)
        own = argument_of(d.name)
        if own in self.of.baseline and d.name == own and not any(same(v, self.of.baseline[own]) for v in values):
            values.append(self.of.baseline[own])
            bounds.append(Bound(f"{self.of.baseline[own]!r} is in your own command", "your command"))
        values = self._possible(d, values, default, bounds)
        if not d.asked:
            for narrowing in narrowings:
                if narrowing.name == d.name:
                    kept = [v for v in values if same(v, default) or self._is_baseline(d, v) or narrowing.keeps(v)]
                    if len(kept) < len(values):
                        bounds.append(Bound(_narrowing_text(narrowing), narrowing.source))
                    values = kept
            values = self._by_load(d, values, default, bounds)
            if d.name == SHARE and any(v < default for v in values):
                bounds.append(Bound(less_cache(default), "kv_pressure"))
        if d.ordered and all(isinstance(v, (int, float)) for v in values):
            values.sort()
        return Parameter(
            name=d.name,
            values=tuple(values),
            default=default,
            ordered=d.ordered,
            group=d.group,
            why=d.why,
            bounds=tuple(bounds),
            changes_outputs=d.changes_outputs,
            changes_contract=d.changes_contract,
            in_compile_key=d.in_compile_key,
        )

    def _is_baseline(self, d: Declaration, value: Any) -> bool:
        return d.name in self.of.baseline and same(value, self.of.baseline[d.name])

    def _default(self, d: Declaration) -> Any:
        if d.name == "speculation":
            return "off"
        if d.default is not None:
            return d.default
        resolved = self.of.resolved.get(d.name)
        if resolved is None or isinstance(resolved, (dict, list)):
            return d.values[0]
        if isinstance(d.values[0], float) and isinstance(resolved, int) and not isinstance(resolved, bool):
            return float(resolved)
        if d.name == "kv_cache_dtype" and not self.of.subject.resolved.get(d.name):
            return d.values[0]
        return resolved

    def _possible(self, d: Declaration, values: list[Any], default: Any, bounds: list[Bound]) -> list[Any]:
        """Without the values that this vLLM, this model or these GPUs cannot take whatever the rest is."""
        version, kept = self.of.arguments.version, []
        for value in values:
            reason, source = None, "model"
            if same(value, default):
                kept.append(value)
                continue
            if d.name == "speculation":
                reason = self._speculation_reason(d, str(value))
            elif (unlike := self.of.arguments.unlike(d.name, value)) is not None:
                reason, source = f"{value!r} is left out: {unlike}", f"vLLM {version}"
            elif d.group == "parallelism" and isinstance(value, int) and not isinstance(value, bool):
                reason, source = self._parallel_reason(d.name, value)
            elif d.name == "max_model_len" and (reason := self._length_reason(int(value))):
                source = "workload"
            elif d.name in ("max_num_seqs", "max_num_batched_tokens") and (reason := self._memory_reason(d.name, value)):
                source = "memory"
            if reason is None:
                kept.append(value)
            else:
                bounds.append(Bound(reason, source))
        return kept

    def _speculation_reason(self, d: Declaration, value: str) -> str | None:
        if method(value) == "mtp" and self.of.model.get("mtp_layers", 0) == 0:
            return f"{value} is left out: the model has no multi-token prediction layers"
        if method(value) == "ngram" and self.of.workload.dummy_weights and not d.asked:
            return f"{value} is left out: with dummy weights only the model's own drafts can be assumed"
        return None

    def _parallel_reason(self, name: str, value: int) -> tuple[str | None, str]:
        if value > self.of.subject.gpus:
            return f"{value} is left out: {self.of.subject.gpus} GPUs are given", "GPUs"
        heads = self.of.model.get("q_heads")
        if name == "tensor_parallel_size" and heads and heads % value:
            return f"{value} is left out: {heads} attention heads are not divisible by it", "model"
        return None, ""

    def _length_reason(self, value: int) -> str | None:
        longest, most = self.of.workload.longest_total, self.of.model.get("max_position")
        if longest is not None and value < longest:
            return f"{value} is left out: the workload has requests of {longest} tokens"
        if most is not None and value > most:
            return f"{value} is left out: the model ends at {most}"
        return None

    def _memory_reason(self, name: str, value: Any) -> str | None:
        """Why no engine with this value can start, everything else as sparing as this space allows."""
        shape = self.of.subject.shape
        if shape is None:
            return None
        sparing: dict[str, Any] = {"gpu_memory_utilization": 0.96, "enable_prefix_caching": False}
        if self.of.subject.gpus > 1:
            sparing["tensor_parallel_size"] = max(
                n for n in (1, 2, 4, 8) if n <= self.of.subject.gpus and shape.q_heads % n == 0
            )
        if "kv_cache_dtype" in self.of.choices.allow_lossy:
            sparing["kv_cache_dtype"] = "fp8"
        config = {**sparing, **self.of.choices.set, name: value}
        verdict = can_start(shape, self.of.subject.gpu, config, self.of.arguments.version, self.of.calibration)
        baseline = can_start(
            shape, self.of.subject.gpu, {**sparing, **self.of.choices.set}, self.of.arguments.version, self.of.calibration
        )
        if verdict.possible is Possible.CANNOT and baseline.possible is not Possible.CANNOT:
            return f"{value} is left out: {verdict.reason}"
        return None

    def _by_load(self, d: Declaration, values: list[Any], default: Any, bounds: list[Bound]) -> list[Any]:
        """Sequences beyond the closed loop's width are never resident: one value above it stands for all."""
        width = self.of.workload.concurrency
        if d.name != "max_num_seqs" or width is None:
            return values
        enough = [v for v in values if v >= width]
        kept = [v for v in values if same(v, default) or self._is_baseline(d, v) or v < width or v == min(enough)]
        if len(kept) < len(values):
            bounds.append(Bound(f"at most {min(enough)}: no more than {width} requests are in flight", "workload"))
        return kept


def argument_of(name: str) -> str:
    """The engine argument that a parameter sets."""
    return "speculative_config" if name == "speculation" else name.partition(".")[0]


def _narrowing_text(narrowing: Narrowing) -> str:
    if narrowing.values is not None:
        return f"{', '.join(map(str, narrowing.values))}: {narrowing.why}"
    ends = [f"at least {narrowing.at_least:g}"] if narrowing.at_least is not None else []
    ends += [f"at most {narrowing.at_most:g}"] if narrowing.at_most is not None else []
    return f"{' and '.join(ends)}: {narrowing.why}"
