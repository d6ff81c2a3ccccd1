"""Names of studies: a word for the shell, a directory in its place, and never anything else."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vopt.optimizer.errors import UsageError
from vopt.optimizer.storage import study_directory
from vopt.optimizer.study_name import checked_name, next_name, safe_name, unknown_study

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


def test_an_ambiguous_name_lists_what_it_could_be_and_nothing_else() -> None:
    names = [f"other-{n}" for n in range(30)] + [f"qwen3-{n}" for n in range(15)]
    error = unknown_study("qwen3", [name for name in names if name.startswith("qwen3")], names)
    assert "other" not in f"{error} {error.hint}"
    assert "qwen3-14" in str(error)
    assert "and 5 more" in str(error)
    assert "vopt show --all" in (error.hint or "")


def test_an_unknown_name_lists_the_most_alike_else_the_latest() -> None:
    names = ["qwen3-8b-throughput-1", "llama-latency-1", *(f"other-{n}" for n in range(12))]
    assert "studies: qwen3-8b-throughput-1 " in (unknown_study("qwen-8b-throughput-1", [], names).hint or "")
    hint = unknown_study("zzz", [], names).hint or ""
    assert "other-11" in hint
    assert "and 4 more" in hint
