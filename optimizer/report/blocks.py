"""What is shown about a study, as values: a terminal draws them with colour, a pipe gets them as plain text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


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
    name: str
    right: bool = False


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
        case Table():
            return _plain_table(block)


def _plain_table(table: Table) -> str:
    rows: Sequence[tuple[str, ...]] = (tuple(column.name for column in table.columns), *table.rows)
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.columns))]
    lines = [f"\n{table.title}"]
    for row in rows:
        cells = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    if table.note:
        lines.append(f"  {table.note}")
    return "\n".join(lines) + "\n"
