"""What is shown about a study, as values: a terminal draws them with colour, a pipe gets them as plain text. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
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


def plain_text(blocks: Iterable[Block]) -> str:
    """Every block as text without colour or drawing; tables in aligned columns, nothing cut off. Ends with a line break."""
    return "".join(_plain(block) for block in blocks)


def _plain(block: Block) -> str:
    match block:
        case Line(text):
            return text + "\n"
        case Code(text):
            return "\n" + "\n".join(f"    {line}" for line in text.splitlines()) + "\n"
        case Facts(rows):
            width = max((len(name) for name, _ in rows), default=0)
            return "".join(f"  {name:<{width}}  {value}\n" for name, value in rows)
        case Table(title, _, _, _, note):
            lines = [f"\n{title}", *(f"  {line}" for line, _ in table_lines(block))]
            return "\n".join([*lines, f"  {note}"] if note else lines) + "\n"


def table_lines(table: Table, width: int | None = None) -> list[tuple[str, Tone]]:
    """The lines of a table, its header first, in aligned columns. When it is wider than ``width`` characters, the wide
    columns stand below their rows, indented and wrapped."""
    rows = (tuple(column.name for column in table.columns), *table.rows)
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.columns))]
    below: list[int] = []
    if width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        below = [place for place, column in enumerate(table.columns) if column.wide]
    beside = [place for place in range(len(table.columns)) if place not in below]
    lines: list[tuple[str, Tone]] = []
    for number, row in enumerate(rows):
        tone = Tone.DIM if number == 0 else table.tones[number - 1] if table.tones else Tone.PLAIN
        cells = [row[p].rjust(widths[p]) if table.columns[p].right else row[p].ljust(widths[p]) for p in beside]
        lines.append(("  ".join(cells).rstrip(), tone))
        if number:
            indent = " " * _INDENT
            wrapped = [textwrap.wrap(row[p], (width or 0) - _INDENT, break_on_hyphens=False) for p in below]
            lines += [(indent + part, Tone.DIM) for parts in wrapped for part in parts]
    return lines
