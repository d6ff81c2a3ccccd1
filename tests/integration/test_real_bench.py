"""``vopt bench`` with the real vLLM for the CPU: engines that it starts, and a server that runs already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.sessions import SMALL, spec
from typer.testing import CliRunner, Result

from vopt.optimizer.cli import app
from vopt.optimizer.engine.server import ServerSession
from vopt.optimizer.load.client import read_metrics
from vopt.optimizer.load.metrics_text import parse

pytestmark = pytest.mark.vllm

SETTINGS = tuple(word for name, value in SMALL.items() for word in ("--set", f"{name}={json.dumps(value)}"))
LOAD = ("--requests", "48", "--concurrency", "8", "--json")


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short requests: the named workloads are too long for a tiny context."""
    path = tmp_path_factory.mktemp("workload") / "short.jsonl"
    lines = [{"prompt_tokens": 60 + number % 32, "output_tokens": 8 + number % 8} for number in range(64)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def vopt(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def document_of(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_running_server_and_its_own_counts(
    tmp_path: Path, vllm_python: str, tiny_models: tuple[Path, Path], engine_cache: Path, workload: Path
) -> None:
    model = tiny_models[0]
    words = ("--load-format", "dummy", "--enforce-eager", "--max-model-len", "2048", "--gpu-memory-utilization", "0.08")
    server = ServerSession(spec(tmp_path, model, vllm_python, engine_cache), ("vllm", "serve", str(model), *words), clients=1)
    try:
        server.start(lambda phase, text: None)
        url = server.target.base_url
        document = document_of(vopt("bench", "--url", url, "--workload", str(workload), *LOAD))
        counted = {name: sum(values.values()) for name, values in parse(read_metrics(server.target)).items()}
        chat = document_of(vopt("bench", "--url", url, "--endpoint", "chat", "--workload", str(workload), *LOAD))
        long = vopt("bench", "--url", url, "--workload", "long-context")
    finally:
        assert server.close() == ()
    assert (document["completed"], document["failed"], document["model_id"]) == (48, 0, str(model))
    assert document["tokenizer_id"] == str(model), "found where the server has its model"
    assert document["total_input_tokens"] == counted["vllm:prompt_tokens_total"]
    assert document["total_output_tokens"] == counted["vllm:generation_tokens_total"]
    assert document["vopt"]["engine"]["vllm_version"] == "0.32.0"
    assert (chat["completed"], chat["endpoint_type"]) == (48, "openai-chat")
    assert (long.exit_code, "2048" in long.stderr) == (2, True)


@pytest.mark.parametrize("kind", ["vllm", "server"])
def test_engines_that_are_started(kind: str, vllm_python: str, tiny_models: tuple[Path, Path], workload: Path) -> None:
    words = ("--model", str(tiny_models[0]), "--engine", kind, *SETTINGS, "--workload", str(workload), *LOAD)
    document = document_of(vopt("bench", *words, "--", "--max-num-seqs", "4"))
    assert (document["completed"], document["failed"]) == (48, 0)
    assert document["vopt"]["command"][-4:] == ["--max-num-seqs", "4", "--host", "127.0.0.1"]
    assert document["mean_e2el_ms"] > document["mean_ttft_ms"] > 0


def test_an_argument_that_vllm_refuses_starts_nothing(vllm_python: str, tiny_models: tuple[Path, Path]) -> None:
    result = vopt("bench", "--model", str(tiny_models[0]), *SETTINGS, "--set", "max_model_len=1000000")
    assert result.exit_code == 2
    assert "start:" not in result.stderr
