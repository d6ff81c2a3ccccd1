"""The installed vLLM's arguments and its verdict on a configuration, from child processes: this process never imports it.

``read_arguments`` runs ``arguments_probe.py`` with the chosen interpreter and keeps its answer on disk, keyed by
interpreter, vLLM version and the time of its last installation. ``VllmJudge`` keeps one child for many questions.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vopt.optimizer.errors import EnvironmentLacks
from vopt.search_spaces.arguments import Arguments

PROBE = Path(__file__).with_name("arguments_probe.py")
LOCATE = (
    "import importlib.util as u, os, sys, json\n"
    "s = u.find_spec('vllm')\n"
    "p = os.path.dirname(s.origin) if s and s.origin else ''\n"
    "m = max([os.stat(os.path.join(p, f)).st_mtime for f in ('__init__.py', 'engine/arg_utils.py')]) if p else 0\n"
    "print(json.dumps([sys.executable, p, m]))\n"
)


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """What ``create_engine_config`` says. ``kind`` is the exception's class name; ``resolved`` vLLM's own values."""

    accepted: bool
    kind: str = ""
    message: str = ""
    resolved: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """The first line that says something, without pydantic's preamble."""
        lines = [line.strip() for line in self.message.splitlines() if line.strip()]
        if self.kind == "ValidationError" and len(lines) > 1:
            about, said = ("", lines[1]) if " [type=" in lines[1] or len(lines) < 3 else (f"{lines[1]}: ", lines[2])
            return about + said.removeprefix("Value error, ").split(" [type=")[0]
        return lines[0] if lines else self.kind


def read_arguments(
    python: str,
    *,
    cache: Path | None = None,
    timeout_s: float = 180.0,
    environment: Mapping[str, str] | None = None,
) -> Arguments:
    """The arguments of the vLLM that ``python`` imports; ``EnvironmentLacks`` when it has none or it cannot be asked."""
    located = _located(python, timeout_s, environment)
    if not located[1]:
        raise EnvironmentLacks(
            f"{python} has no vLLM",
            hint="install vllm there, name another interpreter with --python, or work without an engine: --simulate GPU",
        )
    stored = _cache_file(cache, located)
    if stored is not None and (document := _read(stored)) is not None:
        return Arguments.from_json(document, source=f"vLLM {document['version']} of {python}")
    document = _probe(python, timeout_s, environment)
    if stored is not None:
        _write(stored, document)
    return Arguments.from_json(document, source=f"vLLM {document['version']} of {python}")


class VllmJudge:
    """One child process that answers questions about configurations; starts with the first one, ends with ``close``.

    The child runs on the platform that the interpreter has: a CUDA host's defaults on a CUDA host, the CPU's on a CPU build
    (whose verdict must not be taken for a GPU's: check ``Arguments.device``). CUDA is never initialised by it.
    """

    def __init__(self, python: str, *, timeout_s: float = 180.0, environment: Mapping[str, str] | None = None) -> None:
        self._python = python
        self._timeout_s = timeout_s
        self._environment = dict(environment or {})
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def ask(self, model: str, config: Mapping[str, Any]) -> EngineVerdict:
        """Whether vLLM makes an engine configuration of this; ``EnvironmentLacks`` when the child cannot answer."""
        engine = {name: value for name, value in config.items() if not name.startswith("env:")}
        answer = self._exchange({"model": model, "config": engine})
        return EngineVerdict(answer["ok"], answer.get("kind", ""), answer.get("message", ""), answer.get("resolved", {}))

    def read_back(self, argv: Sequence[str]) -> tuple[dict[str, Any] | None, str]:
        """(what vLLM's own parser makes of these words, ``""``), or (``None``, why it refuses them)."""
        answer = self._exchange({"argv": list(argv)})
        return (answer["given"], "") if answer["ok"] else (None, answer.get("message", ""))

    def close(self) -> None:
        """Ends the child. Idempotent."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.stdin is not None:
            child.stdin.close()
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()

    def _exchange(self, question: Mapping[str, Any]) -> dict[str, Any]:
        child = self._started()
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(question) + "\n")
            child.stdin.flush()
            line = self._answers.get(timeout=self._timeout_s)
        except (BrokenPipeError, queue.Empty):
            line = None
        if line is None:
            self.close()
            raise EnvironmentLacks(
                f"the vLLM of {self._python} gave no answer about a configuration within {self._timeout_s:.0f} s",
                hint=f"try `{self._python} -c 'import vllm'`",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None:
            self._answers = queue.Queue()
            self._child = subprocess.Popen(
                [self._python, "-c", PROBE.read_text(encoding="utf-8"), "ask"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                env=_child_environment(self._environment),
            )
            threading.Thread(target=_pump, args=(self._child, self._answers), daemon=True).start()
        return self._child


def _pump(child: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
    """Moves the child's lines into a queue, so that waiting for one can time out."""
    assert child.stdout is not None
    try:
        for line in child.stdout:
            answers.put(line)
    except ValueError:  # closed while reading
        pass
    answers.put(None)


def _child_environment(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", **more}


def _run(words: list[str], timeout_s: float, environment: Mapping[str, str] | None) -> str:
    """Standard output of a child; its last words in ``EnvironmentLacks`` when it fails."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, check=False, env=_child_environment(environment or {})
        )
    except FileNotFoundError as error:
        raise EnvironmentLacks(f"there is no interpreter {words[0]}", hint="--python wants the path of a Python") from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentLacks(f"{words[0]} did not answer within {timeout_s:.0f} s") from error
    if done.returncode != 0:
        tail = [line for line in done.stderr.strip().splitlines() if line.strip()][-1:] or [f"exit code {done.returncode}"]
        raise EnvironmentLacks(
            f"the vLLM of {words[0]} cannot be asked for its arguments: {tail[0]}",
            hint=f"try `{words[0]} -c 'import vllm'`; on a machine without a GPU only vLLM's CPU build can be imported",
        )
    return done.stdout


def _located(python: str, timeout_s: float, environment: Mapping[str, str] | None) -> list[Any]:
    """[interpreter, folder of vllm ("" without), time of its last change]."""
    located: list[Any] = json.loads(_run([python, "-c", LOCATE], timeout_s, environment))
    return located


def _probe(python: str, timeout_s: float, environment: Mapping[str, str] | None) -> dict[str, Any]:
    text = _run([python, "-c", PROBE.read_text(encoding="utf-8"), "schema"], timeout_s, environment)
    try:
        document: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise EnvironmentLacks(f"the vLLM of {python} answered no JSON: {text[:200]!r}") from error
    return document


def _cache_file(cache: Path | None, located: list[Any]) -> Path | None:
    if cache is None:
        return None
    key = [*located, hashlib.sha256(PROBE.read_bytes()).hexdigest()]
    return cache / f"arguments-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """A stored answer; ``None`` when there is none or it is damaged (then it is asked for again)."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return document if {"version", "arguments"} <= document.keys() else None


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """Whole or not at all, since two searches may write at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(document, file)
    Path(file.name).replace(path)
