from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.load.prose import TASKS, documents, manuals, sources
from vopt.optimizer.load.text import (
    TextTokenizer,
    body_count,
    load_tokenizer,
    natural_bodies,
    random_bodies,
    random_space,
    serving_sampling,
)


def test_digits_are_ten_ids_that_spell_numbers(tokenizer: TextTokenizer) -> None:
    assert len(set(tokenizer.space.digit_ids)) == 10
    assert tokenizer.decode([tokenizer.space.digit_ids[int(digit)] for digit in "2026"]) == "2026"


def test_special_tokens_in_a_text_are_left_out(tokenizer: TextTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("before<|im_end|>after")) == "beforeafter"
    assert not tokenizer.space.special_ids & set(tokenizer.encode("a<|im_start|>b<|im_end|>"))


def test_ids_that_the_model_lacks_are_left_out(model_dir: Path) -> None:
    small, note = load_tokenizer(model_dir, vocab=600)
    assert small is not None, note
    assert max(small.encode("The operator restarts the storage cluster.")) < 600
    assert max(small.space.digit_ids) < 600


def test_no_tokenizer_is_a_note_that_says_what_is_done(tmp_path: Path) -> None:
    found, note = load_tokenizer(tmp_path, vocab=1000)
    assert found is None
    assert "no tokenizer.json" in note
    assert "random token ids" in note


def test_a_broken_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EnvironmentLacks, match="is not a tokenizer"):
        load_tokenizer(tmp_path, vocab=1000)


def test_a_tokenizer_that_does_not_fit_the_vocabulary_is_not_used(model_dir: Path) -> None:
    found, note = load_tokenizer(model_dir, vocab=40)
    assert found is None
    assert "does not fit a vocabulary of 40" in note


def test_bodies_are_long_enough_different_and_repeatable(tokenizer: TextTokenizer) -> None:
    bodies = natural_bodies(tokenizer, count=10, tokens=700, seed=1)
    assert {len(body) for body in bodies} == {700}
    assert len(set(bodies)) == 10
    assert bodies == natural_bodies(tokenizer, count=10, tokens=700, seed=1)
    assert bodies != natural_bodies(tokenizer, count=10, tokens=700, seed=2)


def test_every_task_has_its_material() -> None:
    for number, (kind, instruction) in enumerate(TASKS):
        text = documents(number, random.Random(1), 5000)
        assert text.startswith(instruction)
        assert len(text) > 5000
        assert kind in ("prose", "code", "manual")
    assert len(manuals()) > 15
    assert len(sources()) > 20


def test_random_ids_stay_away_from_both_ends_of_the_vocabulary() -> None:
    space = random_space(151_936)  # Qwen's special tokens begin at 151,643
    assert space.random_ids.start >= 256
    assert space.random_ids.stop < 151_643
    bodies = random_bodies(space, count=3, tokens=500, seed=0)
    assert all(token in space.random_ids for body in bodies for token in body)
    with pytest.raises(ValueError, match="vocabulary of 20"):
        random_space(20)


@pytest.mark.parametrize(("longest", "count"), [(500, 64), (4096, 64), (32_000, 8), (1_000_000, 8)])
def test_fewer_bodies_when_they_are_long(longest: int, count: int) -> None:
    assert body_count(longest) == count


def test_sampling_is_what_vllm_serve_takes_from_the_generation_config(tmp_path: Path) -> None:
    assert serving_sampling(tmp_path) == {}
    config = {
        "do_sample": True,
        "eos_token_id": [1, 2],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": None,
        "max_new_tokens": 2048,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert serving_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_generation_config_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(EnvironmentLacks, match="generation_config"):
        serving_sampling(tmp_path)
