"""What recorded prompts share: their common beginnings, in whole cache blocks. Pure.

From token ids where there are some, else from the text, whose characters stand for tokens in the proportion of each prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vopt.optimizer.load.text import CHARACTERS_PER_TOKEN

if TYPE_CHECKING:
    from vopt.optimizer.load.workload import Recorded

CACHE_BLOCK = 16
"""Tokens per block when measuring what prompts share: vLLM's smallest block."""
REUSE_LEAST = 0.01
"""Share of prompt tokens from which a recording counts as reusing beginnings; below it, numbers make its prompts unique."""
COMPARED_MOST = 4096
"""Recorded prompts that are compared, spread over all of them: no more are ever sent before they repeat."""

Parts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Per prompt, tokens of its beginning in whole blocks: those that an earlier prompt had, and those that any other has.

    ``parts`` divide the latter: (key, tokens from the start to the part's end), equal keys for equal beginnings. ``share`` is
    the part of all tokens that was sent before (0-1).
    """

    seen_before: tuple[int, ...] = ()
    common: tuple[int, ...] = ()
    parts: tuple[Parts, ...] = ()
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a workload says of its prompts: the ``share`` of their tokens that was sent before (0-1), and the length of the
    beginning that prompts typically share, in tokens. ``stated`` is false where nothing is known of either."""

    share: float
    tokens: int
    stated: bool = True


def typical_length(lengths: Sequence[int]) -> int:
    """Mean length over tokens, not over prompts: prompts that share nothing do not make the shared beginnings shorter."""
    total = sum(lengths)
    return round(sum(length * length for length in lengths) / total) if total else 0


def shared_prefix_tokens(prompts: Sequence[Sequence[int] | str], block: int = CACHE_BLOCK) -> SharedPrefixes:
    """What a boundless prefix cache with blocks of ``block`` tokens (of a text: characters) would find, in this order."""
    chains: list[list[int]] = []
    for prompt in prompts:
        chain, parent = [], 0
        for start in range(0, len(prompt) - block + 1, block):
            piece = prompt[start : start + block]
            parent = hash((parent, piece if isinstance(piece, str) else tuple(piece)))
            chain.append(parent)
        chains.append(chain)
    uses: dict[int, int] = {}
    for chain in chains:
        for key in chain:
            uses[key] = uses.get(key, 0) + 1
    seen: set[int] = set()
    before: list[int] = []
    for chain in chains:
        before.append(block * sum(key in seen for key in chain))
        seen.update(chain)
    total = sum(map(len, prompts))
    numbers: dict[int, int] = {}
    return SharedPrefixes(
        tuple(before),
        tuple(block * sum(uses[key] > 1 for key in chain) for chain in chains),
        tuple(_parts(chain, uses, block, numbers) for chain in chains),
        sum(before) / total if total else 0.0,
    )


def _parts(chain: Sequence[int], uses: dict[int, int], block: int, numbers: dict[int, int]) -> Parts:
    """Blocks of a chain that equally many prompts use are used by the same ones, so they make one part. ``numbers`` gives keys
    that do not depend on the process, as hashes of texts do."""
    parts: list[tuple[int, int]] = []
    for place, key in enumerate(chain):
        if uses[key] < 2:
            break
        if place + 1 == len(chain) or uses[chain[place + 1]] != uses[key]:
            parts.append((numbers.setdefault(key, len(numbers)), block * (place + 1)))
    return tuple(parts)


def recorded_sharing(recorded: Sequence[Recorded]) -> SharedPrefixes | None:
    """What the prompts of a recording share, in tokens; ``None`` where it holds lengths only."""
    if recorded and all(entry.token_ids for entry in recorded):
        return shared_prefix_tokens([entry.token_ids for entry in recorded])
    if not recorded or not all(entry.text for entry in recorded):
        return None
    texts = [f"{entry.system}\n\n{entry.text}" if entry.system else entry.text for entry in recorded]
    found = shared_prefix_tokens(texts, CACHE_BLOCK * CHARACTERS_PER_TOKEN)
    scales = [entry.prompt_tokens / len(text) for entry, text in zip(recorded, texts, strict=True)]
    before = tuple(int(tokens * scale) for tokens, scale in zip(found.seen_before, scales, strict=True))
    return SharedPrefixes(
        before,
        tuple(int(tokens * scale) for tokens, scale in zip(found.common, scales, strict=True)),
        tuple(tuple((key, int(end * scale)) for key, end in parts) for parts, scale in zip(found.parts, scales, strict=True)),
        sum(before) / sum(entry.prompt_tokens for entry in recorded),
    )


def thinned(recorded: Sequence[Recorded]) -> Sequence[Recorded]:
    """At most ``COMPARED_MOST`` of them, spread over all."""
    return recorded[:: -(-len(recorded) // COMPARED_MOST) or 1]
