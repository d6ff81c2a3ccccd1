"""``--notify COMMAND``: one command of the user's at the end of a search, whatever the end was."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from vopt.optimizer.errors import Interrupted, UsageError
from vopt.optimizer.history import StudyRecord
from vopt.optimizer.report.redaction import clean_text, known_secrets
from vopt.optimizer.report.shell import exported_variables
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.report.wording import command_text

NOTIFY_TIMEOUT_S = 30.0
"""Longer than any mail or web hook takes; a command that hangs must not keep the answer from the shell."""

_OPERATORS = frozenset({">", ">>", "<", "|", "||", "&", "&&", ";", "2>", "2>&1", "&>"})
_OURS = re.compile(r"\$\{?VOPT_")

Ended = Mapping[str, str]
"""``VOPT_STUDY``, ``VOPT_VERDICT`` (a verdict, ``interrupted`` or ``failed``), ``VOPT_COMMAND`` (may be empty)."""


def notification(study: str, verdict: str, command: str) -> Ended:
    """What the command is told, as environment variables: no value of ours ever becomes a word of it."""
    return {"VOPT_STUDY": study, "VOPT_VERDICT": verdict, "VOPT_COMMAND": command}


def notify_words(command: str) -> list[str]:
    """``command`` as words, split as a shell would; no shell runs it, so ``$``, ``;`` and ``|`` are characters.

    Raises ``UsageError`` for quotes that do not close, for nothing at all, and for what only a shell would do: else ``echo
    "$VOPT_STUDY" > file`` would print that very text, to nobody.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--notify {command!r}: {error}", hint="--notify 'notify-send vopt done'") from None
    meant = next((word for word in words if word in _OPERATORS or _OURS.search(word)), None)
    if meant is not None and not any(word in ("-c", "-lc", "-ec") for word in words):
        raise UsageError(
            f"--notify {command!r}: no shell runs it, so {meant!r} would be passed on as it is",
            hint=f"--notify {shlex.quote(shlex.join(['sh', '-c', command]))}",
        )
    if not words:
        raise UsageError("--notify is empty", hint="--notify 'notify-send vopt done'")
    return words


def notify(words: list[str], ended: Ended, *, timeout_s: float = NOTIFY_TIMEOUT_S, secrets: tuple[str, ...] = ()) -> str:
    """Run the command and wait for it, at most ``timeout_s``. Returns what went wrong in one sentence, empty when nothing did:
    an answer is not lost because nobody could be told of it."""
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **ended},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # standard output is the answer's alone
            stderr=subprocess.PIPE,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"--notify: {words[0]} did not end within {timeout_s:g} s and was stopped"
    except OSError as error:
        return f"--notify: {words[0]} could not be run: {error.strerror or error}"
    if done.returncode == 0:
        return ""
    said = clean_text(done.stderr.decode(errors="replace"), secrets).strip().splitlines()
    return f"--notify: {words[0]} ended with exit code {done.returncode}" + (f": {said[-1][:200]}" if said else "")


@dataclass(slots=True)
class Begun:
    """What is known of a search for whoever is told of its end: its name once it exists, and the study once it ended."""

    study_name: str = ""
    study: StudyRecord | None = None

    def name(self, study_name: str) -> None:
        self.study_name = study_name


@contextmanager
def notified(command: str | None, say: Callable[[str], None]) -> Iterator[Begun]:
    """Runs ``command`` when a search ends: with its verdict, ``interrupted`` or ``failed``. ``say`` hears what went wrong."""
    begun = Begun()
    if command is None:
        yield begun
        return
    words = notify_words(command)
    verdict, line = "failed", ""
    try:
        yield begun
        view = StudyView.of(begun.study, known_secrets(os.environ)) if begun.study else None
        if view is not None and view.answer is not None:
            argv = view.answer.argv
            verdict, line = str(view.answer.verdict), command_text(argv, exported_variables(view)) if argv else ""
    except (Interrupted, KeyboardInterrupt):
        verdict = "interrupted"
        raise
    finally:
        said = notify(words, notification(begun.study_name, verdict, line), secrets=known_secrets(os.environ))
        if said:
            say(said)
