"""What is read from a started engine: its log, its resolved configuration, its caches."""

from __future__ import annotations

import enum
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from vopt.optimizer import caches
from vopt.optimizer.engine.resolved import flatten
from vopt.optimizer.engine.startup_log import read_start_log
from vopt.optimizer.trial import StartClass

LOG = """
(EngineCore pid=7) INFO 11-30 [default_loader.py:391] Loading weights took 2.31 seconds
(EngineCore pid=7) INFO 11-30 [model_runner.py:429] Model loading took 17.66 GiB memory and 3.700000 seconds
(EngineCore pid=7) INFO 11-30 [monitor.py:48] torch.compile took 32.80 s in total
(Worker_TP0 pid=8) INFO 11-30 [gpu_worker.py:773] Available KV cache memory: 101.50 GiB
(Worker_TP1 pid=9) INFO 11-30 [gpu_worker.py:773] Available KV cache memory: 100.25 GiB
(EngineCore pid=7) INFO 11-30 [kv_cache_utils.py:1147] GPU KV cache size: 816,640 tokens
(EngineCore pid=7) INFO 11-30 [model_runner.py:1164] Graph capturing finished in 6 secs, took 1.20 GiB
(EngineCore pid=7) INFO [core.py:396] init engine (profile, create kv cache, warmup model) took 44.90 s (compilation: 32.8 s)
(EngineCore pid=7) WARNING 11-30 [vllm.py:1] Something to know.
"""


def test_a_start_log_tells_parts_and_sizes() -> None:
    log = read_start_log(LOG.splitlines())
    assert log.parts_s == {"weights": 2.31, "model_load": 3.7, "compile": 32.8, "capture": 6.0, "engine_init": 44.9}
    assert log.kv_cache_tokens == 816_640
    assert log.kv_cache_bytes == round(100.25 * 2**30), "the smallest of the workers bounds the engine"
    assert log.messages == ("Something to know.",)


@pytest.mark.parametrize(
    "line",
    [
        "(Worker pid=9) INFO 11-30 [cpu_worker.py:260] Auto set (1.16/23.47) GiB for KV cache on node 0, with 1.9",
        "(Worker pid=9) INFO 11-30 [cpu_worker.py:260] Explicitly set (1.16/23.47) GiB for KV cache on node 0.",
    ],
)
def test_the_cpus_cache_size_is_read_as_well(line: str) -> None:
    assert read_start_log([line]).kv_cache_bytes == round(1.16 * 2**30)


def test_an_empty_log_tells_nothing_rather_than_zero() -> None:
    log = read_start_log([])
    assert (log.parts_s, log.kv_cache_tokens, log.kv_cache_bytes) == ({}, None, None)


class Level(enum.IntEnum):
    O2 = 2


def test_a_resolved_configuration_is_flat_json_without_secrets() -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=1024, policy="fcfs"),
        cache_config=SimpleNamespace(block_size=16, cache_dtype="auto", num_gpu_blocks=10, thing=object()),
        model_config=SimpleNamespace(hf_token="hf_secret", dtype=SimpleNamespace(__str__=None), max_model_len=4096),
        compilation_config=SimpleNamespace(mode=Level.O2, cudagraph_capture_sizes=[1, 2, 4]),
        optimization_level=Level.O2,
        performance_mode="balanced",
    )
    found = flatten(
        config, ["max_num_seqs", "scheduling_policy", "kv_cache_dtype", "block_size", "thing", "hf_token", "absent"]
    )
    assert found == {
        "max_num_seqs": 1024,
        "scheduling_policy": "fcfs",
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "num_gpu_blocks": 10,
        "compilation_mode": "O2",
        "cudagraph_capture_sizes": [1, 2, 4],
        "max_model_len": 4096,
        "performance_mode": "balanced",
        "optimization_level": "O2",
    }


def key(cache: Path, name: str, kind: str = "torch_compile_cache") -> None:
    (cache / "vllm" / kind / name).mkdir(parents=True)


