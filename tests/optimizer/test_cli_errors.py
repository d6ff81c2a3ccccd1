"""Bad input: one paragraph that names the rule, the value and what to type next; exit 2 or 3; nothing started or stored."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vopt.optimizer import subject
from vopt.optimizer.cli import app

MODEL = "Qwen/Qwen3.5-35B-A3B-FP8"
SIMULATED = ["--model", MODEL, "--simulate", "h200"]


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert done.stdout == ""
    return done.exit_code, done.stderr


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["--set", "HF_TOKEN=hf_zzzzzzzzzzzzzzzzzzzzzzzz"],
        ["--storage", "postgresql+nodriver://user:correct-horse@127.0.0.1:1/studies"],
        ["--storage", "mysql://user:correct-horse@127.0.0.1:1/studies"],
        ["--workload", "hf_zzzzzzzzzzzzzzzzzzzzzzzz"],
        ["--limit", "hf_zzzzzzzzzzzzzzzzzzzzzzzz<=1"],
    ],
)
def test_no_error_repeats_a_secret(words: list[str]) -> None:
    code, said = run("search", "--goal", "throughput", *SIMULATED, *words)
    assert code in (2, 3)
    assert "hf_zzzz" not in said
    assert "correct-horse" not in said


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["--goal", "thruput", *SIMULATED], 2, ["thruput", "throughput"]),
        ([*SIMULATED], 2, ["no goal", "--goal throughput"]),
        (["--goal", "throughput", "--simulate", "h200"], 2, ["no model", "--model"]),
        (["--goal", "throughput", "--model", "./nowhere", "--simulate", "h200"], 2, ["./nowhere", "hub id"]),
        (["--goal", "throughput", *SIMULATED, "--simulate", "h900"], 2, ["h900", "h200"]),
        (["--goal", "throughput", *SIMULATED, "--set", "max_num_seq=5"], 2, ["max_num_seq", "max_num_seqs"]),
        (["--goal", "throughput", *SIMULATED, "--set", "max_num_seqs=many"], 2, ["max_num_seqs", "many", "integer"]),
        (["--goal", "throughput", *SIMULATED, "--set", "max_num_seqs=0"], 2, ["max_num_seqs 0", "below 1", "--check"]),
        (["--goal", "throughput", *SIMULATED, "--set", "max_model_len=-5"], 2, ["max_model_len -5", "below 1", "--check"]),
        (["--goal", "throughput", *SIMULATED, "--vary", "chat_template=a,b"], 2, ["chat_template", "API server", "--set"]),
        (["--goal", "throughput", *SIMULATED, "--vary", "api_key=a,b"], 2, ["api_key", "VLLM_API_KEY", "secret"]),
        (["--goal", "throughput", *SIMULATED, "--set", "max_num_batched_tokens=-1"], 2, ["max_num_batched_tokens -1"]),
        (["--goal", "throughput", *SIMULATED, "--set", "gpu_memory_utilization=1.5"], 2, ["1.5", "(0, 1]"]),
        (
            ["--goal", "throughput", "--simulate", "h200", "--", "vllm", "serve", MODEL, "--gpu-memory-utilization", "0"],
            2,
            ["gpu_memory_utilization 0"],
        ),
        (["--goal", "throughput", *SIMULATED, "--data-dir", "/proc/no"], 3, ["/proc/no", "--data-dir", "leave it out"]),
        (["--goal", "throughput", *SIMULATED, "--acceptance-length", "0"], 2, ["--acceptance-length 0", "at least 1"]),
        (["--goal", "throughput", *SIMULATED, "--acceptance-length", "nan"], 2, ["--acceptance-length nan"]),
        (["--goal", "throughput", *SIMULATED, "--set", "max_num_seqs"], 2, ["max_num_seqs", "NAME=VALUE"]),
        (["--goal", "throughput", *SIMULATED, "--vary", "scheduling_policy=lof"], 2, ["lof", "fcfs"]),
        (["--goal", "throughput", *SIMULATED, "--set", "max_model_len=512"], 2, ["512", "max_model_len", "tokens"]),
        (["--goal", "throughput", *SIMULATED, "--workload", "chatt"], 2, ["chatt", "chat"]),
        (["--goal", "throughput", *SIMULATED, "--rate", "5"], 2, ["closed loop", "--goal latency"]),
        (["--goal", "latency", *SIMULATED, "--rate", "-1"], 2, ["-1", "--rate"]),
        (["--goal", "latency", *SIMULATED, "--rate", "nan"], 2, ["nan", "--rate"]),
        (["--goal", "throughput", *SIMULATED, "--concurrency", "0"], 2, ["0", "--concurrency"]),
        (["--goal", "throughput", *SIMULATED, "--concurrency", "99999999999"], 2, ["99999999999", "65,536", "auto"]),
        (["--goal", "latency", *SIMULATED, "--rate", "1e12"], 2, ["1e+12", "100,000"]),
        (["--goal", "throughput", *SIMULATED, "--acceptance-length", "nan"], 2, ["acceptance"]),
        (["--goal", "throughput", *SIMULATED, "--acceptance-length", "-1"], 2, ["acceptance"]),
        (["--goal", "throughput", *SIMULATED, "--python", "."], 2, ["--python .", "no program"]),
        (["--goal", "throughput", *SIMULATED, "--python", "/etc/passwd"], 2, ["/etc/passwd", "no program"]),
        (["--goal", "throughput", *SIMULATED, "--set", "max_num_seqs=1", "--set", "max-num-seqs=2"], 2, ["twice", "1", "2"]),
        (["--goal", "throughput", *SIMULATED, "--study", "../up"], 2, ["../up", "--study up"]),
        (["--goal", "throughput", *SIMULATED, "--dry-run", "--study", "a b"], 2, ["a b", "--study a-b"]),
        (["--goal", "throughput", *SIMULATED, "--limit", "p95_tft_s<=0.5"], 2, ["p95_tft_s", "p95_ttft_s"]),
        (["--goal", "throughput", *SIMULATED, "--limit", "p95_ttft_s<=0.5parsec"], 2, ["parsec"]),
        (["--goal", "throughput", *SIMULATED, "--min-success", "0.9", "--limit", "success_rate>=0.95"], 2, ["--min-success"]),
        (
            ["--goal", "latency", *SIMULATED, "--limit", "mean_e2e_s<=0.001"],
            2,
            ["mean_e2e_s<=0.001", "physical floor of", "GB of"],
        ),
        (["--goal", "latency", *SIMULATED, "--dry-run", "--limit", "p95_ttft_s<=0.1ms"], 2, ["physical floor", "bandwidth"]),
        (["--goal", "goodput", *SIMULATED, "--limit", "tpot_s<=0.01ms"], 2, ["tpot_s", "physical floor"]),
        (["--goal", "throughput", *SIMULATED, "--trials", "1"], 2, ["--trials 1", "baseline", "--trials 2"]),
        (["--goal", "throughput", *SIMULATED, "--dry-run", "--time-budget", "10m"], 2, ["10 min", "confirmation", "--rounds"]),
        (["--goal", "throughput", "--goal", "throughput", *SIMULATED], 2, ["two different goals", "--limit"]),
        (["--goal", "throughput", "--goal", "latency", "--metric", "p95_ttft_s", *SIMULATED], 2, ["--metric", "which of them"]),
        (["--goal", "throughput", *SIMULATED, "--engine", "tgi"], 2, ["tgi", "server"]),
        (["--goal", "throughput", *SIMULATED, "--sampler", "oracle"], 2, ["oracle", "gp"]),
        (["--goal", "throughput", *SIMULATED, "--mode", "fastest"], 2, ["fastest", "balanced"]),
        (["--goal", "throughput", *SIMULATED, "--space", "absent.toml"], 2, ["absent.toml"]),
        (["--goal", "throughput", *SIMULATED, "--seed-from", "nothing-1"], 3, ["studies.db", "no"]),
        (["--goal", "throughput", *SIMULATED, "--storage", "nonsense://x"], 3, ["nonsense"]),
        (["--goal", "throughput", *SIMULATED, "--storage", "sqlite:////proc/no/studies.db"], 3, ["/proc/no"]),
        (["--goal", "throughput", *SIMULATED, "--", "serve", MODEL], 2, ["serve", "vllm serve"]),
        (["--goal", "throughput", "--model", "A/b", "--simulate", "h200", "--", "vllm", "serve", MODEL], 2, ["two models"]),
        (
            ["--goal", "throughput", *SIMULATED, "--", "vllm", "serve", "--num-scheduler-steps", "8"],
            2,
            ["--num-scheduler-steps"],
        ),
        (["--goal", "throughput", *SIMULATED, "--set", "api_key=sk-1234567890"], 2, ["VLLM_API_KEY"]),
        (["--goal", "throughput", *SIMULATED, "--trials", "0"], 2, ["--trials"]),
        (["--goal", "throughput", *SIMULATED, "--window", "soon"], 2, ["soon", "90s"]),
        (["--goal", "throughput", *SIMULATED, "--window", "-5"], 2, ["window"]),
        (["--goal", "throughput", "--model", MODEL, "--python", "/bin/true"], 3, ["/bin/true", "--simulate"]),
    ],
)
def test_says_what_is_wrong_before_anything_starts(words: list[str], code: int, named: list[str], tmp_path: Path) -> None:
    exit_code, message = run("search", *words)
    assert (exit_code, [word for word in named if word not in message]) == (code, []), message
    assert "Traceback" not in message
    assert "sk-1234567890" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (None, "config.json"),
        ('{"architectures": ["Qwen3ForCausalLM"], "hidden', "truncated"),
        ("[1, 2]", "not an object"),
        (json.dumps({"architectures": ["NewThing"], "model_type": "new"}), "cannot be simulated"),
    ],
)
def test_a_directory_that_is_no_model(config: str | None, named: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    if config is not None:
        (model / "config.json").write_text(config)
    exit_code, message = run("search", "--goal", "throughput", "--model", str(model), "--simulate", "h200")
    assert exit_code == 2
    assert named in message
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_space_is_of_a_goal_that_there_is() -> None:
    code, said = run("space", *SIMULATED, "--goal", "thruput")
    assert code == 2
    assert "thruput" in said
    assert "throughput" in said


@pytest.mark.parametrize("verb", [("search", "--goal", "throughput"), ("space",), ("bench",)])
@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"model_type": "new", "text": {"hidden_size": 64}}, "the architecture: model_type 'new'"),
        ({"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9}, "hidden_size"),
        ({"model_type": "qwen3", "text_config": {"num_hidden_layers": "2"}}, "num_hidden_layers: num_hidden_layers = '2'"),
        ({"model_type": "qwen3", "num_hidden_layers": 10**9}, "num_hidden_layers"),
    ],
)
def test_a_simulation_says_what_of_the_shape_it_lacks(
    verb: tuple[str, ...], config: dict[str, object], missing: str, tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    told = ["--no-memory-check"] if verb[0] != "bench" else []
    for more in ([], told):
        code, said = run(*verb, "--model", "./m", "--simulate", "h200", *more)
        assert code == 2
        words = (
            "./m cannot be simulated",
            "computed from the model's shape",
            f"cannot derive {missing}",
            "leave --simulate out",
        )
        for part in words:
            assert part in said
        assert ("leaves out the filter, not the simulation" in said) == bool(more)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_no_gpu_and_no_simulation_names_the_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subject, "vllm_version", lambda python: "0.33.0")
    monkeypatch.setattr(subject.gpus, "inventory", lambda: ())
    exit_code, message = run("search", "--goal", "throughput", "--model", MODEL, "--python", sys.executable)
    assert exit_code == 3
    assert "no NVIDIA GPU" in message
    assert "--simulate h200" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "meant"), [("qwen3-8b", "Qwen/Qwen3-8B"), ("Qwen3-8", "Qwen/Qwen3-8B"), ("nothing-like-it", "Qwen/Qwen3-8B")]
)
def test_a_model_without_its_organisation_is_told_whole(typed: str, meant: str) -> None:
    code, said = run("search", "--goal", "throughput", "--model", typed, "--simulate", "h200")
    assert code == 2
    assert f"--model {meant}" in said
