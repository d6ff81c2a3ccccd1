"""What a search looks like: live on a terminal, as lines elsewhere, and when quiet."""

from __future__ import annotations

import io
from dataclasses import replace

import golden
import pytest
import sample_study
from drawn import render

from vopt.optimizer.events import LoadTicked, Note, StageBegan, TrialBegan, TrialEnded
from vopt.optimizer.history import Stage, TrialRequest
from vopt.optimizer.recommend import Importance
from vopt.optimizer.report.blocks import Code, Column, Facts, Line, Table, Tone, folded, plain_text, table_lines
from vopt.optimizer.report.console import (
    DisplayMode,
    ProgressDisplay,
    display_mode,
    progress_panel,
    rich_block,
    write_blocks,
)
from vopt.optimizer.report.live import MemoryUse, Progress
from vopt.optimizer.report.show import answer_blocks, study_blocks
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.trial import EngineConfig

MEMORY = MemoryUse(140 * 10**9, 150 * 10**9)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def heard(until: int | None = None, width: int = 100) -> tuple[Progress, str, str]:
    """Progress after some events, its lines, and its panel seven seconds later."""
    progress, lines = Progress(), []
    for place, event in enumerate(sample_study.events()[:until]):
        progress.hear(event, place * 20.0)
        if (line := progress.plain_line(event, place * 20.0)) is not None:
            lines.append(line)
    panel = render(progress_panel(progress, (place + 1) * 20.0 - 13.0, MEMORY), width)
    return progress, "\n".join(lines) + "\n", panel


def test_lines_are_as_agreed() -> None:
    progress, lines, _ = heard()
    golden.check("progress-lines.txt", lines)
    golden.check("progress-table.txt", plain_text([progress.table()]))


@pytest.mark.parametrize(("name", "until"), [("start", 4), ("load", 6), ("late", -1)])
def test_the_live_panel_is_as_agreed(name: str, until: int) -> None:
    golden.check(f"progress-live-{name}.txt", heard(until)[2])


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_live_panel_fits_its_terminal(width: int) -> None:
    assert max(len(line) for line in heard(-1, width)[2].splitlines()) <= width


def test_the_best_is_never_an_infeasible_start() -> None:
    progress, lines, _ = heard()
    assert progress.best_label == "2"
    assert "trial 4: 27,830 tokens/s, +30.2 %, cannot win: success rate 51.6 % is below 99 %" in lines
    assert "trial 2" in progress.best_line()


def test_time_left_follows_the_pace_of_the_stage() -> None:
    progress = Progress()
    assert progress.left_s(0.0) is None
    progress.hear(StageBegan("search", 4, 400.0), 0.0)
    assert progress.left_s(50.0) == pytest.approx(350.0)
    trial = sample_study.study().trials[0]
    for label, began in (("0", 0.0), ("1", 200.0)):
        progress.hear(TrialBegan(TrialRequest(label, EngineConfig(), Stage.SEARCH), "seed"), began)
        if label == "0":
            from vopt.optimizer.events import TrialEnded

            progress.hear(TrialEnded(trial, 1.0, 1.0, 1.0), 200.0)
    assert progress.left_s(200.0) == pytest.approx(3 * (200 + 100) / 2)
    assert progress.left_s(10_000.0) == 0.0


def test_a_simulation_promises_no_minutes_of_this_clock() -> None:
    progress = Progress(simulated=True)
    began = StageBegan("search", 4, 3000.0)
    progress.hear(began, 0.0)
    assert progress.left_s(50.0) is None
    assert progress.plain_line(began, 0.0) == "[0:00] search: 4 engine starts, about 50 min of simulated time"


def test_several_goals_are_told_with_their_own_figures() -> None:
    trial = sample_study.two_goals().trials[0]
    assert trial.metrics is not None
    progress = Progress("balance", objectives=("tokens_per_s", "mean_e2e_s"))
    ended = TrialEnded(trial, trial.metrics["balance"], trial.metrics["balance"], None)
    progress.hear(ended, 1.0)
    said = progress.plain_line(ended, 1.0)
    assert said is not None
    assert said.startswith("[0:01] trial 0: balance ")
    assert "tokens/s, mean E2E " in said


def test_a_pipe_gets_lines_and_quiet_only_what_is_important() -> None:
    plain, quiet = io.StringIO(), io.StringIO()
    assert display_mode(plain) is DisplayMode.PLAIN
    assert display_mode(plain, quiet=True) is DisplayMode.QUIET
    rows = [*sample_study.events(), Note("The baseline was repaired.", important=True)]
    for stream, mode in ((plain, DisplayMode.PLAIN), (quiet, DisplayMode.QUIET)):
        with ProgressDisplay(Progress(), stream, mode, clock=lambda: 0.0) as display:
            for event in rows:
                display(event)
    ticks = sum(isinstance(event, LoadTicked) for event in rows)
    assert plain.getvalue().count("\n") == len(rows) - ticks
    assert quiet.getvalue() == "[0:00] The baseline was repaired.\n"
    assert "\x1b" not in plain.getvalue()


