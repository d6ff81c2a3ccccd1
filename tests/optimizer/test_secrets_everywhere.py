"""A token in the environment and one in an argument appear in nothing that a search writes, prints or shows."""

from __future__ import annotations

import os
import sqlite3
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vopt.optimizer.cli import app
from vopt.optimizer.dashboard import DashboardServer
from vopt.optimizer.report.redaction import known_secrets
from vopt.optimizer.study import list_studies

ENVIRONMENT = {
    "HF_TOKEN": "hf_" + "Zq7" * 11,
    "VLLM_API_KEY": "plain-words-that-look-like-nothing",
    "MY_WEBHOOK_SECRET": "another-quiet-value-0815",
}
TYPED = "sk-" + "typed0Hook" * 3
SECRETS = (*ENVIRONMENT.values(), TYPED)
SEARCH = [
    *("search", "--goal", "throughput", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--trials", "3"),
    *("--rounds", "1", "--soak", "5s", "--concurrency", "8", "--window", "5", "--requests", "60"),
    *("--notify", f"true --header 'Authorization: Bearer {TYPED}'"),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.stderr
    return done.stdout + done.stderr


def written(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield str(path), path.read_bytes()


def answers(url: str, study: int) -> Iterator[tuple[str, bytes]]:
    """What the dashboard sends to a browser: the list, the study with its notes, and every artifact."""
    for path in ("api/studies", f"api/studies/{study}?after=0", "api/meta"):
        with urllib.request.urlopen(url + path, timeout=60) as answer:
            yield path, answer.read()


def test_no_secret_in_database_logs_page_script_notes_or_dashboard(tmp_path: Path) -> None:
    shown = {"search": run(*SEARCH)}
    shown["show"], shown["json"] = run("show"), run("show", "--json")
    for form in ("shell", "yaml", "json"):
        shown[form] = run("export", "--format", form, "-o", f"serve.{form}")
    shown["report"] = run("report", "-o", "page.html")
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    (study,) = list_studies(url)
    secrets = known_secrets(os.environ)
    server = DashboardServer(url, lambda copy: list_studies(copy), port=0, secrets=secrets)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        number = sqlite3.connect(tmp_path / "studies.db").execute("select study_id from studies").fetchone()[0]
        served = list(answers(server.url, number))
        copies = list(written(Path(server._folder.name)))
    finally:
        server.close()
        thread.join()
    assert any(b"qwen3-8b" in body for _, body in served)
    assert any(name.endswith(".db") for name, _ in copies)
    assert study.recommendation is not None
    files = list(written(tmp_path))
    assert {Path(name).name for name, _ in files} >= {
        "studies.db",
        "page.html",
        "serve.shell",
        "serve.json",
        "records.jsonl.gz",
    }
    everything = [*((name, text.encode()) for name, text in shown.items()), *served, *copies, *files]
    leaks = [(name, secret) for name, body in everything for secret in SECRETS if secret.encode() in body]
    assert leaks == []


@pytest.mark.parametrize(
    "words",
    [
        ["--", "vllm", "serve", "Qwen/Qwen3-8B", "--api-key", TYPED],
        ["--", "vllm", "serve", "Qwen/Qwen3-8B", f"--api-key={TYPED}"],
        ["--", "vllm", "serve", "Qwen/Qwen3-8B", "--hf-token", TYPED],
        ["--model", "Qwen/Qwen3-8B", "--set", f"api_key={TYPED}"],
        ["--model", "Qwen/Qwen3-8B", "--set", f"env:OPENAI_API_KEY={TYPED}"],
        ["--model", "Qwen/Qwen3-8B", "--set", f'model_loader_extra_config={{"token": "{TYPED}"}}'],
        ["--model", "Qwen/Qwen3-8B", "--set", f'model_loader_extra_config={{"a": {{"api_key": "{TYPED}"}}}}'],
        ["--", "vllm", "serve", "Qwen/Qwen3-8B", "--model-loader-extra-config", f'{{"token": "{TYPED}"}}'],
    ],
)
def test_a_secret_as_a_value_is_refused_and_not_repeated(words: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["search", "--goal", "throughput", "--simulate", "h200", *words])
    assert done.exit_code == 2
    assert TYPED not in done.output
    assert not (tmp_path / "studies.db").exists()
