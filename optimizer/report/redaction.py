"""No secret reaches what people read: the last guard, after tokens were refused on input and filtered from logs.

A value is taken out when its name says that it is a secret (``HF_TOKEN``, ``--api-key``), when it looks like one of the
well-known kinds of token, or when it equals a secret of the environment that the caller names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vopt.optimizer.history import StudyRecord, TrialRecord
from vopt.optimizer.recommend import Recommendation
from vopt.optimizer.secrecy import REMOVED, clean_text, holds_secret, is_secret_name, known_secrets

__all__ = ["REMOVED", "clean", "clean_argv", "clean_text", "holds_secret", "is_secret_name", "known_secrets", "scrub"]


def clean_argv(argv: Sequence[str], secrets: Sequence[str] = ()) -> list[str]:
    """An argument vector without secret options: ``--api-key VALUE`` and ``--api-key=VALUE`` are left out, since a command with
    a placeholder as its key would start and be open to whoever reads this source."""
    words: list[str] = []
    skipping = False
    for i, word in enumerate(argv):
        if word.startswith("--"):
            name, separator, value = word.partition("=")
            following = argv[i + 1] if i + 1 < len(argv) and not argv[i + 1].startswith("--") else None
            skipping = holds_secret(name, value if separator else following)
        if not skipping:
            words.append(clean_text(word, secrets))
    return words


def clean(value: Any, secrets: Sequence[str] = (), name: str = "") -> Any:
    """A JSON value without secrets, containers included."""
    match value:
        case str():
            return REMOVED if holds_secret(name, value) else clean_text(value, secrets)
        case Mapping():
            return {key: clean(item, secrets, str(key)) for key, item in value.items()}
        case list() | tuple() if name.endswith("argv"):
            return clean_argv(value, secrets)
        case list() | tuple():
            return [clean(item, secrets, name) for item in value]
        case _:
            return value


def scrub(record: StudyRecord, secrets: Sequence[str] = ()) -> StudyRecord:
    """The same study with every text in it cleaned; renderers are given nothing else."""
    answer = record.recommendation
    return replace(
        record,
        setup=clean(record.setup, secrets),
        trials=tuple(TrialRecord.from_json(clean(trial.to_json(), secrets)) for trial in record.trials),
        recommendation=Recommendation.from_json(clean(answer.to_json(), secrets)) if answer else None,
    )
