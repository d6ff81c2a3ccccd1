"""What engine starts taught: regions that fail, values that always fail, bounds that engines name.

Grows by ``failed`` and ``succeeded``; stored with the study, and reusable by later studies of the same model, GPU and vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vopt.search_spaces.parameter import Point, Violation, same

HUNGRY = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "max_cudagraph_capture_size",
    "max_model_len",
)
"""Arguments of which more takes more memory: a configuration with at least as much of each fails as well."""

OUT_OF_MEMORY = frozenset({"oom_start", "oom_load", "graph_capture"})
"""Kinds of failures that a smaller ``gpu_memory_utilization`` may mend."""

MEMORY_KINDS = OUT_OF_MEMORY | {"kv_too_small", "mamba_blocks"}
AT_ONCE_KINDS = frozenset({"unsupported", "invalid_config"})
TWICE = 2


@dataclass(frozen=True, slots=True)
class Lesson:
    """Points that lie in this region are not proposed again.

    ``same`` are values that must be equal, ``at_least``/``at_most`` bounds beyond which the point lies inside. ``usual`` names
    those of ``same`` that were the default: a point of a space that lost such a parameter still has that value.
    """

    same: Mapping[str, Any]
    at_least: Mapping[str, float]
    at_most: Mapping[str, float]
    kind: str
    reason: str
    usual: tuple[str, ...] = ()

    def covers(self, point: Point) -> bool:
        return (
            all(same(point[name], value) if name in point else name in self.usual for name, value in self.same.items())
            and all(_number(point.get(name)) is not None and point[name] >= v for name, v in self.at_least.items())
            and all(_number(point.get(name)) is not None and point[name] <= v for name, v in self.at_most.items())
        )


@dataclass(frozen=True, slots=True)
class Learned:
    """Lessons, and how often each overriding value was part of a failure or of a success (``name=value`` -> counts).

    ``culprits`` are the values that failed and never worked: (name, value, reason, kind of the failure)."""

    lessons: tuple[Lesson, ...] = ()
    failures: Mapping[str, int] = field(default_factory=dict)
    successes: Mapping[str, int] = field(default_factory=dict)
    culprits: tuple[tuple[str, Any, str, str], ...] = ()

    def succeeded(self, point: Point, default: Point) -> Learned:
        """This, after an engine of ``point`` was measured: its values are no suspects any more."""
        counts = dict(self.successes)
        for name, value in _overrides(point, default):
            counts[_word(name, value)] = counts.get(_word(name, value), 0) + 1
        kept = tuple(c for c in self.culprits if _word(c[0], c[1]) not in counts)
        return replace(self, successes=counts, culprits=kept)

    def failed(
        self,
        point: Point,
        default: Point,
        *,
        kind: str,
        detail: str,
        hint: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Learned:
        """This, after ``point`` failed for its own fault. ``hint`` is what the engine's message names
        (``{"max_num_seqs": {"at_most": 512}}``); infrastructure failures are not to be passed here."""
        made = [_region(point, default, kind, detail), *_hinted(point, default, hint or {}, kind, detail)]
        counts = dict(self.failures)
        suspects = []
        for name, value in _overrides(point, default):
            word = _word(name, value)
            counts[word] = counts.get(word, 0) + 1
            if word not in self.successes:
                suspects.append((name, value))
        culprits = list(self.culprits)
        for name, value in suspects:
            alone = len(suspects) == 1 and kind not in MEMORY_KINDS
            named = kind in AT_ONCE_KINDS and isinstance(value, str) and value.lower() in detail.lower()
            often = counts[_word(name, value)] >= TWICE and name not in HUNGRY
            if (alone or named or often) and not any(c[0] == name and same(c[1], value) for c in culprits):
                times = counts[_word(name, value)]
                culprits.append((name, value, f"{name} = {value!r} failed {_times(times)}, never worked: {detail}", kind))
        return replace(self, lessons=(*self.lessons, *made), failures=counts, culprits=tuple(culprits))

    def violations(self, point: Point, default: Point) -> list[Violation]:
        """The lessons and culprits that ``point`` runs into."""
        found = [Violation(f"learned:{lesson.kind}", lesson.reason) for lesson in self.lessons if lesson.covers(point)]
        for name, value, reason, _ in self.culprits:
            if name in point and same(point[name], value) and not (name in default and same(default[name], value)):
                repair = {name: default[name]} if name in default else None
                found.append(Violation("learned:always_fails", reason, repair))
        for name, reason in self.dead_names.items():
            if name in point and name in default and not same(point[name], default[name]):
                found.append(Violation("learned:switched_off", reason, {name: default[name]}))
        return found

    @property
    def dead_names(self) -> dict[str, str]:
        """Dimensions of which no value but the default ever worked, two different ones being refused: what they need is not
        here (a missing package, an unsupported backend). Name -> reason."""
        refused: dict[str, list[str]] = {}
        for name, value, reason, kind in self.culprits:
            if kind in AT_ONCE_KINDS and name not in HUNGRY:
                refused.setdefault(name, []).append(f"{value!r}: {reason}")
        worked = {word.partition("=")[0] for word in self.successes}
        return {name: "; ".join(all_) for name, all_ in refused.items() if len(all_) >= TWICE and name not in worked}

    def dead_values(self, default: Point) -> Iterator[tuple[str, Any, str]]:
        """(parameter, value, reason) of every value to cut; a default is never among them."""
        for name, value, reason, _ in self.culprits:
            if not (name in default and same(default[name], value)):
                yield name, value, reason

    def to_json(self) -> dict[str, Any]:
        return {
            "lessons": [
                {
                    "same": dict(lesson.same),
                    "at_least": dict(lesson.at_least),
                    "at_most": dict(lesson.at_most),
                    "kind": lesson.kind,
                    "reason": lesson.reason,
                    "usual": list(lesson.usual),
                }
                for lesson in self.lessons
            ],
            "failures": dict(self.failures),
            "successes": dict(self.successes),
            "culprits": [list(culprit) for culprit in self.culprits],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Learned:
        return cls(
            tuple(Lesson(**{**row, "usual": tuple(row["usual"])}) for row in data.get("lessons", ())),
            data.get("failures", {}),
            data.get("successes", {}),
            tuple((row[0], row[1], row[2], row[3] if len(row) > 3 else "") for row in data.get("culprits", ())),
        )


RELATED = (
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "speculation",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "mamba_ssm_cache_dtype",
    "language_model_only",
    "quantization",
)
"""Arguments that move the bounds which engines name: a bound holds for equal values of these."""


def _hinted(point: Point, default: Point, hint: Mapping[str, Mapping[str, Any]], kind: str, detail: str) -> Iterator[Lesson]:
    related = {name: point[name] for name in RELATED if name in point and name not in hint}
    usual = _usual(related, default)
    for name, bound in hint.items():
        if (most := _number(bound.get("at_most"))) is not None:
            at_least = {name: _above(most, point.get(name))}
            yield Lesson(related, at_least, {}, kind, f"{name} at most {most:g}: {detail}", usual)
        if (least := _number(bound.get("at_least"))) is not None:
            at_most = {name: _below(least, point.get(name))}
            yield Lesson(related, {}, at_most, kind, f"{name} at least {least:g}: {detail}", usual)


def _region(point: Point, default: Point, kind: str, detail: str) -> Lesson:
    """Memory failures cover every hungrier point with equal ``RELATED`` values; other failures the point alone."""
    hungry = {}
    if kind in MEMORY_KINDS:
        for name in HUNGRY:
            # More utilization means more KV cache: it only makes matters worse where memory ran out.
            helps = name == "gpu_memory_utilization" and kind in ("kv_too_small", "mamba_blocks")
            if (number := _number(point.get(name))) is not None and not helps:
                hungry[name] = number
    rest = {name: value for name, value in point.items() if name not in hungry}
    if kind in MEMORY_KINDS:
        # Kernels and schedules move no memory to speak of; a draft only adds to it.
        rest = {name: value for name, value in rest.items() if name in RELATED}
        if rest.get("speculation") == "off":
            del rest["speculation"]
    at_most = {}
    if kind in ("kv_too_small", "mamba_blocks") and (number := _number(point.get("gpu_memory_utilization"))) is not None:
        at_most["gpu_memory_utilization"] = number
        rest.pop("gpu_memory_utilization", None)
    return Lesson(rest, hungry, at_most, kind, f"failed before ({kind}): {detail}", _usual(rest, default))


def _usual(values: Mapping[str, Any], default: Point) -> tuple[str, ...]:
    return tuple(name for name, value in values.items() if name in default and same(value, default[name]))


def _above(most: float, value: Any) -> float:
    return most + 1 if isinstance(value, int) else most * (1 + 1e-9)


def _below(least: float, value: Any) -> float:
    return least - 1 if isinstance(value, int) else least * (1 - 1e-9)


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _overrides(point: Point, default: Point) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in point.items() if not (name in default and same(value, default[name]))]


def _word(name: str, value: Any) -> str:
    return f"{name}={value!r}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
