"""The memory arithmetic on the CPU build: whose memory it shares, and what its start logs teach."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import dense_config, hybrid_config

from vopt.optimizer.cpu_memory import memory_bytes
from vopt.optimizer.engine.startup_log import StartLog, read_start_log
from vopt.search_spaces.defaults import GIB, Gpu
from vopt.search_spaces.memory import Calibration, memory_plan
from vopt.search_spaces.model import shape_from_config
from vopt.search_spaces.shape import ModelShape

LOG = Path(__file__).parents[1] / "assets" / "engine_logs" / "cpu_starts.log"
NODE = Gpu("cpu", round(14.34 * GIB))
SHAPES = {
    "dense": shape_from_config({**dense_config(), "dtype": "bfloat16"}, "tiny-qwen3"),
    "hybrid": shape_from_config(hybrid_config(), "tiny-qwen3.5"),
}


def starts() -> list[tuple[str, str, dict[str, Any], StartLog]]:
    """(model, version, arguments, what the log says) of each recorded start."""
    found = []
    for paragraph in LOG.read_text().split("# ")[2:]:
        head, *lines = paragraph.splitlines()
        model, version, arguments = head.split(" ", 2)
        found.append((model, version, json.loads(arguments), read_start_log(lines)))
    return found


STARTS = starts()


def learnt(shape: ModelShape, arguments: dict[str, Any], log: StartLog, version: str) -> Calibration:
    assert log.kv_cache_bytes is not None
    return Calibration().learn(shape, NODE, arguments, log.kv_cache_bytes, version)


@pytest.mark.parametrize(("model", "version", "arguments", "log"), STARTS)
def test_the_bytes_of_a_log_hold_its_tokens(model: str, version: str, arguments: dict[str, Any], log: StartLog) -> None:
    """The arithmetic of blocks is exact: only the log's rounding to 0.01 GiB lies between."""
    assert log.kv_cache_bytes is not None
    plan = memory_plan(SHAPES[model], NODE, {**arguments, "kv_cache_memory_bytes": log.kv_cache_bytes}, version)
    rounding = 0.006 * GIB / log.kv_cache_bytes
    assert plan.logged_tokens == pytest.approx(log.kv_cache_tokens, rel=rounding)


def test_one_start_teaches_another_version_and_another_share() -> None:
    """From 8 % of the memory with 0.28 to 20 % of it with 0.32, a different length and batch: 60 % off before, 2 % after."""
    dense = {version: (arguments, log) for model, version, arguments, log in STARTS if model == "dense"}
    shape = SHAPES["dense"]
    calibration = learnt(shape, *dense["0.28.0"], "0.28.0")
    arguments, log = dense["0.32.0"]
    assert log.kv_cache_bytes is not None
    before = memory_plan(shape, NODE, arguments, "0.32.0")
    after = memory_plan(shape, NODE, arguments, "0.32.0", calibration)
    assert abs(before.kv_bytes - log.kv_cache_bytes) > 0.1 * log.kv_cache_bytes
    assert after.kv_bytes == pytest.approx(log.kv_cache_bytes, rel=0.02)
    assert after.logged_tokens == pytest.approx(log.kv_cache_tokens, rel=0.02)


@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_one_start_teaches_the_next(model: str) -> None:
    (_, old, arguments, first), (_, new, _, second) = [start for start in STARTS if start[0] == model][:2]
    calibration = learnt(SHAPES[model], arguments, first, old)
    plan = memory_plan(SHAPES[model], NODE, arguments, new, calibration)
    assert second.kv_cache_bytes is not None
    assert plan.kv_bytes == pytest.approx(second.kv_cache_bytes, rel=0.05)
    guess = memory_plan(SHAPES[model], NODE, arguments, new)
    assert abs(guess.kv_bytes - second.kv_cache_bytes) > 5 * abs(plan.kv_bytes - second.kv_cache_bytes)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "Node 1 MemTotal:       1000 kB\nNode 1 MemFree:        500 kB\n"
NODE_ONE = {"sys/devices/system/cpu/cpu3/node1/present": "", "sys/devices/system/node/node1/meminfo": MEMINFO}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (NODE_ONE, 1_024_000),
        (NODE_ONE | {"sys/fs/cgroup/memory.max": "max\n"}, 1_024_000),
        (NODE_ONE | {"sys/fs/cgroup/memory.max": "512000\n"}, 512_000),
        (NODE_ONE | {"sys/fs/cgroup/memory.max": "99999999\n"}, 1_024_000),
        (NODE_ONE | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 1_024_000),
        (NODE_ONE | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "4096\n"}, 4096),
        ({"sys/devices/system/node/node0/meminfo": MEMINFO}, 1_024_000),
    ],
)
def test_the_node_and_the_control_group_bound_the_memory(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert memory_bytes(tree(tmp_path, files), core=3) == expected


def test_without_nodes_it_is_the_hosts(tmp_path: Path) -> None:
    total = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    assert total is not None
    assert memory_bytes(tmp_path, core=0) == pytest.approx(int(total[1]) * 1024, rel=0.01)
