"""The exceptions that a user meets, each with its exit code.

    VoptError
    ├── UsageError            2   what was typed cannot be meant
    │   └── SearchSpaceError  2   a search-space file; holds file, key, value, rule
    ├── EnvironmentLacks      3   no GPU, no vLLM, no disk, no such model, storage that cannot be opened
    ├── NothingFeasible       4   no configuration met the limits, or the baseline cannot be started
    ├── GateFailed            5   ``bench --gate``: the recommendation no longer holds
    ├── Unforeseen           70   a fault of vopt itself; names the file that holds its traceback
    └── Interrupted         130   stopped by the user; the study is kept

A message says which rule was broken and with which value; the hint says what to type next.
"""

from __future__ import annotations

from typing import ClassVar


class VoptError(Exception):
    """Base of everything that ends a command with a message instead of a traceback."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(VoptError):
    """What was typed cannot be meant."""

    exit_code = 2


class SearchSpaceError(UsageError):
    """A search-space file that cannot be meant."""

    def __init__(self, file: str, key: str, value: object, rule: str, *, hint: str = "") -> None:
        super().__init__(f"{file}: {key} = {value!r}: {rule}", hint=hint)
        self.file, self.key, self.value, self.rule = file, key, value, rule


class EnvironmentLacks(VoptError):
    """Something that has to be there is not."""

    exit_code = 3


class NothingFeasible(VoptError):
    """No configuration met the limits."""

    exit_code = 4


class GateFailed(VoptError):
    """A recommendation lost more than the gate allows."""

    exit_code = 5


class Unforeseen(VoptError):
    """A fault of this program. The code is ``EX_SOFTWARE`` of sysexits.h."""

    exit_code = 70


class Interrupted(VoptError):
    """Stopped by the user; the study is kept."""

    exit_code = 130
