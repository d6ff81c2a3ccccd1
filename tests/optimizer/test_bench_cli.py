"""``vopt bench`` and ``vopt workload`` through the command line: bad input, simulated engines, servers on real sockets."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records_file import read_records
from support.fault_server import DONE, ERROR, HEAD, LAST_CHUNK, Script, delta, good, status, token, usage
from support.in_thread import model_server, threaded
from support.tiny_models import write_tiny_models
from typer.testing import CliRunner, Result

from vopt.optimizer import bench_run
from vopt.optimizer.cli import app
from vopt.optimizer.load.workload_files import read_workload
from vopt.optimizer.locks import GPU_LOCKS, lock_gpus
from vopt.optimizer.subject import find_subject

SIMULATED = ("bench", "--model", "Qwen/Qwen3-8B", "--simulate", "h200")
KEY = "sk-do-not-show-this-key-anywhere"


def vopt(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_models(tmp_path_factory.mktemp("tiny"))[0]


BAD = [
    (["--rate", "0"], "rate"),
    (["--rate", "-1"], "rate"),
    (["--rate", "nan"], "rate"),
    (["--rate", "inf"], "rate"),
    (["--concurrency", "0"], "whole number above 0"),
    (["--concurrency", "many"], "whole number above 0"),
    (["--concurrency", "64", "--rate", "2"], "either a closed loop"),
    (["--concurrency", "99999999"], "at most 65,536"),
    (["--window", "0"], "longer than 0"),
    (["--window", "9999999h"], "at most a week"),
    (["--client-processes", "2"], "loaded over HTTP"),
    (["--requests", "2000000"], "at most 1,000,000"),
    (["--repeat", "99"], "at most"),
    (["--arrivals", "never"], "poisson"),
    (["--arrivals", "constant"], "needs a rate"),
    (["--arrivals", "closed", "--rate", "3"], "has no --rate"),
    (["--arrivals", "replay"], "not every request"),
    (["--slo", "speed<=3"], "no such metric"),
    (["--slo", "ttft_s<=3%"], "not in %"),
    (["--slo", "ttft_s<=3 fortnights"], "not a number"),
    (["--slo", "ttft_s"], "NAME<=VALUE"),
    (["--slo", "ttft_s<=0"], "above zero"),
    (["--slo", "p95_ttft_s<=0.5"], "every request"),
    (["--slo", "ttft_s<=1", "--slo", "ttft_s<=2"], "twice"),
    (["--workload", "chatt"], "chat"),
    (["--workload", "long-context"], "max_model_len", ["--set", "max_model_len=4096"]),
    (["--gate", "3%"], "--study"),
    (["--endpoint", "chat"], "--url"),
    (["--tokenizer", "."], "--url"),
    (["--records", "."], "directory"),
    (["--set", "no_such_argument=1"], "no_such_argument"),
    (["--set", "max_model_len=16"], "max_model_len"),
    (["--engine", "warp"], "warp"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: " ".join(case[0]))
def test_bad_input_ends_before_anything_starts(case: tuple[Any, ...]) -> None:
    words, expected, *more = case
    result = vopt(*SIMULATED, *words, *(more[0] if more else ()))
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert "start:" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "it is empty"),
        ("not json\n", "line 1: not JSON"),
        ('{"prompt": 5}\n', "line 1"),
        ('[{"conversations": []}]', "line 1"),
        ('{"format": "vopt-workload", "format_version": 99}', "version 99"),
        ('{"prompt": "hi", "output_tokens": -3}\n', "line 1"),
    ],
)
def test_a_malformed_workload_file(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text(text)
    result = vopt(*SIMULATED, "--workload", "w.jsonl")
    assert result.exit_code == 2, result.output
    assert expected in result.stderr


@pytest.mark.parametrize(
    "url",
    ["8000", "ftp://127.0.0.1", "http://", "http://user:pw@127.0.0.1:1", "http://127.0.0.1:99999", "http://127.0.0.1:1/?a=1"],
)
def test_a_malformed_url(url: str) -> None:
    assert vopt("bench", "--url", url).exit_code == 2


@pytest.mark.parametrize("words", [("--set", "a=1"), ("--simulate", "h200"), ("--gpus", "0"), ("--", "--max-num-seqs", "3")])
def test_engine_options_do_not_fit_a_running_server(words: tuple[str, ...]) -> None:
    result = vopt("bench", "--url", "http://127.0.0.1:9", *words)
    assert result.exit_code == 2
    assert "runs already" in result.stderr


def test_one_simulated_configuration_as_json(tmp_path: Path) -> None:
    words = ("--concurrency", "16", "--window", "10s", "--repeat", "2", "--records", "r.jsonl.gz", "--slo", "ttft_s<=200ms")
    result = vopt(*SIMULATED, *words, "--json", "--", "--max-num-seqs", "32")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["model_id"], document["max_concurrency"]) == ("Qwen/Qwen3-8B", 16)
    assert document["request_goodput"] > 0
    ours = document["vopt"]
    assert ours["simulated"] is True
    assert ours["command"] == ["vllm", "serve", "Qwen/Qwen3-8B", "--max-num-seqs", "32", "--host", "127.0.0.1"]
    assert (ours["repeat"]["starts"], ours["repeat"]["loads"], ours["repeat"]["supports_comparison"]) == (2, 3, True)
    assert ours["metrics"]["prefix_hit_rate"] < 0.01
    assert [Path(path).name for path in ours["records"]] == ["r.jsonl.gz", "r-2.jsonl.gz", "r-3.jsonl.gz"]
    assert len(read_records(tmp_path / "r.jsonl.gz")) == document["num_prompts"]


def test_probes_for_a_concurrency_leave_nothing_in_the_prefix_cache() -> None:
    result = vopt(*SIMULATED, "--window", "5s", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["max_concurrency"] in (64, 128, 256, 512)
    assert document["vopt"]["metrics"]["prefix_hit_rate"] < 0.01
    assert "unexpected_prefix_hits" not in document["vopt"]["flags"]


def test_an_open_loop_as_text() -> None:
    result = vopt(*SIMULATED, "--rate", "4", "--arrivals", "constant", "--window", "20s")
    assert result.exit_code == 0, result.output
    for words in ("SIMULATED", "constant arrivals, 4 requests/s", "mean TTFT", "95 % interval"):
        assert words in result.stdout


def test_a_start_that_fails_shows_the_end_of_the_log() -> None:
    result = vopt(*SIMULATED, "--set", "gpu_memory_utilization=0.1")
    assert result.exit_code == 4
    assert "kv_too_small during start" in result.stderr
    assert "  | " in result.stderr


def test_a_running_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with threaded(model_server()) as server:
        result = vopt("bench", "--url", server.url + "/v1", "--requests", "24", "--records", "r.jsonl.gz", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["completed"], document["failed"], document["model_id"]) == (24, 0, "tiny")
    assert document["vopt"]["engine"]["vllm_version"] == "0.32.0"
    posts = [entry for entry in server.requests if entry[0] == "POST"]
    assert len(posts) == 24
    assert {entry[2]["authorization"] for entry in server.requests} == {f"Bearer {KEY}"}
    assert all(1000 <= number < 30_000 for entry in posts for number in entry[3]["prompt"])
    assert all(entry[3]["ignore_eos"] for entry in posts)
    assert any("--tokenizer DIR gives text" in note for note in document["vopt"]["notes"])
    assert KEY not in result.output
    assert len(read_records(tmp_path / "r.jsonl.gz")) == 24


def every_third_fails() -> Any:
    count = 0

    def completion(body: dict[str, Any]) -> Script:
        nonlocal count
        count += 1
        return [HEAD, token(), ERROR, DONE, LAST_CHUNK] if count % 3 == 0 else good(body["max_tokens"], prompt_tokens=3)

    return completion


def test_failures_are_shown_by_kind_with_their_first_message() -> None:
    with threaded(model_server(every_third_fails())) as server:
        result = vopt("bench", "--url", server.url, "--requests", "24", "--concurrency", "8")
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if "stream_error" in line)
    assert row.split()[:2] == ["stream_error", "8"]
    assert "the engine broke" in row
    assert "16 and 8 in the whole run" in result.stdout
    assert "of the requests succeeded: latencies are over those alone" in result.stdout


def test_a_server_that_refuses_everything() -> None:
    def refuse(body: dict[str, Any]) -> Script:
        return [status("500 Internal Server Error", f'{{"error": {{"message": "no way, {KEY}"}}}}')]

    with threaded(model_server(refuse)) as server:
        result = vopt("bench", "--url", server.url, "--requests", "24", "--concurrency", "24")
    assert result.exit_code == 4, result.output
    assert "http_status" in result.stderr
    assert "no way" in result.stderr
    assert KEY not in result.output


def test_which_model() -> None:
    with threaded(model_server(models=("one", "two"))) as server:
        unnamed = vopt("bench", "--url", server.url, "--requests", "8")
        foreign = vopt("bench", "--url", server.url, "--requests", "8", "--model", "three")
        named = vopt("bench", "--engine", server.url, "--requests", "8", "--model", "two")
    assert (unnamed.exit_code, foreign.exit_code, named.exit_code) == (2, 2, 0), named.output
    assert "one, two" in unnamed.stderr
    assert "not three" in foreign.stderr
    assert {entry[3]["model"] for entry in server.requests if entry[0] == "POST"} == {"two"}


def test_nobody_there_and_nobody_let_in() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = vopt("bench", "--url", f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert (nobody.exit_code, "is the server up" in nobody.stderr) == (3, True)
    with threaded(lambda path, body: [status("401 Unauthorized", "{}")]) as server:
        locked = vopt("bench", "--url", server.url)
    assert (locked.exit_code, "--api-key-file" in locked.stderr) == (3, True)


def test_a_request_longer_than_the_server_takes() -> None:
    with threaded(model_server()) as server:
        result = vopt("bench", "--url", server.url, "--workload", "long-context")
    assert result.exit_code == 2
    assert "8192" in result.stderr
    assert not any(entry[0] == "POST" for entry in server.requests)


def test_a_chat_endpoint_gets_text(tiny_model: Path) -> None:
    def chat(body: dict[str, Any]) -> Script:
        parts = [delta(role="assistant"), delta(content="hi"), delta("stop", content=" there")]
        return [HEAD, *parts, usage(2, 40), DONE, LAST_CHUNK]

    with threaded(model_server(chat)) as server:
        without = vopt("bench", "--url", server.url, "--endpoint", "chat")
        result = vopt(
            *("bench", "--url", server.url, "--endpoint", "chat", "--tokenizer", str(tiny_model), "--requests", "8", "--json")
        )
    assert without.exit_code == 2
    assert "--tokenizer DIR" in without.stderr
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["completed"], document["total_output_tokens"], document["endpoint_type"]) == (8, 16, "openai-chat")
    texts = [entry[3]["messages"][0]["content"] for entry in server.requests if entry[0] == "POST"]
    assert len(set(texts)) == 8


def test_another_make_of_server_gets_openai_fields_only() -> None:
    with threaded(model_server(version=None, owner="somebody")) as server:
        result = vopt("bench", "--url", server.url, "--requests", "8")
    assert result.exit_code == 0, result.output
    assert "no vLLM" in result.stderr
    bodies = [entry[3] for entry in server.requests if entry[0] == "POST"]
    assert not any({"ignore_eos", "top_k", "min_p"} & set(body) for body in bodies)


def test_a_replay_sends_at_the_recorded_times(tmp_path: Path) -> None:
    lines = [{"timestamp": 0.1 * number, "prompt_tokens": 20, "output_tokens": 4} for number in range(12)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with threaded(model_server()) as server:
        words = ("--arrivals", "replay", "--workload", "log.jsonl", "--records", "r.jsonl.gz", "--json")
        result = vopt("bench", "--url", server.url, *words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["completed"] == 12
    scheduled = sorted(record.scheduled_s for record in read_records(tmp_path / "r.jsonl.gz"))
    assert scheduled == pytest.approx([0.1 * number for number in range(12)])


def pages() -> Iterator[str]:
    for n in (100, 400):
        rows = [(name, what) for name in ("request_prompt_tokens", "request_generation_tokens") for what in (n,)]
        lines = [f'vllm:{name}_bucket{{le="{le}"}} {what}' for name, what in rows for le in ("100", "+Inf")]
        lines += [f"vllm:{name}_sum {50 * what}\nvllm:{name}_count {what}" for name, what in rows]
        lines += [f"vllm:num_requests_running {n / 100}", "vllm:num_requests_waiting 0"]
        yield "\n".join(lines)


def test_a_workload_from_the_metrics_of_a_server(tmp_path: Path) -> None:
    with threaded(model_server(pages=pages())) as server:
        result = vopt("workload", "--from-metrics", f"{server.url}/metrics", "--for", "0.2s", "-o", "out/mine.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == "out/mine.json"
    assert "300 requests" in result.stdout
    path = tmp_path / "out" / "mine.json"
    workload = read_workload(path, None).workload
    assert (workload.name, round(workload.lengths.mean[0])) == ("mine", 50)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), 2),
        (("--from-metrics", "nonsense"), 2),
        (("--from-metrics", "http://127.0.0.1:9", "--for", "0"), 2),
        (("--from-metrics", "http://127.0.0.1:9", "-o", "."), 2),
        (("--from-metrics", "http://127.0.0.1:9", "--for", "1s"), 3),
    ],
)
def test_a_workload_that_cannot_be_had(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    result = vopt("workload", *words)
    assert result.exit_code == code, result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("GPU of a bench in use by a search")
def test_a_bench_waits_for_no_gpu_and_shares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    uuid = f"GPU-of-a-test-{os.getpid()}"

    def with_a_gpu(*words: Any, **more: Any) -> Any:
        subject = find_subject(*words, **more)
        return replace(subject, machine=replace(subject.machine, uuids=(uuid,)))

    monkeypatch.setattr(bench_run, "find_subject", with_a_gpu)
    words = (*SIMULATED, "--concurrency", "4", "--window", "2s")
    (lock,) = lock_gpus([uuid], "a search of x")
    try:
        result = vopt(*words)
        assert result.exit_code == 3, result.output
        assert "a search of x" in result.output
        lock.release()
        assert vopt(*words).exit_code == 0
        lock.acquire("the bench has given it back")
    finally:
        lock.release()
        (GPU_LOCKS / f"{uuid}.lock").unlink()
