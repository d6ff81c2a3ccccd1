"""A workload becomes requests: lengths in blocks, prompts as token ids, checked against the model's context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.lengths import shuffled_blocks, stratified_order
from vopt.optimizer.load.sessions import with_history
from vopt.optimizer.load.sharing import REUSE_LEAST, Parts, recorded_sharing, shared_prefix_tokens
from vopt.optimizer.load.source import HEADER_DIGITS, RequestSource
from vopt.optimizer.load.text import TextTokenizer, body_count, natural_bodies, random_bodies, random_space
from vopt.optimizer.load.workload import Recorded, Workload

BLOCKS = 16
"""Blocks before the order of lengths repeats."""
RECORDED_MOST = 4096
"""Recorded requests before they repeat (64 blocks); the requests travel to each trial, and more would show nothing new."""
REPLAYED_MOST = 65_536
SHARED = "prompts share beginnings: {:.0%} of their tokens were sent before; they stay shared"


@dataclass(frozen=True, slots=True)
class Materialised:
    """The requests of a workload, and what a user should know about how they were made."""

    source: RequestSource
    notes: tuple[str, ...] = ()
    natural_text: bool = True
    reuse_share: float = 0.0


def materialise(
    workload: Workload,
    tokenizer: TextTokenizer | None,
    *,
    seed: int,
    vocab: int,
    max_model_len: int,
    sampling: Mapping[str, Any] | None = None,
    natural_ends: bool = False,
    chat: bool = False,
    prompts: bool = True,
    replay: bool = False,
) -> Materialised:
    """The requests of ``workload`` for a model with ``vocab`` ids and a context of ``max_model_len`` tokens.

    ``sampling`` is what ``vllm serve`` would apply, used unless the workload states its own. ``natural_ends``: outputs stop
    where the model ends them (the lengths are limits); otherwise every one has exactly its length. ``chat``: texts for a chat
    endpoint are added. ``prompts=False`` (a simulation) leaves token ids out and says what prompts share instead. ``replay``:
    recorded order and times.

    Equal arguments give equal requests. ``UsageError`` when a request does not fit, or text is asked for without a tokenizer.
    """
    check_fits(workload, max_model_len)
    notes: list[str] = []
    stated = workload.with_sampling(sampling or {}).sampling or {}
    if workload.schema is not None:
        stated = {**stated, "structured_outputs": {"json": workload.schema}}
    parts: dict[str, Any] = {"sampling": stated, "ignore_eos": not natural_ends}
    natural, share = workload.natural_text and tokenizer is not None, workload.reuse_share()
    if not prompts:
        natural = workload.natural_text
    elif workload.natural_text and tokenizer is None:
        notes.append("no tokenizer: prompts are random token ids, so nothing that depends on text can be judged")
    if workload.recorded:
        more, natural, share = _recorded(workload, tokenizer, seed, vocab, prompts, replay, notes)
        parts.update(more)
    else:
        parts.update(_generated(workload, tokenizer, seed, vocab, prompts))
    if chat and "texts" not in parts:
        parts["texts"] = _texts(tokenizer, parts)
    return Materialised(RequestSource(**parts), tuple(notes), natural, share)


def check_fits(workload: Workload, max_model_len: int) -> None:
    """``UsageError`` with the numbers when the longest request is longer than the model's context."""
    pairs = workload.request_lengths()
    prompt, output = max(pairs, key=sum)
    if prompt + output > max_model_len:
        over = sum(sum(pair) > max_model_len for pair in pairs)
        raise UsageError(
            f"the workload {workload.name} asks for up to {prompt} + {output} = {prompt + output} tokens in one request, "
            f"and max_model_len is {max_model_len} ({over} of {len(pairs)} requests are longer)",
            hint=f"choose a shorter workload, or --set max_model_len={prompt + output} if the model allows it",
        )


