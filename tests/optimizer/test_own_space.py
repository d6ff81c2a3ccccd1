"""``--space FILE``: a file of the user's builds on the built-in space, and says where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from typer.testing import CliRunner

from vopt.optimizer.cli import app
from vopt.optimizer.environment import find_model
from vopt.optimizer.errors import EnvironmentLacks, SearchSpaceError
from vopt.optimizer.space_of import user_space

OWN = """
[keep.max_num_seqs]
values = [256, 512]
why = "our clients never have more than 512 requests open"

[[seeds]]
set = { max_num_batched_tokens = 16384 }
why = "what the last study found"
"""


def test_a_file_narrows_what_the_package_declares(tmp_path: Path) -> None:
    path = tmp_path / "my-space.toml"
    path.write_text(OWN)
    done = CliRunner().invoke(app, ["space", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--space", str(path)])
    assert done.exit_code == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "256, 512: our clients never have more than 512 requests open" in text
    assert "max_num_batched_tokens=16384: what the last study found" in text


def test_what_only_the_server_takes_is_named_as_that(tmp_path: Path) -> None:
    words = ["--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--set", "port=9000", "--set", 'served_model_name=["a b"]']
    done = CliRunner().invoke(app, ["space", *words])
    assert "--port 9000: for the server in front of the engine: in served and exported commands, not in-process" in done.stdout
    assert 'served_model_name=["a b"]' in done.stdout
    document = json.loads(CliRunner().invoke(app, ["space", *words, "--json"]).stdout)
    assert document["front_end"] == ["--port", "9000"]
    found = CliRunner().invoke(app, ["search", "--goal", "throughput", "--dry-run", *words])
    assert "not in-process" in found.stderr


def test_a_name_that_nobody_declares_is_named(tmp_path: Path) -> None:
    path = tmp_path / "my-space.toml"
    path.write_text(OWN.replace("max_num_seqs", "max_num_sekvs"))
    with pytest.raises(SearchSpaceError, match=r"max_num_sekvs.*near: .*max_num_seqs"):
        user_space(path)


@pytest.mark.parametrize("line", ["mode = 'throughput'", "bare = { performance_mode = 'throughput' }"])
def test_what_only_the_packages_own_files_say_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "my-space.toml"
    path.write_text(line + "\n" + OWN)
    with pytest.raises(SearchSpaceError, match="choose it by --mode"):
        user_space(path)


def test_a_model_that_is_only_not_cached_is_not_said_to_lack_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(name: str, file: str, revision: str | None = None) -> str:
        raise LocalEntryNotFoundError("the hub cannot be reached and nothing is cached")

    monkeypatch.setattr("vopt.optimizer.hub.hf_hub_download", away)
    with pytest.raises(EnvironmentLacks, match="not cached here and the hub cannot be reached"):
        find_model("Foo/Bar-9000")
