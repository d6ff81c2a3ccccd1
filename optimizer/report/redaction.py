"""No secret reaches what people read: the last guard, after tokens were refused on input and filtered from logs.

A value is taken out when its name says that it is a secret (``HF_TOKEN``, ``--api-key``), when it looks like one of the
well-known kinds of token, or when it equals a secret of the environment that the caller names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vopt.optimizer.history import StudyRecord, TrialRecord
from vopt.optimizer.recommend import Recommendation

REMOVED = "[removed]"
_SECRET_NAME = re.compile(
    r"(?i)(?:^|[_.-])(?:token|secret|password|passwd|passphrase|api[_-]?key|apikey|access[_-]?key|private[_-]?key"
    r"|credentials?|authorization|cookie|key)$"
)
# Hugging Face, OpenAI-like, GitHub, GitLab, AWS key ids, Slack, JSON web tokens; then bearer headers and URL passwords.
_SECRET_SHAPE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}"
    r"|\bglpat-[A-Za-z0-9_-]{16,}|\bAKIA[A-Z0-9]{16}\b|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*|(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{8,}"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
_ASSIGNED = re.compile(
    r"(?i)\b((?:[a-z0-9]+[_-])*(?:token|secret|password|api[_-]?key))(['\"]?\s*[=:]\s*['\"]?)(?!None\b|\[removed\])([^\s'\",)}]{6,})"
)
SHORTEST_SECRET = 6
"""Characters; a shorter environment value would take ordinary words out of every page."""


def is_secret_name(name: str) -> bool:
    """Whether a variable, an option or a JSON key of this name holds a secret."""
    return _SECRET_NAME.search(name.lstrip("-")) is not None


def known_secrets(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values of an environment (``os.environ``) that must appear nowhere, longest first."""
    found = {value for name, value in environment.items() if is_secret_name(name) and len(value) >= SHORTEST_SECRET}
    return tuple(sorted(found, key=len, reverse=True))


def clean_text(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` without known secrets and without what looks like a token."""
    for secret in secrets:
        text = text.replace(secret, REMOVED)
    return _ASSIGNED.sub(rf"\1\2{REMOVED}", _SECRET_SHAPE.sub(REMOVED, text))


def clean_argv(argv: Sequence[str], secrets: Sequence[str] = ()) -> list[str]:
    """An argument vector without secret options: ``--api-key VALUE`` and ``--api-key=VALUE`` are left out, since a command with
    a placeholder as its key would start and be open to whoever reads this source."""
    words: list[str] = []
    skipping = False
    for word in argv:
        if word.startswith("--"):
            skipping = is_secret_name(word.split("=", 1)[0])
        if not skipping:
            words.append(clean_text(word, secrets))
    return words


def clean(value: Any, secrets: Sequence[str] = (), name: str = "") -> Any:
    """A JSON value without secrets, containers included."""
    match value:
        case str():
            return REMOVED if value and is_secret_name(name) else clean_text(value, secrets)
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
