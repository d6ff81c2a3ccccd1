"""Everything that a declaration is judged against: subject, goal, workload, the user's choices, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vopt.search_spaces.arguments import Arguments
from vopt.search_spaces.choices import Choices
from vopt.search_spaces.declaration import SpaceFile
from vopt.search_spaces.defaults import Resolved, resolve
from vopt.search_spaces.evidence import WorkloadFacts
from vopt.search_spaces.memory import Calibration, MemoryPlan, memory_plan
from vopt.search_spaces.subject import Subject, model_facts

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


@dataclass(frozen=True)
class Circumstances:
    """``baseline`` is the user's own configuration. The defaults are those of a subject alone: no workload, no choices."""

    subject: Subject
    goal: str = "throughput"
    workload: WorkloadFacts = field(default_factory=WorkloadFacts)
    choices: Choices = field(default_factory=Choices)
    baseline: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None

    @property
    def arguments(self) -> Arguments:
        return self.subject.arguments

    @cached_property
    def model(self) -> dict[str, Any]:
        """What the rules need to know of the model, as JSON."""
        return model_facts(self.subject.shape)

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """vLLM's own values of what a point leaves open: arithmetic first, the answer of an installed vLLM above it."""
        found: dict[str, Any] = {a.name: a.default for a in self.arguments.arguments.values() if a.default is not None}
        shape = self.subject.shape
        if shape is not None:
            found |= _by_name(resolve(shape, self.subject.gpu, self.choices.set, self.arguments.version))
        return found | {name: value for name, value in self.subject.resolved.items() if value is not None}

    @cached_property
    def plan(self) -> MemoryPlan | None:
        """The memory of the defaults; ``None`` where the model's shape is not known."""
        subject = self.subject
        if subject.shape is None:
            return None
        return memory_plan(subject.shape, subject.gpu, self.choices.set, self.arguments.version, self.calibration)

    @property
    def block(self) -> int | None:
        """Tokens in a KV block of a hybrid model; ``None`` for others."""
        return self.plan.layout.block_size if self.plan is not None and self.model["hybrid"] else None

    @property
    def resident(self) -> int | None:
        """Requests of the workload's mean length that the cache of the defaults holds at once."""
        total = self.workload.total_tokens
        return self.plan.resident(total) if self.plan is not None and total and self.plan.kv_bytes > 0 else None

    def facts(self, user: SpaceFile | None = None) -> dict[str, Any]:
        """What a space keeps of them, as JSON."""
        gpu = self.subject.gpu
        return {
            "version": self.arguments.version,
            "goal": self.goal,
            "model": self.model,
            "gpu": {"name": gpu.name, "memory_bytes": gpu.memory_bytes},
            "gpus": self.subject.gpus,
            "resolved": {key: self.resolved[key] for key in RESOLVED_FACTS if key in self.resolved},
            "set": dict(self.choices.set),
            "asked": sorted(self.choices.vary),
            "acceptance_length": self.workload.acceptance_length if self.workload.dummy_weights else None,
            "hybrid_block": self.block,
            "forbidden": [{"conditions": dict(r.conditions), "why": r.why} for r in (user.rules if user else ())],
        }


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
