"""What a simulation draws: tables of seeded normal deviates, and how many steps a sequence takes under speculation. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Lengths

from vopt.optimizer.engine.roofline import acceptance_length
from vopt.optimizer.engine.simulated_state import Sequence
from vopt.search_spaces.defaults import Speculation

NORMALS = 4096
"""Length of the table of normal deviates that requests and steps draw from by number."""


def normals(seed: str) -> list[float]:
    """A table of seeded standard normal deviates."""
    generator = random.Random(seed)
    return [generator.gauss(0.0, 1.0) for _ in range(NORMALS)]


def speculative_steps(speculation: Speculation, table: Lengths[float]) -> Callable[[Sequence, int], int]:
    """How many verification steps a sequence needs for a number of tokens: a sum of many steps, hence nearly normal.

    A step keeps 1 + j tokens with the chance that j drafts in a row are accepted, each with the same probability; that
    probability is solved for from the mean acceptance length.
    """
    mean = acceptance_length(speculation.method, speculation.tokens, speculation.acceptance_length)
    low, high = 0.0, 1.0
    for _ in range(40):
        chance = (low + high) / 2
        total = sum(chance**drafts for drafts in range(speculation.tokens + 1))
        low, high = (chance, high) if total < mean else (low, chance)
    lasts = [low**drafts for drafts in range(speculation.tokens + 1)]  # chance of at least 1 + drafts tokens
    second = sum((2 * drafts + 1) * chance for drafts, chance in enumerate(lasts))
    variance = max(0.0, second - mean * mean)

    def steps(sequence: Sequence, tokens: int) -> int:
        drawn = tokens / mean + table[sequence.index % NORMALS] * math.sqrt(tokens * variance / mean**3)
        fewest = -(-tokens // (1 + speculation.tokens))
        return max(1, fewest, min(tokens, round(drawn)))

    return steps
