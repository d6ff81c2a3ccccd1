"""The measured command as files of the tools that launch it: vLLM's YAML, a compose file, Kubernetes manifests. The only
importer of yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import yaml

from vopt.optimizer.command import bound_argv
from vopt.optimizer.errors import NothingFeasible, UsageError
from vopt.optimizer.history import StudyRecord
from vopt.optimizer.report import wording
from vopt.optimizer.report.document import answer_document
from vopt.optimizer.report.redaction import clean_argv
from vopt.optimizer.report.shell import container_variables, provenance, shell_script
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.trial import Phase


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


DEFAULT_PORT = 8000
_ENTRY = ("vllm", "serve")
# vLLM's short options (engine/arg_utils.py of 0.32); its YAML reader knows long names only.
_SHORT = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-O": "--optimization-level",
}
_PARALLEL = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--prefill-context-parallel-size")


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
            return _with_comments(view, trial, "Use it with: vllm serve --config FILE.yaml", [config_mapping(bound_argv(argv))])
        case ExportFormat.JSON:
            return json.dumps(_json(view, argv, trial), indent=2, ensure_ascii=False) + "\n"
        case ExportFormat.DOCKER:
            return _with_comments(view, trial, "Use it with: docker compose -f FILE.yaml up", [compose(view, argv, trial)])
        case ExportFormat.K8S:
            return _with_comments(view, trial, "Use it with: kubectl apply -f FILE.yaml", manifests(view, argv, trial))


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
        return clean_argv(start.argv)
    answer = view.answer
    if answer is None:
        raise UsageError(
            f"The study {view.name} has no answer yet.", hint=f"vopt resume {view.name}, or --trial N for one trial"
        )
    if answer.argv is None:
        raise NothingFeasible(
            f"The study {view.name} found nothing feasible: {answer.reason}", hint=f"vopt show {view.name} lists the reasons"
        )
    return clean_argv(answer.argv)


def options_of(argv: Sequence[str]) -> tuple[str | None, list[tuple[str, list[str]]]]:
    """``vllm serve MODEL --a 1 --b`` -> the model, and (option, values) in order, with long option names."""
    words = list(argv[2:] if tuple(argv[:2]) == _ENTRY else argv)
    model = words.pop(0) if words and not words[0].startswith("-") else None
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if _is_option(word):
            name, equals, value = word.partition("=")
            name = _SHORT.get(name, name)
            if re.fullmatch(r"-O\d", name):
                name, equals, value = "--optimization-level", "=", name[2:]
            options.append((name, [value] if equals else []))
        elif not options:
            raise UsageError(f"{word!r} in the launch command belongs to no option.")
        else:
            options[-1][1].append(word)
    return model, options


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
    except yaml.YAMLError as error:
        raise UsageError(f"The file is not YAML: {wording.one_line(str(error), 200)}") from error
    if not isinstance(mapping, dict):
        raise UsageError("A vLLM configuration file holds a mapping of option names to values.", hint="max-num-seqs: 512")
    words = [*_ENTRY]
    if "model" in mapping:
        words.append(str(mapping["model"]))
    for key, value in mapping.items():
        if key != "model":
            words += _words(str(key), value)
    return tuple(words)


def compose(view: StudyView, argv: Sequence[str], trial: str | None = None) -> dict[str, Any]:
    """A compose file: the official image of the measured version, published on this host's loopback only."""
    port, words = _in_container(argv)
    start_s = _start_period_s(view)
    probe = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/health', timeout=5)"
    volumes: list[Any] = ["huggingface:/cache/huggingface", "vllm:/cache/vllm"]
    if (path := _model_path(words)) is not None:
        # The long form: a path may hold colons.
        volumes.append({"type": "bind", "source": _for_compose(path), "target": _for_compose(path), "read_only": True})
    service: dict[str, Any] = {
        "image": image(view),
        "entrypoint": [*_ENTRY],
        "command": [_for_compose(word) for word in words],
        # Passed through from the shell that runs compose, never written here.
        "environment": [
            "HF_TOKEN",
            "VLLM_API_KEY",
            *(f"{name}={_for_compose(value)}" for name, value in container_variables(view, trial).items()),
        ],
        "ports": [f"127.0.0.1:{port}:{port}"],
        "shm_size": "16gb",
        "volumes": volumes,
        "deploy": {
            "resources": {
                "reservations": {"devices": [{"driver": "nvidia", "count": gpus_needed(argv), "capabilities": ["gpu"]}]}
            }
        },
        "healthcheck": {
            "test": ["CMD", "python3", "-c", probe],
            "interval": "15s",
            "timeout": "10s",
            "retries": 4,
            "start_period": f"{start_s}s",
        },
        "restart": "unless-stopped",
    }
    return {"services": {"vllm": service}, "volumes": {"huggingface": {}, "vllm": {}}}


