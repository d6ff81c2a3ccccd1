"""Output on its way to the log, and messages on theirs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vopt.optimizer.engine.drain import Drain, redact, secrets_in
from vopt.optimizer.engine.wire import Channel, ChannelClosed, plan_from_json, plan_to_json, tick_from_json, tick_to_json
from vopt.optimizer.load.plan import Arrivals, LoadPlan, Tick


@given(before=st.text(), secret=st.text("abcdefXYZ0123456789-_", min_size=8, max_size=40), after=st.text())
def test_a_known_secret_never_survives(before: str, secret: str, after: str) -> None:
    assert secret not in redact(before + secret + after, (secret,)).replace("[struck out]", "")


@pytest.mark.parametrize(
    "line",
    [
        "api_key=None, api-key: null",
        "generation throughput: 1234.5 tokens/s, max_num_batched_tokens=8192",
        "tokenizer='Qwen/Qwen3-0.6B', skip_tokenizer_init=False, hf_token=None",
        "Loading weights took 2.31 seconds",
    ],
)
def test_ordinary_lines_stay_as_they_are(line: str) -> None:
    assert redact(line) == line


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("non-default args: {'api_key': ['sekret-value-1'], 'model': 'x'}", "sekret-value-1"),
        ("using hf_AbCdEfGhIjKlMnOpQrStUv to log in", "hf_AbCdEfGhIjKlMnOpQrStUv"),
        ("hf_token='abcdefghij'", "abcdefghij"),
        ("Authorization: Bearer abc.def.ghi-123", "abc.def.ghi-123"),
    ],
)
def test_what_looks_like_a_secret_is_struck_out(line: str, secret: str) -> None:
    assert secret not in redact(line)


def test_secrets_are_known_by_the_names_of_their_variables() -> None:
    environment = {
        "HF_TOKEN": "0123456789",
        "AWS_SECRET_ACCESS_KEY": "longer-0123456789",
        "PATH": "/usr/bin:/bin",
        "MY_TOKEN": "x",
    }
    assert secrets_in(environment) == ("longer-0123456789", "0123456789")


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "output", os.O_CREAT | os.O_APPEND | os.O_RDWR)
    yield fd
    os.close(fd)


@settings(deadline=None, max_examples=25)
@given(chunks=st.lists(st.binary(max_size=300), max_size=12))
def test_everything_arrives_in_order_however_it_is_cut(tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("drain")
    fd = os.open(folder / "output", os.O_CREAT | os.O_APPEND | os.O_RDWR)
    drain = Drain(fd, folder / "log", cap_bytes=1 << 20)
    for chunk in chunks:
        os.write(fd, chunk)
        drain.step()
    drain.close()
    os.close(fd)
    whole = b"".join(chunks)
    expected = redact(whole.decode(errors="replace")).encode()
    if b"\n" not in whole.strip(b"\n") and not any(byte >= 0x80 for byte in whole):
        assert (folder / "log").read_bytes() == (expected if whole.endswith(b"\n") or not whole else expected + b"\n")
    assert (folder / "log").read_bytes().count(b"\n") >= whole.count(b"\n")


def test_the_log_keeps_its_beginning_and_its_end_within_the_cap(tmp_path: Path, raw: int) -> None:
    drain = Drain(raw, tmp_path / "log", cap_bytes=10_000)
    for number in range(5_000):
        os.write(raw, f"line {number}\n".encode())
        if number % 50 == 0:
            drain.step()
    drain.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "line 0"
    assert lines[-1] == "line 4999"
    assert (tmp_path / "log").stat().st_size <= 12_000
    assert any("left out" in line for line in lines)
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def pair() -> tuple[Channel, Channel]:
    first_read, first_write = os.pipe()
    second_read, second_write = os.pipe()
    return Channel(first_read, second_write), Channel(second_read, first_write)


def test_messages_larger_than_a_pipe_arrive_whole_and_in_order() -> None:
    here, there = pair()
    messages = [{"number": number, "text": "ü" * 100_000} for number in range(3)]
    sender = threading.Thread(target=lambda: [here.send(message) for message in messages])
    sender.start()
    assert [there.receive(10.0) for _ in messages] == messages
    sender.join()
    assert there.receive(0.01) is None
    here.close()
    with pytest.raises(ChannelClosed):
        there.receive(1.0)
    with pytest.raises(ChannelClosed):
        there.send({})
    there.close()
    with pytest.raises(ChannelClosed):
        there.receive(0)


def test_plans_and_ticks_survive_the_journey() -> None:
    plan = LoadPlan(arrivals=Arrivals.POISSON, window_s=12.5, rate=3.0, max_requests=7)
    assert plan_from_json(plan_to_json(plan)) == plan
    tick = Tick(at_s=1.0, window_open_s=None, sent=3, succeeded=2, failed=0, running=1, window_tokens=0.0, window_s=0.0)
    assert tick_from_json(tick_to_json(tick)) == tick
