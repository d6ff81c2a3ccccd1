from __future__ import annotations

import golden
import pytest
import sample_study
from drawn import render

from vopt.optimizer.recommend import Importance
from vopt.optimizer.report import notes
from vopt.optimizer.report.blocks import plain_text
from vopt.optimizer.report.console import rich_block
from vopt.optimizer.report.show import answer_blocks, list_blocks, study_blocks
from vopt.optimizer.report.view import StudyView

IMPORTANCE = Importance({"max_num_seqs": 0.61, "max_num_batched_tokens": 0.36, "performance_mode": 0.03})
ALL = {**sample_study.VARIANTS, "running": sample_study.running}


@pytest.mark.parametrize("name", ALL)
def test_answers_are_as_agreed(name: str) -> None:
    golden.check(f"answer-{name}.txt", plain_text(answer_blocks(StudyView.of(ALL[name]()))))


@pytest.mark.parametrize("name", ["better", "nothing_feasible", "running"])
def test_studies_are_as_agreed(name: str) -> None:
    golden.check(f"show-{name}.txt", plain_text(study_blocks(StudyView.of(ALL[name]()), IMPORTANCE)))


def test_a_study_on_a_terminal_is_as_agreed() -> None:
    blocks = study_blocks(StudyView.of(sample_study.study()), IMPORTANCE)
    golden.check("show-terminal-80.txt", "".join(render(rich_block(block, 80), 80) for block in blocks))


def test_the_list_is_as_agreed() -> None:
    golden.check("show-list.txt", plain_text(list_blocks([StudyView.of(make()) for make in ALL.values()])))
    assert "vopt search" in plain_text(list_blocks([]))


def test_an_answer_names_gain_cost_power_and_every_rejection() -> None:
    made = sample_study.study()
    text = plain_text(answer_blocks(StudyView.of(made)))
    assert made.recommendation is not None
    for part in ("+13.9 %", "interval +12.1 % to +15.7 %", "1.8 % or more", "p95 TTFT +16.3 %", "3 of 81,240", "10 min at 512"):
        assert part in text
    assert [row.reason for row in made.recommendation.rejected if row.reason not in text] == []


def test_what_is_simulated_says_so_everywhere() -> None:
    view = StudyView.of(sample_study.simulated())
    for text in (
        plain_text(answer_blocks(view)),
        plain_text(study_blocks(view)),
        plain_text(list_blocks([view])),
        notes.study_note(view),
    ):
        assert "simulated" in text.lower()


def test_notes_are_as_agreed() -> None:
    view = StudyView.of(sample_study.study())
    golden.check("note-study.md", notes.study_note(view))
    for label in ("0", "4", "9"):
        trial = view.trial(label)
        assert trial is not None
        golden.check(f"note-trial-{label}.md", notes.trial_note(view, trial))


def test_no_text_can_leave_its_code_block() -> None:
    assert notes.fenced("a\n```\nb\n````\n") == "`````\na\n```\nb\n````\n\n`````"