def test_a_terminal_is_redrawn_and_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    assert display_mode(stream) is DisplayMode.LIVE
    asked = []

    def memory() -> MemoryUse:
        asked.append(1)
        return MEMORY

    with ProgressDisplay(Progress(), stream, DisplayMode.LIVE, memory=memory, clock=lambda: 0.0) as display:
        for event in sample_study.events():
            display(event)
    text = stream.getvalue()
    assert "130.4 of 139.7 GiB" in text
    assert "cannot win" in text
    assert text.count("\x1b[?25h") == 1, "the cursor is shown again"
    assert len(asked) == 1, "memory is asked for every two seconds, not at every redraw"


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert display_mode(Terminal()) is DisplayMode.PLAIN


def test_no_color_keeps_the_layout_and_drops_the_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    write_blocks([Line("fine", Tone.GOOD)], stream)
    assert "fine" in stream.getvalue()
    assert "\x1b[32m" not in stream.getvalue()


def test_escape_sequences_and_markup_from_an_engine_do_nothing() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07 [red]x[/red] <b>"
    trial = sample_study.study().trials[3]
    assert trial.failure is not None
    trial = replace(trial, failure=replace(trial.failure, detail=evil), config=EngineConfig({"name": evil}))
    from vopt.optimizer.events import TrialEnded

    progress = Progress()
    event = TrialEnded(trial, None, None, None, evil)
    progress.hear(event, 0.0)
    for text in (
        str(progress.plain_line(event, 0.0)),
        render(progress_panel(progress, 0.0)),
        render(rich_block(progress.table())),
    ):
        assert "\x1b" not in text
        assert "\x07" not in text
    assert "[red]x[/red]" in str(progress.plain_line(event, 0.0))


def test_wide_columns_stand_below_when_the_terminal_is_narrow() -> None:
    table = Table("t", (Column("A"), Column("B", right=True), Column("Why", wide=True)), (("x", "1", "a long reason " * 5),))
    assert len(table_lines(table)) == 2
    narrow = [line for line, _ in table_lines(table, 40)]
    assert narrow[1] == "x  1"
    assert narrow[2].startswith("      a long reason")
    assert all(len(line) <= 40 for line in narrow)


def test_a_table_that_fits_no_terminal_breaks_its_cells_between_words_and_no_row_after_its_end() -> None:
    columns = (Column("Metric"), Column("Baseline", right=True), Column("Winner", right=True), Column("Change", right=True))
    rows = (("Output throughput, tokens/s", "2,340 (2,330–2,353)", "2,665 (2,653–2,679)", "+13.9 %"), ("a", "1", "2", "3 %"))
    for width in range(50, 80):
        lines = [line for line, _ in table_lines(Table("t", columns, rows), width)]
        assert max(map(len, lines)) <= width, lines
        words = " ".join(lines).split()
        assert {"Output", "throughput,", "tokens/s", "(2,330–2,353)", "(2,653–2,679)"} <= set(words)
        assert any("+13.9 %" in line for line in lines), "a figure keeps its unit"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_text_is_folded_between_words_under_its_last_column(width: int) -> None:
    line = "  --max-num-seqs 4096  ok       at most as many as the KV cache has room for, which the arithmetic puts at 312"
    rows = folded(line, width).split("\n")
    assert max(map(len, rows)) <= width
    assert " ".join(rows).split() == line.split()
    hang = line.index("at most") if line.index("at most") <= 0.6 * width else line.index("ok")
    assert all(row.startswith(" " * hang) and row[hang] != " " for row in rows[1:])


def test_what_is_to_be_copied_stays_in_one_piece_and_a_pipe_gets_lines_as_they_are() -> None:
    command = "  vllm serve Qwen/Qwen3-8B " + "--max-num-seqs 512 " * 6
    assert folded(command, 40) == command
    assert folded("word " * 40, None) == "word " * 40


@pytest.mark.parametrize("name", sample_study.VARIANTS)
def test_every_block_of_a_study_fits_80_columns(name: str) -> None:
    view = StudyView.of(sample_study.VARIANTS[name]())
    blocks = [*study_blocks(view, Importance(why="x " * 60)), *answer_blocks(view)]
    for block in blocks:
        if not isinstance(block, Code):
            drawn = render(rich_block(block, 80), 400)
            said = [line for line in drawn.splitlines() if len(line) > 80]
            assert not said or isinstance(block, Facts), said
