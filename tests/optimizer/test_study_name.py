"""Names of studies: a word for the shell, a directory in its place, and never anything else."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vopt.optimizer.errors import UsageError
from vopt.optimizer.storage import study_directory
from vopt.optimizer.study_name import checked_name, next_name, safe_name

ODD = [
    "",
    ".",
    "..",
    "../up",
    "/abs/x",
    "-dash",
    "a b",
    "a\nb",
    "a\tb",
    "it's",
    '"q"',
    "$HOME",
    "%s",
    "a/b",
    "x" * 300,
    "\udcff",
    "*",
]


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_name_is_refused_with_one_that_is(name: str) -> None:
    with pytest.raises(UsageError, match="--study") as refused:
        checked_name(name)
    words = shlex.split(refused.value.hint)
    assert words[0] == "--study"
    assert checked_name(words[1]) == words[1]


@pytest.mark.parametrize("name", ["qwen3.5-9b-throughput-1", "größe", "日本", "a+b=c@d_e", "7"])
def test_names_of_letters_and_digits_are_kept(name: str) -> None:
    assert checked_name(name) == name == safe_name(name)


@given(st.text())
def test_any_text_gives_a_name_that_stays_in_its_directory(text: str) -> None:
    name = safe_name(text)
    assert checked_name(name) == name
    assert study_directory("sqlite:////data/studies.db", name) == Path("/data/studies") / name


@given(st.text(min_size=1))
@example("\N{MATHEMATICAL BOLD CAPITAL A}" * 30)  # four bytes each
def test_a_study_is_named_after_any_model_directory(text: str) -> None:
    name = next_name((), {"model": f"/models/{text}", "goal": "throughput"})
    assert checked_name(name) == name
    assert name.endswith("-throughput-1")
