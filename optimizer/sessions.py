"""Which session a trial gets: in-process vLLM, the served command, a running server, or a simulation."""

from __future__ import annotations

import atexit

from vopt.optimizer.engine.base import Session
from vopt.optimizer.errors import UsageError
from vopt.optimizer.evaluate import OpenSession
from vopt.optimizer.subject import Subject
from vopt.optimizer.trial import TrialSpec

KINDS = ("vllm", "server", "simulated")


def opener(kind: str, subject: Subject) -> OpenSession:
    """The factory for one study. ``kind`` is one of ``KINDS``, or the URL of a running server (never started nor stopped).

    Raises:
        UsageError: another kind, or ``simulated`` without a device to simulate.
    """
    if kind.startswith(("http://", "https://")):
        raise UsageError(
            "a search starts engines itself, so --engine URL fits vopt bench only", hint=f"vopt bench --url {kind}"
        )
    if kind not in KINDS:
        raise UsageError(f"--engine {kind}: there are {', '.join(KINDS)}, or a URL with vopt bench", hint="--engine vllm")
    if subject.machine.simulated or kind == "simulated":
        return _simulated(subject)

    from vopt.optimizer.engine.spare import Spares

    spares = Spares()
    atexit.register(spares.close)  # earlier, a served start ends it

    def open_session(spec: TrialSpec, served: bool) -> Session:
        if served or kind == "server":
            spares.close()
            from vopt.optimizer.engine.server import ServerSession

            return ServerSession(spec, argv=subject.argv(spec.arguments), clients=spec.client_processes)
        from vopt.optimizer.engine.process import ProcessSession

        return ProcessSession(spec, spares)

    return open_session


def _simulated(subject: Subject) -> OpenSession:
    from vopt.optimizer.engine.simulated import SimulatedSession
    from vopt.optimizer.engine.simulated_startup import SimulatedCaches

    shape, hardware = subject.shape, subject.machine.hardware
    if shape is None or hardware is None:
        raise UsageError("--engine simulated needs the GPU to simulate", hint="--simulate h200")

    caches = SimulatedCaches()

    def open_session(spec: TrialSpec, served: bool) -> Session:
        return SimulatedSession(
            spec, shape, hardware, version=subject.schema.version, caches=caches, gpus=subject.machine.count
        )

    return open_session
