"""What stands around the arguments of a launch command: shell text, assignments, wrappers, a container.

``docker run … vllm/vllm-openai:TAG --model M`` is read as the ``vllm serve M`` that its image starts; ``-e`` assignments
count as environment, everything else about the container (ports, volumes, GPUs) is not vLLM's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from vopt.optimizer.errors import UsageError
from vopt.optimizer.secrecy import is_secret_name, refuse_secret

ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
CONTAINERS = ("docker", "podman", "nerdctl")
LOG_TO = re.compile(
    r"(\s*(\d?>{1,2}\s*(&\d|[^\s;|<>&]+)|&>{1,2}\s*[^\s;|<>&]+|<\s*/dev/null|2?>&1|\|&?\s*tee(\s+-a)?\s+[^\s;|<>&]+))+\s*&?\s*"
)
"""Where the output of a command goes, at its end."""

OWN_ARGUMENTS = ("$@", "$*")
"""What a script was called with: as it stands, nothing."""

SWITCHES = frozenset(
    {"--detach", "--init", "--interactive", "--oom-kill-disable", "--privileged", "--publish-all", "--quiet", "--read-only"}
    | {"--rm", "--sig-proxy", "--tty"}
)
"""Options of ``docker run`` that take no value; the short ones are ``-d``, ``-i``, ``-t``, ``-P`` and ``-q``."""


def split(text: str) -> list[str]:
    """The words of one command; ``UsageError`` where the text holds more than one, or is none."""
    text = re.sub(r"\\\r?\n", " ", text).strip().removesuffix("&")
    at = _first_operator(text)
    if at is not None and LOG_TO.fullmatch(text[_descriptor(text, at) :]):
        text = text[: _descriptor(text, at)]
        at = None
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UsageError(
            f"the command is not valid shell text: {error}", hint="put quotes around JSON values: '{...}'"
        ) from error
    if at is not None:
        raise UsageError(
            f"the command holds {text[at]!r}: give one `vllm serve` command alone",
            hint="leave out what stands before or after the command; put quotes around values that hold this character",
        )
    return [word for word in words if word not in OWN_ARGUMENTS]


def _first_operator(text: str) -> int | None:
    """Where the shell would end the command or redirect it: the first operator outside quotes and comments."""
    quote = ""
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote and (quote == "'" or text[i - 1] != "\\") else quote
        elif character in "'\"" and text[i - 1 : i] != "\\":
            quote = character
        elif character in ";|<>&" and text[i - 1 : i] != "\\":
            return i
    return None


def _descriptor(text: str, at: int) -> int:
    """The place of the file descriptor before a redirection (``2>``), else the redirection's own."""
    return at - 1 if text[at] == ">" and re.search(r"(^|\s)\d$", text[:at]) else at


def environment_of(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(assignments before the command, the command's words)."""
    environment: dict[str, str] = {}
    rest = list(words)
    while rest and (rest[0] in ("env", "export", "exec", "nohup") or ASSIGNMENT.match(rest[0])):
        _assign(environment, rest.pop(0))
    if rest and _is_container(rest):
        return _in_container(rest, environment)
    return environment, rest


def _assign(environment: dict[str, str], word: str) -> None:
    if ASSIGNMENT.match(word):
        name, value = word.split("=", 1)
        refuse_secret(f"env:{name}", value)
        environment[name] = value


def _is_container(words: Sequence[str]) -> bool:
    return any(word.rsplit("/", 1)[-1] in CONTAINERS for word in words[:2]) and "run" in words[:4]


def _in_container(words: Sequence[str], outside: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """(assignments of ``-e``, the words of the command that the image starts). Of ``outside``, the variables of the shell, a
    container gets those that ``-e NAME`` passes on."""
    environment: dict[str, str] = {}
    rest = list(words[words.index("run") + 1 :])
    entry: str | None = None
    while rest and rest[0].startswith("-"):
        option, separator, value = rest.pop(0).partition("=")
        if not separator:
            alone = option in SWITCHES or re.fullmatch(r"-[ditPq]+", option)
            value = "" if alone or not rest else rest.pop(0)
        name = value.partition("=")[0]
        if option in ("-e", "--env") and "=" in value and not _from_outside(name, value):
            _assign(environment, value)
        elif option in ("-e", "--env") and value in outside:
            environment[value] = outside[value]
        entry = value if option == "--entrypoint" else entry
    if not rest:
        raise UsageError("this container command names no image", hint="docker run … vllm/vllm-openai:TAG --model MODEL …")
    image, *command = rest
    if command[:2] == ["vllm", "serve"] or any("api_server" in word for word in command[:3]):
        return environment, command
    if entry is not None and entry.rsplit("/", 1)[-1] != "vllm":
        return environment, [entry, *command]
    if "vllm" not in image:
        raise UsageError(f"the image {image!r} is not one of vLLM's", hint="give the `vllm serve` command that it runs")
    return environment, ["vllm", "serve", *(command[1:] if command[:1] == ["serve"] else command)]


def _from_outside(name: str, value: str) -> bool:
    """A secret that the shell fills in (``-e HF_TOKEN=$HF_TOKEN``): it is not in the text, and engines inherit it."""
    return is_secret_name(name) and value.partition("=")[2].startswith("$")


def arguments_of(words: list[str]) -> list[str]:
    """The words after ``vllm serve`` or ``python -m vllm.entrypoints.openai.api_server``."""
    if not words:
        raise UsageError("the command is empty", hint="vopt space --check 'vllm serve MODEL --flag value'")
    if words[0].startswith("-"):
        return words
    for i, word in enumerate(words):
        if word.startswith("-") and word != "-m":
            break
        if word == "serve" and i > 0 and words[i - 1].rsplit("/", 1)[-1] in ("vllm", "vllm.entrypoints.cli.main"):
            return words[i + 1 :]
        if word in ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server") and words[i - 1 : i] == ["-m"]:
            return words[i + 1 :]
    raise UsageError(
        f"{' '.join(words[:3])!r} is not a `vllm serve` command",
        hint="give `vllm serve MODEL ...`, `python -m vllm.entrypoints.openai.api_server ...`, "
        "`docker run ... vllm/vllm-openai ...`, or flags alone",
    )
