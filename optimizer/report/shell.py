"""The exported script: the measured command, quoted so that any value survives, with its provenance in comments. Pure."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence

from vopt.optimizer.command import LOOPBACK, bound_argv
from vopt.optimizer.recommend import Verdict
from vopt.optimizer.report import wording
from vopt.optimizer.report.redaction import REMOVED, clean_argv, holds_secret
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.stated_acceptance import stated_notes
from vopt.optimizer.variables import OURS, PLACES, handed_on, stored

_ENTRY = "env:"
SERVER_KEY = "VLLM_API_KEY"
KEY_WITHHELD = (
    f"{SERVER_KEY} was set where this was searched; it is a secret and not written here, and without it vLLM asks nobody"
)


def exported_variables(view: StudyView, trial: str | None = None) -> dict[str, str]:
    """Environment variables that the exported engine was measured with and that change what it does: vLLM's own, all that the
    command in use brought, and the ``env:NAME`` entries of ``--set`` and of its configuration. No secrets, no places of the
    machine that searched."""
    return {name: value for name, value in _variables(view, trial).items() if not _is_withheld(name, value)}


def withheld_variables(view: StudyView, trial: str | None = None) -> tuple[str, ...]:
    """Names of the variables that the measurement had and whose values are secrets: whoever starts the engine sets them."""
    return tuple(name for name, value in _variables(view, trial).items() if _is_withheld(name, value) and name != "HF_TOKEN")


def had_server_key(view: StudyView) -> bool:
    """Whether the shell that searched had the server's key. Engines were measured without it, since it changes nothing that
    they compute; but whoever has one wants it in front of the server too."""
    return SERVER_KEY in stored(view.setup)


def _variables(view: StudyView, trial: str | None) -> dict[str, str]:
    found = handed_on(view.setup)
    start = view.trial(trial) if trial is not None else None
    config = start.config if start else view.answer.winner_config if view.answer else None
    for name, value in (*_typed_variables(view), *(config or {}).items()):
        if name.startswith(_ENTRY):
            found[name.removeprefix(_ENTRY)] = ("1" if value else "0") if isinstance(value, bool) else str(value)
    return {name: str(value) for name, value in sorted(found.items()) if _exportable(name)}


def _exportable(name: str) -> bool:
    return name.isidentifier() and name.isascii() and name not in {*OURS, SERVER_KEY}


def _is_withheld(name: str, value: str) -> bool:
    return REMOVED in value or holds_secret(name, value)


def _typed_variables(view: StudyView) -> list[tuple[str, str]]:
    """``--set env:NAME=VALUE`` as it was typed."""
    typed = (view.setup.get("options") or {}).get("set") or ()
    rows = (str(text).partition("=") for text in typed)
    return [(name, value) for name, _, value in rows]


def shell_script(view: StudyView, argv: Sequence[str], *, trial: str | None = None) -> str:
    """A bash script that becomes ``argv``; further arguments given to it are appended. ``trial`` names the engine start
    when it is not the study's answer."""
    words = bound_argv(clean_argv(argv))
    lines = ["#!/usr/bin/env bash", *(f"# {line}".rstrip() for line in provenance(view, trial=trial))]
    if _on_loopback(words):
        lines += [
            "#",
            f"# It listens on {LOOPBACK} only. To open it to other machines: replace that by 0.0.0.0, and set VLLM_API_KEY,",
            "# since vLLM asks nobody for a password.",
        ]
    if had_server_key(view):
        lines += ["#", f"# {KEY_WITHHELD}."]
    lines.append("set -euo pipefail")
    lines += _exports(exported_variables(view, trial))
    for name in withheld_variables(view, trial):
        lines += [
            f': "${{{name}:?was set in the measurement; its value is a secret, so set it before this}}"',
            f"export {name}",
        ]
    # ShellCheck cannot know that $, backslashes and typographic quotes inside single quotes are literal on purpose.
    lines += ["", "# shellcheck disable=SC1003,SC1112,SC2016", f"exec {wording.command_lines(words)} \\", '  "$@"', ""]
    return "\n".join(lines)


def _on_loopback(words: Sequence[str]) -> bool:
    return f"--host={LOOPBACK}" in words or ("--host", LOOPBACK) in itertools.pairwise(words)


def provenance(view: StudyView, *, trial: str | None = None) -> list[str]:
    """Where a command comes from: lines of text for comments, each without line breaks."""
    answer = view.answer
    start = view.trial(trial) if trial is not None else None
    environment = view.setup.get("environment") or {}
    rows = []
    if start is not None:
        rows.append(f"vLLM launch command of engine start {start.label} of the study {view.name}: {_result(view, trial)}")
    elif answer is not None and answer.verdict is Verdict.NO_GAIN:
        rows.append(f"vLLM launch command for {view.model}: the baseline, since the study found nothing measurably better")
    else:
        rows.append(f"vLLM launch command for {view.model}, found by vopt {environment.get('vopt_version', '')}".rstrip())
    if view.simulated:
        rows.append("SIMULATED: no engine ran. Measure it before you rely on it.")
    shown = start or next(iter(view.challenger_starts() if answer and answer.winner_config else view.arm(winner=False)), None)
    stated = stated_notes({**(view.setup.get("fixed") or {}), **shown.config}) if shown is not None else ()
    rows += [f"NOT FOR SERVICE: {note}" for note in stated]
    if start is None:
        rows.append(view.verdict_line().removeprefix("SIMULATED. "))
    rows += [
        f"study {view.name} of {view.record.created_at}, goal {view.goal.get('name', '')}" + _joined("; ", view.limits),
        f"{'simulated' if view.simulated else 'measured'} on {view.machine}" + _driver(environment),
        f"workload {view.workload}, digest {view.setup.get('workload_digest', '')}, seed {view.setup.get('seed', '')}",
    ]
    if revision := view.setup.get("model_revision"):
        rows.append(f"model revision {revision}")
    if start is None and answer is not None:
        if answer.winner_label is not None:
            rows.append(f"winner: engine start {answer.winner_label}; {answer.reason}")
        if answer.soak:
            rows.append(f"soak: {answer.soak}")
        rows += [f"less than the defaults: {', '.join(below)}"] if (below := view.below_defaults()) else []
    told = view.notes if start is None else (*view.removed, *view.left_out)
    rows += [f"note: {note}" for note in told if note not in stated]
    return [wording.one_line(row) for row in rows]


def container_variables(view: StudyView, trial: str | None = None) -> Mapping[str, str]:
    """The same for containers, which have places of their own."""
    host = ("_ROOT", "_HOME", "_DIR", "PATH")
    found = exported_variables(view, trial).items()
    return {name: value for name, value in found if not name.endswith(host) and not PLACES.fullmatch(name)}


def _result(view: StudyView, label: str | None) -> str:
    start = view.trial(label) if label is not None else None
    if start is None:
        return ""
    excluded = view.why_not(start)
    value = wording.metric_text(view.metric, view.value(start))
    return f"{value}; cannot be the answer: {excluded[1]}" if excluded else value


def _joined(separator: str, rows: Sequence[str]) -> str:
    return separator + separator.join(rows) if rows else ""


def _driver(environment: Mapping[str, object]) -> str:
    return f", driver {environment['driver']}" if environment.get("driver") else ""


def _exports(variables: Mapping[str, str]) -> list[str]:
    if not variables:
        return []
    head = ["", "# Environment of the measurement.", "# shellcheck disable=SC1003,SC1112,SC2016"]
    return [*head, *(f"export {name}={shlex.quote(value)}" for name, value in variables.items())]
