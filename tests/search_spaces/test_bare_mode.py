"""A performance mode is one flag for several arguments: it must not move what the user keeps, sets or bounds."""

from __future__ import annotations

from typing import Any

import pytest

from vopt.search_spaces.arguments import stored_arguments
from vopt.search_spaces.bare_mode import bare_mode, within_limits
from vopt.search_spaces.build import Subject, build_space
from vopt.search_spaces.choices import Choices
from vopt.search_spaces.defaults import GIB, Gpu
from vopt.search_spaces.model import known_model
from vopt.search_spaces.parse import base_declarations, parse_space
from vopt.search_spaces.space import SearchSpace

SEQS, TOKENS = "max_num_seqs", "max_num_batched_tokens"
FLAG = {"performance_mode": "throughput"}


def made(goal: str = "throughput", file: str = "", baseline: dict[str, Any] | None = None, **choices: Any) -> SearchSpace:
    subject = Subject(stored_arguments("0.33.0"), Gpu("NVIDIA H200", 141 * GIB), known_model("Qwen/Qwen3-8B"))
    user = parse_space(file, "own.toml", base_declarations()) if file else None
    return build_space(subject, goal=goal, choices=Choices(**choices), user=user, baseline=baseline)


def test_a_mode_that_nothing_speaks_against_is_its_flag_and_says_what_it_sets() -> None:
    found = bare_mode(made(), "throughput")
    assert dict(found.config) == FLAG
    assert dict(found.resolved) == {SEQS: 2048, TOKENS: 16384}
    assert found.reason == ""
    assert bare_mode(made(), "balanced").config == {}


def test_a_kept_argument_leaves_the_rest_of_the_mode_written_out() -> None:
    found = bare_mode(made(keep=frozenset({SEQS})), "throughput")
    assert dict(found.config) == {TOKENS: 16384}
    assert found.reason == "the flag would set max_num_seqs to 2048, which you keep"


def test_where_everything_is_kept_nothing_of_the_mode_is_measured() -> None:
    found = bare_mode(made(keep=frozenset({SEQS, TOKENS})), "throughput")
    assert found.config == {}
    assert "max_num_batched_tokens to 16384, which you keep" in found.reason


@pytest.mark.parametrize(
    "file",
    [
        "[parameters.max_num_seqs]\nvalues = [256, 512]",
        "[keep.max_num_seqs]\nat_most = 512",
        '[[rules]]\nforbid = { max_num_seqs = { at_least = 1500 } }\nwhy = "no more"',
    ],
)
def test_bounds_of_a_space_file_hold_for_the_mode(file: str) -> None:
    found = bare_mode(made(file=file), "throughput")
    assert "performance_mode" not in found.config
    assert SEQS not in found.config
    assert found.reason


def test_bounds_of_vary_hold_and_a_range_that_has_the_value_does_not_bind() -> None:
    assert dict(bare_mode(made(vary={SEQS: (256, 512)}), "throughput").config) == {TOKENS: 16384}
    assert dict(bare_mode(made(vary={SEQS: (512, 2048)}), "throughput").config) == FLAG
    assert dict(bare_mode(made(vary={SEQS: None}), "throughput").config) == FLAG


def test_what_is_stated_anyway_is_not_changed_by_the_flag() -> None:
    """vLLM doubles only what is unset."""
    space = made(set={SEQS: 256})
    assert dict(bare_mode(space, "throughput").config) == FLAG
    assert dict(bare_mode(space, "throughput").resolved) == {TOKENS: 16384}
    carried = made(keep=frozenset({SEQS}), baseline={SEQS: 300})
    assert dict(bare_mode(carried, "throughput").config) == FLAG


def test_the_mode_itself_can_be_kept_or_set() -> None:
    for choices in ({"keep": frozenset({"performance_mode"})}, {"set": {"performance_mode": "balanced"}}):
        found = bare_mode(made(**choices), "throughput")
        assert found.config == {}
        assert "performance_mode" in found.reason


def test_interactivity_captures_other_graphs() -> None:
    assert dict(bare_mode(made("latency"), "interactivity").config) == {"performance_mode": "interactivity"}
    kept = bare_mode(made("latency", keep=frozenset({"cudagraph_capture_sizes"})), "interactivity")
    assert kept.config == {}
    assert "cudagraph_capture_sizes to 76 sizes" in kept.reason


def test_what_another_study_found_is_measured_within_the_limits_alone() -> None:
    space = made(keep=frozenset({SEQS}), vary={TOKENS: (4096, 16384)})
    assert within_limits(space, {TOKENS: 16384}, {})
    assert not within_limits(space, {TOKENS: 32768}, {})
    assert not within_limits(space, {SEQS: 512}, {})
    assert within_limits(space, {SEQS: 512}, {SEQS: 512})
    assert not within_limits(space, FLAG, {})
    assert within_limits(made(), {**FLAG, SEQS: 512}, {})