def manifests(view: StudyView, argv: Sequence[str], trial: str | None = None) -> list[dict[str, Any]]:
    """A Kubernetes Deployment and its Service (reachable inside the cluster)."""
    port, words = _in_container(argv)
    name = _dns_label(view.name)
    labels = {"app.kubernetes.io/name": "vllm", "app.kubernetes.io/instance": name}
    probe = {"httpGet": {"path": "/health", "port": "http"}}
    gpus = {"nvidia.com/gpu": str(gpus_needed(argv))}
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "cache", "mountPath": "/cache"}]
    container = {
        "name": "vllm",
        "image": image(view),
        "command": [*_ENTRY],
        "args": [word.replace("$", "$$") for word in words],
        "ports": [{"name": "http", "containerPort": port}],
        "env": [
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "huggingface", "key": "token", "optional": True}},
            },
            *({"name": key, "value": value.replace("$", "$$")} for key, value in container_variables(view, trial).items()),
        ],
        "resources": {"limits": dict(gpus), "requests": dict(gpus)},
        "startupProbe": probe | {"periodSeconds": 10, "failureThreshold": max(30, _start_period_s(view) // 10)},
        "readinessProbe": probe | {"periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": probe | {"periodSeconds": 15, "timeoutSeconds": 10, "failureThreshold": 4},
        "volumeMounts": mounts,
    }
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
        {"name": "cache", "emptyDir": {}},
    ]
    if (path := _model_path(words)) is not None:
        volumes.append({"name": "model", "hostPath": {"path": path}})
        mounts.append({"name": "model", "mountPath": path, "readOnly": True})
    # Kubernetes would otherwise announce services as VLLM_..._PORT variables, which vLLM takes for its own settings.
    pod = {"enableServiceLinks": False, "containers": [container], "volumes": volumes}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": 1,
            # Two engines do not fit on one GPU while a new version rolls out.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
    }
    return [deployment, service]


def image(view: StudyView) -> str:
    """The official image of the vLLM that was measured. Raises ``UsageError`` when no GPU was."""
    version = str(view.setup.get("vllm_version") or "").split("+")[0]
    if not view.gpus:
        raise UsageError(
            f"The study {view.name} was measured without a GPU; the official image is for GPUs.", hint="export --format shell"
        )
    if not version:
        raise UsageError(f"The study {view.name} does not say which vLLM it measured.", hint="export --format shell")
    return f"vllm/vllm-openai:v{version}"


def gpus_needed(argv: Sequence[str]) -> int:
    """GPUs that a launch command takes: the product of its parallel sizes."""
    found = {
        name: int(values[0]) for name, values in options_of(argv)[1] if name in _PARALLEL and values and values[0].isdigit()
    }
    product = 1
    for size in found.values():
        product *= size
    return product


def _is_option(word: str) -> bool:
    """Negative numbers and JSON are values."""
    return word.startswith("--") or (word.split("=")[0] in _SHORT or bool(re.fullmatch(r"-O\d", word)))


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


def _in_container(argv: Sequence[str]) -> tuple[int, list[str]]:
    """(port, words after ``vllm serve``). Inside a container the server has to listen on all of the container's own
    interfaces, vLLM's default; who reaches it is decided outside."""
    model, options = options_of(argv)
    port = next((int(values[0]) for name, values in options if name == "--port" and values), DEFAULT_PORT)
    words = [] if model is None else [model]
    for name, values in options:
        if name == "--host" and values != ["0.0.0.0"]:
            continue
        words += [name, *values]
    return port, words


def _for_compose(text: str) -> str:
    return text.replace("$", "$$")


def _model_path(words: Sequence[str]) -> str | None:
    return words[0] if words and words[0].startswith("/") else None


def _start_period_s(view: StudyView) -> int:
    """Three times the slowest start that was measured, at least five minutes: the first start also downloads and compiles."""
    slowest = max((trial.phase_s.get(Phase.START, 0.0) for trial in view.trials), default=0.0)
    return max(300, round(slowest * 3))


def _dns_label(name: str) -> str:
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].strip("-")
    return f"vllm-{label}" if label else "vllm"


def _json(view: StudyView, argv: list[str], trial: str | None) -> dict[str, Any]:
    document = answer_document(view)
    return document if trial is None else document | {"argv": argv, "command": wording.command_text(argv), "trial": trial}


def _with_comments(view: StudyView, trial: str | None, use: str, documents: Iterable[dict[str, Any]]) -> str:
    comments = "".join(f"# {line}".rstrip() + "\n" for line in (*provenance(view, trial=trial), use))
    dumped = [yaml.dump(one, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=100_000) for one in documents]
    return comments + "---\n".join(dumped)
