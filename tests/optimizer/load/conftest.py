from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from vopt.optimizer.load.prose import prose
from vopt.optimizer.load.text import TextTokenizer, load_tokenizer

VOCAB = 1600


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a small byte-level BPE tokenizer whose special tokens lie at the top, as in Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(islice(prose(random.Random(0)), 200), trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> TextTokenizer:
    found, note = load_tokenizer(model_dir, vocab=VOCAB)
    assert found is not None, note
    return found
