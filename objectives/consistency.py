"""Records that contradict themselves: a client or an engine that miscounts shows here before it shows in a figure.

Standard library only.
"""

from __future__ import annotations

import math

from vopt.objectives.records import RequestRecord

CLOCK_TOLERANCE_S = 1e-6


def contradictions(record: RequestRecord) -> tuple[str, ...]:
    """What cannot be true at once in ``record``, in words; empty when it is consistent.

    Output tokens below the requested number are no contradiction here: a natural end is legitimate, and a client that asked
    for ``ignore_eos`` records the shortfall as ``short_output``.
    """
    return (*_times(record), *_tokens(record), *_ending(record))


def _times(record: RequestRecord) -> list[str]:
    times = record.chunk_times_s
    if not math.isfinite(record.scheduled_s + record.sent_s + record.ended_s + sum(times)):
        return ["a time is not a finite number"]
    found = []
    if record.sent_s < record.scheduled_s - CLOCK_TOLERANCE_S:
        found.append("sent before it was scheduled")
    if record.ended_s < record.sent_s - CLOCK_TOLERANCE_S:
        found.append("ended before it was sent")
    if list(times) != sorted(times):
        return [*found, "chunk times run backwards"]
    if times and times[0] < record.sent_s - CLOCK_TOLERANCE_S:
        found.append("a chunk came before the request was sent")
    if times and times[-1] > record.ended_s + CLOCK_TOLERANCE_S:
        found.append("ended before the last chunk")
    if record.first_content_s is not None and times and record.first_content_s < times[0] - CLOCK_TOLERANCE_S:
        found.append("first content before the first token")
    return found


def _tokens(record: RequestRecord) -> list[str]:
    found = []
    if min((record.prompt_tokens, record.output_tokens, record.requested_output_tokens, *record.chunk_tokens)) < 0:
        found.append("a negative token count")
    if record.chunk_tokens and len(record.chunk_tokens) != len(record.chunk_times_s):
        found.append(f"{len(record.chunk_times_s)} chunk times but {len(record.chunk_tokens)} chunk token counts")
    if record.succeeded and record.chunk_tokens and sum(record.chunk_tokens) != record.output_tokens:
        found.append(f"chunks hold {sum(record.chunk_tokens)} tokens but {record.output_tokens} were counted")
    if record.output_tokens > record.requested_output_tokens > 0:
        found.append(f"{record.output_tokens} output tokens but only {record.requested_output_tokens} were asked for")
    if record.cached_prompt_tokens is not None and record.cached_prompt_tokens > record.prompt_tokens:
        found.append("more cached prompt tokens than prompt tokens")
    if record.counted_prompt_tokens is not None:
        counted = record.counted_prompt_tokens
        found.append(
            f"the server counted {counted} prompt tokens, which is not what was sent; {record.prompt_tokens} are credited"
        )
    return found


def _ending(record: RequestRecord) -> list[str]:
    if record.failure is not None:
        return ["both failed and censored"] if record.censored else []
    if record.censored:
        return []
    found = []
    if record.output_tokens == 0:
        found.append("succeeded without output tokens")
    elif not record.chunk_times_s:
        found.append("succeeded with output tokens but without a chunk")
    if record.finish_reason not in ("stop", "length"):
        found.append(f"succeeded with finish reason {record.finish_reason!r}")
    return found
