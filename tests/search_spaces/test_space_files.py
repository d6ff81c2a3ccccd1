"""Search-space files: what they say, and errors that name file, key, value and rule."""

from __future__ import annotations

import pytest

from vopt.search_spaces.parse import (
    MODES,
    SpaceFileError,
    bare_mode_config,
    base_declarations,
    mode_file,
    mode_for,
    parse_space,
)


def test_base_declares_every_group_with_a_reason() -> None:
    declared = {declaration.name: declaration for declaration in base_declarations()}
    assert {d.group for d in declared.values()} >= {
        "scheduling",
        "memory",
        "compile",
        "speculation",
        "quantization",
        "parallelism",
        "kernels",
        "multimodal",
        "hybrid",
    }
    assert all(len(d.why) > 20 for d in declared.values())
    assert declared["kv_cache_dtype"].changes_outputs
    assert declared["stream_interval"].changes_contract
    assert declared["enforce_eager"].never


@pytest.mark.parametrize("mode", MODES)
def test_modes_give_a_reason_for_each_line(mode: str) -> None:
    file = mode_file(mode)
    assert file.mode == mode
    assert file.seeds
    assert all("given in" not in entry.why for entry in (*file.keeps, *file.seeds))


def test_modes_follow_the_goal_and_have_a_bare_flag() -> None:
    assert [mode_for(goal) for goal in ("throughput", "latency", "goodput")] == ["throughput", "interactivity", "balanced"]
    assert bare_mode_config("throughput") == {"performance_mode": "throughput"}
    assert bare_mode_config("balanced") == {}
    with pytest.raises(SpaceFileError, match="not one of auto, balanced"):
        mode_file("fast")


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [
        ("[parameters.x]\nvalues = [1]\ncolour = 'red'", "parameters.x.colour", "unknown key"),
        ("[wishes]\n", "wishes", "unknown key"),
        ("[parameters.x]\nvalues = []", "parameters.x.values", "empty range"),
        ("[parameters.x]\nrange = { from = 8, to = 4 }", "parameters.x.range", "empty range"),
        ("[parameters.x]\nrange = { from = 0, to = 4, step = 'double' }", "parameters.x.range", "empty range"),
        ("[parameters.x]\nrange = { from = 1, to = 4, step = -1 }", "parameters.x.range.step", "positive number"),
        ("[parameters.x]\nvalues = [1, 2]\ndefault = 3", "parameters.x.default", "outside the range"),
        ("[parameters.x]\nvalues = [1, 2, 1]", "parameters.x.values", "given twice"),
        ("[parameters.x]\nvalues = [1]\n[parameters.x]\nvalues = [2]", "file", "not valid TOML"),
        (
            "[parameters.max_num_seqs]\nvalues = [1]\n[parameters.max-num-seqs]\nvalues = [2]",
            "parameters.max-num-seqs",
            "declared twice",
        ),
        ("[[rules]]\nforbid = { max_num_sequences = 1 }", "rules[0].forbid", "declared nowhere; near: max_num_"),
        ("[[rules]]\nwhy = 'no'", "rules[0].forbid", "at least one thing"),
        ("[[seeds]]\nset = { nothing = 1 }", "seeds[0].set", "declared nowhere"),
        ("[keep.max_num_seqs]\nat_least = 99999", "keep.max_num_seqs", "nothing of"),
        ("[parameters.x]\nvalues = [1]\ngroup = 'misc'", "parameters.x.group", "not one of"),
        ("[parameters.x]\nvalues = [1]\nsince = 'soon'", "parameters.x.since", "not a vLLM version"),
        ("[parameters.x]\nvalues = [1]\nneeds = 'luck'", "parameters.x.needs", "not one of"),
        ("[parameters.x]\nvalues = 3", "parameters.x.values", "a list"),
        ("[parameters.x]\nvalues = [1]\nordered = 'yes'", "parameters.x.ordered", "true or false"),
        ("parameters = 3", "parameters", "a table"),
        ("[parameters.x]\nvalues = [1]\nwhy = 3", "parameters.x.why", "text"),
        ("[parameters.x]\nvalues = [1]\nsearched = 'latency'", "parameters.x.searched", "a list"),
        ("[parameters.x]\nvalues = [2026-01-01]", "parameters.x.values", "no value that an argument can have"),
        ("[parameters.x]\nvalues = [inf]", "parameters.x.values", "no value that an argument can have"),
        ("[keep.max_num_seqs]\nat_least = 'x'", "keep.max_num_seqs.at_least", "a number"),
        ("[keep.max_num_seqs]\nvalues = 512", "keep.max_num_seqs.values", "a list"),
        ("seeds = 3", "seeds", "a list"),
        ("[seeds]\nset = { max_num_seqs = 64 }", "seeds", "a list"),
        ("[[seeds]]\nset = { max_num_seqs = 'abc' }", "seeds[0].set.max_num_seqs", "not one of the values of max_num_seqs: 16"),
        ("[[seeds]]\nset = { max_num_seqs = 64 }\nwhy = 1", "seeds[0].why", "text"),
        ("rules = {}", "rules", "a list"),
        ("[[rules]]\nforbid = { max_num_seqs = { at_least = 'x' } }", "rules[0].forbid.max_num_seqs.at_least", "a number"),
        (
            "[[rules]]\nforbid = { max_num_seqs = { at_least = 1, below = 2 } }",
            "rules[0].forbid.max_num_seqs.below",
            "unknown key",
        ),
        ("mode = 'fast'", "mode", "not one of balanced"),
        ("mode = 5", "mode", "text"),
        ("[parameters.x]\nvalues = [1", "file", "not valid TOML"),
    ],
)
def test_errors_name_file_key_value_and_rule(text: str, key: str, rule: str) -> None:
    with pytest.raises(SpaceFileError) as caught:
        parse_space(text, "mine.toml", base_declarations())
    assert caught.value.file == "mine.toml"
    assert caught.value.key == key
    assert rule in caught.value.rule
    assert str(caught.value).startswith(f"mine.toml: {key} = ")


def test_a_users_file_replaces_only_what_it_says() -> None:
    text = """
    [parameters.max_num_seqs]
    values = [100, 200]
    [parameters."env:VLLM_X"]
    values = [0, 1]
    default = 0
    [parameters.new_thing]
    range = { from = 0.1, to = 0.4, step = 0.1 }
    """
    file = parse_space(text, "mine.toml", base_declarations())
    by_name = {declaration.name: declaration for declaration in file.declarations}
    assert by_name["max_num_seqs"].values == (100, 200)
    assert by_name["max_num_seqs"].group == "scheduling"
    assert by_name["max_num_seqs"].source == "base.toml, mine.toml"
    assert by_name["env:VLLM_X"].group == "environment"
    assert by_name["new_thing"].values == (0.1, 0.2, 0.3, 0.4)
