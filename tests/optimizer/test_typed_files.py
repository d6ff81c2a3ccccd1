"""Files that a user names: whatever stands behind the name, an answer in bounded memory and one sentence."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vopt.optimizer.command_in_use import file_command
from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.target import read_api_key
from vopt.optimizer.load.workload_files import read_workload
from vopt.optimizer.space_of import user_space
from vopt.optimizer.typed_files import SMALL_BYTES, read_typed

READERS: dict[str, Callable[[Path], object]] = {
    "--from": file_command,
    "--space": user_space,
    "--workload": lambda path: read_workload(path, None),
    "--api-key-file": lambda path: read_api_key(path, {}),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["/dev/zero", "/dev/urandom", ".", "/proc/self", "absent", "nul\0l", "x" * 300, "bytes"])
def test_what_is_no_text_file_is_refused_at_once(
    reader: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError) as refused:
        READERS[reader](Path(name))
    assert refused.value.hint


def test_a_file_too_large_for_what_it_is_read_as_is_not_read_whole(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(100 * SMALL_BYTES)
    with pytest.raises(UsageError, match="larger than 16 MiB"):
        read_typed(large, "--from")


def test_a_pipe_may_stand_for_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("vllm serve m\r\n"))
    writer.start()
    assert read_typed(pipe, "--from") == "vllm serve m\n"
    writer.join()
