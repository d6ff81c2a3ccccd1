"""A search as a command line that types it again, from its options. Pure."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any, get_type_hints

from vopt.optimizer.options import ResumeOptions, SearchOptions
from vopt.optimizer.shared_options import duration_s

_OF_ONE_RUN = frozenset({"command", "study", "seed_from", "dry_run", "json", "quiet", "notify"})


def search_line(options: SearchOptions, *, seed_from: str | None = None, more: Sequence[str] = ()) -> str:
    """``vopt search …`` with every option that is not as by default, but for its name and what it prints. ``more`` are further
    words."""
    words = ["vopt", "search", *_words(options, _OF_ONE_RUN), *more]
    if seed_from is not None:
        words += ["--seed-from", seed_from]
    return shlex.join([*words, *(("--", *options.command) if options.command else ())])


def resume_line(study: str, options: SearchOptions) -> str:
    """``vopt resume STUDY``, with the storage where it is not the usual one."""
    places = ResumeOptions(study=study, storage=options.storage)
    return shlex.join(["vopt", "resume", study, *_words(places, frozenset({"study"}))])


def _words(options: Any, without: frozenset[str]) -> list[str]:
    hints = get_type_hints(type(options), include_extras=True)
    words: list[str] = []
    for spec in dataclasses.fields(options):
        value = getattr(options, spec.name)
        usual = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
        if spec.name in without or value == usual:
            continue
        typer_option = hints[spec.name].__metadata__[0]
        names = (typer_option.default, *typer_option.param_decls)  # in ``Annotated`` the first name is kept as the default
        flag = next(name for name in names if str(name).startswith("--"))
        for one in value if isinstance(value, (list, tuple)) else [value]:
            words += [flag] if one is True else [flag, _text(one, seconds=typer_option.parser is duration_s)]
    return words


def _text(value: Any, *, seconds: bool) -> str:
    return f"{value:g}s" if seconds else f"{value:g}" if isinstance(value, float) else str(value)
