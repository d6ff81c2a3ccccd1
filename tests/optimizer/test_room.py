"""Room for a search: refused before any start, with the way on."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.room import available_memory_bytes, check_disk, check_offload, need, oom_kills


@pytest.mark.fault("disk too small")
def test_what_lands_on_one_file_system_is_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50 * 2**30))
    wanted = need(weights_bytes=40 * 2**30, starts=16, compile_keys=8)
    check_disk(wanted, hub=tmp_path, cache=tmp_path / "not" / "yet", results=tmp_path)
    more = need(weights_bytes=49 * 2**30, starts=16, compile_keys=8)
    with pytest.raises(EnvironmentLacks, match=r"50\.0 GiB are free") as caught:
        check_disk(more, hub=tmp_path, cache=tmp_path, results=tmp_path)
    assert "vopt clean" in caught.value.hint


@pytest.mark.parametrize("name", ["kv_offloading_size", "cpu_offload_gb"])
@pytest.mark.fault("offload beyond half of the memory")
def test_offload_beyond_half_of_the_free_memory_is_refused(name: str) -> None:
    check_offload({name: 60}, 128 * 2**30)
    check_offload({name: None}, 128 * 2**30)
    check_offload({name: 1000}, None)
    with pytest.raises(UsageError, match="more than half") as caught:
        check_offload({name: 70}, 128 * 2**30)
    assert f"--set {name}=64" in caught.value.hint


def test_this_host_knows_its_memory() -> None:
    assert (available_memory_bytes() or 0) > 2**20


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/search.slice/a:b", "search.slice/a:b/memory.events"),
        ("9:cpu:/x\n4:hugetlb,memory:/box\n0::/", "memory/box/memory.oom_control"),
    ],
)
def test_kills_for_lack_of_memory_are_counted_in_our_group_and_on_the_host(tmp_path: Path, groups: str, file: str) -> None:
    proc, mounted = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups + "\n")
    assert oom_kills(proc, mounted) == 0
    (mounted / file).parent.mkdir(parents=True)
    (mounted / file).write_text("oom 9\noom_kill 2\nunder_oom 0\noom_group_kill 5\n")
    (proc / "vmstat").write_text("nr_free_pages 12\noom_kill 3\n")
    assert oom_kills(proc, mounted) == 5


def test_this_host_counts_its_kills() -> None:
    assert oom_kills() >= 0
