from types import SimpleNamespace
from typing import Any

counts = {"vllm:num_requests_running": 0, "vllm:generation_tokens": 0, "vllm:prompt_tokens": 0, "vllm:kv_cache_usage_perc": 0.0}


def get_metrics_snapshot() -> list[Any]:
    return [SimpleNamespace(name=name, value=value) for name, value in counts.items()]
