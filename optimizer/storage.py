"""Where studies are kept: opening a storage with clear words for what can be wrong, and the directory beside it."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from vopt.optimizer.errors import EnvironmentLacks, UsageError

DEFAULT_STORAGE = "sqlite:///studies.db"
_SQLITE_MAGIC = b"SQLite format 3\x00"


def sqlite_path(url: str) -> Path | None:
    """The file of an SQLite URL; ``None`` for other databases. ``UsageError`` for what is no URL."""
    try:
        parsed = make_url(url)
    except SQLAlchemyError as error:
        raise UsageError(f"{url!r} is no storage URL", hint=f"for example --storage {DEFAULT_STORAGE}") from error
    if parsed.get_backend_name() != "sqlite":
        return None
    if not parsed.database or parsed.database == ":memory:":
        raise UsageError(
            f"{url!r} names no file: a study must outlive its search", hint=f"for example --storage {DEFAULT_STORAGE}"
        )
    if "{" in parsed.database or "}" in parsed.database:
        raise UsageError(f"{url!r}: Optuna cannot open a path with braces", hint="choose a path without { and }")
    return Path(parsed.database).expanduser()


class _Unsynchronised(sqlite3.Connection):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.execute("PRAGMA synchronous=OFF")


def storage_for(url: str, *, create: bool, timeout_s: float = 60.0, durable: bool = True) -> BaseStorage:
    """Open a storage. With ``create`` ``False`` a missing database is an error and nothing is made or changed.

    ``durable=False`` does not wait for the disk at each commit: for simulations, which can be run again.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # its news of each study and trial would break the live display
    path = sqlite_path(url)
    arguments: dict[str, Any] = {}
    if path is not None:
        _check_file(path, create=create)
        # A reader or writer may hold SQLite's lock for a while: the default of 5 s loses results.
        arguments = {"connect_args": {"timeout": timeout_s, **({} if durable else {"factory": _Unsynchronised})}}
        url = f"sqlite:///{path}"
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return _opened(url, arguments, create=create or path is None)
    except ImportError as error:
        raise EnvironmentLacks(
            f"the driver of {url!r} is not installed: {error}", hint=f"or use --storage {DEFAULT_STORAGE}"
        ) from error
    except RuntimeError as error:  # Optuna's own check of the schema version
        raise EnvironmentLacks(
            f"{url!r} was written by another version of Optuna: {error}",
            hint=f"back it up, then: optuna storage upgrade --storage {url}",
        ) from error
    except (SQLAlchemyError, OSError) as error:
        raise EnvironmentLacks(
            f"the storage {url!r} cannot be opened: {error}", hint=f"for example --storage {DEFAULT_STORAGE}"
        ) from error
    finally:
        optuna.logging.set_verbosity(verbosity)


TOGETHER_S = 20.0
"""How long searches that make one database at the same moment try: each makes some tables, and all find them all at last."""


def _opened(url: str, arguments: dict[str, Any], *, create: bool) -> RDBStorage:
    """Optuna looks whether a table is there and then makes it: two searches that begin together get in each other's way."""
    until = time.monotonic() + (TOGETHER_S if create else 0.0)
    while True:
        try:
            return RDBStorage(url, engine_kwargs=arguments, skip_table_creation=not create)
        except (SQLAlchemyError, StorageInternalError, RuntimeError, AssertionError) as error:
            if time.monotonic() >= until or not _of_two_makers(error):
                raise
        time.sleep(0.05 + 0.1 * random.random())


def _of_two_makers(error: Exception) -> bool:
    """Whether another maker of the same tables explains it; Optuna's version check fails where a version is not there yet."""
    reason = innermost(error)
    return isinstance(error, AssertionError) or any(
        said in reason for said in ("already exists", "UNIQUE constraint failed", "no such table", "duplicate key")
    )


def sqlite_file(study: optuna.Study) -> tuple[Path, int] | None:
    """(path, inode) of the SQLite file that a study lies in, inode 0 when it is gone; ``None`` for other databases."""
    url = str(getattr(study._storage, "url", "") or getattr(getattr(study._storage, "_backend", None), "url", ""))
    path = sqlite_path(url) if url else None
    if path is None:
        return None
    try:
        return path, path.stat().st_ino
    except OSError:
        return path, 0


def _check_file(path: Path, *, create: bool) -> None:
    if path.is_dir():
        raise EnvironmentLacks(
            f"{path} is a directory, not a database", hint=f"for example --storage sqlite:///{path / 'studies.db'}"
        )
    if path.exists():
        with path.open("rb") as file:
            head = file.read(16)
        if head and head != _SQLITE_MAGIC:
            raise EnvironmentLacks(f"{path} is not an SQLite database", hint="give another --storage")
        if create and not os.access(path, os.W_OK):
            raise EnvironmentLacks(f"{path} cannot be written", hint="give another --storage, or change its owner")
        return
    if not create:
        raise EnvironmentLacks(f"there is no database {path}", hint="vopt search makes one; or give another --storage")
    if not path.parent.is_dir():
        raise EnvironmentLacks(f"there is no directory {path.parent} for the database", hint=f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise EnvironmentLacks(f"{path.parent} cannot be written", hint="give another --storage")


def make_data_dir(data_dir: Path | None) -> None:
    """The user's own folder for records, made before a database is. ``EnvironmentLacks`` when nothing can be written there."""
    if data_dir is None:
        return
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(data_dir, os.W_OK | os.X_OK):
            raise PermissionError(f"{data_dir} cannot be written")
    except OSError as error:
        raise EnvironmentLacks(
            f"--data-dir {data_dir}: {error.strerror or error}", hint="name a directory that you may write to, or leave it out"
        ) from None


def study_directory(url: str, name: str, data_dir: Path | None = None) -> Path:
    """Where a study's raw records and logs lie: ``studies/<name>`` beside the SQLite file, else below ``data_dir``."""
    path = sqlite_path(url)
    base = data_dir or (path.parent if path is not None else Path())
    return (base / "studies" / name).absolute()


def made_directory(directory: Path) -> None:
    """Make a study's directory, before its study exists: a study without one would be the latest and be nobody's."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise EnvironmentLacks(
            f"{directory} cannot be made: {error.strerror or error}", hint="--data-dir with a directory that you may write to"
        ) from None


def innermost(error: BaseException) -> str:
    """What the database itself said, below the layers that only say that it failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def waiting_is_useless(reason: str) -> bool:
    """A lock is given back some day; a full disk and a file that may not be written stay as they are."""
    return any(said in reason for said in ("disk is full", "readonly database"))


@contextmanager
def readable(url: str) -> Iterator[None]:
    """A database without studies' tables, or with damaged ones, in words of its own. Raises ``EnvironmentLacks``."""
    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        raise EnvironmentLacks(
            f"the studies in {url!r} cannot be read: {innermost(error)}",
            hint="give another --storage; what was measured is also in the files below studies/, beside the database",
        ) from error
