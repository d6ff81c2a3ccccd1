"""What variables hold in a script that is read and not run: assignments, exports and expansions.

A value of ``None`` is one that only a real shell knows; in a word it is a hole, an expression between two null characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vopt.optimizer.secrecy import is_secret_name
from vopt.optimizer.shell_words import Kind, Piece, Word, pieces_of

DECLARING = frozenset({"export", "declare", "typeset", "readonly", "local"})
HOLE = re.compile("\0([^\0]*)\0")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*])(?:\[[@*]\])?(?:(:?)([-=+?])(.*))?", re.DOTALL)


@dataclass(slots=True)
class ShellState:
    """``outside`` is the environment in which the script would run; ``read_outside`` what of it was looked up, without secrets:
    those stay unknown. ``exported`` are the names that a command would see."""

    outside: Mapping[str, str]
    variables: dict[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    exported: dict[str, None] = field(default_factory=dict)
    export_all: bool = False
    read_outside: dict[str, None] = field(default_factory=dict)

    def environment(self) -> dict[str, str | tuple[str, ...] | None]:
        """What a command that starts now would see of the script's own variables."""
        return {name: self.variables[name] for name in self.exported if name in self.variables}

    def declare(self, words: tuple[Word, ...], *, certain: bool) -> None:
        options = "".join(word.literal for word in words[1:] if word.literal.startswith("-"))
        if "f" in options or "p" in options:
            return
        exports = words[0].literal == "export" or "x" in options
        for word in words[1:]:
            if word.literal.startswith("-"):
                continue
            if name_in(word):
                self.assign(word, exported=exports, certain=certain)
            elif "n" in options:
                self.exported.pop(word.literal, None)
            elif exports and word.literal.isidentifier():
                self.exported[word.literal] = None

    def assign(self, word: Word, *, exported: bool, certain: bool) -> None:
        name = name_in(word)
        appends = word.bare.partition("=")[0].endswith("+")
        value: str | tuple[str, ...] | None
        if not certain:
            value = None
        elif word.items is not None:
            fields = [text for item in word.items for text in self.fields(item)]
            value = tuple(fields)
        else:
            value = whole(self.assigned(word))
        if appends and value is not None:
            value = _appended(self.variables.get(name, self.outside.get(name, "")), value)
        self.variables[name] = value
        inherited = name in self.outside and not isinstance(value, tuple)
        if exported or self.export_all or inherited:
            self.exported[name] = None

    def forget(self, name: str) -> None:
        """``name`` gets a value that only a real shell knows."""
        self.variables[name] = None
        if self.export_all or name in self.outside:
            self.exported[name] = None

    def assigned(self, word: Word) -> str:
        """The value of ``NAME=value``: no splitting; what is not set is empty, as a shell has it. Holes stay in."""
        first, *others = word.pieces
        rest = (Piece(first.text.partition("=")[2], quoted=not first.text.partition("=")[2].startswith("~")), *others)
        return "".join(self.fields(Word(tuple(_quoted(piece) for piece in rest)), unset=""))

    def unset(self, name: str, *, certain: bool) -> None:
        self.variables[name] = _UNSET if certain else None
        if certain:
            self.exported.pop(name, None)

    def set_options(self, options: Sequence[str]) -> None:
        """``set -a`` and ``set -o allexport`` export what is assigned from there on."""
        on = any(re.fullmatch(r"-[a-zA-Z]*a[a-zA-Z]*", option) for option in options) or {"-o", "allexport"} <= set(options)
        self.export_all = (self.export_all or on) and "+a" not in options

    def fields(self, word: Word, *, unset: str | None = None, seen: bool = True) -> list[str]:
        """The words that one word becomes. ``unset``: what a variable is that nobody set; ``None``: a hole, unless it stands
        alone and unquoted, which is no word at all."""
        fields: list[str] = []
        current: str | None = None
        for piece in word.pieces:
            value: str | Sequence[str] = piece.text
            if piece.kind is Kind.VARIABLE:
                value = self._value(piece, unset, seen=seen, alone=len(word.pieces) == 1)
            elif piece.kind is Kind.UNKNOWN:
                value = f"\0{piece.text}\0"
            elif current is None and not piece.quoted and piece.text.startswith("~/") and "HOME" in self.outside:
                value = self.outside["HOME"] + piece.text[1:]
            parts = _parts(value, piece)
            if not parts:
                continue
            if isinstance(value, str) and piece.kind is Kind.VARIABLE and not piece.quoted and value[:1].isspace() and current:
                fields.append(current)
                current = None
            current = (current or "") + parts[0]
            for part in parts[1:]:
                fields.append(current)
                current = part
        return fields if current is None else [*fields, current]

    def _value(self, piece: Piece, unset: str | None, *, seen: bool, alone: bool) -> str | Sequence[str]:
        found = _PARAMETER.fullmatch(piece.text)
        if found is None:
            return f"\0${{{piece.text}}}\0"
        name, colon, operator, word = found.groups()
        value = self._look_up(name, seen=seen)
        if value is None:
            return f"\0${name}\0"
        missing = value is _UNSET or (bool(colon) and not value)
        if operator == "+":
            return "" if missing else self._default(word, piece)
        if missing and operator in ("-", "="):
            value = self._default(word, piece)
            if operator == "=":
                self.variables[name] = value
            return value
        if value is _UNSET:
            if unset is not None:
                return unset
            return [] if alone and not piece.quoted and operator is None and not name.isdigit() else f"\0${name}\0"
        return value

    def _default(self, word: str, piece: Piece) -> str:
        pieces = pieces_of(word, quoted=piece.quoted)
        return "".join(self.fields(Word(tuple(_quoted(one) for one in pieces)), unset=""))

    def _look_up(self, name: str, *, seen: bool) -> str | Sequence[str] | None:
        """``None``: set, and not known; ``_UNSET``: nobody set it."""
        if name in ("@", "*"):
            return ()
        if name in self.variables:
            return self.variables[name]
        if is_secret_name(name):
            return None
        if name not in self.outside:
            return _UNSET
        if seen:
            self.read_outside[name] = None
        return self.outside[name]


class _Unset(str):
    """No value; unlike an empty one, ``${NAME-word}`` replaces it."""

    __slots__ = ()


_UNSET = _Unset()


def _quoted(piece: Piece) -> Piece:
    """An assignment and a default are not split at blanks."""
    keeps = piece.kind is Kind.TEXT and not piece.quoted and piece.text.startswith("~")
    return piece if keeps else Piece(piece.text, piece.kind, quoted=True)


def _parts(value: str | Sequence[str], piece: Piece) -> list[str]:
    if isinstance(value, str):
        split = piece.kind is Kind.VARIABLE and not piece.quoted
        return value.split() if split and not HOLE.search(value) else [value]
    return list(value)


def whole(text: str) -> str | None:
    return None if HOLE.search(text) else text


def _appended(before: str | tuple[str, ...] | None, value: str | tuple[str, ...]) -> str | tuple[str, ...] | None:
    if isinstance(value, tuple):
        return None if before is None else (*((before,) if isinstance(before, str) and before else before or ()), *value)
    return before + value if isinstance(before, str) else None


def name_in(word: Word) -> str:
    """The name in ``NAME=value`` and ``NAME+=value``, else empty."""
    found = re.match(r"([A-Za-z_]\w*)\+?=", word.bare)
    return found[1] if found else ""
