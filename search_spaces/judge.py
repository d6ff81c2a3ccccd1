"""Judges one declaration after the other against vLLM version, model, GPUs, memory, workload and the user's choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vopt.search_spaces.arguments import Arguments, release_of
from vopt.search_spaces.choices import Choices
from vopt.search_spaces.defaults import Gpu, Resolved, resolve
from vopt.search_spaces.evidence import Evidence, Surroundings, WorkloadFacts, evidence_for
from vopt.search_spaces.memory import Calibration, Possible, can_start, memory_plan
from vopt.search_spaces.parameter import Bound, Inactive, Parameter, Violation, same
from vopt.search_spaces.parse import Declaration, Narrowing, SpaceFile, SpaceFileError
from vopt.search_spaces.shape import ModelShape
from vopt.search_spaces.space import Check
from vopt.search_spaces.speculation import method

RESOLVED_FACTS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "async_scheduling",
    "max_cudagraph_capture_size",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is searched for: a model (``None``: its shape could not be read, memory and model rules are off) on some GPUs
    with the arguments of a vLLM. ``resolved`` are vLLM's own values where it was asked; arithmetic fills the rest."""

    arguments: Arguments
    gpu: Gpu
    shape: ModelShape | None = None
    gpus: int = 1
    resolved: Mapping[str, Any] = field(default_factory=dict)


def memory_check(subject: Subject, calibration: Calibration | None = None) -> Check:
    """A check that refuses what exact arithmetic says cannot start."""
    shape, gpu, version = subject.shape, subject.gpu, subject.arguments.version

    def check(config: Mapping[str, Any]) -> Violation | None:
        if shape is None:
            return None
        verdict = can_start(shape, gpu, config, version, calibration)
        if verdict.possible is not Possible.CANNOT:
            return None
        return Violation("memory", verdict.reason, verdict.repair)

    return check


def model_facts(shape: ModelShape | None) -> dict[str, Any]:
    """What the rules need to know of a model, as JSON; empty without a shape."""
    if shape is None:
        return {}
    return {
        "name": shape.name,
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "layers": shape.layers,
        "hybrid": shape.hybrid,
        "moe": shape.experts is not None,
        "mla": shape.latent is not None,
        "multimodal": shape.multimodal,
        "mtp_layers": shape.mtp_layers,
        "quantization": shape.quantization.method if shape.quantization else None,
        "dtype": shape.dtype,
        "max_position": shape.max_position,
    }


