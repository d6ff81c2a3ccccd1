"""The command that you paste is the command that was measured: the exported script starts the real server and it answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vopt.optimizer.engine.kin import descendants
from vopt.optimizer.engine.ports import free_port
from vopt.optimizer.study import read_study

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

SET = ("load_format=dummy", "enforce_eager=true", "gpu_memory_utilization=0.08", "max_model_len=2048")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, tiny_models: tuple[Path, Path], engine_cache: Path) -> Path:
    """The folder of a study whose every start was a served command."""
    folder = tmp_path_factory.mktemp("exported")
    words = [word for setting in SET for word in ("--set", setting)]
    vopt(
        folder,
        engine_cache,
        *("search", "--goal", "throughput", "--model", str(tiny_models[0]), *words, "--vary", "max_num_seqs=64,256"),
        *("--keep", "max_num_batched_tokens", "--trials", "2", "--rounds", "0", "--soak", "0", "--no-guard"),
        *("--engine", "server"),
        *("--workload", "throughput", "--concurrency", "4", "--window", "4", "--requests", "60"),
    )
    return folder


def vopt(folder: Path, cache: Path, *words: str) -> str:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "vopt.optimizer", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@contextlib.contextmanager
def running(script: Path, folder: Path, cache: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The script, as a user starts it, on a port that is free here; ended as Ctrl-C ends it."""
    places = folder / "bin"
    places.mkdir()
    (places / "vllm").write_text(f'#!/bin/sh\nexec {sys.executable} -m vllm.entrypoints.cli.main "$@"\n')
    (places / "vllm").chmod(0o755)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PATH": f"{places}:{os.environ['PATH']}"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "serve.log").open("wb") as log:
        server = subprocess.Popen(
            [str(script), "--port", str(port)], env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield server
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait(10)
                raise


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode() if body else None,
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_what_is_exported_was_measured(searched: Path, engine_cache: Path) -> None:
    study = read_study(f"sqlite:///{searched / 'studies.db'}")
    exported = json.loads(vopt(searched, engine_cache, "export", "--format", "json"))["argv"]
    measured = [trial for trial in study.trials if trial.metrics is not None]
    assert measured
    assert all(trial.served for trial in measured)
    assert exported in [list(trial.argv) for trial in measured]
    assert exported[-2:] == ["--host", "127.0.0.1"]
    # The process itself said what it was given: all but the port is in the recorded words.
    for trial in measured:
        log = (Path(trial.directory) / "engine.log").read_text()
        said = next(line for line in log.splitlines() if "non-default args" in line)
        assert "127.0.0.1" in said
        assert "max_model_len': 2048" in said


def test_the_exported_script_serves(searched: Path, engine_cache: Path, tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    vopt(searched, engine_cache, "export", "-o", str(script))
    port = free_port()
    with running(script, tmp_path, engine_cache, port) as server:
        deadline = time.monotonic() + 300
        while True:
            assert server.poll() is None, (tmp_path / "serve.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "the server was not ready in five minutes"
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                models = ask(port, "/v1/models")
                break
            time.sleep(1)
        assert [model["id"] for model in models["data"]] == [str(tiny_models[0])]
        body = {"model": str(tiny_models[0]), "prompt": list(range(20, 84)), "max_tokens": 5, "ignore_eos": True}
        answer = ask(port, "/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 5
    assert descendants(os.getpid()) == ()
