"""A served trial from start to stop, with a stand-in for ``vllm serve``; the real one is tested in tests/integration."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.children import children
from support.fault_server import serving, status
from support.sessions import plan, source, spec

from vopt.objectives.records import LoadStatus
from vopt.optimizer.engine import server
from vopt.optimizer.engine.base import Session
from vopt.optimizer.engine.ports import free_port, listens
from vopt.optimizer.engine.server import ServerSession, UrlSession, without_place
from vopt.optimizer.load.target import parse_target
from vopt.optimizer.trial import Blame, Deadlines, EngineFailure, FailureKind, Phase

STUB = Path(__file__).parents[2] / "support" / "stub_vllm"
Serve = Callable[..., ServerSession]


def no_phase(phase: Phase, words: str) -> None: ...


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setattr(server, "READY_POLL_S", 0.02)
    sessions: list[ServerSession] = []

    def make(manner: str = "good", start_s: float = 20.0, *words: str) -> ServerSession:
        trial = replace(
            spec(tmp_path / str(len(sessions)), "m", sys.executable, tmp_path / "cache"),
            environment={"PYTHONPATH": str(STUB), "STUB_SERVE": manner},
            deadlines=Deadlines(start_s=start_s, load_s=30.0, stop_s=5.0),
        )
        sessions.append(ServerSession(trial, ("vllm", "serve", "m", *words), clients=1))
        return sessions[-1]

    before = children()
    yield make
    assert [session.close() for session in sessions] == [()] * len(sessions)
    assert children() <= before


def test_start_load_stop(serve: Serve, tmp_path: Path) -> None:
    session: Session = serve("good", 20.0, "--host", "0.0.0.0", "--port=8000", "--max-num-seqs", "8")
    phases: list[Phase] = []
    started = session.start(lambda phase, words: phases.append(phase))
    assert phases == [Phase.START]
    assert started.start_parts_s["ready"] > 0
    load = session.load(source(20, 4), plan(window_s=1.0, concurrency=4), lambda tick: True)
    assert load.status in (LoadStatus.COMPLETE, LoadStatus.UNSTEADY)
    assert any(record.succeeded for record in load.records)
    assert session.close() == ()
    said = (tmp_path / "0" / "engine.log").read_text()
    assert "serve m --max-num-seqs 8 --host 127.0.0.1 --port " in said
    assert "0.0.0.0" not in said
    assert "8000" not in said


@pytest.mark.fault("served: ends before it is ready")
def test_a_server_that_ends_before_it_is_ready(serve: Serve) -> None:
    with pytest.raises(EngineFailure) as failure:
        serve("exit").start(no_phase)
    failed = failure.value.failed
    assert (failed.phase, failed.kind) == (Phase.START, FailureKind.INVALID_CONFIG)
    assert "max_num_batched_tokens" in failed.detail


@pytest.mark.fault("served: never listens")
def test_a_server_that_never_listens_is_a_hang(serve: Serve) -> None:
    with pytest.raises(EngineFailure) as failure:
        serve("silent", 0.8).start(no_phase)
    assert failure.value.failed.kind is FailureKind.HANG


@pytest.mark.fault("served: offers another model")
def test_a_server_that_offers_another_model(serve: Serve) -> None:
    with pytest.raises(EngineFailure, match="the server offers other, not m"):
        serve("other").start(no_phase)


@pytest.mark.fault("served: answers errors only")
def test_a_server_that_answers_errors_only_is_broken(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BROKEN_AFTER_S", 0.2)
    with pytest.raises(EngineFailure) as failure:
        serve("broken").start(no_phase)
    failed = failure.value.failed
    assert (failed.phase, failed.kind, failed.kind.blame) == (Phase.START, FailureKind.DRIVER, Blame.INFRASTRUCTURE)
    assert "/v1/models answers HTTP 500" in failed.detail
    assert "Internal Server Error" in failed.detail
    assert "no attribute 'Router'" in failed.detail
    assert any("Router" in line for line in failed.log_tail)


@pytest.mark.fault("served: dies under load")
def test_a_server_that_dies_under_load(serve: Serve) -> None:
    session = serve("dies")
    session.start(no_phase)
    with pytest.raises(EngineFailure) as failure:
        session.load(source(20, 4), plan(window_s=10.0, concurrency=4), lambda tick: True)
    failed = failure.value.failed
    assert (failed.phase, failed.kind) == (Phase.LOAD, FailureKind.ENGINE_DIED)
    assert failed.load is not None
    assert sum(record.succeeded for record in failed.load.records) <= 30


@pytest.mark.fault("port taken by a foreign server")
async def test_a_foreign_server_on_the_port_never_gets_a_request(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:

    page = status("200 OK", '{"data": [{"id": "m"}]}')
    async with serving([page]) as foreign:
        monkeypatch.setattr(server, "free_port", lambda: foreign.port)
        session = serve("silent", 1.0)
        with pytest.raises(EngineFailure) as failure:
            await asyncio.to_thread(session.start, no_phase)
        assert failure.value.failed.kind is FailureKind.PORT, "whoever has our port, the configuration is not to blame"
        assert foreign.requests == []
        assert foreign.connections == 0


def test_who_listens() -> None:

    port = free_port()
    assert not listens(os.getpid(), port)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert listens(os.getpid(), port)
        with subprocess.Popen(["sleep", "30"]) as bystander:
            assert not listens(bystander.pid, port)
            bystander.kill()


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["m", "--host", "0.0.0.0", "--port", "1", "--dtype", "auto"], ["m", "--dtype", "auto"]),
        (["m", "--host=0.0.0.0", "--ssl-keyfile", "k", "--seed=1"], ["m", "--seed=1"]),
        (["m", "--uds", "/s"], ["m"]),
    ],
)
def test_where_a_command_listens_is_ours_to_say(words: list[str], kept: list[str]) -> None:
    assert list(without_place(words)) == kept


async def test_a_running_server_that_does_not_fit() -> None:

    page = status("200 OK", '{"data": [{"id": "m"}]}')
    async with serving([page]) as running:
        fits, other = (UrlSession(parse_target(running.url, model)) for model in ("m", "another"))
        assert (await asyncio.to_thread(fits.start, no_phase)).vllm_version == "unknown"
        with pytest.raises(EngineFailure, match="serves m, not another"):
            await asyncio.to_thread(other.start, no_phase)
    with pytest.raises(EngineFailure, match="/v1/models"):
        await asyncio.to_thread(UrlSession(parse_target(f"http://127.0.0.1:{free_port()}", "m")).start, no_phase)
    assert fits.close() == ()
