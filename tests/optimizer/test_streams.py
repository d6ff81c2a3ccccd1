"""Standard streams that are full, closed, without a reader, or in a poor encoding: no traceback, and no search ends of it."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from vopt.optimizer import cli, streams
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.faults import refused, unforeseen


class Refusing(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))

    flush = write  # type: ignore[assignment]  # refuses whatever it is asked


def test_a_full_standard_output_is_an_error_once() -> None:
    output = streams.Output(Refusing(errno.ENOSPC))
    with pytest.raises(EnvironmentLacks, match="No space left"):
        output.write("answer")
    output.write("more")
    output.flush()


def test_a_reader_that_went_away_ends_the_command_as_it_ends_any_other() -> None:
    with pytest.raises(streams.ReaderGone) as gone:
        streams.Output(Refusing(errno.EPIPE)).write("answer")
    assert gone.value.exit_code == 141


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_progress_that_nobody_takes_ends_nothing(number: int) -> None:
    progress = streams.Progress(Refusing(number))
    progress.write("trial 1")
    progress.flush()


@given(st.text(), st.sampled_from(["ascii", "latin-1", "cp1252", "utf-8", "koi8-r"]))
def test_every_text_can_be_said_in_every_encoding(text: str, encoding: str) -> None:
    streams.codecs.register_error(streams.SPOKEN, streams.spoken)
    said = text.encode(encoding, errors=streams.SPOKEN)
    assert not text or said


def test_a_path_that_is_not_unicode_keeps_its_bytes() -> None:
    streams.codecs.register_error(streams.SPOKEN, streams.spoken)
    name = os.fsdecode(b"/models/\xff\xfe")
    assert name.encode("utf-8", errors=streams.SPOKEN) == b"/models/\xff\xfe"


def vopt(*words: str, **settings: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "vopt.optimizer", *words], timeout=60, check=False, **settings)  # type: ignore[call-overload,no-any-return]  # settings of subprocess.run


def test_help_into_a_full_disk_a_closed_pipe_and_ascii(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = vopt("--help", stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, b"Traceback" in done.stderr, b"No space left" in done.stderr) == (3, False, True)
    reading, writing = os.pipe()
    os.close(reading)
    done = vopt("--help", stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
    done = vopt("--help", capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")


def test_closed_streams_are_no_files_of_ours(tmp_path: Path) -> None:
    """Else the database, opened first, would be what descriptor 1 or 2 points at."""
    words = f"exec {sys.executable} -m vopt.optimizer show --storage sqlite:///{tmp_path}/absent.db"
    done = subprocess.run(["sh", "-c", f"{words} <&- >&- 2>&-"], timeout=60, check=False)
    assert done.returncode == 3
    done = subprocess.run(["sh", "-c", f"{words} 2>&-"], timeout=60, check=False, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (3, b"")


def test_what_nobody_expected_is_said_in_one_paragraph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("goal")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("vopt.optimizer.clean.clean", broken)
    done = CliRunner().invoke(cli.app, ["clean"])
    assert (done.exit_code, done.stdout) == (70, "")
    assert "KeyError: 'goal'" in done.stderr
    assert "Traceback" not in done.stderr
    kept = next(tmp_path.glob("vopt-fault-*.txt"))
    assert "Traceback" in kept.read_text()
    assert str(kept) in done.stderr
    assert kept.stat().st_mode & 0o077 == 0


def test_a_fault_names_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    fault = unforeseen(ValueError("hf_abcdefghijklmnop is odd"))
    assert "hf_abcdefghijklmnop" not in f"{fault.message} {fault.hint}"
    assert "hf_abcdefghijklmnop" not in Path(fault.hint.split()[-1]).read_text()
    Path(fault.hint.split()[-1]).unlink()


def test_a_refused_file_is_named() -> None:
    said = refused(PermissionError(errno.EACCES, "Permission denied", "/etc/x"))
    assert (said.message, said.exit_code) == ("/etc/x: Permission denied", 3)


def test_a_device_keeps_its_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, ``-o /dev/null`` must not take the device from everybody."""
    changed: list[Path] = []
    monkeypatch.setattr(Path, "chmod", lambda self, mode: changed.append(self))
    streams.write_text("#!/bin/sh\n", Path("/dev/null"))
    assert changed == []
