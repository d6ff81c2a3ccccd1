"""Engine config -> words -> engine config, for every argument of every stored release."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vopt.optimizer.command import shell_line, split_environment, to_argv, to_words
from vopt.optimizer.command_reader import parse_command
from vopt.optimizer.errors import UsageError
from vopt.optimizer.secrecy import refuse_secret, refuse_words
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.arguments import Argument, Arguments, Kind, stored_arguments, stored_versions

SCHEMA = stored_arguments("0.32.0")
LEFT_OUT = {"model", "config", "api_key", "hf_token"}

text = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=20)
json_leaf = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | text
json_object = st.dictionaries(
    text, st.recursive(json_leaf, lambda inner: st.lists(inner, max_size=3), max_leaves=5), max_size=4
)


def speakable(argument: Argument, value: str) -> bool:
    return not (argument.nullable and value in ("", "None"))


def scalars(kind: str, argument: Argument) -> st.SearchStrategy[Any]:
    match kind:
        case "int":
            return st.integers(-(10**9), 10**9)
        case "float":
            return st.floats(allow_nan=False, allow_infinity=False)
        case _:
            if isinstance(argument.default, int):
                return st.integers(0, 3)
            return text.filter(lambda value: speakable(argument, value))


def list_items(argument: Argument) -> st.SearchStrategy[Any]:
    if argument.element == "str":
        return text.filter(lambda value: speakable(argument, value) and not value.startswith("-"))
    return scalars(argument.element, argument) if argument.element == "int" else st.floats(0, 1e9)


def innocent(argument: Argument, value: Any) -> bool:
    """Whether a value may be written down: what is drawn can look like a secret, {"AUTHORIZATION": 1} say."""
    try:
        refuse_secret(argument.name, value)
        refuse_words(
            [argument.flags[0], json.dumps(value, separators=(",", ":"))]
        )  # {"api_key": 1234567}: as text it may be one
    except UsageError:
        return False
    return True


def values_of(argument: Argument) -> st.SearchStrategy[Any]:
    return any_of(argument).filter(lambda value: innocent(argument, value))


def any_of(argument: Argument) -> st.SearchStrategy[Any]:
    if argument.choices is not None and argument.kind is not Kind.LIST:
        return st.sampled_from(argument.choices)
    match argument.kind:
        case Kind.BOOL:
            return st.booleans()
        case Kind.FLAG:
            return st.just(True)
        case Kind.JSON:
            return json_object
        case Kind.JSON_OR_STR:
            plain = text.filter(lambda value: not (value.strip().startswith("{") and value.strip().endswith("}")))
            return json_object | plain.filter(lambda value: speakable(argument, value))
        case Kind.LIST | Kind.APPEND:
            items = st.sampled_from(argument.choices) if argument.choices else list_items(argument)
            return st.lists(items, min_size=1, max_size=4)
        case Kind.COMMA:
            words = st.text(st.characters(categories=("L",)), min_size=1, max_size=6)
            return st.lists(st.integers(0, 64) | words, min_size=1, max_size=4)
        case Kind.OPTIONAL:
            return st.just(True) | text
        case _:
            return scalars(argument.kind.value, argument)


def engine_arguments(schema: Arguments) -> list[Argument]:
    return [a for a in schema.arguments.values() if not a.front_end and a.name not in LEFT_OUT]


@pytest.mark.parametrize("argument", engine_arguments(SCHEMA), ids=lambda argument: argument.name)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_every_argument_comes_back(argument: Argument, data: st.DataObject) -> None:
    config = EngineConfig({argument.name: data.draw(values_of(argument))})
    argv = to_argv("org/model name", config, (), SCHEMA)
    assert parse_command(argv, SCHEMA).config == config
    line = parse_command(shell_line(argv), SCHEMA)
    assert line.config == config
    assert line.model == "org/model name"


@pytest.mark.parametrize("version", stored_versions())
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whole_configurations_come_back_in_every_release(version: str, data: st.DataObject) -> None:
    schema = stored_arguments(version)
    chosen = data.draw(
        st.lists(st.sampled_from(engine_arguments(schema)), max_size=6, unique_by=lambda argument: argument.name)
    )
    config = EngineConfig({argument.name: data.draw(values_of(argument)) for argument in chosen})
    front_end = ("--port", "8001", "--api-server-count", "2")
    parsed = parse_command(shell_line(to_argv("m", config, front_end, schema), {"A": "b c"}), schema)
    assert parsed.config == config
    assert parsed.front_end == front_end
    assert parsed.environment == {"A": "b c"}


def test_forms_that_people_read() -> None:
    config = {
        "enable_prefix_caching": False,
        "max_num_seqs": 512,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
        "cudagraph_capture_sizes": [1, 2, 4],
        "seed": -3,
        "disable_log_stats": True,
        "tokenizer": "/models/my tokenizer",
    }
    assert shlex.join(to_words(config, SCHEMA)) == (
        "--no-enable-prefix-caching --max-num-seqs 512 "
        """--speculative-config '{"method":"mtp","num_speculative_tokens":1}' --cudagraph-capture-sizes 1 2 4 """
        "--seed=-3 --disable-log-stats --tokenizer '/models/my tokenizer'"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"no_such": 1}, "is not an argument of vLLM 0.32.0"),
        ({"model_weights": "x"}, "has no command-line form"),
        ({"max_num_seqs": "many"}, "takes an integer"),
        ({"quantization": "None"}, "reads it as no value"),
        ({"hf_overrides": "{a}"}, "reads text in braces as JSON"),
        ({"ignore_patterns": []}, "wants at least one value"),
        ({"ignore_patterns": ["a", "--b"]}, "would be read as a flag"),
        ({"device_ids": ["0"]}, "comma-separated"),
        ({"scheduling_policy": "lof"}, "takes fcfs, priority"),
    ],
)
def test_what_no_command_line_can_say_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        to_words(config, SCHEMA)


@pytest.mark.parametrize(
    ("refuse", "config"),
    [
        (lambda config: to_words(config, SCHEMA), {"api_key": ["hunter2"]}),
        (lambda config: to_words(config, SCHEMA), {"hf_token": "hunter2"}),
        (split_environment, {"env:HF_TOKEN": "hunter2"}),
        (split_environment, {"env:AWS_SECRET_ACCESS_KEY": "hunter2"}),
    ],
)
def test_secrets_are_refused_without_being_repeated(refuse: Callable[[Any], object], config: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        refuse(config)
    assert "hunter2" not in caught.value.message + caught.value.hint
    assert caught.value.hint


def test_a_bare_token_flag_is_no_secret() -> None:
    assert to_words({"hf_token": True}, SCHEMA) == ("--hf-token",)


def test_environment_is_kept_apart() -> None:
    engine, variables = split_environment({"max_num_seqs": 4, "env:VLLM_A": True, "env:VLLM_B": 3})
    assert engine == EngineConfig({"max_num_seqs": 4})
    assert variables == {"VLLM_A": "1", "VLLM_B": "3"}
    assert to_words({"env:VLLM_A": True}, SCHEMA) == ()


@pytest.mark.parametrize("version", stored_versions())
def test_switches_of_every_release_come_back(version: str) -> None:
    schema = stored_arguments(version)
    for argument in schema.arguments.values():
        if argument.kind is not Kind.BOOL or argument.front_end:
            continue
        for value in (True, False):
            words = to_words({argument.name: value}, schema)
            assert len(words) == 1, words
            assert dict(parse_command(["vllm", "serve", "m", *words], schema).config) == {argument.name: value}
        for flag in argument.negatives:
            assert dict(parse_command(["vllm", "serve", "m", flag], schema).config) == {argument.name: False}
    off = to_argv("m", {"enable_prefix_caching": False}, (), schema)
    assert off == ("vllm", "serve", "m", "--no-enable-prefix-caching")