def test_the_start_class_is_what_a_start_added_to_the_caches(tmp_path: Path) -> None:
    empty = caches.cache_state(tmp_path)
    key(tmp_path, "a" * 10)
    key(tmp_path, "model", "modelinfos")
    first = caches.cache_state(tmp_path)
    assert caches.start_class(empty, first) is StartClass.FIRST
    assert caches.start_class(first, caches.cache_state(tmp_path)) is StartClass.KNOWN_KEY
    key(tmp_path, "b" * 10, "torch_compile_cache/torch_aot_compile")
    assert caches.start_class(first, caches.cache_state(tmp_path)) is StartClass.NEW_KEY


def test_what_asking_learned_of_a_model_spares_its_first_start_the_inspection_and_no_name(tmp_path: Path) -> None:
    asked = tmp_path / "asked" / "modelinfos"
    asked.mkdir(parents=True)
    (asked / "new.json").write_text("learned by asking")
    (asked / "both.json").write_text("learned by asking")
    caches.lend_inspections(tmp_path / "nothing here")
    (tmp_path / "vllm" / "modelinfos").mkdir(parents=True)
    (tmp_path / "vllm" / "modelinfos" / "both.json").write_text("an engine's own")

    before = caches.cache_state(tmp_path)
    caches.lend_inspections(tmp_path)
    key(tmp_path, "a" * 10)
    assert caches.start_class(before, caches.cache_state(tmp_path)) is StartClass.FIRST, "it tunes kernels all the same"
    assert {path.name: path.read_text() for path in (tmp_path / "vllm" / "modelinfos").iterdir()} == {
        "new.json": "learned by asking",
        "both.json": "an engine's own",
    }

    again = caches.cache_state(tmp_path)
    caches.lend_inspections(tmp_path)
    assert caches.start_class(again, caches.cache_state(tmp_path)) is StartClass.KNOWN_KEY


def test_a_cache_that_cannot_be_written_lends_nothing_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "asked" / "modelinfos").mkdir(parents=True)
    (tmp_path / "asked" / "modelinfos" / "new.json").write_text("learned by asking")
    (tmp_path / "vllm").write_text("a file where a folder belongs")
    caches.lend_inspections(tmp_path)
    assert (tmp_path / "vllm").is_file()


def test_a_full_disk_leaves_no_half_of_what_is_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asked" / "modelinfos").mkdir(parents=True)
    (tmp_path / "asked" / "modelinfos" / "new.json").write_text("learned by asking")

    def half(source: Path, target: Path) -> None:
        target.write_text(source.read_text()[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caches.shutil, "copyfile", half)
    caches.lend_inspections(tmp_path)
    assert list((tmp_path / "vllm" / "modelinfos").iterdir()) == []


def test_engines_share_a_cache_only_with_their_like(tmp_path: Path) -> None:
    names = {
        caches.engine_cache(tmp_path, gpu, version)
        for gpu in ("NVIDIA H200", "NVIDIA H100", "cpu")
        for version in ("0.32.0", "0.33.0")
    }
    assert len(names) == 6
    assert caches.engine_cache(tmp_path, "NVIDIA H200", "0.32.0") == tmp_path / "engines" / "nvidia-h200-vllm-0.32.0"


@pytest.mark.parametrize(("cpu_build", "offline"), [(True, True), (False, False)])
def test_nothing_that_the_environment_sets_is_temporary_or_public(tmp_path: Path, cpu_build: bool, offline: bool) -> None:
    environment = caches.engine_environment(tmp_path, cpu_build=cpu_build, offline=offline, start_s=900)
    assert environment["VLLM_CACHE_ROOT"].startswith(str(tmp_path))
    assert environment["TRITON_CACHE_DIR"].startswith(str(tmp_path))
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert int(environment["VLLM_ENGINE_READY_TIMEOUT_S"]) > 900
    assert ("VLLM_USE_AOT_COMPILE" in environment) == cpu_build
    assert ("HF_HUB_OFFLINE" in environment) == offline


def test_a_deadline_that_changes_leaves_the_environment_as_it_is(tmp_path: Path) -> None:
    """A process that imported vLLM ahead, under the deadline of the trial before, has to be of use for the next one."""
    first, later = (caches.engine_environment(tmp_path, cpu_build=False, offline=True, start_s=s) for s in (1200.0, 300.0))
    assert first == later
