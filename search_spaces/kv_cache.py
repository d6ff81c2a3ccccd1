"""How vLLM lays out the KV cache: groups of layers that share one pool of equal blocks.

Source: vLLM 0.33, ``platforms/interface.py`` (block size of hybrids), ``v1/core/kv_cache_utils.py`` (groups and
capacity), ``v1/kv_cache_interface.py`` (blocks per request of each kind) and ``mamba_utils.py`` (state of a gated delta
net). The start-up logs of club-3090#612 and #652 and home-ops#13226 are reproduced exactly by the tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vopt.search_spaces.defaults import Resolved
from vopt.search_spaces.shape import DTYPE_BYTES, LayerKind, ModelShape


def token_bytes(shape: ModelShape, kv_dtype: str, tensor: int = 1) -> float:
    """KV bytes of one token in one attention layer on one rank. Heads are replicated beyond one a rank; MLA always."""
    size = DTYPE_BYTES.get(kv_dtype, DTYPE_BYTES[shape.dtype])
    if shape.latent is not None:
        return (shape.latent.kv_rank + shape.latent.rope_dim) * size
    return 2 * max(1, shape.kv_heads // tensor) * shape.head_dim * size


def state_bytes(shape: ModelShape, state_dtype: str | None, tensor: int = 1, speculative_tokens: int = 0) -> int:
    """Bytes of one sequence's state in one gated-delta-net layer on one rank; 0 for other models."""
    n = shape.linear
    if n is None:
        return 0
    conv = (2 * n.k_heads * n.k_dim + n.v_heads * n.v_dim) // tensor
    recurrent = n.v_heads // tensor * n.v_dim * n.k_dim
    conv_bytes = conv * (n.conv_width - 1 + speculative_tokens) * DTYPE_BYTES[shape.dtype]
    return round(conv_bytes + recurrent * DTYPE_BYTES[state_dtype or n.state_dtype])


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout on one rank: ``block_size`` tokens a block, ``group_layers`` layers a group, groups by kind of layer.

    A block id is valid in every group at once, so one block costs ``block_bytes`` = layers of a group x page.
    """

    block_size: int
    page_bytes: int
    group_layers: int
    full_groups: int
    sliding_groups: int
    linear_groups: int
    window: int
    in_flight_tokens: int
    state_blocks: int

    @property
    def block_bytes(self) -> int:
        return self.group_layers * self.page_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a request holds once ``tokens`` of it are computed (its peak when that is its whole length)."""
        full = math.ceil(tokens / self.block_size) * self.full_groups
        sliding = 0
        if self.sliding_groups:
            held = min(self.window - 1 + self.in_flight_tokens, tokens)
            sliding = (math.ceil(held / self.block_size) + 1) * self.sliding_groups
        return full + sliding + self.state_blocks * self.linear_groups

    def max_concurrency(self, blocks: int, length: int) -> float:
        """Requests of ``length`` tokens that fit at once, as vLLM logs it."""
        return blocks / self.blocks_for(length)

    def longest(self, blocks: int, at_most: int) -> int:
        """The longest request that ``blocks`` hold; 0 when not even one token fits."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_for(middle) <= blocks else (low, middle - 1)
        return low


def kv_layout(shape: ModelShape, resolved: Resolved) -> KvLayout:
    """The layout that vLLM chooses for a model and its arguments."""
    tensor = resolved.tensor
    per_token = token_bytes(shape, resolved.kv_cache_dtype, tensor)
    # Kernels for MLA on Hopper want blocks of 64 (FlashMLA), everything else starts at 16.
    block = resolved.block_size or (64 if shape.latent is not None else 16)
    kinds = {kind: math.ceil(shape.count(kind) / resolved.pipeline) for kind in LayerKind if shape.count(kind)}
    if resolved.speculation is not None and resolved.speculation.method == "mtp":
        # The drafter's attention layers register caches of their own beside the model's.
        kinds[LayerKind.FULL] = kinds.get(LayerKind.FULL, 0) + shape.mtp_layers
    state = state_bytes(shape, resolved.state_dtype, tensor, resolved.speculative_tokens) if shape.hybrid else 0
    if state:
        alignment = max(block, 16)
        block = max(block, alignment * math.ceil(state / (alignment * per_token)))
    group = _group_layers(list(kinds.values()))
    groups = {kind: math.ceil(number / group) for kind, number in kinds.items()}
    return KvLayout(
        block_size=block,
        page_bytes=round(block * per_token),
        group_layers=group,
        full_groups=groups.get(LayerKind.FULL, 0),
        sliding_groups=groups.get(LayerKind.SLIDING, 0),
        linear_groups=groups.get(LayerKind.LINEAR, 0),
        window=shape.window or 0,
        in_flight_tokens=resolved.batches_in_flight * resolved.max_num_batched_tokens,
        # With prefix caching ("align") the state before and after the newest block boundary are both kept.
        state_blocks=(2 if resolved.prefix_caching else 1) + resolved.speculative_tokens,
    )


def _group_layers(counts: list[int]) -> int:
    """Layers of a group: the smallest kind's number, or the largest's when they are nearly alike (less padding)."""
    smallest, largest = min(counts), max(counts)
    return largest if largest < 1.5 * smallest else smallest
