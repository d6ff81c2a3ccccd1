"""What is shown about a study, as values: a terminal draws them with colour, a pipe gets them as plain text. Pure."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

_INDENT = 6


class Tone(StrEnum):
    """What colour means; never the only carrier of it."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    WARN = "warn"
    DIM = "dim"


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    tone: Tone = Tone.PLAIN
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, aligned."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Column:
    """``wide`` columns hold sentences: on a narrow terminal they stand below their row."""

    name: str
    right: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; ``tones[i]`` colours row *i*."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    tones: tuple[Tone, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """Words to be copied as they are."""

    text: str


Block = Line | Facts | Table | Code


@dataclass(slots=True)
class TableMaker:
    """Collects rows with their tones."""

    title: str
    columns: tuple[Column, ...]
    note: str = ""
    rows: list[tuple[str, ...]] = field(default_factory=list)
    tones: list[Tone] = field(default_factory=list)

    def add(self, *cells: str, tone: Tone = Tone.PLAIN) -> None:
        self.rows.append(cells)
        self.tones.append(tone)

    def done(self) -> Table:
        return Table(self.title, self.columns, tuple(self.rows), tuple(self.tones), self.note)


def plain_text(blocks: Iterable[Block], width: int | None = None) -> str:
    """Every block as text without colour or drawing; tables in aligned columns, nothing cut off. Ends with a line break.
    ``width``: of a terminal; without one lines are as long as they are."""
    return "".join(_plain(block, width) for block in blocks)


def _plain(block: Block, width: int | None) -> str:
    match block:
        case Line(text):
            return folded(text, width) + "\n"
        case Code(text):
            return "\n" + "\n".join(f"    {line}" for line in text.splitlines()) + "\n"
        case Facts(rows):
            names = max((len(name) for name, _ in rows), default=0)
            return "".join(folded(f"  {name:<{names}}  {value}", width, names + 4) + "\n" for name, value in rows)
        case Table(title, _, _, _, note):
            lines = [f"\n{title}", *(f"  {line}" for line, _ in table_lines(block, width and width - 2))]
            return "\n".join([*lines, folded(f"  {note}", width, 2)] if note else lines) + "\n"


def folded(text: str, width: int | None, hang: int | None = None) -> str:
    """Lines broken between words where they are wider than ``width``; ``None`` leaves them. What follows stands ``hang``
    columns in, or under the last of the columns that the line has. Commands stay in one piece, to be copied."""
    if width is None:
        return text
    return "\n".join(_folded(line, width, hang) for line in text.split("\n"))


_COMMANDS = ("vllm ", "exec ")


def _folded(line: str, width: int, hang: int | None) -> str:
    if len(line) <= width or line.lstrip().startswith(_COMMANDS):
        return line
    indent = len(line) - len(line.lstrip())
    if hang is None:
        columns = [match.end() for match in re.finditer(r"\S  +(?=\S)", line) if match.end() <= 0.6 * width]
        hang = columns[-1] if columns else indent + 2
    # What stands before the last column is no text to be wrapped.
    head = line[:hang] if line[:hang].strip() else " " * indent
    first, *rest = _words(line[len(head) :], width - max(len(head), hang))
    return "\n".join([head + first, *(" " * hang + row for row in rest)])


_UNIT = re.compile(r"(?<=\d) (?=(?:%|ms|s|min|h|GiB|tokens/s|requests/s)(?![\w/]))|(?<=,) (?=%)")
"""The space between a figure and its unit."""


def _words(text: str, width: int) -> list[str]:
    """``text`` in rows of at most ``width`` characters, broken between words; a figure keeps its unit."""
    kept = _UNIT.sub("\N{NO-BREAK SPACE}", text)
    rows = textwrap.wrap(kept, max(width, 1), break_long_words=False, break_on_hyphens=False) or [""]
    return [row.replace("\N{NO-BREAK SPACE}", " ") for row in rows]


def table_lines(table: Table, width: int | None = None) -> list[tuple[str, Tone]]:
    """The lines of a table, its header first, in aligned columns. When it is wider than ``width`` characters, the wide columns
    stand below their rows, indented and wrapped; where that is not enough, cells take several lines, broken between words."""
    rows = (tuple(column.name for column in table.columns), *table.rows)
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.columns))]
    below: list[int] = []
    if width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        below = [place for place, column in enumerate(table.columns) if column.wide]
    beside = [place for place in range(len(table.columns)) if place not in below]
    if width is not None:
        _narrowed(rows, widths, beside, width)
    lines: list[tuple[str, Tone]] = []
    for number, row in enumerate(rows):
        tone = Tone.DIM if number == 0 else table.tones[number - 1] if table.tones else Tone.PLAIN
        cells = [_words(row[place], widths[place]) for place in beside]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            parts = (
                part.rjust(widths[p]) if table.columns[p].right else part.ljust(widths[p])
                for p, part in zip(beside, line, strict=True)
            )
            lines.append(("  ".join(parts).rstrip(), tone))
        if number:
            indent = " " * _INDENT
            wrapped = [_words(row[p], (width or 0) - _INDENT) if row[p] else [] for p in below]
            lines += [(indent + part, Tone.DIM) for parts in wrapped for part in parts]
    return lines


def _narrowed(rows: Sequence[tuple[str, ...]], widths: list[int], beside: Sequence[int], width: int) -> None:
    """Make the widest columns narrower, those of one width together, until all fit or no cell has a place left to break."""
    while sum(widths[place] for place in beside) + 2 * (len(beside) - 1) > width:
        narrower = {place: _next_width(rows, place, widths[place]) for place in beside}
        widest = max((widths[place] for place in beside if narrower[place] < widths[place]), default=0)
        if not widest:
            return
        for place in beside:
            if widths[place] == widest:
                widths[place] = narrower[place]


def _next_width(rows: Sequence[tuple[str, ...]], place: int, width: int) -> int:
    """The width of a column once its widest cells are broken in one more place; the same when none can be."""
    return max(len(part) for row in rows for part in _words(row[place], width - 1))
