from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

DEFAULTS = {"OPENAI_API_SERVER": (1024, 8192), "LLM_CLASS": (1024, 16384)}


@dataclass
class AsyncEngineArgs:
    model: str
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int = 4096
    block_size: int | None = None
    enforce_eager: bool = False
    load_format: str = "auto"
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool | None = None
    speculative_config: dict[str, Any] | None = None
    hf_token: str | None = None
    revision: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def create_engine_config(self, usage_context: Any) -> Any:
        seqs, tokens = DEFAULTS.get(usage_context.value, (128, 2048))
        self.max_num_seqs = self.max_num_seqs or seqs  # vLLM fills its arguments in, too
        self.max_num_batched_tokens = self.max_num_batched_tokens or tokens
        if self.speculative_config is not None:
            self.speculative_config["target_model_config"] = "filled in, as up to 0.25"
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be greater than or equal to"
                f" max_num_seqs ({self.max_num_seqs})."
            )
        return SimpleNamespace(
            performance_mode="balanced",
            scheduler_config=SimpleNamespace(
                max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens, policy="fcfs"
            ),
            cache_config=SimpleNamespace(block_size=self.block_size or 16, num_gpu_blocks=1000, cache_dtype="auto"),
            model_config=SimpleNamespace(model=self.model, max_model_len=self.max_model_len, enforce_eager=self.enforce_eager),
            compilation_config=SimpleNamespace(compilation_time=0.0, cudagraph_capture_sizes=[]),
            speculative_config=None,
        )