class Judge:
    """Judges declarations one by one against everything that is known."""

    def __init__(
        self,
        subject: Subject,
        goal: str,
        mode: str,
        workload: WorkloadFacts,
        choices: Choices,
        baseline: Mapping[str, Any],
        calibration: Calibration | None,
    ) -> None:
        self.subject, self.goal, self.mode = subject, goal, mode
        self.workload, self.choices, self.baseline, self.calibration = workload, choices, baseline, calibration
        self.arguments, self.shape, self.gpus = subject.arguments, subject.shape, subject.gpus
        self.model = model_facts(subject.shape)
        self.resolved = self._resolved()
        self.block: int | None = None
        self.resident: int | None = None
        if self.shape is not None:
            plan = memory_plan(self.shape, subject.gpu, choices.set, self.arguments.version, calibration)
            self.block = plan.layout.block_size if self.shape.hybrid else None
            if workload.total_tokens and plan.kv_bytes > 0:
                self.resident = plan.resident(workload.total_tokens)

    @classmethod
    def plain(cls, subject: Subject) -> Judge:
        """A judge of a subject alone: no workload, no choices."""
        return cls(subject, "throughput", "balanced", WorkloadFacts(), Choices(), {}, None)

    def _resolved(self) -> dict[str, Any]:
        """vLLM's own values of what a point leaves open: arithmetic first, the answer of an installed vLLM above it."""
        found: dict[str, Any] = {a.name: a.default for a in self.arguments.arguments.values() if a.default is not None}
        if self.shape is not None:
            values = resolve(self.shape, self.subject.gpu, self.choices.set, self.arguments.version)
            found |= _by_name(values)
        found |= {name: value for name, value in self.subject.resolved.items() if value is not None}
        return found

    def facts(self, user: SpaceFile | None) -> dict[str, Any]:
        return {
            "version": self.arguments.version,
            "goal": self.goal,
            "model": self.model,
            "gpu": {"name": self.subject.gpu.name, "memory_bytes": self.subject.gpu.memory_bytes},
            "gpus": self.gpus,
            "resolved": {key: self.resolved[key] for key in RESOLVED_FACTS if key in self.resolved},
            "set": dict(self.choices.set),
            "asked": sorted(self.choices.vary),
            "acceptance_length": self.workload.acceptance_length if self.workload.dummy_weights else None,
            "hybrid_block": self.block,
            "forbidden": [{"conditions": dict(r.conditions), "why": r.why} for r in (user.rules if user else ())],
        }

    def checks(self) -> tuple[Check, ...]:
        return (memory_check(self.subject, self.calibration),) if self.shape is not None else ()

    def judge(self, d: Declaration, narrowings: tuple[Narrowing, ...]) -> tuple[Parameter | None, Inactive | None]:
        """(parameter, ``None``) to search it; (``None``, why not); (parameter, why not yet) when evidence may reopen it."""
        if reason := self._left_out(d):
            return None, Inactive(d.name, reason)
        made = self._parameter(d, narrowings)
        if len(made.values) < 2:
            reason = "; ".join(bound.text for bound in made.bounds) or "one value alone is possible here"
            return None, Inactive(d.name, reason)
        evidence = Evidence(True) if d.asked else evidence_for(d.needs, self._around())
        if evidence.active:
            return made, None
        return made, Inactive(d.name, evidence.reason, evidence.reopens_on)

    def _around(self) -> Surroundings:
        hybrid = bool(self.model.get("hybrid"))
        return Surroundings(self.workload, self.resolved, hybrid, self.block, self.resident)

    def _left_out(self, d: Declaration) -> str | None:
        checks = (self._by_user, self._by_version, self._by_model, self._by_contract, self._by_goal)
        return next((reason for check in checks if (reason := check(d))), None)

    def _by_user(self, d: Declaration) -> str | None:
        own = argument_of(d.name)
        if d.name in self.choices.set or own in self.choices.set:
            return f"set by you to {self.choices.set.get(d.name, self.choices.set.get(own))!r}"
        if d.name in self.choices.keep:
            return "kept at vLLM's default by you"
        return d.never if d.never and not d.asked else None

    def _by_version(self, d: Declaration) -> str | None:
        if d.name.startswith("env:"):
            return None
        release, version = self.arguments.release, self.arguments.version
        if d.since and release < release_of(d.since):
            return f"vLLM {version} has it not yet (since {d.since})"
        if d.until and release >= release_of(d.until):
            return f"vLLM {version} has it no longer (until {d.until})"
        if argument_of(d.name) not in self.arguments.engine_names:
            return f"vLLM {version} has no such argument"
        return None

    def _by_model(self, d: Declaration) -> str | None:
        for word in d.applies:
            if word == "gpus":
                if self.gpus < 2:
                    return "one GPU is given"
            elif self.shape is None:
                return "the model's shape is not known" if not d.asked else None
            elif not self._is(word):
                return f"the model is not one it applies to ({word.replace('_', ' ')})"
        return None

    def _is(self, word: str) -> bool:
        model = self.model
        answers = {
            "dense": not model["moe"],
            "moe": model["moe"],
            "hybrid": model["hybrid"],
            "not_hybrid": not model["hybrid"],
            "mla": model["mla"],
            "not_mla": not model["mla"],
            "multimodal": model["multimodal"],
            "mtp": model["mtp_layers"] > 0,
            "unquantized": model["quantization"] is None,
        }
        return bool(answers[word])

    def _by_contract(self, d: Declaration) -> str | None:
        for changes, allowed, option, what in (
            (d.changes_outputs, self.choices.allow_lossy, "--allow-lossy", "it changes outputs"),
            (d.changes_contract, self.choices.allow_contract, "--allow-contract", "it changes what clients may send or see"),
        ):
            if changes and d.name not in allowed:
                if d.asked:
                    raise SpaceFileError("--vary", d.name, list(d.values), f"{what}: add {option} {d.name}")
                return f"{what}: {option} {d.name}"
        return None

    def _by_goal(self, d: Declaration) -> str | None:
        wanted = d.asked or d.name in self.choices.allow_lossy or d.name in self.choices.allow_contract
        return (
            None if wanted or any(goal in d.searched for goal in self.goal.split("-")) else f"only on request (--vary {d.name})"
        )

    def _parameter(self, d: Declaration, narrowings: tuple[Narrowing, ...]) -> Parameter:
        default = self._default(d)
        bounds: list[Bound] = []
        values = list(d.values)
        if not any(same(v, default) for v in values):
            values.append(default)
        own = argument_of(d.name)
        if own in self.baseline and d.name == own and not any(same(v, self.baseline[own]) for v in values):
            values.append(self.baseline[own])
            bounds.append(Bound(f"{self.baseline[own]!r} is in your own command", "your command"))
        values = self._possible(d, values, default, bounds)
        if not d.asked:
            for narrowing in narrowings:
                if narrowing.name == d.name:
                    kept = [v for v in values if same(v, default) or self._is_baseline(d, v) or narrowing.keeps(v)]
                    if len(kept) < len(values):
                        bounds.append(Bound(_narrowing_text(narrowing), narrowing.source))
                    values = kept
            values = self._by_load(d, values, default, bounds)
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
        return d.name in self.baseline and same(value, self.baseline[d.name])

    def _default(self, d: Declaration) -> Any:
        if d.name == "speculation":
            return "off"
        if d.default is not None:
            return d.default
        resolved = self.resolved.get(d.name)
        if resolved is None or isinstance(resolved, (dict, list)):
            return d.values[0]
        if isinstance(d.values[0], float) and isinstance(resolved, int) and not isinstance(resolved, bool):
            return float(resolved)
        if d.name == "kv_cache_dtype" and not self.subject.resolved.get(d.name):
            return d.values[0]
        return resolved

    def _possible(self, d: Declaration, values: list[Any], default: Any, bounds: list[Bound]) -> list[Any]:
        """Without the values that this vLLM, this model or these GPUs cannot take whatever the rest is."""
        version, kept = self.arguments.version, []
        for value in values:
            reason, source = None, "model"
            if same(value, default):
                kept.append(value)
                continue
            if d.name == "speculation":
                reason = self._speculation_reason(d, str(value))
            elif (unlike := self.arguments.unlike(d.name, value)) is not None:
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
        if method(value) == "mtp" and self.model.get("mtp_layers", 0) == 0:
            return f"{value} is left out: the model has no multi-token prediction layers"
        if method(value) == "ngram" and self.workload.dummy_weights and not d.asked:
            return f"{value} is left out: with dummy weights only the model's own drafts can be assumed"
        return None

    def _parallel_reason(self, name: str, value: int) -> tuple[str | None, str]:
        if value > self.gpus:
            return f"{value} is left out: {self.gpus} GPUs are given", "GPUs"
        heads = self.model.get("q_heads")
        if name == "tensor_parallel_size" and heads and heads % value:
            return f"{value} is left out: {heads} attention heads are not divisible by it", "model"
        return None, ""

    def _length_reason(self, value: int) -> str | None:
        longest, most = self.workload.longest_total, self.model.get("max_position")
        if longest is not None and value < longest:
            return f"{value} is left out: the workload has requests of {longest} tokens"
        if most is not None and value > most:
            return f"{value} is left out: the model ends at {most}"
        return None

    def _memory_reason(self, name: str, value: Any) -> str | None:
        """Why no engine with this value can start, everything else as sparing as this space allows."""
        if self.shape is None:
            return None
        sparing: dict[str, Any] = {"gpu_memory_utilization": 0.96, "enable_prefix_caching": False}
        if self.gpus > 1:
            sparing["tensor_parallel_size"] = max(n for n in (1, 2, 4, 8) if n <= self.gpus and self.shape.q_heads % n == 0)
        if "kv_cache_dtype" in self.choices.allow_lossy:
            sparing["kv_cache_dtype"] = "fp8"
        config = {**sparing, **self.choices.set, name: value}
        verdict = can_start(self.shape, self.subject.gpu, config, self.arguments.version, self.calibration)
        baseline = can_start(
            self.shape, self.subject.gpu, {**sparing, **self.choices.set}, self.arguments.version, self.calibration
        )
        if verdict.possible is Possible.CANNOT and baseline.possible is not Possible.CANNOT:
            return f"{value} is left out: {verdict.reason}"
        return None

    def _by_load(self, d: Declaration, values: list[Any], default: Any, bounds: list[Bound]) -> list[Any]:
        """Sequences beyond the closed loop's width are never resident: one value above it stands for all."""
        width = self.workload.concurrency
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


def _by_name(values: Resolved) -> dict[str, Any]:
    return {
        "max_num_seqs": values.max_num_seqs,
        "max_num_batched_tokens": values.max_num_batched_tokens,
        "max_model_len": values.max_model_len,
        "gpu_memory_utilization": values.gpu_memory_utilization,
        "enable_prefix_caching": values.prefix_caching,
        "enable_chunked_prefill": values.chunked_prefill,
        "async_scheduling": values.async_scheduling,
        "max_cudagraph_capture_size": values.capture_size,
        "tensor_parallel_size": values.tensor,
        "pipeline_parallel_size": values.pipeline,
        "data_parallel_size": values.data,
    }


def _narrowing_text(narrowing: Narrowing) -> str:
    if narrowing.values is not None:
        return f"{', '.join(map(str, narrowing.values))}: {narrowing.why}"
    ends = [f"at least {narrowing.at_least:g}"] if narrowing.at_least is not None else []
    ends += [f"at most {narrowing.at_most:g}"] if narrowing.at_most is not None else []
    return f"{' and '.join(ends)}: {narrowing.why}"
