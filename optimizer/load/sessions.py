"""Conversations: turns of one user, each sent a think time after the answer before it, with the history sent again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vopt.optimizer.load.source import HEADER_DIGITS


@dataclass(frozen=True, slots=True)
class SessionShape:
    """Every session has ``turns`` turns and begins with ``system_tokens`` that all sessions share.

    The lengths of a workload with sessions are those of one turn: the user's new words and the answer.
    """

    turns: int
    think_s: float = 0.0
    system_tokens: int = 0

    def __post_init__(self) -> None:
        if self.turns < 1 or self.think_s < 0 or self.system_tokens < 0:
            raise ValueError(
                "a session needs 1 turn or more and no negative times or lengths, got "
                f"turns={self.turns}, think_s={self.think_s}, system_tokens={self.system_tokens}"
            )


def with_history(turn_lengths: Sequence[tuple[int, int]], shape: SessionShape) -> tuple[tuple[int, int], ...]:
    """(prompt tokens, output tokens) of each request: ``shape.turns`` pairs in a row make a session.

    A prompt is the system prompt, the number that makes the session unique, and all earlier words and answers. Pairs that do
    not fill a last session are left out; ``ValueError`` when there is not even one.
    """
    lengths: list[tuple[int, int]] = []
    for first in range(0, len(turn_lengths) - shape.turns + 1, shape.turns):
        history = shape.system_tokens + HEADER_DIGITS
        for user, answer in turn_lengths[first : first + shape.turns]:
            lengths.append((history + user, answer))
            history += user + answer
    if not lengths:
        raise ValueError(f"sessions of {shape.turns} turns need at least as many turns, got {len(turn_lengths)}")
    return tuple(lengths)
