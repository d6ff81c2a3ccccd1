"""The command in use, typed after ``--`` or in a file: read whole, or said what of it is not; refused with a secret in it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from vopt.optimizer.command import LaunchCommand, shell_line
from vopt.optimizer.command_reader import parse_command
from vopt.optimizer.command_shell import CONTAINERS
from vopt.optimizer.errors import UsageError
from vopt.optimizer.options import BenchOptions, SpaceOptions
from vopt.optimizer.report.deploy import argv_from_yaml, is_configuration
from vopt.optimizer.script import read_script
from vopt.optimizer.secrecy import refuse_known, refuse_secret, refuse_words
from vopt.optimizer.trial import EngineConfig
from vopt.optimizer.typed_files import read_typed
from vopt.optimizer.variables import OURS
from vopt.search_spaces.arguments import Arguments
from vopt.search_spaces.choices import parse_value
from vopt.search_spaces.parse import canonical

_OF_ANOTHER_TOOL = re.compile(r"(?m)^(services|apiVersion):")
_MAY_HOLD_SECRETS = frozenset({"storage", "data_dir", "notify", "url", "api_key_file"})
"""Options whose values reach no engine and no command; they are stored without what is secret in them, or not at all."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Written:
    """A launch command as text or words, and what was said about the file that it comes from."""

    command: str | tuple[str, ...]
    notes: tuple[str, ...] = ()


def command_in_use(options: SpaceOptions | BenchOptions, schema: Arguments, say: Say, warn: Say) -> LaunchCommand:
    """The words after ``--``, or the file of ``--from``; nothing else may stand there. ``warn`` hears what of it is left out:
    whoever starts the exported command has to know. ``say`` hears the rest.

    Raises:
        UsageError: no command, two, one that this vLLM does not take, or one with a secret in it.
    """
    words = list(options.command or ())
    left_out: list[str] = []
    from_file: Path | None = getattr(options, "from_file", None)
    if words and from_file is not None:
        raise UsageError("the command in use is given twice: by --from and after --", hint="leave one of them out")
    if from_file is not None:
        written = file_command(from_file)
        left_out += written.notes
        command = parse_command(written.command, schema)
    elif words:
        if not _is_command(words, options):
            raise UsageError(
                f"{words[0]!r} is no option of vopt and no vllm command",
                hint="vopt search --goal throughput -- vllm serve MODEL …",
            )
        command = parse_command(words, schema)
    else:
        return LaunchCommand(None, EngineConfig())
    command = with_config_file(command, schema)
    refuse_known((*_texts_of(command), *command.environment.values()), os.environ)
    left_out += [f"{name} of the command is left out: {OURS[name]}" for name in command.environment if name in OURS]
    for note in left_out:
        warn(note)
    kept = {name: value for name, value in command.environment.items() if name not in OURS}
    if kept:
        say(f"with the command's own environment: {shell_line((), kept).strip()}")
    return replace(command, environment=kept, left_out=tuple(left_out))


def _texts_of(command: LaunchCommand) -> tuple[str, ...]:
    return (command.model or "", *command.front_end, *(word for flag in command.flags for word in flag.words))


def _is_command(words: Sequence[str], options: SpaceOptions | BenchOptions) -> bool:
    if isinstance(options, BenchOptions) and words[0].startswith("-"):
        return True
    return any(Path(word).name in ("vllm", "python", "python3", *CONTAINERS) for word in words[:3]) or "=" in words[0]


def file_command(path: Path, option: str = "--from") -> Written:
    """What a file holds: a script with one launch command, or vLLM's YAML.

    Raises:
        UsageError: neither; a file of another tool; a value that only a shell knows; a secret.
    """
    where = f"{option} {path}"
    text = read_typed(path, option, hint=f"{option} FILE that holds one vllm serve command, or vLLM's YAML")
    if is_configuration(text):
        if (other := _OF_ANOTHER_TOOL.search(text)) is not None:
            raise _another_tool(where, other[1])
        return Written(argv_from_yaml(text))
    if (other := _OF_ANOTHER_TOOL.search(text)) is not None:
        raise _another_tool(where, other[1])
    if not ("vllm" in text or "api_server" in text):
        if option == "--check":  # flags alone
            return Written(text)
        return Written(argv_from_yaml(text))
    script = read_script(text, where, os.environ)
    return Written(script.words, script.notes(where))


def _another_tool(where: str, key: str) -> UsageError:
    what = "a compose file" if key == "services" else "a Kubernetes manifest"
    return UsageError(
        f"{where}: {what}, not a launch command",
        hint="give the `vllm serve …` or `docker run …` command that it starts; vopt export --format shell writes one",
    )


def with_config_file(command: LaunchCommand, schema: Arguments, *, strict: bool = True) -> LaunchCommand:
    """``command`` with the arguments of its ``--config`` file, as vLLM puts them in: before its own, which win.

    Raises:
        UsageError: no such file, no YAML, or arguments that this vLLM does not take.
    """
    if command.config_file is None:
        return command
    path = Path(command.config_file)
    text = read_typed(path, "--config", hint="--config FILE.yaml, by its whole path")
    file = parse_command(argv_from_yaml(text), schema, strict=strict)
    both = ("vllm", "serve", "m", *file.front_end, *command.front_end)
    return replace(
        command,
        model=command.model or file.model,
        config=file.config | command.config,
        front_end=parse_command(both, schema, strict=strict).front_end,
        config_file=None,
        flags=(*file.flags, *command.flags),
    )


def refuse_typed(options: SpaceOptions | BenchOptions) -> None:
    """``UsageError`` for a secret in what was typed, before anything is started or stored; also for an older study's options
    that have lost one."""
    for spec in fields(options):
        value = getattr(options, spec.name)
        if spec.name in _MAY_HOLD_SECRETS or value is None:
            continue
        if spec.name in ("set", "vary"):
            for text in value:
                _refuse_pair(text)
        elif spec.name == "command":
            refuse_words(value)
        elif isinstance(value, (str, list)):
            refuse_secret(f"--{spec.name.replace('_', '-')}", value)


def _refuse_pair(text: str) -> None:
    """``NAME=VALUE`` of ``--set``, and ``NAME=V1,V2`` of ``--vary``: one value, or each of them."""
    name, _, value = text.partition("=")
    name = canonical(name.strip())
    refuse_secret(name, value)
    whole = parse_value(value)
    for one in whole if isinstance(whole, list) else value.split(","):
        refuse_secret(name, one)
