"""The workload: which requests a goal is measured with. Declared here, turned into requests by ``materialise``."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.lengths import Lengths, Marginal
from vopt.optimizer.load.sessions import SessionShape, with_history
from vopt.optimizer.load.sharing import REUSE_LEAST, Sharing, recorded_sharing, thinned, typical_length
from vopt.optimizer.load.source import HEADER_DIGITS

FORMAT = "vopt-workload"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Reuse:
    """Beginnings that prompts share: ``prefixes`` different ones of ``prefix_tokens`` each.

    ``share`` is the part of all prompt tokens that a boundless prefix cache would have seen before (0-1): declared for a
    generated workload, measured for a recorded one.
    """

    prefixes: int = 0
    prefix_tokens: int = 0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a file. Its text stays in memory: ``to_json`` holds lengths and hashes, never prompts."""

    prompt_tokens: int
    output_tokens: int
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    text: str = field(default="", repr=False)
    system: str = field(default="", repr=False)
    at_s: float | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    session: str | None = None
    sha256: str = ""

    def to_json(self) -> dict[str, Any]:
        kept = {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens, "sha256": self.sha256}
        return {**kept, "at_s": self.at_s, "sampling": dict(self.sampling), "session": self.session}


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the engine; when it is asked (arrivals, concurrency, rate) belongs to the plan of a load.

    ``sampling`` ``None`` stands for what ``vllm serve`` would apply: fill it in with ``with_sampling`` before ``digest`` is
    stored. ``schema`` is a JSON schema that every answer must meet. With ``sessions`` the lengths are those of one turn.
    """

    name: str
    lengths: Lengths
    reuse: Reuse = Reuse()
    sampling: Mapping[str, Any] | None = None
    natural_text: bool = True
    schema: Mapping[str, Any] | None = None
    sessions: SessionShape | None = None
    recorded: tuple[Recorded, ...] = field(default=(), repr=False)

    def with_sampling(self, serving: Mapping[str, Any]) -> Workload:
        """With the sampling parameters of ``vllm serve``, where the workload states none of its own."""
        return self if self.sampling is not None else replace(self, sampling=dict(serving))

    def request_lengths(self) -> tuple[tuple[int, int], ...]:
        """(prompt tokens, output tokens) of one block, or of every recorded request; histories and headers included."""
        if self.recorded:
            extra = HEADER_DIGITS if all(entry.token_ids for entry in self.recorded) else 0
            return tuple((max(HEADER_DIGITS, entry.prompt_tokens + extra), entry.output_tokens) for entry in self.recorded)
        block = self.lengths.block()
        return with_history(block, self.sessions) if self.sessions else block

    @property
    def has_times(self) -> bool:
        """Whether the recording can be replayed at its own times."""
        return bool(self.recorded) and all(entry.at_s is not None for entry in self.recorded)

    def longest(self) -> Workload:
        """The same kind of requests, every one as long as this workload's longest: for the soak and for memory."""
        prompt, output = max(self.request_lengths(), key=lambda pair: (pair[0] + pair[1], pair))
        lengths = Lengths(Marginal(prompt, most=prompt), Marginal(output, most=output))
        return replace(self, name=f"{self.name}-longest", lengths=lengths, sessions=None, recorded=(), reuse=Reuse())

    def facts(self) -> dict[str, Any]:
        """What the search space may ask of a workload: lengths in tokens, shares 0-1."""
        pairs, sharing = self.request_lengths(), self.sharing()
        return {
            "workload": self.name,
            "max_prompt_tokens": max(prompt for prompt, _ in pairs),
            "max_output_tokens": max(output for _, output in pairs),
            "max_total_tokens": max(prompt + output for prompt, output in pairs),
            "mean_prompt_tokens": sum(prompt for prompt, _ in pairs) / len(pairs),
            "mean_output_tokens": sum(output for _, output in pairs) / len(pairs),
            "reuse_share": sharing.share,
            "shared_prefix_tokens": sharing.tokens,
            "states_reuse": sharing.stated,
            "natural_text": self.natural_text,
            "structured_output": self.schema is not None or any("structured_outputs" in r.sampling for r in self.recorded),
            "multi_turn": self.sessions is not None,
            "sampling": None if self.sampling is None else dict(self.sampling),
        }

    def sharing(self) -> Sharing:
        """What its prompts share with each other, as far as it says.

        The built-in workloads are lengths and no more: their prompts share nothing because nothing is known of yours. The same
        goes for a recording without prompts.
        """
        if self.sessions is not None:
            pairs, turns = self.request_lengths(), self.sessions.turns
            # A later turn repeats the prompt before it, a first one the system prompt.
            again = [pairs[i - 1][0] if i % turns else self.sessions.system_tokens for i in range(len(pairs))]
            return Sharing(sum(again) / sum(prompt for prompt, _ in pairs), typical_length(again))
        if self.recorded:
            found = recorded_sharing(thinned(self.recorded))
            if found is not None:
                return Sharing(found.share, typical_length(found.seen_before) if found.share >= REUSE_LEAST else 0)
        stated = not self.recorded and replace(self, sampling=None) not in NAMED.values()
        return Sharing(self.reuse.share, self.reuse.prefix_tokens, stated or self.reuse.prefix_tokens > 0)

    def reuse_share(self) -> float:
        """The part of the prompt tokens that earlier requests have sent already, as far as the workload says."""
        return self.sharing().share

    @property
    def digest(self) -> str:
        """Twelve hex digits over everything that shapes the requests; the name is not part of it."""
        body = self.to_json()
        del body["name"]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "name": self.name,
            "lengths": self.lengths.to_json(),
            "reuse": asdict(self.reuse),
            "sampling": None if self.sampling is None else dict(self.sampling),
            "natural_text": self.natural_text,
            "schema": self.schema,
            "sessions": asdict(self.sessions) if self.sessions else None,
            "recorded": [entry.to_json() for entry in self.recorded],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Workload:
        """A declared workload; ``UsageError`` for another format. Recorded prompts come back as their lengths."""
        if data.get("format") != FORMAT or data.get("format_version") != FORMAT_VERSION:
            found = f"{data.get('format')!r} version {data.get('format_version')!r}"
            raise UsageError(
                f"a workload file has format {FORMAT!r} version {FORMAT_VERSION}, this one says {found}",
                hint="vopt workload --from-metrics URL   # writes one of this version",
            )
        try:
            sessions = data.get("sessions")
            return cls(
                name=str(data["name"]),
                lengths=Lengths.from_json(data["lengths"]),
                reuse=Reuse(**data.get("reuse", {})),
                sampling=data.get("sampling"),
                natural_text=bool(data.get("natural_text", True)),
                schema=data.get("schema"),
                sessions=SessionShape(**sessions) if sessions else None,
                recorded=tuple(Recorded(**entry) for entry in data.get("recorded", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"the workload file cannot be meant: {type(error).__name__}: {error}",
                hint="vopt workload --from-metrics URL   # writes a whole one",
            ) from error


def _fixed(prompt: int, output: int) -> Lengths:
    return Lengths(Marginal(prompt, most=prompt), Marginal(output, most=output))


CHAT = Workload("chat", Lengths(Marginal(342, 1.0, 8, 4000), Marginal(281, 0.9, 4, 2000)))
"""Long-tailed like ShareGPT: means of 342 tokens in and 281 out, as in GPUStack's performance lab, cut at 4,000 and 2,000."""

NAMED: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        CHAT,
        Workload("throughput", _fixed(1024, 128)),
        Workload("long-context", _fixed(32000, 100)),
        Workload("generation", _fixed(1000, 2000)),
    )
}


