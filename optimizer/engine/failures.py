"""From what an engine said and how it ended to a failure kind. The messages are data, in ``failures.toml``.

The frontend's own error is of no use here: "Engine core initialization failed. See root cause above" hides the cause,
which only the engine core's output tells. So the log decides, read from its last line upwards, because what an engine
says last before it dies is what killed it; then the exception; then the way the process ended. A process that is killed
says nothing: whether the kernel did it for lack of memory is told by the kernel's own counter.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vopt.optimizer.trial import Failed, FailureKind, Phase

NOISE = re.compile(
    r"registry\.py|Tokenizer not available|See root cause above|Engine core initialization failed"
    r"|initialization failed due to an exception in a background process"
    r"|encountered an issue\. See stack trace|resource_tracker|(?:^|\s)(?:WARNING|INFO|DEBUG)(?::| \d)|(?:^|\) )vopt: "
)
"""Lines that mention failures without being their cause (model class inspection logs a traceback that is survived; a trial
process says what it does in another way then)."""

_EXCEPTION = re.compile(r"(?:^|\s)(?P<type>(?:\w+\.)*\w*(?:Error|Exception|Interrupt)): (?P<text>.+)")
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)*(?:ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]+\] ?|^(?:\([^)]*pid=\d+\)\s*)+")
_CONFIG_EXCEPTIONS = ("ValidationError", "TypeError", "ValueError", "AssertionError")
LINES_LOOKED_AT = 2000
LINES_KEPT = 40


@dataclass(frozen=True, slots=True)
class MessageRule:
    """One entry of ``failures.toml``."""

    kind: FailureKind
    pattern: re.Pattern[str]
    sample: str
    source: str
    versions: str
    phases: frozenset[Phase]
    argument: str | None = None
    bound: str | None = None

    def applies(self, phase: Phase) -> bool:
        return not self.phases or phase in self.phases

    def hint(self, found: re.Match[str]) -> dict[str, dict[str, Any]]:
        """What the message teaches: ``{"max_num_seqs": {"at_most": 856}}``."""
        if self.argument is None or self.bound is None:
            return {}
        return {self.argument: {self.bound: int(found["bound"])}}


@cache
def rules() -> tuple[MessageRule, ...]:
    data = tomllib.loads((Path(__file__).parent / "failures.toml").read_text())
    return tuple(_rule(entry) for entry in data["message"])


def _rule(entry: dict[str, Any]) -> MessageRule:
    hint = entry.get("hint", {})
    return MessageRule(
        kind=FailureKind(entry["kind"]),
        pattern=re.compile(entry["pattern"], re.IGNORECASE),
        sample=entry["sample"],
        source=entry["source"],
        versions=entry["versions"],
        phases=frozenset(Phase(name) for name in entry.get("phases", ())),
        argument=hint.get("argument"),
        bound=hint.get("bound"),
    )


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: its exit status (negative: by that signal), or ``None`` while it runs."""

    code: int | None = None

    def words(self) -> str:
        if self.code is None:
            return "the process still ran"
        return f"killed by signal {-self.code}" if self.code < 0 else f"exit status {self.code}"


def classify(
    phase: Phase,
    ending: Ending,
    exception: str | None,
    log_lines: Sequence[str],
    *,
    hang: bool = False,
    oom_killed: bool = False,
) -> Failed:
    """The failure of one engine. ``exception`` is ``Type: text`` from the trial process, ``log_lines`` its whole log's end;
    ``oom_killed``: the kernel killed a process for lack of memory meanwhile, which explains a death but no other message."""
    tail = tuple(log_lines[-LINES_KEPT:])
    if hang:
        return Failed(phase, FailureKind.HANG, _hang_detail(phase, tail), log_tail=tail)
    found = _by_words(phase, ending, exception, log_lines, tail)
    if not oom_killed or found.kind is not FailureKind.ENGINE_DIED:
        return found
    kind = FailureKind.OOM_START if phase in (Phase.START, Phase.PREFLIGHT) else FailureKind.OOM_LOAD
    return dataclasses.replace(found, kind=kind, detail=f"the kernel killed a process for lack of memory; {found.detail}")


def _by_words(phase: Phase, ending: Ending, exception: str | None, log_lines: Sequence[str], tail: tuple[str, ...]) -> Failed:
    lines = [clean(line) for line in log_lines[-LINES_LOOKED_AT:] if not NOISE.search(line)]
    for line in [*reversed(lines), exception or ""]:
        for rule in rules():
            if rule.applies(phase) and (found := rule.pattern.search(line)):
                return Failed(phase, rule.kind, line.strip()[:1000], log_tail=tail, hint=rule.hint(found))
    cause = root_cause(log_lines) or exception or ending.words()
    return Failed(phase, _kind_without_message(phase, ending, cause), cause[:1000], log_tail=tail)


def disturbed(failed: Failed, why: tuple[int, str]) -> Failed:
    """The failure of a trial that something outside ended, (errno or 0, words): nobody's configuration is to blame."""
    number, words = why
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        kind = FailureKind.DISK_FULL
    else:
        kind = FailureKind.STORAGE if number else FailureKind.DISTURBED
    return dataclasses.replace(failed, kind=kind, detail=words, hint={})


def clean(line: str) -> str:
    """A log line without the process and logger that wrote it."""
    return _PREFIX.sub("", line)


def root_cause(log_lines: Sequence[str]) -> str | None:
    """The last exception that an engine's own process logged, the frontend's summary of it left out."""
    for line in reversed(log_lines[-LINES_LOOKED_AT:]):
        if not NOISE.search(line) and (found := _EXCEPTION.search(clean(line))):
            return f"{found['type']}: {found['text'].strip()}"
    return None


def _kind_without_message(phase: Phase, ending: Ending, cause: str) -> FailureKind:
    """No known message: an error of the arguments while starting is the configuration's, anything else a death. Somebody who
    is killed complains of nothing; what others log as they go down with it is no cause."""
    name = cause.partition(":")[0].rpartition(".")[2]
    killed = ending.code is not None and ending.code < 0
    if phase in (Phase.START, Phase.PREFLIGHT) and not killed and (name in _CONFIG_EXCEPTIONS or ending.code == 2):
        return FailureKind.INVALID_CONFIG
    return FailureKind.ENGINE_DIED


def _hang_detail(phase: Phase, tail: Sequence[str]) -> str:
    last = [clean(line).strip() for line in tail if line.strip()][-3:]
    return f"no end of {phase} before its deadline; the log ends with: {' | '.join(last) or '(nothing)'}"[:1000]
