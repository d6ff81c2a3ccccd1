"""Prompts as token ids: natural text through the model's tokenizer, or random ids where there is none.

The only importer of ``tokenizers``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.load.prose import documents

SAMPLING_NAMES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p", "min_p")
"""What ``vllm serve`` takes from a model's ``generation_config.json`` (vLLM 0.32, ``ModelConfig.get_diff_sampling_param``)."""

CHARACTERS_PER_TOKEN = 4
BODY_TOKENS = 1 << 18
"""Tokens of all bodies together, as far as 64 bodies of the longest prompt are more than that."""


@dataclass(frozen=True, slots=True)
class TokenSpace:
    """Which ids prompts may use, and how numbers are spelled."""

    digit_ids: tuple[int, ...]
    random_ids: range
    special_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A model's own tokenizer. ``vocab``: ids from this on are unknown to the model and never used."""

    _inner: Any = field(repr=False)
    space: TokenSpace
    vocab: int

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text`` without special tokens, and without ids that the model does not have."""
        return self._plain(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        return [self._plain(found.ids) for found in self._inner.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def _plain(self, ids: Iterable[int]) -> tuple[int, ...]:
        special, vocab = self.space.special_ids, self.vocab
        return tuple(token for token in ids if token < vocab and token not in special)


def load_tokenizer(model_dir: Path, *, vocab: int) -> tuple[TextTokenizer | None, str]:
    """The tokenizer in ``model_dir``/``tokenizer.json``, or ``None`` and a note for the user that says why not.

    ``vocab`` is the model's ``vocab_size``. ``EnvironmentLacks`` for a file that cannot be read as a tokenizer.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return None, f"{model_dir} has no tokenizer.json, so prompts are random token ids: speculation cannot be judged on them"
    try:
        inner = _Tokenizer.from_file(str(path))
    except Exception as error:  # the bindings raise bare Exception for a malformed file
        raise EnvironmentLacks(f"{path} is not a tokenizer: {error}", hint="download the model again") from error
    special = frozenset(number for number, token in inner.get_added_tokens_decoder().items() if token.special)
    digits = tuple(ids[-1] for ids in (inner.encode(str(digit), add_special_tokens=False).ids for digit in range(10)) if ids)
    usable = random_space(vocab)
    if len(set(digits)) < 10 or any(digit in special or digit >= vocab for digit in digits):
        digits = usable.digit_ids  # a tokenizer without ten digit tokens: any ten ids spell numbers as well
    tokenizer = TextTokenizer(inner, TokenSpace(digits, usable.random_ids, special), vocab)
    sample = "The operator restarts the storage cluster before the night shift."
    if len(tokenizer.encode(sample)) < 5:
        return None, f"the tokenizer in {model_dir} does not fit a vocabulary of {vocab}, so prompts are random token ids"
    return tokenizer, ""


def random_space(vocab: int) -> TokenSpace:
    """Ids that are very likely ordinary text: special and control tokens lie at both ends of every known vocabulary.

    Leaves out the lowest eighth (at most 1,000) and the highest sixteenth (at least 8, at most 4,096). ``ValueError``
    below 32 ids.
    """
    if vocab < 32:
        raise ValueError(f"a vocabulary of {vocab} is too small for prompts; 32 is the least")
    low = min(1000, vocab // 8)
    high = vocab - min(4096, max(8, vocab // 16))
    return TokenSpace(tuple(range(low, low + 10)), range(low, high))


def natural_bodies(tokenizer: TextTokenizer, *, count: int, tokens: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """``count`` texts of ``tokens`` ids each: instructions with material from a grammar, documentation and source code."""
    bodies: list[tuple[int, ...]] = []
    for number in range(count):
        draw = random.Random(f"text-{seed}-{number}")
        ids: tuple[int, ...] = ()
        while len(ids) < tokens:  # code and tables have fewer characters per token than prose
            ids += tokenizer.encode(documents(number, draw, CHARACTERS_PER_TOKEN * (tokens - len(ids)) + 200))
        bodies.append(ids[:tokens])
    return tuple(bodies)


def random_bodies(space: TokenSpace, *, count: int, tokens: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """``count`` bodies of ``tokens`` random ordinary ids each."""
    draw = random.Random(f"ids-{seed}")
    allowed = [token for token in space.random_ids if token not in space.special_ids]
    return tuple(tuple(draw.choices(allowed, k=tokens)) for _ in range(count))


def body_count(longest: int) -> int:
    """How many bodies to make for prompts of up to ``longest`` tokens: 64, fewer when they are long, never below 8."""
    return max(8, min(64, BODY_TOKENS // max(1, longest)))


def serving_sampling(model_dir: Path) -> dict[str, float | int]:
    """Sampling parameters that ``vllm serve`` would apply to a request that names none: the model's generation config.

    ``max_new_tokens`` is not among them: vLLM uses it only for requests without ``max_tokens``, and ours always have it.
    Empty when the model has no generation config. ``EnvironmentLacks`` for one that is not a JSON object.
    """
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EnvironmentLacks(f"{path} is not JSON: {error}", hint="download the model again") from error
    if not isinstance(data, Mapping):
        raise EnvironmentLacks(f"{path} holds {type(data).__name__} instead of an object", hint="download the model again")
    return {name: data[name] for name in SAMPLING_NAMES if isinstance(data.get(name), (int, float))}
