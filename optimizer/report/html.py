"""Small pieces of HTML. Every text is escaped here and nowhere else. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from vopt.optimizer.report.blocks import Table, Tone


def text(value: object) -> str:
    """Escaped for element content and quoted attributes."""
    return escape(str(value), quote=True)


def element(name: str, content: str, **attributes: str) -> str:
    """``content`` is HTML; attribute values are text. ``cls`` is the class, ``data_x`` becomes ``data-x``."""
    names = {"cls": "class"}
    said = "".join(f' {names.get(key, key.replace("_", "-"))}="{text(value)}"' for key, value in attributes.items())
    return f"<{name}{said}>{content}</{name}>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """A definition list; values are HTML."""
    return element("dl", "".join(element("dt", text(name)) + element("dd", value) for name, value in rows))


def table(shown: Table, *, name: str = "", row_attributes: Iterable[Mapping[str, str]] = ()) -> str:
    """A table of texts that turns into cards on a phone."""
    head = "".join(element("th", text(column.name), cls="right" if column.right else "") for column in shown.columns)
    attributes = [dict(row) for row in row_attributes] or [{} for _ in shown.rows]
    body = []
    for place, row in enumerate(shown.rows):
        tone = shown.tones[place] if shown.tones else Tone.PLAIN
        cells = "".join(
            element("td", text(cell), data_name=column.name, cls="right" if column.right else "wide" if column.wide else "")
            for cell, column in zip(row, shown.columns, strict=True)
        )
        body.append(element("tr", cells, **({"cls": str(tone)} | attributes[place])))
    note = element("p", text(shown.note), cls="soft") if shown.note else ""
    whole = element("thead", element("tr", head)) + element("tbody", "".join(body))
    return element("table", whole, **({"id": name} if name else {})) + note


def embedded_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
