"""Natural text from a seeded grammar, and from the documentation and source that every Python interpreter carries. Pure.

The point is text that a language model meets in practice: repeated names, plausible syntax, instructions, code. Random
token ids look like nothing that a draft model or an n-gram lookup was made for, so speculation on them shows nothing.
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Iterator
from functools import lru_cache

TOPICS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "a harbour town",
        ("the ferry", "the harbour master", "a fishing crew", "the tide gauge", "the old pier"),
        ("repairs", "waits for", "inspects", "leaves", "lights"),
        ("the breakwater", "a torn net", "the morning market", "a fog signal", "the winter storm"),
    ),
    (
        "a bakery",
        ("the baker", "a new oven", "the apprentice", "the flour mill", "a regular customer"),
        ("weighs", "delivers", "warms", "orders", "praises"),
        ("the rye dough", "two dozen rolls", "a birthday cake", "the sourdough starter", "the delivery van"),
    ),
    (
        "a data centre",
        ("the operator", "the cooling loop", "a failed disk", "the scheduler", "the night shift"),
        ("restarts", "replaces", "logs", "throttles", "migrates"),
        ("the storage cluster", "a stuck job", "the power meter", "a database replica", "the backup window"),
    ),
    (
        "a school library",
        ("the librarian", "a reading group", "the pupil", "the catalogue", "a visiting author"),
        ("lends", "sorts", "reads", "recommends", "misplaces"),
        ("a travel book", "the atlas", "an unfinished novel", "the poetry shelf", "a dictionary"),
    ),
    (
        "a mountain railway",
        ("the driver", "the signal box", "a snow plough", "the conductor", "the timetable"),
        ("passes", "clears", "announces", "delays", "connects"),
        ("the upper tunnel", "a late train", "the viaduct", "the valley station", "an empty carriage"),
    ),
    (
        "a vegetable garden",
        ("the gardener", "a dry spring", "the compost heap", "the greenhouse", "a neighbour"),
        ("waters", "plants", "harvests", "covers", "shares"),
        ("the bean rows", "a tray of seedlings", "the tomatoes", "the stone path", "an apple tree"),
    ),
    (
        "a small clinic",
        ("the nurse", "a worried parent", "the laboratory", "the receptionist", "the specialist"),
        ("examines", "calls", "schedules", "compares", "explains"),
        ("a blood test", "the waiting list", "an old scar", "the vaccination card", "a second opinion"),
    ),
    (
        "a theatre",
        ("the director", "an understudy", "the lighting desk", "the audience", "the stage crew"),
        ("rehearses", "dims", "applauds", "rewrites", "paints"),
        ("the second act", "a borrowed costume", "the curtain", "an open letter", "the closing scene"),
    ),
    (
        "a weather station",
        ("the observer", "a pressure sensor", "the balloon", "the archive", "a cold front"),
        ("measures", "records", "predicts", "corrects", "crosses"),
        ("the wind speed", "a missing value", "the dew point", "the coastal forecast", "an early frost"),
    ),
    (
        "a bicycle workshop",
        ("the mechanic", "a courier", "the wheel stand", "the spare-parts shelf", "a young customer"),
        ("adjusts", "tests", "orders", "cleans", "borrows"),
        ("the rear brake", "a bent spoke", "the gear cable", "an invoice", "the front fork"),
    ),
)
OPENERS = (
    "In the morning",
    "Later that day",
    "According to the report",
    "Without any warning",
    "As usual",
    "After the inspection",
    "Two weeks later",
    "To everyone's surprise",
    "When the bell rang",
    "Because of the delay",
)
JOINS = ("because", "although", "while", "so that", "until", "before")
QUALITIES = ("carefully", "slowly", "again", "twice", "with great patience", "for the first time", "in silence", "as agreed")
REMARKS = (
    "Nobody had expected it.",
    "The figures were checked once more.",
    "That was the plan, at least.",
    "It took {n} minutes.",
    "About {n} people saw it.",
    "The cost came to {n} euros.",
    "This had happened {n} times before.",
    "No one asked why.",
)

TASKS: tuple[tuple[str, str], ...] = (
    ("prose", "Summarise the following text in three sentences. Keep names and figures.\n\n"),
    (
        "prose",
        "Answer the question at the end of this text with one short paragraph, and quote the sentence that supports it.\n\n",
    ),
    (
        "code",
        "Rewrite the following Python code so that it is easier to read. Explain each change.\n\n```python\n",
    ),
    ("prose", "Translate the following text into French, then list five words that were hard to translate.\n\n"),
    ("manual", "Explain the following documentation to a beginner, with one example for each function.\n\n"),
    ("prose", "Write a continuation of this story in the same tone, about as long as the text itself.\n\n"),
    ("code", "Find possible errors in the following Python code and propose a test for each.\n\n```python\n"),
    ("manual", "Turn this reference text into a list of questions and answers.\n\n"),
)
"""Kinds of material and the instruction that comes before it; request bodies go through them in turn."""

_NAMES = """
argparse asyncio.tasks bisect calendar collections configparser contextlib csv datetime decimal difflib fractions functools
heapq inspect json logging pathlib random shlex statistics string subprocess tempfile textwrap threading typing unittest.case
urllib.parse zipfile
"""
MANUALS = tuple(_NAMES.split())
"""Standard-library modules whose documentation and source are used; importing them has no side effects."""


def prose(draw: random.Random) -> Iterator[str]:
    """Endless paragraphs, each about one topic."""
    while True:
        place, subjects, verbs, things = draw.choice(TOPICS)
        lines = [f"This is a note about {place}."]
        for _ in range(draw.randint(4, 9)):
            lines.append(_sentence(draw, subjects, verbs, things))
            if draw.random() < 0.35:
                lines.append(draw.choice(REMARKS).format(n=draw.randint(3, 400)))
        yield " ".join(lines) + "\n\n"


def _sentence(draw: random.Random, subjects: tuple[str, ...], verbs: tuple[str, ...], things: tuple[str, ...]) -> str:
    clause = f"{draw.choice(subjects)} {draw.choice(verbs)} {draw.choice(things)}"
    match draw.randrange(4):
        case 0:
            return f"{draw.choice(OPENERS)}, {clause} {draw.choice(QUALITIES)}."
        case 1:
            other = f"{draw.choice(subjects)} {draw.choice(verbs)} {draw.choice(things)}"
            return f"{clause[0].upper()}{clause[1:]} {draw.choice(JOINS)} {other}."
        case 2:
            return f"{draw.choice(OPENERS)}, {clause}, and then {draw.choice(verbs)} {draw.choice(things)}."
        case _:
            return f"{clause[0].upper()}{clause[1:]} {draw.choice(QUALITIES)}."


@lru_cache(maxsize=1)
def manuals() -> tuple[str, ...]:
    """Documentation of standard-library modules, classes and functions; empty where Python runs without docstrings."""
    pages: list[str] = []
    for name in MANUALS:
        module = importlib.import_module(name)
        parts = [inspect.getdoc(module) or ""]
        for member_name, member in sorted(vars(module).items()):
            if not member_name.startswith("_") and inspect.isroutine(member) and (text := inspect.getdoc(member)):
                parts.append(f"{name}.{member_name}\n{text}")
        page = "\n\n".join(part for part in parts if part)
        if len(page) > 400:
            pages.append(page + "\n\n")
    return tuple(pages)


@lru_cache(maxsize=1)
def sources() -> tuple[str, ...]:
    """Source of standard-library modules; empty where Python runs without its sources."""
    found: list[str] = []
    for name in MANUALS:
        try:
            found.append(inspect.getsource(importlib.import_module(name)))
        except OSError:
            continue  # a frozen or stripped standard library
    return tuple(found)


def documents(number: int, draw: random.Random, characters: int) -> str:
    """Text number ``number``: an instruction and at least ``characters`` of material for it."""
    kind, instruction = TASKS[number % len(TASKS)]
    pages = {"manual": manuals, "code": sources}.get(kind, tuple)()
    material = _excerpts(pages, draw) if pages else prose(draw)
    parts, size = [instruction], 0
    while size < characters:
        part = next(material)
        parts.append(part)
        size += len(part)
    return "".join(parts)


def _excerpts(pages: tuple[str, ...], draw: random.Random) -> Iterator[str]:
    """Endless stretches of ``pages``, each from the beginning of a line."""
    while True:
        lines = draw.choice(pages).splitlines(keepends=True)
        start = draw.randrange(max(1, len(lines) - 40))
        yield "".join(lines[start : start + draw.randint(40, 160)])
