"""Weights that are read ahead: which files, until when, and that a trial says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vopt.optimizer.engine.readahead import BLOCK_BYTES, Readahead, missing, weight_files


def weights(directory: Path, *names: str, size: int = 3 * BLOCK_BYTES + 5) -> list[Path]:
    """Files on disk of which, where the file system allows it, nothing is in the page cache."""
    paths = [directory / name for name in names]
    for path in paths:
        with path.open("wb") as file:
            file.write(os.urandom(size))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return paths


def absent(path: Path) -> int:
    with path.open("rb") as file:
        return len(list(missing(file.fileno())))


def test_the_files_of_a_model_are_those_that_vllm_reads(tmp_path: Path) -> None:
    one, two = weights(tmp_path, "model-1.safetensors", "model-2.safetensors", size=10)
    weights(tmp_path, "consolidated.safetensors", "original.pth", size=10)
    assert weight_files(str(tmp_path), {}) == (one, two)
    assert weight_files(str(tmp_path), {"load_format": "safetensors"}) == (one, two)
    assert weight_files(str(tmp_path), {"load_format": "dummy"}) == ()
    assert weight_files(str(tmp_path), {"load_format": "runai_streamer"}) == (), "it reads past the page cache"
    assert weight_files("Qwen/Qwen3-8B", {}) == ()


def test_what_is_missing_is_read_once(tmp_path: Path) -> None:
    paths = weights(tmp_path, "a.safetensors", "b.safetensors")
    gone = [absent(path) for path in paths]
    weights(tmp_path, "a.safetensors", "b.safetensors")
    ahead = Readahead(paths).wait()
    assert ahead.total_bytes == 2 * (3 * BLOCK_BYTES + 5)
    assert (ahead.read_bytes > 0) == any(gone)
    assert [absent(path) for path in paths] == [0, 0]
    assert Readahead(paths).wait().read_bytes == 0


def test_it_stops_when_told_and_spares_the_memory(tmp_path: Path) -> None:
    paths = weights(tmp_path, *(f"{number}.safetensors" for number in range(8)))
    reading = Readahead(paths)
    done = reading.settle().read_bytes
    assert reading.settle().read_bytes == done
    assert Readahead(paths, available_bytes=BLOCK_BYTES).wait().total_bytes == 0


@pytest.mark.parametrize("broken", ["directory", "absent", "forbidden"])
def test_a_file_that_cannot_be_read_is_the_engines_to_complain_about(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "m.safetensors"
    if broken == "directory":
        path.mkdir()
    elif broken == "forbidden":
        weights(tmp_path, path.name)
        path.chmod(0)
    (good,) = weights(tmp_path, "z.safetensors")
    Readahead((path, good)).wait()
    assert absent(good) == 0
