"""The measured command as files of the tools that launch it: vLLM's YAML, a compose file, Kubernetes manifests. The only
importer of yaml."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import yaml

from vopt.optimizer.command import bound_argv
from vopt.optimizer.errors import NothingFeasible, UsageError
from vopt.optimizer.history import StudyRecord
from vopt.optimizer.report import wording
from vopt.optimizer.report.containers import KUBERNETES_USE, compose, gpus_needed, manifests
from vopt.optimizer.report.document import answer_document
from vopt.optimizer.report.launch_options import ENTRY, options_of
from vopt.optimizer.report.redaction import REMOVED, clean_argv
from vopt.optimizer.report.shell import (
    KEY_WITHHELD,
    exported_variables,
    had_server_key,
    provenance,
    shell_script,
    withheld_variables,
)
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.stated_acceptance import stated_length

__all__ = [
    "ExportFormat",
    "argv_from_yaml",
    "compose",
    "config_mapping",
    "export",
    "exported_argv",
    "gpus_needed",
    "is_configuration",
    "manifests",
    "options_of",
]


class _Plain(yaml.SafeDumper):
    """Without anchors: people edit these files."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Double quotes, which escape, for what is not printable: in the other styles PyYAML folds a next-line character away."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Plain.add_representer(str, _quoted)


class ExportFormat(StrEnum):
    SHELL = "shell"
    YAML = "yaml"
    JSON = "json"
    DOCKER = "docker"
    K8S = "k8s"


def export(record: StudyRecord, form: str, trial: str | None = None, *, secrets: Sequence[str] = ()) -> str:
    """The answer of a study, or engine start ``trial``, in one of the formats; ends with a line break. ``secrets`` are values
    that must not be in it.

    Raises ``NothingFeasible`` when there is no answer to export, ``UsageError`` for a format or trial that does not exist, or a
    container of what did not run on a GPU.
    """
    view = StudyView.of(record, secrets)
    argv = exported_argv(view, trial)
    match _format(form):
        case ExportFormat.SHELL:
            return shell_script(view, argv, trial=trial)
        case ExportFormat.YAML:
            use = ("Use it with: vllm serve --config FILE.yaml", *_beside(view, trial))
            return _with_comments(view, trial, use, [config_mapping(bound_argv(argv))])
        case ExportFormat.JSON:
            return json.dumps(_json(view, argv, trial), indent=2, ensure_ascii=False) + "\n"
        case ExportFormat.DOCKER:
            use = ("Use it with: docker compose -f FILE.yaml up", *_withheld(view, trial))
            return _with_comments(view, trial, use, [compose(view, argv, trial)])
        case ExportFormat.K8S:
            return _with_comments(view, trial, (*KUBERNETES_USE, *_withheld(view, trial)), manifests(view, argv, trial))


def _format(form: str) -> ExportFormat:
    try:
        return ExportFormat(form)
    except ValueError:
        known = ", ".join(ExportFormat)
        raise UsageError(f"{form!r} is no export format.", hint=f"--format FORMAT, one of {known}") from None


def exported_argv(view: StudyView, trial: str | None = None) -> list[str]:
    """The launch command that is exported, without secrets."""
    if trial is not None:
        start = view.trial(trial)
        if start is None:
            known = ", ".join(row.label for row in view.trials)
            raise UsageError(f"The study {view.name} has no engine start {trial!r}.", hint=f"Engine starts: {known}")
        return _whole(view, start.argv)
    answer = view.answer
    if answer is None:
        raise UsageError(
            f"The study {view.name} has no answer yet.", hint=f"vopt resume {view.name}, or --trial N for one trial"
        )
    if answer.argv is None:
        raise NothingFeasible(
            f"The study {view.name} found nothing feasible: {answer.reason}", hint=f"vopt show {view.name} lists the reasons"
        )
    return _whole(view, answer.argv)


def _whole(view: StudyView, argv: Sequence[str]) -> list[str]:
    """``argv``, unless a secret had to be taken out of it: what is left is not what was measured."""
    words = clean_argv(argv)
    if (lost := next((i for i, word in enumerate(words) if REMOVED in word), None)) is None:
        return words
    option = next((word.partition("=")[0] for word in reversed(words[: lost + 1]) if word.startswith("-")), "the command")
    raise UsageError(
        f"The study {view.name} was measured with a secret in {option}, which is not written out: the rest is another command.",
        hint="vopt search … once more, with the secret in the environment of the shell that starts it, and not in the command",
    )


