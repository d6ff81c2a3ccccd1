"""Whether the names in a user's search-space file are arguments of any vLLM at all: a typo would be left out in silence."""

from __future__ import annotations

import difflib
from functools import cache

from vopt.search_spaces.arguments import Arguments, stored_arguments, stored_versions
from vopt.search_spaces.declaration import SpaceFile, SpaceFileError
from vopt.search_spaces.domain import argument_of
from vopt.search_spaces.parse import base_declarations
from vopt.search_spaces.retired import retired


def check_names(file: SpaceFile, arguments: Arguments) -> None:
    """Raises ``SpaceFileError`` for a parameter that neither ``arguments`` nor another known release has. One that only another
    release has is no error: the space says that this vLLM lacks it."""
    known = _of_all_releases() | {*arguments.arguments}
    for declaration in file.declarations:
        name = argument_of(declaration.name)
        if declaration.name.startswith("env:") or name in known:
            continue
        near = difflib.get_close_matches(name, sorted(known), n=1)
        instead = f"; did you mean {near[0]}?" if near else ""
        versions = f"vLLM {stored_versions()[0]} to {stored_versions()[-1]}"
        raise SpaceFileError(file.source, "parameters", declaration.name, f"no argument of {versions} has this name{instead}")


@cache
def _of_all_releases() -> frozenset[str]:
    names = {argument_of(declaration.name) for declaration in base_declarations()} | {*retired()}
    for version in stored_versions():
        names |= {*stored_arguments(version).arguments}
    return frozenset(names)
