"""A typo in a space file is an error with the nearest name; an argument of another release is not."""

from __future__ import annotations

import pytest

from vopt.search_spaces.arguments import stored_arguments
from vopt.search_spaces.known_names import check_names
from vopt.search_spaces.parse import SpaceFile, SpaceFileError, base_declarations, parse_space
from vopt.search_spaces.retired import retired

ARGUMENTS = stored_arguments("0.33.0")


def file_with(name: str) -> SpaceFile:
    return parse_space(f"[parameters.{name}]\nvalues = [1, 2]\n", "mine.toml", base_declarations())


@pytest.mark.parametrize(
    ("name", "near"),
    [("max_num_batched_token", "max_num_batched_tokens"), ("max-num-seq", "max_num_seqs"), ("nonsense_arg", "")],
)
def test_a_name_that_no_release_has_is_an_error_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(SpaceFileError, match=r"mine\.toml: parameters = ") as caught:
        check_names(file_with(name), ARGUMENTS)
    assert ("did you mean " + near if near else "has this name") in caught.value.rule


@pytest.mark.parametrize(
    "name",
    ["max_num_seqs", "'compilation_config.cudagraph_mode'", "speculation", "'env:VLLM_USE_V1'", next(iter(retired()))],
)
def test_what_some_release_has_is_none(name: str) -> None:
    check_names(file_with(name), ARGUMENTS)


def test_an_argument_of_another_release_alone_is_none() -> None:
    old, new = (set(stored_arguments(version).arguments) for version in ("0.20.0", "0.33.0"))
    gone = sorted(old - new)
    assert gone
    for name in gone:
        check_names(file_with(name), ARGUMENTS)
