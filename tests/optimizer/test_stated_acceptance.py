"""A stated acceptance of drafts: said in the headline, the answer and every exported file, with what to serve instead."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.sample_study import study

from vopt.optimizer.history import StudyRecord
from vopt.optimizer.report.deploy import export
from vopt.optimizer.report.document import answer_document
from vopt.optimizer.report.page import page
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.stated_acceptance import condition, stated_length, stated_notes
from vopt.optimizer.trial import EngineConfig

COMPARED: Mapping[str, Any] = {"method": "mtp", "num_speculative_tokens": 1}
STATED = {**COMPARED, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1.75}
RATES = {**COMPARED, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.75]}


@pytest.mark.parametrize("speculation", [STATED, RATES])
def test_what_is_stated_is_said_with_the_command_that_serves(speculation: Mapping[str, Any]) -> None:
    config = {"max_num_seqs": 8, "speculative_config": speculation}
    (note,) = stated_notes(config)
    assert "wrong text" in note
    assert "1.75 tokens" in note
    words = shlex.split(note.partition("Serve it with ")[2].partition(", and")[0])
    assert words[0] == "--speculative-config"
    assert json.loads(words[1]) == COMPARED
    assert "if 1.75 tokens a step" in condition(stated_length(config))


@pytest.mark.parametrize("config", [{}, {"speculative_config": None}, {"speculative_config": COMPARED}])
def test_drafts_that_are_compared_need_no_condition(config: Mapping[str, Any]) -> None:
    assert stated_notes(config) == ()
    assert condition(stated_length(config)) == ""


def synthetic() -> StudyRecord:
    """A study whose winner has a stated acceptance."""
    record = study()
    assert record.recommendation is not None
    before = record.recommendation.winner_config
    assert before is not None
    config = EngineConfig({**before, "speculative_config": STATED})
    trials = tuple(replace(trial, config=config) if trial.config == before else trial for trial in record.trials)
    notes = (*stated_notes(config), *record.recommendation.notes)
    answer = replace(record.recommendation, winner_config=config, notes=notes)
    return replace(record, trials=trials, recommendation=answer)


@pytest.mark.parametrize("form", ["shell", "yaml", "docker", "k8s"])
def test_every_file_says_it_once_and_first(form: str) -> None:
    text = export(synthetic(), form)
    assert text.count("wrong text") == 1
    assert "# NOT FOR SERVICE: this command's answers are wrong text" in "\n".join(text.splitlines()[:5])
    assert "NOT FOR SERVICE" not in export(study(), form)


def test_headline_page_and_the_script_of_one_start_say_it() -> None:
    record = synthetic()
    view = StudyView.of(record)
    assert view.verdict_line().endswith(", if 1.75 tokens a step are accepted, as was stated and not measured")
    assert answer_document(view)["stated_acceptance"] == 1.75
    assert answer_document(StudyView.of(study()))["stated_acceptance"] is None
    fixed = replace(study(), setup={**study().setup, "fixed": {"speculative_config": STATED}})
    assert "if 1.75 tokens a step" in StudyView.of(fixed).verdict_line(), "also where it is in every start"
    assert '<p class="simulated">this command' in page(record), "framed, and no small print"
    assert "NOT FOR SERVICE" in export(record, "shell", view.arm(winner=True)[0].label)
    assert "NOT FOR SERVICE" not in export(record, "shell", view.arm(winner=False)[0].label)
    for winner, stated in ((True, 1.75), (False, None)):
        label = view.arm(winner=winner)[0].label
        assert json.loads(export(record, "json", label))["stated_acceptance"] == stated, "of the command that is exported"
