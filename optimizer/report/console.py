"""The terminal: live progress and blocks with colour. The only importer of rich."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from vopt.optimizer.events import Event, LoadTicked, Note, PhaseBegan, TrialEnded
from vopt.optimizer.report.blocks import Block, Code, Facts, Line, Table, Tone, folded, plain_text, table_lines
from vopt.optimizer.report.live import MemoryUse, Progress

REFRESH_PER_S = 4
MEMORY_EVERY_S = 2.0
_STYLES = {Tone.PLAIN: "", Tone.GOOD: "green", Tone.BAD: "red", Tone.WARN: "yellow", Tone.DIM: "dim"}


class DisplayMode(StrEnum):
    """``live`` redraws in place, ``plain`` writes one line per event, ``quiet`` writes important notes alone."""

    LIVE = "live"
    PLAIN = "plain"
    QUIET = "quiet"


def display_mode(stream: TextIO, *, quiet: bool = False) -> DisplayMode:
    """What suits a stream: a terminal that can redraw gets the live display (``TERM=dumb`` cannot)."""
    if quiet:
        return DisplayMode.QUIET
    console = Console(file=stream)
    return DisplayMode.LIVE if console.is_terminal and not console.is_dumb_terminal else DisplayMode.PLAIN


class ProgressDisplay:
    """A listener that shows a search on ``stream``; a context manager, since a live display has to be taken down.

    ``memory`` tells the GPUs' memory, if anything can; ``clock`` gives seconds.
    """

    def __init__(
        self,
        progress: Progress,
        stream: TextIO,
        mode: DisplayMode,
        *,
        memory: Callable[[], MemoryUse | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._stream, self._mode = progress, stream, mode
        self._clock, self._began_s = clock, clock()
        self._ask_memory, self._memory, self._memory_at_s = memory, None, float("-inf")
        self._live: Live | None = None

    _memory: MemoryUse | None

    def __enter__(self) -> ProgressDisplay:
        if self._mode is DisplayMode.LIVE:
            self._live = Live(
                console=Console(file=self._stream),
                refresh_per_second=REFRESH_PER_S,
                transient=True,
                get_renderable=self._panel,
                # What others write to standard output is the answer: it is not this display's to redirect.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def __call__(self, event: Event) -> None:
        at_s = self._clock() - self._began_s
        self._progress.hear(event, at_s)
        match self._mode:
            case DisplayMode.QUIET:
                if isinstance(event, Note) and event.important:
                    self._write(self._progress.plain_line(event, at_s))
            case DisplayMode.PLAIN:
                self._write(self._progress.plain_line(event, at_s))
            case DisplayMode.LIVE:
                if not isinstance(event, LoadTicked | PhaseBegan):
                    self._above(event, at_s)

    def _write(self, line: str | None) -> None:
        if line is not None:
            self._stream.write(line + "\n")
            self._stream.flush()

    def _above(self, event: Event, at_s: float) -> None:
        """Written above the live part, where it stays."""
        line = self._progress.plain_line(event, at_s)
        if line is None or self._live is None:
            return
        tone = Tone.BAD if isinstance(event, TrialEnded) and event.reason else Tone.DIM
        self._live.console.print(Text(line, style=_STYLES[tone]))

    def _panel(self) -> RenderableType:
        at_s = self._clock() - self._began_s
        if self._ask_memory is not None and at_s - self._memory_at_s >= MEMORY_EVERY_S:
            self._memory, self._memory_at_s = self._ask_memory(), at_s
        return progress_panel(self._progress, at_s, self._memory)


def progress_panel(progress: Progress, at_s: float, memory: MemoryUse | None = None) -> RenderableType:
    """The live display at one moment."""
    head = Text(progress.headline(at_s), style="bold", no_wrap=True, overflow="ellipsis")
    grid = RichTable.grid(padding=(0, 2), expand=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1, overflow="ellipsis", no_wrap=True)
    for name, text in progress.facts(at_s, memory):
        style = "red" if progress.failures and text.startswith(tuple(f"{label}: " for label, _ in progress.failures)) else ""
        grid.add_row(name, Text(text, style=style, no_wrap=True, overflow="ellipsis"))
        share = progress.phase_share(at_s)
        if name == "Phase" and share is not None:
            grid.add_row("", ProgressBar(total=1.0, completed=share, width=40))
    return Group(Text(""), head, grid)


def write_blocks(blocks: Iterable[Block], stream: TextIO) -> None:
    """Blocks with colour on a terminal, as plain text elsewhere (``NO_COLOR`` keeps the layout and drops the colour)."""
    console = Console(file=stream)
    if not console.is_terminal:
        stream.write(plain_text(blocks))
        stream.flush()
        return
    for block in blocks:
        console.print(rich_block(block, console.width))


def rich_block(block: Block, width: int = 100) -> RenderableType:
    """One block for a terminal ``width`` characters wide. Texts are never read as markup."""
    match block:
        case Line(text, tone, strong):
            return Text(folded(text, width), style=f"{'bold ' if strong else ''}{_STYLES[tone]}".strip())
        case Code(text):
            return Text("\n" + "\n".join(f"    {line}" for line in text.splitlines()) + "\n", style="bold cyan")
        case Facts(rows):
            grid = RichTable.grid(padding=(0, 2))
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(overflow="fold")
            for name, value in rows:
                grid.add_row(f"  {name}", Text(value))
            return grid
        case Table(title, _, _, _, note):
            drawn = Text(f"\n{title}\n", style="bold", no_wrap=False)
            for line, tone in table_lines(block, width - 2):
                drawn.append(f"  {line}\n", style=f"not bold {_STYLES[tone]}")
            return drawn.append(folded(f"  {note}", width, 2) + "\n", style="not bold dim") if note else drawn