def _generated(workload: Workload, tokenizer: TextTokenizer | None, seed: int, vocab: int, prompts: bool) -> dict[str, Any]:
    lengths = shuffled_blocks(workload.lengths.block(), BLOCKS, seed)
    parts: dict[str, Any] = {}
    prefix_tokens, prefixes = workload.reuse.prefix_tokens, workload.reuse.prefixes
    if workload.sessions is not None:
        shape = workload.sessions
        lengths = with_history(lengths, shape)
        parts["turns"] = (shape.turns,) * (len(lengths) // shape.turns)
        parts["think_s"] = (shape.think_s,)
        prefix_tokens, prefixes = shape.system_tokens, 1 if shape.system_tokens else 0
    longest = max(pair[0] for pair in lengths)
    parts["lengths"] = lengths
    if prompts:
        text = tokenizer if workload.natural_text else None
        space = tokenizer.space if tokenizer is not None else random_space(vocab)
        count = body_count(longest)
        if text is not None:
            bodies = natural_bodies(text, count=count + prefixes, tokens=longest, seed=seed)
        else:
            bodies = random_bodies(space, count=count + prefixes, tokens=longest, seed=seed)
        parts["bodies"], parts["digit_ids"] = bodies[:count], space.digit_ids
        parts["shared_prefixes"] = tuple(body[:prefix_tokens] for body in bodies[count:])
    elif prefix_tokens:
        parts["shared"] = tuple(((key, prefix_tokens),) for key in range(prefixes))
    return parts


def _recorded(
    workload: Workload, tokenizer: TextTokenizer | None, seed: int, vocab: int, prompts: bool, replay: bool, notes: list[str]
) -> tuple[dict[str, Any], bool, float]:
    """(parts of the source, whether the text is natural, measured reuse) of a recording."""
    if replay and not workload.has_times:
        raise UsageError(
            f"the workload {workload.name} has no timestamp on every request, so it cannot be replayed",
            hint="--rate 8   # instead of --arrivals replay",
        )
    lengths = workload.request_lengths()
    if replay:
        order = sorted(range(len(lengths)), key=lambda i: (workload.recorded[i].at_s or 0.0, i))
    else:
        order = list(stratified_order([sum(pair) for pair in lengths], seed))
    most = REPLAYED_MOST if replay else RECORDED_MOST
    if len(order) > most:
        spread = "the first in time" if replay else "spread over all lengths"
        notes.append(f"{most} of the {len(order)} recorded requests are used, {spread}")
        order = order[:most]
    entries = [workload.recorded[i] for i in order]
    parts: dict[str, Any] = {"lengths": tuple(lengths[i] for i in order)}
    if replay:
        parts["scheduled_s"] = tuple(entry.at_s or 0.0 for entry in entries)
    if all(entry.text for entry in entries):
        parts["texts"] = tuple(entry.text for entry in entries)
        parts["systems"] = tuple(entry.system for entry in entries)
    if any(entry.session for entry in entries):
        parts["sessions"] = tuple(entry.session or "" for entry in entries)
    if any(entry.sampling for entry in entries):
        parts["samplings"] = tuple(entry.sampling for entry in entries)
    with_ids = all(entry.token_ids for entry in entries)
    share = workload.reuse.share
    if not prompts:
        parts["shared"], share = _shared(entries, share, notes)
        return parts, with_ids or workload.natural_text, share
    space = tokenizer.space if tokenizer is not None else random_space(vocab)
    parts["digit_ids"] = space.digit_ids
    if not with_ids:
        longest = max(pair[0] for pair in parts["lengths"])
        make = natural_bodies if tokenizer is not None and workload.natural_text else None
        count = body_count(longest)
        if make is not None and tokenizer is not None:
            parts["bodies"] = make(tokenizer, count=count, tokens=longest, seed=seed)
            notes.append("the file holds lengths without prompts: the text is generated")
        else:
            parts["bodies"] = random_bodies(space, count=count, tokens=longest, seed=seed)
        return parts, make is not None, share
    parts["bodies"] = tuple(entry.token_ids for entry in entries)
    shared = shared_prefix_tokens(parts["bodies"])
    share = shared.share
    if share >= REUSE_LEAST:
        parts["header_at"] = shared.common
        notes.append(SHARED.format(share))
    notes.append(f"each recorded prompt carries {HEADER_DIGITS} tokens that number it, so that none repeats")
    return parts, True, share


def _shared(entries: Sequence[Recorded], declared: float, notes: list[str]) -> tuple[tuple[Parts, ...], float]:
    """(what recorded prompts share, the share of their tokens) for an engine that gets no token ids."""
    sharing = recorded_sharing(entries)
    if sharing is None or sharing.share < REUSE_LEAST:
        return (), declared
    notes.append(SHARED.format(sharing.share))
    return sharing.parts, sharing.share


def _texts(tokenizer: TextTokenizer | None, parts: Mapping[str, Any]) -> tuple[str, ...]:
    """The generated prompts as text, one for each entry of ``lengths``."""
    if tokenizer is None or "bodies" not in parts:
        raise UsageError(
            "a chat endpoint takes text, and without the model's tokenizer there is none",
            hint="use the completions endpoint, or give a workload file with prompts",
        )
    bodies = parts["bodies"]
    cut = ((bodies[i % len(bodies)], max(1, prompt - HEADER_DIGITS)) for i, (prompt, _) in enumerate(parts["lengths"]))
    return tuple(tokenizer.decode(body[:tokens]) for body, tokens in cut)
