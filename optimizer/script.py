"""The one launch command of a script, with the variables that its engine would see; what else stands there is named.

Nothing is run. Variables that the script sets are filled in, those of this shell where they are no secrets; what only a shell
could know (the output of a command) is left out of the environment by name, and is an error in the command itself.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vopt.optimizer.command_shell import ASSIGNMENT, CONTAINERS, environment_of
from vopt.optimizer.errors import UsageError
from vopt.optimizer.secrecy import SECRET_ARGUMENTS, clean_text, refuse_secret
from vopt.optimizer.shell_state import DECLARING, HOLE, ShellState, name_in, whole
from vopt.optimizer.shell_words import SimpleCommand, Unclosed, Word, simple_commands

SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_OPENS, _CLOSES = ("if", "for", "while", "until", "case", "select"), ("fi", "done", "esac")
_BEFORE = ("then", "do", "else", "elif", "{", "}", "!", "time", "if", "while", "until")
_TALK = frozenset(
    {"echo", "printf", "pkill", "pgrep", "kill", "grep", "which", "type", "ps", "man", "cat", "logger", "exit", "trap"}
)
_QUIET = frozenset({"set", "echo", "printf", "wait", "true", ":", "tee", "exit", "[", "[[", "test", "for", "case", "select"})
_GOES_ON = frozenset({"cd", "source", ".", "echo", "mkdir", "ulimit", "set", "module", "conda", "pushd", "sleep", "shopt", ":"})
_READING = frozenset({"read", "mapfile", "readarray"})
_TAKES_ONE = re.compile(r"-[a-zA-Z]*[dinNptu]")
_FUNCTION = re.compile(r"(?m)^\s*(?:function\s+)?([\w-]+)\s*\(\)|^\s*function\s+([\w-]+)\s*\{")
_TRANSPARENT = frozenset({"exec", "nohup", "env", "time", "command", "setsid", "uv", "run", "builtin", "--"})


@dataclass(frozen=True, slots=True)
class Script:
    """``words``: assignments, then the command (as ``parse_command`` takes them). ``left_out`` are the other commands of the
    file and the variables that are not known, as short texts without secrets; ``from_shell`` the variables of this shell that
    were filled in."""

    words: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    from_shell: tuple[str, ...] = ()

    def notes(self, where: str) -> tuple[str, ...]:
        """What the user should know about a file ``where`` that was read, one sentence each."""
        notes = []
        if self.left_out:
            notes.append(f"{where}: left out, as no part of the command or of its environment: {'; '.join(self.left_out)}")
        if self.from_shell:
            names = ", ".join(f"${name}" for name in self.from_shell)
            notes.append(f"{where}: {names}: as set in this shell")
        return tuple(notes)


def read_script(text: str, where: str, outside: Mapping[str, str]) -> Script:
    """The launch command of a shell script. ``outside`` is the environment in which it would be run (``os.environ``).

    Raises:
        UsageError: no launch command or several, text that is no shell syntax, a value that only a shell knows, a secret.
    """
    shell = _Shell(ShellState(outside), frozenset(name for names in _FUNCTION.findall(text) for name in names if name))
    try:
        shell.run(simple_commands(text))
    except Unclosed as error:
        raise UsageError(
            f"{where}: not valid shell text: {error}", hint="put quotes around JSON values: '{...}'; they may span lines"
        ) from error
    if len(shell.served) != 1:
        raise UsageError(
            f"{where}: holds {len(shell.served)} 'vllm serve' commands; give a file with one",
            hint="vllm serve MODEL --flag …   # on one line, or on several joined by a backslash",
        )
    return Script(shell.served[0], tuple(dict.fromkeys(shell.left_out)), tuple(shell.state.read_outside))


@dataclass(slots=True)
class _Shell:
    """Goes once over the commands and runs assignments alone. ``functions`` are what the script defines: their bodies are read
    where they stand."""

    state: ShellState
    functions: frozenset[str] = frozenset()
    depth: int = 0
    served: list[tuple[str, ...]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def run(self, commands: Iterable[SimpleCommand]) -> None:
        certain = True
        for command in commands:
            certain = certain and command.joined == "&&" if command.joined in ("&&", "||") else True
            words = self._stripped(command.words)
            head = words[0].literal if words else ""
            if words:
                self._one(words, command, certain=certain and not self.depth and command.joined not in ("||", "|"))
            certain = certain and (head in _GOES_ON or head in DECLARING or bool(words and name_in(words[0])))

    def _stripped(self, words: tuple[Word, ...]) -> tuple[Word, ...]:
        """Without keywords before the command; counts how deep in conditions and loops it stands."""
        while words and words[0].bare == words[0].literal:
            self.depth += (words[0].bare in _OPENS) - (words[0].bare in _CLOSES)
            if words[0].bare not in _BEFORE and words[0].bare not in _CLOSES:
                break
            words = words[1:]
        return words

    def _one(self, words: tuple[Word, ...], command: SimpleCommand, *, certain: bool) -> None:
        head, state = words[0].literal, self.state
        if all(name_in(word) for word in words):
            for word in words:
                state.assign(word, exported=False, certain=certain)
        elif head in DECLARING:
            state.declare(words, certain=certain)
        elif head == "unset":
            for name in (word.literal for word in words[1:] if not word.literal.startswith("-")):
                state.unset(name, certain=certain)
                if name in state.outside:  # engines of ours inherit it
                    self.left_out.append(f"unset {name}")
        elif head == "set":
            state.set_options([word.literal for word in words[1:]])
        elif head.rsplit("/", 1)[-1] in ("bash", "sh", "eval") and "vllm" in words[-1].literal:
            self.run(simple_commands(words[-1].literal))
        else:
            for name in _filled(words):
                state.forget(name)
            self._command(words, command)

    def _command(self, words: tuple[Word, ...], command: SimpleCommand) -> None:
        fields = [text for word in words for text in self.state.fields(word, seen=False)]
        rest = list(fields)
        while rest and (ASSIGNMENT.match(rest[0]) or rest[0] in _TRANSPARENT):
            rest.pop(0)
        if rest and rest[0] not in _TALK and _start(rest) is not None:
            # Once more, since reading what this shell knows counts from here on.
            self.served.append(self._served(words))
        elif (
            not (rest and (rest[0] in _QUIET or rest[0] in self.functions or rest[0] == "function")) and words[0].literal != ":"
        ):
            self.left_out.append(_short(command.source))
        elif words[0].literal == ":":
            for word in words[1:]:
                self.state.fields(word, seen=False)

    def _served(self, words: tuple[Word, ...]) -> tuple[str, ...]:
        """Assignments and command, from the words of the simple command that serves."""
        environment = self.state.environment()
        at = 0
        while at < len(words) and (name := name_in(words[at])):
            environment[name] = whole(self.state.assigned(words[at]))
            at += 1
        fields = [text for word in words[at:] for text in self.state.fields(word)]
        start = _start(fields) or 0
        wrappers: list[str] = []
        for i, word in enumerate(fields[:start]):
            name = word.partition("=")[0]
            if ASSIGNMENT.match(word) and "env" in fields[:i]:
                environment[name] = whole(word.partition("=")[2])
            elif fields[i - 1 : i] == ["-u"] and "env" in fields[:i]:
                environment.pop(word, None)
                wrappers.append(word)
            elif word not in _TRANSPARENT and word != "sudo":
                wrappers.append(word)
        if wrappers:
            self.left_out.append(_short(" ".join(wrappers), whole=True))
        known = {name: value for name, value in environment.items() if isinstance(value, str)}
        self.left_out += [f"{name} (its value is not in the file)" for name, value in environment.items() if value is None]
        command = fields[start:]
        if command[0].rsplit("/", 1)[-1] in CONTAINERS:
            known, command = self._contained(known, command)
        for before, word in zip(["", *command], command, strict=False):
            if hole := HOLE.search(word):
                _refuse_hole(before if word.startswith("\0") else word, hole[1])
        return (*(f"{name}={value}" for name, value in known.items()), *command)

    def _contained(self, environment: Mapping[str, str], command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """Of a container: what ``-e`` passes on, and the command that its image starts."""
        by_name = [word.partition("=")[0] if ASSIGNMENT.match(word) and HOLE.search(word) else word for word in command]
        for word, named in zip(command, by_name, strict=True):
            if word != named:
                self.left_out.append(f"{named} (its value is not in the file)")
        self.left_out += [_short(word, whole=True) for word in command if word.startswith("--env-file")]
        return environment_of((*(f"{name}={value}" for name, value in environment.items()), *by_name))


def _filled(words: Sequence[Word]) -> list[str]:
    """The variables that a loop or ``read`` fills while the script runs."""
    texts = [word.literal for word in words]
    while texts and name_in(words[len(words) - len(texts)]):
        texts.pop(0)
    if texts[:1] in (["for"], ["select"]):
        return [name for name in texts[1:2] if name.isidentifier()]
    if not texts or texts[0] not in _READING:
        return []
    names = [text for before, text in itertools.pairwise(texts) if not _TAKES_ONE.fullmatch(before)]
    return [name for name in names if name.isidentifier()] or ["REPLY"]


def _start(fields: Sequence[str]) -> int | None:
    """Where the launch command begins; ``None``: these words launch nothing."""
    for i, word in enumerate(fields):
        name = word.rsplit("/", 1)[-1]
        following = fields[i + 1 : i + 2]
        if name in CONTAINERS and "run" in fields[i : i + 3] and any("vllm" in other for other in fields[i:]):
            return i
        if name == "vllm" and following == ["serve"]:
            return i
        if word == "-m" and (
            (following and following[0] in SERVERS) or fields[i + 1 : i + 3] == ["vllm.entrypoints.cli.main", "serve"]
        ):
            return max(0, i - 1)
    return None


def _short(source: str, *, whole: bool = False) -> str:
    """A command as one short text: what it is, not all that it says, since that may hold a secret."""
    plain = (f"{word.partition('=')[0]}=…" if ASSIGNMENT.match(word) else word for word in source.split())
    words = clean_text(" ".join(plain)).split()
    shown = words if whole else words[:2]
    text = " ".join(shown) + (" …" if len(shown) < len(words) else "")
    return text if len(text) <= 60 else text[:59] + "…"


def _refuse_hole(before: str, expression: str) -> None:
    name = before.partition("=")[0].lstrip("-").replace("-", "_")
    if name in SECRET_ARGUMENTS:
        refuse_secret(name, expression)
    raise UsageError(
        f"the command holds {_short(expression)}, whose value is not in the file: only the shell that runs it knows it",
        hint="write the value itself; or set it above the command: NAME=value",
    )
