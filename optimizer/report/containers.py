"""The measured command in containers: a compose file, Kubernetes manifests, as mappings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vopt.optimizer.errors import UsageError
from vopt.optimizer.report.launch_options import ENTRY, options_of
from vopt.optimizer.report.shell import container_variables, withheld_variables
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.trial import Phase

DEFAULT_PORT = 8000
CACHE = "/cache"
CACHES = {"HF_HOME": f"{CACHE}/huggingface", "VLLM_CACHE_ROOT": f"{CACHE}/vllm"}
"""Where the container keeps weights and compiled graphs, whatever the home of its user is."""
KUBERNETES_USE = (
    "Use it with: kubectl apply -f FILE.yaml",
    "a gated model needs its token first: kubectl create secret generic huggingface --from-literal=token=…",
    "vLLM asks nobody for a password unless there is one: kubectl create secret generic vllm --from-literal=api-key=…",
    f"{CACHE} is an emptyDir: each new pod downloads and compiles again; a PersistentVolumeClaim there keeps both",
)
_PARALLEL = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--prefill-context-parallel-size")


def compose(view: StudyView, argv: Sequence[str], trial: str | None = None) -> dict[str, Any]:
    """A compose file: the official image of the measured version, published on this host's loopback only."""
    port, words = _in_container(argv)
    start_s = _start_period_s(view)
    probe = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/health', timeout=5)"
    volumes: list[Any] = [f"huggingface:{CACHES['HF_HOME']}", f"vllm:{CACHES['VLLM_CACHE_ROOT']}"]
    if (path := _model_path(words)) is not None:
        # The long form: a path may hold colons.
        volumes.append({"type": "bind", "source": _for_compose(path), "target": _for_compose(path), "read_only": True})
    service: dict[str, Any] = {
        "image": image(view),
        "entrypoint": [*ENTRY],
        "command": [_for_compose(word) for word in words],
        # Passed through from the shell that runs compose, never written here.
        "environment": [
            "HF_TOKEN",
            "VLLM_API_KEY",
            *withheld_variables(view, trial),
            *(f"{name}={path}" for name, path in CACHES.items()),
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
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "cache", "mountPath": CACHE}]
    container = {
        "name": "vllm",
        "image": image(view),
        "command": [*ENTRY],
        "args": [word.replace("$", "$$") for word in words],
        "ports": [{"name": "http", "containerPort": port}],
        "env": [
            _from_secret("HF_TOKEN", "huggingface", "token"),
            _from_secret("VLLM_API_KEY", "vllm", "api-key"),
            *({"name": key, "value": path} for key, path in CACHES.items()),
            *({"name": key, "value": value.replace("$", "$$")} for key, value in container_variables(view, trial).items()),
        ],
        "resources": {"limits": dict(gpus), "requests": dict(gpus)},
        "startupProbe": probe
        | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": max(30, _start_period_s(view) // 10)},
        # Under full load the server answers late: with the default of one second it would be taken out of service.
        "readinessProbe": probe | {"periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
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


def _from_secret(variable: str, secret: str, key: str) -> dict[str, Any]:
    """A variable from a secret of the cluster that may be absent."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": True}}}


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
