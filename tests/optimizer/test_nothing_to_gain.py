"""A goodput search whose baseline keeps every bound: goodput is never above what is sent, so nothing else is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vopt.optimizer.cli import app
from vopt.optimizer.history import Stage
from vopt.optimizer.study import read_study

SEARCH = (
    *("search", "--goal", "goodput", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--trials", "3", "--rounds", "1"),
    *("--soak", "0", "--window", "4s", "--quiet", "--json"),
)
EASY = ("--limit", "ttft_s<=5s", "--limit", "tpot_s<=500ms", "--rate", "4")


def vopt(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_one_start_is_enough_and_says_what_would_show_a_gain() -> None:
    found = vopt(*SEARCH, *EASY)
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["verdict"] == "no_gain"
    assert "keeps every bound for 100% of its requests" in document["reason"]
    assert "higher --rate" in document["reason"]
    assert [note for note in document["notes"] if "keeps every bound" in note] == [], "once is enough"
    assert len(read_study("sqlite:///studies.db").trials) == 1

    again = vopt("resume", "--trials", "5", "--quiet", "--json")
    assert json.loads(again.stdout)["reason"] == document["reason"]
    assert len(read_study("sqlite:///studies.db").trials) == 1


def test_where_a_bound_is_missed_the_search_goes_on() -> None:
    found = vopt(*SEARCH, "--limit", "ttft_s<=19ms", "--limit", "tpot_s<=500ms", "--rate", "4")
    assert found.exit_code == 0, found.output
    assert sum(start.stage is Stage.SEARCH for start in read_study("sqlite:///studies.db").trials) >= 2


def test_a_latency_at_the_same_rate_can_still_fall() -> None:
    found = vopt("search", "--goal", "latency", *SEARCH[3:], "--rate", "4")
    assert found.exit_code == 0, found.output
    assert sum(start.stage is Stage.SEARCH for start in read_study("sqlite:///studies.db").trials) >= 2
