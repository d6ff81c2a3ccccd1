"""What the user typed, and where keys may come from."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.target import checked_rate, parse_target, read_api_key


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://host/v1", "http://host:80"),
        ("https://host/openai/v1/chat/completions", "https://host:443/openai"),
        ("http://[::1]:8000/v1/completions", "http://[::1]:8000"),
    ],
)
def test_urls(url: str, base: str) -> None:
    assert parse_target(url, "m").base_url == base


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host:0",
        "http://u:p@host",
        "http://host/?a=b",
    ],
)
def test_urls_that_cannot_be_meant(url: str) -> None:
    with pytest.raises(UsageError):
        parse_target(url, "m")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_cannot_be_meant(rate: float) -> None:
    with pytest.raises(UsageError):
        checked_rate(rate)


def test_the_key_is_neither_shown_nor_stored() -> None:
    target = parse_target("http://host", "m", api_key="secret-key")
    assert "secret-key" not in repr(target)
    with pytest.raises(TypeError):
        pickle.dumps(target)


def test_where_the_key_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    environment = {"OPENAI_API_KEY": "openai", "VLLM_API_KEY": "vllm"}
    assert read_api_key(file, environment) == "from-file"
    assert read_api_key(None, environment) == "vllm"
    assert read_api_key(None, {"OPENAI_API_KEY": "openai"}) == "openai"
    assert read_api_key(None, {}) is None


@pytest.mark.parametrize("content", ["", "two words", "two\nlines"])
def test_files_without_one_key(tmp_path: Path, content: str) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    with pytest.raises(UsageError):
        read_api_key(file, {})
    with pytest.raises(UsageError):
        read_api_key(tmp_path / "absent", {})
