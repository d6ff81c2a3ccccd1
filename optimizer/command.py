"""Engine config -> ``vllm serve`` words, and the value that a launch command is read into (``command_reader``).

The forms are those of vLLM's own parser (``vllm/engine/arg_utils.py`` ``_compute_kwargs`` and
``vllm/utils/argparse_utils.py``, 0.20 to 0.33): what it cannot read back is refused here instead of exported.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vopt.optimizer.errors import UsageError
from vopt.optimizer.secrecy import ENVIRONMENT_PREFIX, refuse_secret
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.arguments import Argument, Arguments, Kind

SEE_SPACE = "vopt space …   # shows what can be set, with ranges and defaults"
NEGATIVE_INTEGER = re.compile(r"-\d+")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as it was written. ``name`` is ``None`` when this vLLM does not know it; ``words`` are its value words;
    ``problem`` says why vLLM would refuse or drop it."""

    written: str
    name: str | None
    words: tuple[str, ...]
    value: Any = None
    front_end: bool = False
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """A launch command taken apart. ``front_end`` are the words that do not reach the engine; ``config_file`` is the
    argument of ``--config`` (not read here); ``environment`` are the assignments before the command; ``left_out`` says what of
    the command as it was given is not in it."""

    model: str | None
    config: EngineConfig
    front_end: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    config_file: str | None = None
    flags: tuple[Flag, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(f"{flag.written}: {flag.problem}" for flag in self.flags if flag.problem)


def split_environment(config: Mapping[str, Any]) -> tuple[EngineConfig, dict[str, str]]:
    """(engine arguments, environment): the ``env:NAME`` entries apart, as the strings that an environment holds."""
    engine = {name: value for name, value in config.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    variables = {}
    for name, value in config.items():
        if name.startswith(ENVIRONMENT_PREFIX):
            refuse_secret(name, value)
            text = ("1" if value else "0") if isinstance(value, bool) else str(value)
            variables[name.removeprefix(ENVIRONMENT_PREFIX)] = text
    return EngineConfig(engine), variables


LOOPBACK = "127.0.0.1"
_BINDING = ("--host", "--uds", "--fd")


def bound_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """``argv`` on loopback, unless it says itself where to listen. vLLM without ``--host`` listens on every interface, and
    serves whoever reaches it."""
    listens = any(word.split("=", 1)[0] in _BINDING for word in argv)
    return tuple(argv) if listens else (*argv, "--host", LOOPBACK)


def to_argv(model: str, config: Mapping[str, Any], front_end: Iterable[str], schema: Arguments) -> tuple[str, ...]:
    """The words of ``vllm serve MODEL ...``. ``env:NAME`` entries are not in it (``split_environment``)."""
    return ("vllm", "serve", model, *to_words(config, schema), *front_end)


def to_words(config: Mapping[str, Any], schema: Arguments) -> tuple[str, ...]:
    """Flags and values of an engine config; ``UsageError`` for what no command line of this vLLM can say."""
    words: list[str] = []
    for name, value in config.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            words += argument_words(name, value, schema)
    return tuple(words)


def argument_words(name: str, value: Any, schema: Arguments) -> list[str]:
    """The words of one argument, such that vLLM's parser reads ``value`` back."""
    refuse_secret(name, value)
    argument = schema.get(name)
    if argument is None:
        kind = "has no command-line form in" if name in schema.hidden else "is not an argument of"
        raise UsageError(f"{name} {kind} vLLM {schema.version}", hint=SEE_SPACE)
    if value is None:
        return _none_words(argument)
    if reason := schema.unlike(name, value):
        raise UsageError(f"{name} = {value!r}: {reason}", hint=SEE_SPACE)
    return _WRITERS[argument.kind](argument, value)


def flags_text(config: Mapping[str, Any]) -> str:
    """A configuration as flags, for people to read; a command to run is made by ``to_argv``."""
    words: list[str] = []
    for name, value in config.items():
        flag = "--" + name.replace("_", "-")
        if name.startswith(ENVIRONMENT_PREFIX):
            words.append(f"{name.removeprefix(ENVIRONMENT_PREFIX)}={value}")
        elif isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, value if isinstance(value, str) else _json_text(value)]
    return shlex.join(words) or "no flags"


def shell_line(argv: Iterable[str], environment: Mapping[str, str] | None = None) -> str:
    """One line that a POSIX shell splits into exactly these words."""
    prefix = [f"{name}={shlex.quote(value)}" for name, value in sorted((environment or {}).items())]
    return " ".join([*prefix, shlex.join(argv)])


def _inexpressible(argument: Argument, value: Any, why: str) -> UsageError:
    return UsageError(f"{argument.name} = {value!r} cannot be written on a command line: {why}", hint=SEE_SPACE)


def _pair(argument: Argument, text: str) -> list[str]:
    """``--x value``; ``--x=value`` where the value would be taken for a flag."""
    return [f"{argument.flag}={text}"] if text.startswith("-") else [argument.flag, text]


def _none_words(argument: Argument) -> list[str]:
    if argument.default is None or argument.kind in (Kind.FLAG, Kind.OPTIONAL):
        return []
    if argument.nullable:
        return [argument.flag, "None"]
    raise _inexpressible(argument, None, f"its default is {argument.default!r}")


def _text(argument: Argument, value: Any) -> str:
    text = repr(value) if isinstance(value, float) else str(value)
    if argument.nullable and text in ("", "None"):
        raise _inexpressible(argument, value, "vLLM reads it as no value")
    return text


def _json_text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _json_or_text(argument: Argument, value: Any) -> str:
    if isinstance(value, dict):
        return _json_text(value)
    if not isinstance(value, str):
        raise _inexpressible(argument, value, "it takes a JSON object or a string")
    if re.match(r"(?s)^\s*{.*}\s*$", value):
        raise _inexpressible(argument, value, "vLLM reads text in braces as JSON; give the object itself")
    return value


def _list_words(argument: Argument, value: Iterable[Any]) -> list[str]:
    items = [repr(item) if isinstance(item, float) else str(item) for item in value]
    if not items:
        if not argument.default:
            return []
        raise _inexpressible(argument, [], "the flag wants at least one value")
    if argument.nullable and any(item in ("", "None") for item in items):
        raise _inexpressible(argument, items, "vLLM reads an empty item as no value")
    if len(items) == 1:
        return _pair(argument, items[0])
    for item in items:
        if item.startswith("-") and not NEGATIVE_INTEGER.fullmatch(item):
            raise _inexpressible(argument, items, f"{item!r} would be read as a flag")
    return [argument.flag, *items]


def _comma_text(argument: Argument, value: Iterable[Any]) -> str:
    items = list(value)
    for item in items:
        text = str(item)
        if "," in text or text != text.strip() or not text or (isinstance(item, str) and item.isdigit()):
            raise _inexpressible(argument, items, f"{item!r} does not survive the comma-separated form")
    return ",".join(map(str, items))


def _switch(argument: Argument, value: Any) -> list[str]:
    if value:
        return [argument.flag]
    if argument.kind is Kind.FLAG:
        return []
    if argument.negative is None:
        raise _inexpressible(argument, value, "it can only be switched on")
    return [argument.negative]


def _scalar_words(argument: Argument, value: Any) -> list[str]:
    return _pair(argument, _text(argument, value))


_WRITERS: Mapping[Kind, Callable[[Argument, Any], list[str]]] = {
    Kind.BOOL: _switch,
    Kind.FLAG: _switch,
    Kind.INT: _scalar_words,
    Kind.FLOAT: _scalar_words,
    Kind.STR: _scalar_words,
    Kind.OPTIONAL: lambda argument, value: [argument.flag] if value is True else _scalar_words(argument, value),
    Kind.LIST: _list_words,
    Kind.APPEND: lambda argument, value: [word for item in value for word in _pair(argument, str(item))],
    Kind.COMMA: lambda argument, value: _pair(argument, _comma_text(argument, value)),
    Kind.JSON: lambda argument, value: _pair(argument, _json_text(value)),
    Kind.JSON_OR_STR: lambda argument, value: _pair(argument, _json_or_text(argument, value)),
}
