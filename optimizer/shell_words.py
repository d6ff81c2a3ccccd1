"""Shell text -> simple commands of words, as a POSIX shell (and bash, where scripts use it) would split them; nothing is run.

An expansion stays what it is, so that whoever knows the variables can fill it in (``script``). After POSIX.1-2017, "Shell
Command Language", 2.2, 2.3 and 2.6.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

OPERATORS = ("&&", "||", ";;", "|&", ";", "|", "&", "(", ")", "\n")
REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|<>|>>|>\||<&|>&|<|>)|&>>?")
VARIABLE = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}


class Unclosed(ValueError):
    """Quotes, braces or parentheses that do not close; the text says which, and on which line they open."""


class Kind(StrEnum):
    """Text; a variable, whose text is what stands in its braces; or what only a shell knows (a command's output)."""

    TEXT = "text"
    VARIABLE = "variable"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a word that is quoted, or is not, as a whole."""

    text: str
    kind: Kind = Kind.TEXT
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """``items`` are the words of an array, ``NAME=(…)``, of which ``pieces`` hold the ``NAME=``."""

    pieces: tuple[Piece, ...]
    items: tuple[Word, ...] | None = None

    @property
    def literal(self) -> str:
        """The word where it holds no expansion, else empty."""
        return "".join(p.text for p in self.pieces) if all(p.kind is Kind.TEXT for p in self.pieces) else ""

    @property
    def bare(self) -> str:
        """The unquoted text that it begins with: what can be a keyword or ``NAME=``."""
        first = self.pieces[0] if self.pieces else Piece("", quoted=True)
        return "" if first.quoted or first.kind is not Kind.TEXT else first.text


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """``joined`` is the operator before it (a line break at the start of a line); ``source`` its own text."""

    words: tuple[Word, ...]
    joined: str
    source: str


def simple_commands(text: str) -> tuple[SimpleCommand, ...]:
    """Every simple command of a script in order, keywords (``if``, ``do``) as words of theirs; redirections and documents
    given in place are left out. Raises ``Unclosed``."""
    return tuple(_Lexer(text).commands())


def pieces_of(text: str, *, quoted: bool) -> tuple[Piece, ...]:
    """The pieces of the word after ``:-`` in ``${NAME:-word}``. Raises ``Unclosed``."""
    lexer = _Lexer(text)
    return tuple(lexer.double_quoted("") if quoted else lexer.word_pieces(""))


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.documents: list[tuple[str, bool]] = []

    def commands(self) -> Iterator[SimpleCommand]:
        words: list[Word] = []
        joined, began = "\n", 0
        while True:
            self._skip_blanks()
            operator = "" if self._redirection() else self._operator()
            if self.at < len(self.text) and not operator:
                if self._skip_redirected():
                    continue
                began = began if words else self.at
                words.append(self._word())
                continue
            if words:
                yield SimpleCommand(tuple(words), joined, self.text[began : self.at].strip())
            if not operator:
                return
            joined = operator if words or operator not in ("\n", ";") else joined
            words = []
            self.at += len(operator)
            if operator == "\n":
                self._skip_documents()

    def _operator(self) -> str:
        return next((one for one in OPERATORS if self.text.startswith(one, self.at)), "")

    def _redirection(self) -> re.Match[str] | None:
        found = REDIRECTION.match(self.text, self.at)
        return None if found is None or self.text.startswith(("<(", ">("), self.at) else found

    def _skip_blanks(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _skip_redirected(self) -> bool:
        """Past a redirection and its target; the delimiter of a document is kept for the end of the line."""
        found = self._redirection()
        if found is None:
            return False
        self.at = found.end()
        self._skip_blanks()
        if self.at < len(self.text) and not self._operator():
            target = self._word()
            if found[0].lstrip("0123456789") in ("<<", "<<-"):
                self.documents.append(("".join(piece.text for piece in target.pieces), found[0].endswith("-")))
        return True

    def _skip_documents(self) -> None:
        for delimiter, tabs in self.documents:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                line = self.text[self.at :] if end < 0 else self.text[self.at : end]
                self.at = len(self.text) if end < 0 else end + 1
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
        self.documents.clear()

    def _word(self) -> Word:
        pieces = tuple(self.word_pieces(" \t\r\n;|&()<>"))
        if pieces and re.fullmatch(r"[A-Za-z_]\w*\+?=", Word(pieces).bare) and self.text.startswith("(", self.at):
            return Word(pieces, tuple(self._items()))
        return Word(pieces)

    def _items(self) -> Iterator[Word]:
        opened = self.at
        self.at += 1
        while True:
            self._skip_blanks()
            if self.at >= len(self.text):
                raise self._unclosed("(", opened)
            if self.text[self.at] == ")":
                self.at += 1
                return
            if self.text[self.at] == "\n":
                self.at += 1
                continue
            before = self.at
            yield Word(tuple(self.word_pieces(" \t\r\n)")))
            if self.at == before:
                self.at += 1

    def word_pieces(self, ends: str) -> Iterator[Piece]:
        """Pieces up to the first unquoted character of ``ends`` (empty: up to the end)."""
        plain = ""
        while self.at < len(self.text):
            character = self.text[self.at]
            process = self.text.startswith(("<(", ">("), self.at)
            if character in ends and not process:
                break
            if character == "\\":
                escaped, self.at = self.text[self.at + 1 : self.at + 2], self.at + 2
                if escaped == "\n":
                    continue
                if plain:
                    yield Piece(plain)
                    plain = ""
                yield Piece(escaped, quoted=True)
            elif character in "'\"`$" or process:
                if plain:
                    yield Piece(plain)
                    plain = ""
                yield from self._special(character)
            else:
                plain, self.at = plain + character, self.at + 1
        if plain:
            yield Piece(plain)

    def _special(self, character: str) -> Iterator[Piece]:
        """What begins with a quote, a dollar, a backtick or ``<(``, outside double quotes."""
        if character == "'":
            end = self.text.find("'", self.at + 1)
            if end < 0:
                raise self._unclosed("'", self.at)
            yield Piece(self.text[self.at + 1 : end], quoted=True)
            self.at = end + 1
        elif character == '"' or self.text.startswith('$"', self.at):
            self.at += 1 if character == '"' else 2
            yield from self.double_quoted('"')
        elif self.text.startswith("$'", self.at):
            yield Piece(self._ansi(), quoted=True)
        elif character in "<>":
            yield self._nested(2, ")", quoted=False)
        else:
            yield self._expansion(quoted=False)

    def double_quoted(self, closing: str) -> Iterator[Piece]:
        """Pieces up to the closing quote and past it (empty: up to the end); at least one, since ``""`` is a word."""
        opened, text, count = self.at, "", 0
        while self.at < len(self.text) and self.text[self.at] != (closing or None):
            character = self.text[self.at]
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in (
                '"',
                "\\",
                "$",
                "`",
                "\n",
                "}" if not closing else '"',
            ):
                text, self.at = text + self.text[self.at + 1].replace("\n", ""), self.at + 2
            elif character in "$`":
                if text:
                    yield Piece(text, quoted=True)
                    text = ""
                count += 1
                yield self._expansion(quoted=True)
            else:  # quotes inside ``"${NAME:-"word"}"`` are the shell's
                text, self.at = text + (character if closing or character != '"' else ""), self.at + 1
        if closing:
            if self.at >= len(self.text):
                raise self._unclosed('"', opened - 1)
            self.at += 1
        if text or not count:
            yield Piece(text, quoted=True)

    def _expansion(self, *, quoted: bool) -> Piece:
        if self.text[self.at] == "`":
            end = re.compile(r"(?:[^`\\]|\\.)*`", re.DOTALL).match(self.text, self.at + 1)
            if end is None:
                raise self._unclosed("`", self.at)
            source, self.at = self.text[self.at : end.end()], end.end()
            return Piece(source, Kind.UNKNOWN, quoted)
        if self.text.startswith("$(", self.at):
            return self._nested(2, ")", quoted=quoted)
        if self.text.startswith("${", self.at):
            whole = self._nested(2, "}", quoted=quoted)
            return Piece(whole.text[2:-1], Kind.VARIABLE, quoted)
        name = VARIABLE.match(self.text, self.at + 1)
        if name is None:
            self.at += 1
            return Piece("$", quoted=quoted)
        self.at = name.end()
        return Piece(name[0], Kind.VARIABLE, quoted)

    def _nested(self, skip: int, closing: str, *, quoted: bool) -> Piece:
        """Past the bracket that closes the one that opens here; quotes and further brackets inside are honoured."""
        began, depth = self.at, 1
        opening = "(" if closing == ")" else "{"
        self.at += skip
        while depth:
            character = self.text[self.at : self.at + 1]
            if not character:
                raise self._unclosed(self.text[began : began + skip], began)
            if character == "\\":
                self.at += 2
            elif character == "'" and not (quoted and closing == "}"):
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    raise self._unclosed("'", self.at)
                self.at = end + 1
            elif character == '"':
                self.at += 1
                for _ in self.double_quoted('"'):
                    pass
            else:
                depth += (character == opening) - (character == closing)
                self.at += 1
        return Piece(self.text[began : self.at], Kind.UNKNOWN, quoted)

    def _ansi(self) -> str:
        """``$'…'`` with its escapes."""
        found = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, self.at)
        if found is None:
            raise self._unclosed("$'", self.at)
        self.at = found.end()
        return re.sub(r"(?s)\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,8}|[0-7]{1,3}|.)", _escaped, found[1])

    def _unclosed(self, what: str, at: int) -> Unclosed:
        return Unclosed(f"No closing for the {what} on line {self.text.count(chr(10), 0, max(at, 0)) + 1}")


def _escaped(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number <= 0x10FFFF else match[0]
    if code.isdigit() and code[0] in "01234567":
        return chr(int(code, 8) & 0xFF)
    return _ESCAPES.get(code, code if code in "\\'\"?" else match[0])
