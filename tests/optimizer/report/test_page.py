"""The page as text: complete, escaped, self-contained. How it looks and behaves is in ``test_page_browser.py``."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import golden
import pytest
import sample_study
from plotly.offline import get_plotlyjs

from vopt.optimizer.recommend import Importance
from vopt.optimizer.report import html
from vopt.optimizer.report.page import page, render_page
from vopt.optimizer.report.page_template import SCRIPT
from vopt.optimizer.report.view import StudyView

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def without_library(text: str) -> str:
    return text.replace(get_plotlyjs(), "/* plotly */")


def body(text: str) -> str:
    return re.sub(r"<script.*?</script>|<style>.*?</style>", "", without_library(text), flags=re.DOTALL)


def test_verdict_and_command_come_first() -> None:
    text = body(render_page(StudyView.of(sample_study.study()), Importance(), {}))
    order = [
        text.index(part) for part in ("<h1>Better than", "--max-num-batched-tokens 16384", 'id="comparison"', 'id="trials"')
    ]
    assert order == sorted(order)


@pytest.mark.parametrize("name", [*sample_study.VARIANTS, "running"])
def test_bodies_are_as_agreed(name: str) -> None:
    made = {**sample_study.VARIANTS, "running": sample_study.running}[name]()
    text = body(render_page(StudyView.of(made), Importance(), {}))
    golden.check(
        f"page-{name}.html", re.sub(r"><(section|tr|h2|h3|p|dl|div|figure|table|header|nav|dt|details)", r">\n<\1", text)
    )


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    text = without_library(page(sample_study.on_disk(sample_study.study(), tmp_path)))
    assert re.findall(r"(?:src|href)=\"(?!#|data:)[^\"]*\"", text) == []
    assert "url(" not in text
    assert "@import" not in text


def test_only_our_two_scripts_may_run() -> None:
    text = page(sample_study.study())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    for code in (get_plotlyjs(), SCRIPT):
        assert f"sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}" in policy[1]
        assert f"<script>{code}</script>" in text
    assert "unsafe-eval" not in policy[1]
    assert text.count(get_plotlyjs()) == 1, "the library is inlined once"


def test_lines_to_type_say_where_the_study_lies_and_no_password() -> None:
    study = sample_study.study()
    assert "--storage" not in body(page(study))
    text = body(page(study, storage="postgresql://me:hunter2@db/vopt", secrets=("hunter2",)))
    lines = [line for line in re.findall(r"vopt (?:export|bench)[^<]*", text) if study.name in line]
    assert len(lines) == 2
    assert all("--storage" in line and "db/vopt" in line for line in lines), lines
    assert "hunter2" not in text


def test_hostile_text_stays_text() -> None:
    made = sample_study.study()
    answer = made.recommendation
    assert answer is not None
    trial = made.trials[3]
    assert trial.failure is not None
    failure = replace(trial.failure, detail=EVIL, log_tail=(EVIL,))
    hostile = replace(trial, label=EVIL, failure=failure, argv=("vllm", "serve", EVIL), directory=EVIL, began_at=EVIL)
    answer = replace(answer, argv=("vllm", "serve", EVIL), reason=EVIL, notes=(EVIL,), soak=EVIL)
    setup = {**made.setup, "model": EVIL, "workload": {"name": EVIL}, "environment": {EVIL: EVIL}}
    made = replace(made, name=EVIL, setup=setup, trials=(made.trials[0], hostile), recommendation=answer)
    text = without_library(page(made))
    assert "<img" not in text
    assert text.count("<script") == 3
    assert text.count("</script>") == 3


def test_embedded_data_is_json_and_cannot_end_its_script() -> None:
    value = {"a": EVIL, "b": [1.5, None]}
    text = html.embedded_json(value)
    assert "<" not in text
    assert json.loads(text) == value


def test_every_start_is_in_the_table_with_its_evidence(tmp_path: Path) -> None:
    made = sample_study.on_disk(sample_study.study(), tmp_path)
    text = body(page(made))
    assert text.count("<tr data-kind") + text.count('<tr class="out" data-kind') == len(made.trials)
    for trial in made.trials:
        assert html.text(trial.directory) in text
        assert html.text(trial.began_at) in text
    for fact in ("b5d1e6f0a9c3", "580.95.05", "8f3c1a7d0e5b", "0c7e2f51d8aa"):
        assert fact in text
