from __future__ import annotations

import json
import shlex
from typing import Any

import golden
import pytest
import sample_study

from vopt.optimizer.report.document import FORMAT_VERSION, answer_document, list_document, study_document
from vopt.optimizer.report.view import StudyView


def document_of(name: str) -> dict[str, Any]:
    made = sample_study.VARIANTS[name]()
    read: dict[str, Any] = json.loads(json.dumps(answer_document(StudyView.of(made)), allow_nan=False))
    return read


@pytest.mark.parametrize("name", sample_study.VARIANTS)
def test_documents_are_as_agreed(name: str) -> None:
    text = json.dumps(document_of(name), indent=1, ensure_ascii=False, sort_keys=False)
    golden.check(f"document-{name}.json", text + "\n")


@pytest.mark.parametrize("name", sample_study.VARIANTS)
def test_command_and_argv_say_the_same(name: str) -> None:
    document = document_of(name)
    assert document["format_version"] == FORMAT_VERSION
    if document["argv"] is None:
        assert document["command"] is None
        assert document["verdict"] == "nothing_feasible"
    else:
        assert shlex.split(document["command"]) == document["argv"]


def test_without_a_gain_there_is_no_winner_and_the_command_is_the_baseline() -> None:
    document = document_of("no_gain")
    assert document["winner"] is None
    assert document["argv"] == document["baseline"]["argv"]


def test_a_running_study_has_no_verdict() -> None:
    document = study_document(StudyView.of(sample_study.running()))
    assert document["verdict"] is None
    assert document["command"] is None
    assert len(document["starts"]) == 5
    assert document["baseline"]["metrics"]["tokens_per_s"] == 21_380


def test_every_start_is_in_the_study_document_with_its_reason() -> None:
    made = sample_study.study()
    document = study_document(StudyView.of(made))
    assert [row["trial"] for row in document["starts"]] == [trial.label for trial in made.trials]
    by_label = {row["trial"]: row for row in document["starts"]}
    assert by_label["4"]["kind"] == "limit:success_rate"
    assert by_label["4"]["feasible"] is False
    assert by_label["8"]["feasible"] is True


def test_the_list_names_each_study_once() -> None:
    views = [StudyView.of(make()) for make in sample_study.VARIANTS.values()]
    assert [row["study"] for row in list_document(views)["studies"]] == [view.name for view in views]
