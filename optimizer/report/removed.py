"""What secrets were taken out of a stored study, by the names of what held them: its commands are not whole without. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vopt.optimizer.history import StudyRecord
from vopt.optimizer.report.redaction import REMOVED, clean
from vopt.optimizer.variables import handed_on


def removed_notes(record: StudyRecord, secrets: Sequence[str] = ()) -> tuple[str, ...]:
    """One sentence for the commands of a study, one for the environment; none where nothing is missing. ``record`` as it is
    stored: an option that is a secret as a whole is not in a cleaned command any more."""
    notes = []
    if words := tuple(dict.fromkeys(_of_commands(record, secrets))):
        them = "them" if len(words) > 1 else "it"
        notes.append(
            f"{', '.join(words)}: a secret was removed here, so the commands of this study are not whole: put {them} back "
            "before you use one. Neither export nor resume takes a command with a placeholder in it"
        )
    variables = [name for name, value in handed_on(record.setup).items() if REMOVED in str(clean(value, secrets, name))]
    if variables:
        notes.append(
            f"{', '.join(variables)}: set in the measurement, a secret, and not stored: the command needs "
            f"{'them' if len(variables) > 1 else 'it'} again, in the environment that starts it"
        )
    return tuple(notes)


def _of_commands(record: StudyRecord, secrets: Sequence[str]) -> Iterator[str]:
    answer = record.recommendation
    argvs = [record.setup.get("baseline_argv") or (), record.setup.get("front_end") or ()]
    argvs += [answer.argv or (), answer.baseline_argv or ()] if answer else []
    for argv in (*argvs, *(trial.argv for trial in record.trials)):
        yield from _of_argv([str(word) for word in argv], secrets)
    configs = [record.setup.get("fixed") or {}, record.setup.get("baseline") or {}]
    for config in (*configs, *(trial.config for trial in record.trials)):
        yield from (_flag(name) for name, value in config.items() if _holds(value, secrets, name))


def _of_argv(argv: Sequence[str], secrets: Sequence[str]) -> Iterator[str]:
    """The option of every word that is, or would be, taken out or replaced."""
    option = "the model"
    for word in argv:
        name, separator, value = word.partition("=")
        if word.startswith("-"):
            option = name
            if separator and _holds(value, secrets, name):
                yield option
        elif _holds(word, secrets, option):
            yield option


def _holds(value: Any, secrets: Sequence[str], name: str) -> bool:
    """Whether a placeholder is in ``value`` once it is cleaned."""
    match clean(value, secrets, name):
        case str() as text:
            return REMOVED in text
        case Mapping() as entries:
            return any(_holds(one, secrets, str(key)) for key, one in entries.items())
        case list() | tuple() as entries:
            return any(_holds(one, secrets, name) for one in entries)
        case _:
            return False


def _flag(name: str) -> str:
    return name.removeprefix("env:") if name.startswith("env:") else f"--{name.partition('.')[0].replace('_', '-')}"