def named(name: str) -> Workload:
    """A built-in workload; ``UsageError`` names the known ones."""
    if name in NAMED:
        return NAMED[name]
    near = difflib.get_close_matches(name, NAMED, n=1)
    hint = f"did you mean --workload {near[0]}?" if near else "or give the path of a workload file"
    raise UsageError(f"--workload {name}: no file and no workload of that name; there are {', '.join(NAMED)}", hint=hint)


PREFIX_EXAMPLE = '{"prefix_tokens": 1024, "suffix_tokens": 128, "prefixes": 10, "output_tokens": 128}'


def prefix_repetition(*, prefix_tokens: int, suffix_tokens: int, prefixes: int, output_tokens: int) -> Workload:
    """Prompts that share one of ``prefixes`` beginnings, like the dataset of that name in ``vllm bench serve``."""
    if min(prefix_tokens, prefixes, output_tokens) < 1 or suffix_tokens < HEADER_DIGITS:
        raise UsageError(
            f"prefix repetition needs a prefix, prefixes and output of at least 1 and a suffix of at least {HEADER_DIGITS}, "
            f"not {prefix_tokens}, {prefixes}, {output_tokens} and {suffix_tokens}",
            hint=PREFIX_EXAMPLE,
        )
    prompt = prefix_tokens + suffix_tokens
    return Workload("prefix-repetition", _fixed(prompt, output_tokens), Reuse(prefixes, prefix_tokens, prefix_tokens / prompt))