def _beside(view: StudyView, trial: str | None) -> tuple[str, ...]:
    """What the measured command had and vLLM's YAML cannot hold."""
    variables = exported_variables(view, trial)
    shown = " ".join(f"{name}={_on_one_line(value)}" for name, value in variables.items())
    return (*([f"with these variables in the environment: {shown}"] if variables else []), *_withheld(view, trial))


def _on_one_line(value: str) -> str:
    """``value`` quoted for a shell, line breaks and control characters as bash escapes them."""
    if value.isprintable():
        return shlex.quote(value)
    escaped = (f"\\{ch}" if ch in "\\'" else ch if ch.isprintable() else f"\\U{ord(ch):08x}" for ch in value)
    return f"$'{''.join(escaped)}'"


def _withheld(view: StudyView, trial: str | None) -> tuple[str, ...]:
    names = withheld_variables(view, trial)
    rows = [f"{name} was set in the measurement and is a secret: set it where the engine starts" for name in names]
    return (*rows, *([KEY_WITHHELD] if had_server_key(view) else []))


def config_mapping(argv: Sequence[str]) -> dict[str, Any]:
    """``vllm serve --config``'s mapping for ``argv``. Values stay texts, JSON included, so that vLLM reads the very words
    that were measured; integers are bare. Raises ``UsageError`` for an option given twice, which a mapping cannot hold."""
    model, options = options_of(argv)
    mapping: dict[str, Any] = {} if model is None else {"model": model}
    for option, values in options:
        name = option.lstrip("-")
        if name in mapping:
            raise UsageError(f"{option} is given twice; a YAML file can hold it once.", hint="export --format shell")
        # A bare option is ``true``; ``--no-x`` is written so, since older vLLM drops ``x: false``.
        mapping[name] = True if not values else _scalar(values[0]) if len(values) == 1 else [_scalar(value) for value in values]
    return mapping


def argv_from_yaml(text: str) -> tuple[str, ...]:
    """The launch command that vLLM makes of a ``--config`` file: its own rules (``FlexibleArgumentParser.load_config_file``).

    Raises ``UsageError`` for text that is no mapping.
    """
    try:
        mapping = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that there is not
        raise UsageError(f"The file is not YAML: {wording.one_line(str(error), 200)}", hint="max-num-seqs: 512") from error
    if not isinstance(mapping, dict):
        raise UsageError("A vLLM configuration file holds a mapping of option names to values.", hint="max-num-seqs: 512")
    words = [*ENTRY]
    if "model" in mapping:
        words.append(str(mapping["model"]))
    for key, value in mapping.items():
        if key != "model":
            words += _words(str(key), value)
    return tuple(words)


def is_configuration(text: str) -> bool:
    """Whether a text is a YAML mapping whose keys could be option names: what ``argv_from_yaml`` takes, and no shell script."""
    try:
        mapping = yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    except ValueError:
        return True  # valid syntax with a date that there is not: ``argv_from_yaml`` says so
    return isinstance(mapping, dict) and all(re.fullmatch(r"[A-Za-z][\w.-]*", str(key)) for key in mapping)


def _scalar(text: str) -> int | str:
    return int(text) if re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) else text


def _words(key: str, value: Any) -> list[str]:
    match value:
        case bool():
            return [f"--{key}"] if value else [f"--no-{key}"]
        case list():
            return [f"--{key}", *(str(item) for item in value)] if value else []
        case dict():
            return [f"--{key}", json.dumps(value)]
        case _:
            return [f"--{key}", str(value)]


def _json(view: StudyView, argv: list[str], trial: str | None) -> dict[str, Any]:
    document = answer_document(view)
    if trial is None:
        return document
    words = {"argv": argv, "command": wording.command_text(argv), "variables": exported_variables(view, trial)}
    start = view.trial(trial)
    stated = stated_length({**(view.setup.get("fixed") or {}), **(start.config if start is not None else {})})
    return document | words | {"stated_acceptance": stated, "trial": trial}


def _with_comments(view: StudyView, trial: str | None, use: Sequence[str], documents: Iterable[dict[str, Any]]) -> str:
    comments = "".join(f"# {line}".rstrip() + "\n" for line in (*provenance(view, trial=trial), *use))
    dumped = [yaml.dump(one, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=100_000) for one in documents]
    return comments + "---\n".join(dumped)
