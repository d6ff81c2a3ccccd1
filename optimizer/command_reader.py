"""A launch command -> ``LaunchCommand``: what vLLM's own parser would read, without vLLM.

Knows what ``FlexibleArgumentParser`` does before argparse (underscores, ``-O3``, dotted JSON keys, ``key+`` lists, number
suffixes) and what argparse itself does (short aliases, unique prefixes, lists up to the next flag).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from vopt.optimizer.command import Flag, LaunchCommand
from vopt.optimizer.command_shell import arguments_of, environment_of, split
from vopt.optimizer.errors import UsageError
from vopt.optimizer.secrecy import refuse_secret, refuse_words
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.arguments import Argument, Arguments, Kind

HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
NUMBER = re.compile(r"-\d+|-\d*\.\d+")
MULTIPLIERS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_command(
    command: str | Sequence[str],
    schema: Arguments,
    *,
    strict: bool = True,
    valueless: frozenset[str] = frozenset(),
    several: frozenset[str] = frozenset(),
) -> LaunchCommand:
    """Reads one ``vllm serve`` command: shell text or its words; flags alone (``--model M ...``) are taken too.

    ``strict`` raises ``UsageError`` for the first flag that this vLLM does not take; otherwise it stands in ``flags`` with
    its problem. ``valueless`` are unknown flags (``--like-this``) known to take no value, ``several`` those known to take more
    than one.
    """
    environment, words = environment_of(split(command) if isinstance(command, str) else command)
    reader = _Reader(schema, valueless, several)
    arguments = arguments_of(words)
    refuse_words(arguments)
    reader.read(arguments)
    result = reader.result(environment)
    if strict and (problems := result.problems):
        raise UsageError(
            f"vLLM {schema.version} does not take this command: {problems[0]}",
            hint="`vopt space --check` takes a command apart flag by flag",
        )
    return result


def human_integer(text: str) -> int:
    """``8k`` -> 8000, ``8K`` -> 8192, ``1.5m`` -> 1500000; ``ValueError`` for decimals with a binary suffix."""
    match = HUMAN.fullmatch(text.strip())
    if match is None:
        return int(text)
    number, suffix = match.groups()
    return int(float(number) * MULTIPLIERS[suffix]) if suffix.islower() else int(number) * MULTIPLIERS[suffix]


class _Reader:
    """Goes once over the words and collects flags; the last of two equal flags wins, as in argparse."""

    def __init__(self, schema: Arguments, valueless: frozenset[str], several: frozenset[str]) -> None:
        self.schema = schema
        self.valueless, self.several = valueless, several
        self.model: str | None = None
        self.config_file: str | None = None
        self.flags: list[Flag] = []
        self.dotted: dict[str, dict[str, Any]] = {}

    def read(self, words: list[str]) -> None:
        rest = [self._normal(word) for word in words]
        while rest:
            word = rest.pop(0)
            if word == "-O" or (word.startswith("-O") and word[2:3].isdigit()) or word.startswith("-O="):
                level = (rest.pop(0) if rest else "") if word == "-O" else word[2:].removeprefix("=")
                rest[:0] = ["--optimization-level", level]
            elif not word.startswith("-") or NUMBER.fullmatch(word):
                self._positional(word)
            elif "." in word.split("=", 1)[0]:
                self._dotted(word, rest)
            else:
                self._flag(word, rest)

    def result(self, environment: dict[str, str]) -> LaunchCommand:
        config: dict[str, Any] = {}
        front: dict[str, tuple[str, ...]] = {}
        for flag in self.flags:
            if flag.name is None or flag.problem:
                continue
            if flag.front_end:
                argument = self.schema[flag.name]
                joined = argument.kind is not Kind.LIST and flag.words and flag.words[0].startswith("-")
                written = (f"{flag.written}={flag.words[0]}",) if joined else (flag.written, *flag.words)
                front[flag.name] = (
                    (*front[flag.name], *written) if argument.kind is Kind.APPEND and flag.name in front else written
                )
            elif self.schema[flag.name].kind is Kind.APPEND:
                config[flag.name] = [*config.get(flag.name, []), *flag.value]
            else:
                config[flag.name] = flag.value
        words = tuple(word for words in front.values() for word in words)
        return LaunchCommand(self.model, EngineConfig(config), words, environment, self.config_file, tuple(self.flags))

    @staticmethod
    def _normal(word: str) -> str:
        if not word.startswith("--"):
            return word
        key, separator, value = word.partition("=")
        head, dot, tail = key.partition(".")
        return head.replace("_", "-") + dot + tail + separator + value

    def _positional(self, word: str) -> None:
        if self.model is None:
            self.model = word
        else:
            self.flags.append(Flag(word, None, (), problem="this word belongs to no flag"))

    def _find(self, key: str) -> tuple[Argument | None, str, str | None]:
        """(argument, its canonical flag, problem)."""
        if argument := self.schema.by_flag.get(key):
            canonical = key if key in argument.negatives else argument.flag
            return argument, canonical, None
        if key.startswith("--"):
            matches = {flag: a for flag, a in self.schema.by_flag.items() if flag.startswith(key)}
            found = {argument.name for argument in matches.values()}
            if len(matches) == 1:
                flag, argument = next(iter(matches.items()))
                return argument, flag, None
            if len(found) > 1 or len(matches) > 1:
                return None, key, f"could be {', '.join(sorted(matches))}"
        return None, key, f"vLLM {self.schema.version} has no such argument"

    def _flag(self, word: str, rest: list[str]) -> None:
        key, separator, explicit = word.partition("=")
        argument, flag, problem = self._find(key)
        if argument is None:
            takes = not separator and key not in self.valueless and rest and not _is_flag(rest[0])
            unknown = [explicit] if separator else [rest.pop(0)] if takes else []
            while takes and key in self.several and rest and not _is_flag(rest[0]):
                unknown.append(rest.pop(0))
            self.flags.append(Flag(key, None, tuple(unknown), problem=problem))
            return
        words = self._values(argument, flag, explicit if separator else None, rest)
        if argument.name == "config":
            self.config_file = words[0] if words else None
            return
        if argument.name == "model" or argument.name == "model_tag":
            self.model = words[0] if words else self.model
            return
        try:
            value, problem = _value(argument, flag, words, explicit if separator else None), None
            problem = self.schema.unlike(argument.name, value)
        except ValueError as error:
            value, problem = None, str(error)
        refuse_secret(argument.name, value)
        self.flags.append(Flag(flag, argument.name, words, value, argument.front_end, problem))

    def _values(self, argument: Argument, flag: str, explicit: str | None, rest: list[str]) -> tuple[str, ...]:
        if explicit is not None:
            return (explicit,)
        if argument.kind in (Kind.BOOL, Kind.FLAG):
            return ()
        if argument.kind is Kind.LIST:
            taken: list[str] = []
            while rest and not _is_flag(rest[0]):
                taken.append(rest.pop(0))
            return tuple(taken)
        return (rest.pop(0),) if rest and not _is_flag(rest[0]) else ()

    def _dotted(self, word: str, rest: list[str]) -> None:
        path, separator, text = word.partition("=")
        if not separator:
            text = rest.pop(0) if rest else ""
        key, *keys = path.removesuffix("+").split(".")
        argument, flag, problem = self._find(key)
        if argument is None:
            self.flags.append(Flag(path, None, (text,), problem=problem))
            return
        value: Any = text.split(",") if path.endswith("+") else _loose(text)
        for part in reversed(keys):
            value = {part: value}
        if argument.name not in self.dotted and any(earlier.name == argument.name for earlier in self.flags):
            # vLLM appends the dotted keys as one more flag, and the last flag wins.
            self.flags.append(Flag(flag, None, (), problem="dotted keys replace the JSON given beside them"))
        merged = self.dotted.setdefault(argument.name, {})
        _merge(merged, value)
        self.flags = [f for f in self.flags if f.name != argument.name]
        self.flags.append(Flag(flag, argument.name, (json.dumps(merged),), dict(merged), argument.front_end))


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not NUMBER.fullmatch(word) and " " not in word


def _merge(into: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif isinstance(value, list) and isinstance(into.get(key), list):
            into[key] = into[key] + value
        else:
            into[key] = value


def _loose(text: str) -> Any:
    """The value of a dotted key: JSON, else a number with a suffix, else text."""
    for read in (json.loads, human_integer):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _value(argument: Argument, flag: str, words: tuple[str, ...], explicit: str | None) -> Any:
    """The value in an argument's words; ``ValueError`` says what is wrong with them."""
    kind = argument.kind
    if kind in (Kind.BOOL, Kind.FLAG):
        if explicit is not None:
            raise ValueError(f"takes no value: write {flag}" + (f" or {argument.negative}" if argument.negative else ""))
        return flag not in argument.negatives
    if kind is Kind.OPTIONAL:
        return words[0] if words else True
    if not words:
        raise ValueError("wants a value")
    if kind in (Kind.LIST, Kind.APPEND):
        return [_scalar(argument.element, word, argument) for word in words]
    word = words[0]
    if kind is Kind.COMMA:
        return [int(part) if part.strip().isdigit() else part.strip() for part in word.split(",")]
    if argument.nullable and word in ("", "None"):
        return None
    if kind is Kind.JSON or (kind is Kind.JSON_OR_STR and re.match(r"(?s)^\s*{.*}\s*$", word)):
        try:
            return json.loads(_expand(word) if kind is Kind.JSON else word)
        except json.JSONDecodeError as error:
            raise ValueError(f"{word!r} is not valid JSON ({error.msg}); quote it for the shell: '{{...}}'") from error
    if kind is Kind.JSON_OR_STR:
        return word
    return _scalar(kind.value, word, argument)


def _expand(text: str) -> str:
    """Number suffixes inside JSON, outside its strings."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b", lambda match: str(human_integer(match[0])), parts[i])
    return "".join(parts)


def _scalar(kind: str, word: str, argument: Argument) -> Any:
    match kind:
        case "int":
            if argument.name == "max_model_len" and word.lower() == "auto":
                return -1
            try:
                return human_integer(word) if argument.human else int(word)
            except ValueError:
                raise ValueError(f"{word!r} is not an integer" + _suffix_note(argument, word)) from None
        case "float":
            try:
                return float(word)
            except ValueError:
                raise ValueError(f"{word!r} is not a number") from None
        case _:
            if argument.name.endswith("_backend") and argument.choices and word not in argument.choices:
                word = word.lower().replace("-", "_")
            return int(word) if isinstance(argument.default, int) and word.isdigit() else word


def _suffix_note(argument: Argument, word: str) -> str:
    if HUMAN.fullmatch(word) and not argument.human:
        return f"; {argument.flag} takes no suffix"
    return ""
