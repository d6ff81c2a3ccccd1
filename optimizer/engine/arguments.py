"""The installed vLLM's arguments and its verdict on a configuration, from one child process: this process never imports it.

An import of vLLM takes 13 to 21 s on a host with an H200, so a search pays for one: its ``VllmProbe`` answers the questions
about arguments, model and configurations until the search ends. The arguments are kept on disk, keyed by interpreter, vLLM
folder and the time of its last installation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vopt.optimizer.errors import EnvironmentLacks
from vopt.search_spaces.arguments import Arguments

PROBE = Path(__file__).with_name("arguments_probe.py")
PATIENCE_S = 10.0
"""Most that a killed child is waited for."""

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


class VllmProbe:
    """One child process that imports vLLM and answers many questions; from ``wake`` or the first of them to ``close``.

    The child runs on the platform that the interpreter has: a CUDA host's defaults on a CUDA host, the CPU's on a CPU build
    (whose verdict must not be taken for a GPU's: check ``Arguments.device``). It sees the GPUs that ``see`` names, and never
    stays on one: a child that an answer left with a CUDA context ends with that answer, so that no engine finds memory taken
    by it and no search takes it for somebody's work. It leads its own process group and kills it when this process is gone,
    however that ended. One that died between two questions is replaced; one that dies or stays silent over a question is an
    ``EnvironmentLacks`` that says which.
    """

    def __init__(self, python: str, *, timeout_s: float = 180.0, environment: Mapping[str, str] | None = None) -> None:
        self.python = python
        self._timeout_s = timeout_s
        self._environment = (
            dict(os.environ) | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"} | dict(environment or {})
        )
        self._child: _Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def see(self, environment: Mapping[str, str]) -> None:
        """What shows the child the GPUs of a trial and no others (``gpus.cuda_environment``): whether a tensor-parallel size
        fits, and what the defaults are, depends on them. A child that saw others ends."""
        if self._environment != (seeing := self._environment | dict(environment)):
            self.close()
            self._environment = seeing

    def wake(self) -> None:
        """Start the import now, while this process has other things to do. ``EnvironmentLacks``: no such interpreter."""
        if self._child is not None and self._child.ended is not None:
            self.close()
        if self._child is None:
            self._child = _Child(self.python, self._environment)

    def arguments(self, cache: Path | None = None) -> Arguments:
        """The arguments of the vLLM that ``python`` imports, from below ``cache`` where they were asked for before.

        ``EnvironmentLacks`` when it has none or cannot be asked.
        """
        located = self._located()
        if not located[1]:
            raise EnvironmentLacks(
                f"{self.python} has no vLLM",
                hint="install vllm there, name another interpreter with --python, or work without an engine: --simulate GPU",
            )
        stored = _cache_file(cache, located)
        document = _read(stored) if stored is not None else None
        if document is None:
            answer = self._exchange({"schema": True}, "its arguments")
            if not answer["ok"]:
                raise EnvironmentLacks(
                    f"the vLLM of {self.python} cannot be asked for its arguments: {answer['kind']}: {answer['message']}",
                    hint="vopt doctor   # says which vLLM it is, and which ones are known",
                )
            document = answer["schema"]
            if stored is not None:
                _write(stored, document)
        return Arguments.from_json(document, source=f"vLLM {document['version']} of {self.python}")

    def ask(self, model: str, config: Mapping[str, Any]) -> EngineVerdict:
        """Whether vLLM makes an engine configuration of this; ``EnvironmentLacks`` when the child cannot answer."""
        engine = {name: value for name, value in config.items() if not name.startswith("env:")}
        answer = self._exchange({"model": model, "config": engine}, "a configuration")
        return EngineVerdict(answer["ok"], answer.get("kind", ""), answer.get("message", ""), answer.get("resolved", {}))

    def read_back(self, argv: Sequence[str]) -> tuple[dict[str, Any] | None, str]:
        """(what vLLM's own parser makes of these words, ``""``), or (``None``, why it refuses them)."""
        answer = self._exchange({"argv": list(argv)}, "a command")
        return (answer["given"], "") if answer["ok"] else (None, answer.get("message", ""))

    def close(self) -> None:
        """Ends the child and whatever it started. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _exchange(self, question: Mapping[str, Any], about: str) -> dict[str, Any]:
        """One question and its answer; ``EnvironmentLacks``: the child cannot import vLLM, died over it, or stayed silent."""
        self.wake()
        assert self._child is not None
        try:
            answer = self._child.answer(question, self._timeout_s)
        except queue.Empty:
            why = f"gave no answer about {about} within {self._timeout_s:g} s"
        except _Died as died:
            why = f"died over a question about {about} ({died})"
        else:
            if "broken" not in answer:
                if answer.get("on_gpu"):
                    self.close()
                return answer
            why = f"cannot be imported: {answer['broken']}"
        self.close()
        raise EnvironmentLacks(
            f"the vLLM of {self.python} {why}",
            hint=f"{self.python} -c 'import vllm.engine.arg_utils'   # without a GPU only vLLM's CPU build can be imported",
        )

    def _located(self) -> list[Any]:
        """[interpreter, folder of vllm ("" without), time of its last change]; asked without importing it."""
        try:
            done = subprocess.run(
                [self.python, "-c", LOCATE],
                capture_output=True,
                text=True,
                timeout=self._timeout_s,
                check=False,
                env=self._environment,
            )
            located: list[Any] = json.loads(done.stdout)
        except OSError as error:
            raise _no_interpreter(self.python, error) from error
        except subprocess.TimeoutExpired as error:
            raise EnvironmentLacks(
                f"{self.python} did not answer within {self._timeout_s:g} s", hint=f"{self.python} --version"
            ) from error
        except ValueError as error:
            said = _last_line(done.stderr) or _last_line(done.stdout) or "nothing"
            raise EnvironmentLacks(
                f"{self.python} cannot be asked where its vLLM is (exit code {done.returncode}): {said}",
                hint="--python wants the path of a Python 3.11 or later",
            ) from error
        return located


class _Died(Exception):
    """The child ended instead of answering; the text says how."""


class _Child:
    """The process: questions go in as JSON lines, answers come out as JSON lines; what it logs is kept for its last line.

    It is waited for by ``end`` alone: until then its number, which is its group's too, is nobody else's.
    """

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end
        try:
            self._process = subprocess.Popen(
                [python, "-c", PROBE.read_text(encoding="utf-8"), "ask"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            self._log.close()
            raise _no_interpreter(python, error) from error
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._pump = threading.Thread(target=self._read, daemon=True)
        self._pump.start()

    def answer(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """``queue.Empty`` when there is none in time, ``_Died`` when there can be none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except BrokenPipeError:
            line = None
        if line is None:
            raise _Died(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def ended(self) -> str | None:
        """How it ended; ``None`` while it lives."""
        seen = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return None
        return f"exit code {seen.si_status}" if seen.si_code == os.CLD_EXITED else signal.Signals(seen.si_status).name

    def end(self) -> None:
        """Kills it and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=PATIENCE_S)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # a question that it never read
                self._process.stdin.close()
        self._pump.join(PATIENCE_S)
        if self._process.stdout is not None and not self._pump.is_alive():
            self._process.stdout.close()
        self._log.close()

    def _read(self) -> None:
        """Moves the child's lines into a queue, so that waiting for one can time out."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _last_words(self) -> str:
        """Its output is at its end, so is the process, or nearly."""
        deadline = time.monotonic() + PATIENCE_S
        while (how := self.ended) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self._log.seek(0)
        said = _last_line(self._log.read().decode(errors="replace"))
        return ": ".join(words for words in (how or "its output ended", said) if words)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _no_interpreter(python: str, error: OSError) -> EnvironmentLacks:
    if isinstance(error, FileNotFoundError):
        return EnvironmentLacks(f"there is no interpreter {python}", hint="--python wants the path of a Python")
    return EnvironmentLacks(
        f"{python} does not run as an interpreter: {error.strerror}", hint="--python wants the path of a Python"
    )


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
