"""A goodput search whose baseline keeps every bound: goodput is never above what is sent, so nothing else is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from landscapes import small_landscape
from support.sample_study import study
from typer.testing import CliRunner, Result

from vopt.objectives.metrics import Metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer.cli import app
from vopt.optimizer.history import Stage
from vopt.optimizer.options import ResumeOptions
from vopt.optimizer.resumption import unspent
from vopt.optimizer.setup import Budget, SearchSetup
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
    for words in (["--trials", "5"], []):
        said = vopt("resume", "--quiet", *words).stderr
        assert "goodput is never above what is sent" in said.partition("No measurable gain")[0], "why no start was made"
        assert "--vary" not in said
        assert "goes on" not in said, "no budget helps"


def test_a_resume_of_a_search_that_was_sent_too_much_says_so() -> None:
    landscape, record = small_landscape(), study()
    metrics = Metrics({"requests_per_s": 40.0, "tokens_per_s": 8000.0, "success_rate": 1.0}, succeeded=400)
    baseline = replace(record.trials[0], status=LoadStatus.OVERLOADED, metrics=metrics, environment={})
    made = replace(record, trials=(baseline,))
    setup = SearchSetup(landscape.goal, landscape.space, Budget(trials=8, rounds=1, time_s=600, soak_s=0), rate=400.0)
    (said,) = unspent(setup, ResumeOptions(trials=8), made, made)
    assert said.startswith("--trials 8: at --rate 400 the baseline is overloaded")


def test_where_a_bound_is_missed_the_search_goes_on() -> None:
    found = vopt(*SEARCH, "--limit", "ttft_s<=19ms", "--limit", "tpot_s<=500ms", "--rate", "4")
    assert found.exit_code == 0, found.output
    assert sum(start.stage is Stage.SEARCH for start in read_study("sqlite:///studies.db").trials) >= 2


def test_a_latency_at_the_same_rate_can_still_fall() -> None:
    found = vopt("search", "--goal", "latency", *SEARCH[3:], "--rate", "4")
    assert found.exit_code == 0, found.output
    assert sum(start.stage is Stage.SEARCH for start in read_study("sqlite:///studies.db").trials) >= 2
