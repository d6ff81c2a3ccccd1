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
        ["--", "vllm", "serve", "Qwen/Qwen3-8B", "--otlp-traces-endpoint", f"https://me:{TYPED}@h/x"],
        ["--", "vllm", "serve", "Qwen/Qwen3-8B", "--otlp-traces-endpoint", f"https://h/x?api_key={TYPED}"],
        ["--", "vllm", "serve", "Qwen/Qwen3-8B", "-cc.remote_password", TYPED],
        ["--", f"REDIS_URL=redis://:{TYPED}@h", "vllm", "serve", "Qwen/Qwen3-8B"],
        ["--", "vllm", "serve", "Qwen/Qwen3-8B", "--chat-template", ENVIRONMENT["MY_WEBHOOK_SECRET"]],
        ["--model", "Qwen/Qwen3-8B", "--set", f"env:LMCACHE_REMOTE_PASS={TYPED}"],
        ["--model", "Qwen/Qwen3-8B", "--set", f"env:REDIS_URL=redis://:{TYPED}@h"],
        ["--model", "Qwen/Qwen3-8B", "--vary", f"env:REDIS_URL=redis://h,redis://:{TYPED}@h"],
        ["--model", "Qwen/Qwen3-8B", "--vary", f'env:X_PASS=["0","{TYPED}"]'],
        ["--from", "script.sh"],
        ["--model", "Qwen/Qwen3-8B", "--space", "mine.toml"],
    ],
)
def test_a_secret_as_a_value_is_refused_and_not_repeated(words: list[str], tmp_path: Path) -> None:
    Path("script.sh").write_text(f"export REMOTE_PASS={TYPED}\nvllm serve Qwen/Qwen3-8B\n")
    Path("mine.toml").write_text(f'[parameters."env:X_PASS"]\nvalues = ["0", "{TYPED}"]\nwhy = "x"\n')
    done = CliRunner().invoke(app, ["search", "--goal", "throughput", "--simulate", "h200", *words])
    assert done.exit_code == 2
    assert TYPED not in done.output
    assert ENVIRONMENT["MY_WEBHOOK_SECRET"] not in done.output
    assert "secret" in done.output
    assert not (tmp_path / "studies.db").exists()


SHORT = ["search", "--goal", "throughput", "--simulate", "h200", "--trials", "2", "--rounds", "0", "--soak", "0s"]
SHORT += ["--concurrency", "8", "--window", "5", "--requests", "60"]
ENDPOINT = "https://collector.example/x?tenant=production"


def test_an_older_study_that_lost_a_secret_is_neither_resumed_nor_exported_as_the_command(tmp_path: Path) -> None:
    run(*SHORT, "--", "vllm", "serve", "Qwen/Qwen3-8B", "--otlp-traces-endpoint", ENDPOINT)
    assert ENDPOINT in run("export")
    database = sqlite3.connect(tmp_path / "studies.db")
    placeholder = ENDPOINT.replace("collector", "[removed]@collector")
    for table in ("study_user_attributes", "trial_user_attributes"):
        database.execute(f"update {table} set value_json = replace(value_json, ?, ?)", (ENDPOINT, placeholder))
    database.commit()
    database.close()
    shown = " ".join(run("show").split())
    assert "--otlp-traces-endpoint: a secret was removed here" in shown
    assert "put it back before you use one" in shown
    for words in (["resume", "--trials", "3"], *(["export", "--format", form] for form in ("shell", "yaml", "json"))):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2, words
        assert "https://[removed]" not in done.stdout
        assert "secret" in done.stderr
        assert "otlp" in done.stderr
        assert "vopt search" in done.stderr


def test_a_script_of_ours_is_read_back_with_its_variables(tmp_path: Path) -> None:
    """The same baseline: what was fixed by --set is in the script, and the script is the command in use."""
    run(*SHORT, "--model", "Qwen/Qwen3-8B", "--set", "env:VLLM_USE_V2_MODEL_RUNNER=0", "--set", "env:LMCACHE_CHUNK=7")
    run("export", "-o", "first.sh")
    Path("mine.sh").write_text("cd /srv/app\n" + Path("first.sh").read_text())
    said = run(*SHORT, "--from", "mine.sh")
    assert "mine.sh: left out, as no part of the command or of its environment: cd /srv/app" in said
    (second, _) = sorted(list_studies(f"sqlite:///{tmp_path / 'studies.db'}"), key=lambda study: study.name, reverse=True)
    own = {"LMCACHE_CHUNK": "7", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert second.setup["environment"]["variables"] == {**own, "VLLM_API_KEY": "[removed]"}
    run("export", "-o", "second.sh")
    commands = [
        [row for row in Path(name).read_text().splitlines() if not row.startswith("# ")] for name in ("first.sh", "second.sh")
    ]
    assert commands[0] == commands[1]


def test_a_secret_that_engines_inherit_is_a_name_in_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts the script has to set it: with a placeholder as its value it would start something else."""
    monkeypatch.setenv("VLLM_REMOTE", f"redis://:{TYPED}@h")
    run(*SHORT, "--model", "Qwen/Qwen3-8B")
    script = run("export")
    assert ': "${VLLM_REMOTE:?' in script
    assert "removed" not in script
    assert "VLLM_REMOTE" in run("export", "--format", "yaml")
    assert [name for name, body in written(tmp_path) if TYPED.encode() in body] == []


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "VLLM_PORT"])
def test_what_a_search_decides_for_each_start_is_left_out_by_name(name: str, tmp_path: Path) -> None:
    Path("mine.sh").write_text(f"export {name}=5\nvllm serve Qwen/Qwen3-8B\n")
    assert f"{name} of the command is left out" in run(*SHORT, "--from", "mine.sh")
    (study,) = list_studies(f"sqlite:///{tmp_path / 'studies.db'}")
    assert name not in study.setup["environment"]["variables"]
