"""vLLM's own word on a configuration before an engine is started for it: ``create_engine_config`` in a child process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vopt.optimizer.command import split_environment
from vopt.optimizer.engine.arguments import VllmProbe
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.subject import Subject
from vopt.optimizer.trial import EngineConfig


class Preflight:
    """Asks once for each configuration, the child that has already told what the subject is. One that cannot answer is said
    once, and then nothing is refused any more: the engines themselves will tell. ``close`` ends the child."""

    def __init__(self, subject: Subject, say: Callable[[str], None], probe: VllmProbe) -> None:
        self._model = str(subject.model.directory or subject.model.name)
        self._fixed, self._say = subject.fixed, say
        self._answers: dict[EngineConfig, str | None] = {}
        self._probe: VllmProbe | None = probe
        if not speaks_for(subject):
            self.close()

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """Why vLLM refuses this configuration, in its own words; ``None`` when it does not, or cannot be asked."""
        arguments, _ = split_environment(self._fixed | config)
        if self._probe is None:
            return None
        if arguments not in self._answers:
            try:
                verdict = self._probe.ask(self._model, arguments)
            except EnvironmentLacks as error:
                self._say(f"{error}: configurations are no longer checked before their engines start")
                self.close()
                return None
            self._answers[arguments] = None if verdict.accepted else verdict.reason
        return self._answers[arguments]

    def close(self) -> None:
        """Ends the child. Idempotent; nothing is refused afterwards."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None


def speaks_for(subject: Subject) -> bool:
    """Whether the installed vLLM's verdict holds here: not for a simulation, and a CPU build's not for a GPU."""
    if subject.machine.simulated:
        return False
    return subject.machine.gpu is None or subject.schema.device != "cpu"
