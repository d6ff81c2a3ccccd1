"""What is said where drafts are accepted at a stated length (vLLM's synthetic acceptance), not by what the model says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vopt.optimizer.command import flags_text
from vopt.search_spaces.speculation import stated_acceptance, without_stated

SPECULATION = "speculative_config"
WRONG_TEXT = "this command's answers are wrong text"
"""How the note begins that must not be overlooked."""


def stated_length(config: Mapping[str, Any]) -> float | None:
    """Tokens a step that a configuration states; ``None`` where drafts are compared, or there are none."""
    speculation = config.get(SPECULATION)
    return stated_acceptance(speculation) if isinstance(speculation, Mapping) else None


def condition(length: float | None) -> str:
    """The ``if`` under which a comparison holds, for the end of a sentence; empty without one."""
    return "" if length is None else f", if {length:g} tokens a step are accepted, as was stated and not measured"


def stated_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What figures and command of a configuration are good for, and what to type to serve."""
    length, speculation = stated_length(config), config.get(SPECULATION)
    if length is None or not isinstance(speculation, Mapping):
        return ()
    served = flags_text({SPECULATION: without_stated(speculation)})
    return (
        f"{WRONG_TEXT}: each step keeps {length:g} tokens in the mean, whatever the model says "
        f"(synthetic acceptance). Its figures hold only if drafts for your text are kept as often. Serve it with {served}, and "
        "measure that with real weights and prompts like your own",
    )
