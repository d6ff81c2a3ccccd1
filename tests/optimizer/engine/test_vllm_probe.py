"""The one child that imports vLLM and answers for it: how often it imports, and what happens when it dies or hangs.

Its vLLM is a small one made here: it has the arguments of a stored release, counts its imports, and does what a question says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from asked import read_arguments
from support.sessions import eventually

from vopt.optimizer import launch as launching
from vopt.optimizer.engine.arguments import VllmProbe
from vopt.optimizer.engine.kin import Identity, alive, identity
from vopt.optimizer.environment import ModelFiles
from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.history import StudyRecord
from vopt.optimizer.launch import Prepared, launch
from vopt.optimizer.options import SearchOptions
from vopt.optimizer.preflight import Preflight
from vopt.optimizer.study import Study, read_study
from vopt.optimizer.subject import Machine, Subject
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.arguments import stored_arguments

IMPORTED = """
import json, os, pathlib, signal, subprocess, sys, time
from dataclasses import dataclass, make_dataclass
from types import SimpleNamespace

HERE = pathlib.Path(__file__).parents[2]
with (HERE / "imports").open("a") as file:
    file.write(f"{os.getpid()}\\n")
if (HERE / "hang").exists():
    helper = subprocess.Popen(["/bin/sleep", "600"])
    (HERE / "helper").write_text(str(helper.pid))
    time.sleep(600)
if (HERE / "broken").exists():
    print("a warning that vLLM logs", file=sys.stderr)
    import a_module_that_is_missing

ROWS = json.loads((HERE / "rows.json").read_text())


class AsyncEngineArgs(make_dataclass("Fields", [(row["name"], object, row.get("default")) for row in ROWS])):
    @staticmethod
    def add_cli_args(parser):
        for row in ROWS:
            kind = {"int": int, "float": float}.get(row["kind"], str)
            parser.add_argument(*row["flags"], dest=row["name"], type=kind, default=row.get("default"))
        return parser

    def create_engine_config(self, context):
        assert context == "of vllm serve"
        print("vLLM logs to standard output")
        match self.seed:
            case 1:
                print("terminate called after throwing an instance", file=sys.stderr)
                os.kill(os.getpid(), signal.SIGKILL)
            case 2:
                os._exit(7)
            case 3:
                time.sleep(600)
            case 4:
                raise ValueError("seed 4 is refused")
            case 5 | 6:  # what the import of a model class does to torch, with and without a context
                cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 2)
                native = SimpleNamespace(_cuda_hasPrimaryContext=lambda device: self.seed == 5 and device == 1)
                sys.modules["torch"] = SimpleNamespace(cuda=cuda, _C=native)
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=self.max_num_seqs or 1024),
            model_config=SimpleNamespace(quantization="sees " + os.environ.get("CUDA_VISIBLE_DEVICES", "all")),
        )
"""


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A directory with a ``vllm`` that counts its imports in the file ``imports``."""
    root = tmp_path / "release"
    for name, text in {
        "engine/arg_utils": IMPORTED,
        "usage/usage_lib": "class UsageContext:\n    OPENAI_API_SERVER = 'of vllm serve'\n",
        "utils/argparse_utils": "import argparse, functools\n"
        "FlexibleArgumentParser = functools.partial(argparse.ArgumentParser, add_help=False)\n",
        "platforms/__init__": "class current_platform:\n    device_type = 'cpu'\n",
    }.items():
        path = root / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    (root / "vllm" / "__init__.py").write_text("__version__ = '0.32.0'\n")
    said = stored_arguments("0.32.0")
    rows = [
        {"name": one.name, "flags": [flag for flag in one.flags if flag.startswith("--")], "kind": str(one.kind)}
        for one in said.arguments.values()
        if not one.front_end
    ]
    (root / "rows.json").write_text(json.dumps([row for row in rows if row["flags"]]))
    return root


@pytest.fixture
def probe(release: Path) -> Iterator[VllmProbe]:
    with VllmProbe(sys.executable, timeout_s=60.0, environment={"PYTHONPATH": str(release)}) as made:
        yield made


def imports(release: Path) -> list[int]:
    """The process of each import so far."""
    counted = release / "imports"
    return [int(line) for line in counted.read_text().splitlines()] if counted.exists() else []


def test_one_import_answers_everything(release: Path, probe: VllmProbe) -> None:
    said = probe.arguments()
    assert (said.version, said.device, "max_num_seqs" in said.engine_names) == ("0.32.0", "cpu", True)
    taken = probe.ask("m", {"max_num_seqs": 64, "env:VLLM_X": "1"})
    assert (taken.accepted, taken.resolved["max_num_seqs"]) == (True, 64)
    refused = probe.ask("m", {"seed": 4})
    assert (refused.accepted, refused.kind, refused.reason) == (False, "ValueError", "seed 4 is refused")
    assert probe.read_back(["--max-num-seqs", "8"]) == ({"max_num_seqs": 8}, "")
    assert probe.read_back(["--no-such-flag"])[0] is None
    assert len(imports(release)) == 1


def test_a_child_that_is_left_with_a_cuda_context_ends_with_its_answer(release: Path, probe: VllmProbe) -> None:
    assert probe.ask("m", {"seed": 6, "max_num_seqs": 8}).accepted
    assert probe.ask("m", {}).accepted
    (first,) = imports(release)
    assert probe.ask("m", {"seed": 5, "max_num_seqs": 8}).resolved["max_num_seqs"] == 8
    eventually(lambda: identity(first) is None, 20.0)
    assert probe.ask("m", {}).accepted
    assert len(imports(release)) == 2


def test_the_child_sees_the_gpus_of_a_trial_alone(release: Path, probe: VllmProbe) -> None:
    first = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"}
    probe.see(first)
    assert probe.ask("m", {}).resolved["quantization"] == "sees 0"
    probe.see(first)
    assert probe.ask("m", {}).resolved["quantization"] == "sees 0"
    assert len(imports(release)) == 1
    probe.see(first | {"CUDA_VISIBLE_DEVICES": "1"})
    assert probe.ask("m", {}).resolved["quantization"] == "sees 1"
    assert len(imports(release)) == 2


def test_arguments_on_disk_need_no_import(release: Path, probe: VllmProbe, tmp_path: Path) -> None:
    first = probe.arguments(tmp_path / "cache")
    assert len(imports(release)) == 1
    with VllmProbe(sys.executable, environment={"PYTHONPATH": str(release)}) as second:
        assert second.arguments(tmp_path / "cache") == first
        assert len(imports(release)) == 1
        assert second.ask("m", {}).accepted
    assert len(imports(release)) == 2
    os.utime(release / "vllm" / "engine" / "arg_utils.py", (1, 2**31))
    read_arguments(sys.executable, cache=tmp_path / "cache", environment={"PYTHONPATH": str(release)})
    assert len(imports(release)) == 3, "an installation of later is asked again"


def test_a_search_and_its_preflight_share_the_child(release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(release))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("vopt.optimizer.subject.find_machine", lambda *_: Machine(None))
    model = tmp_path / "model"
    model.mkdir()
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256}
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 8192, **shape}
    (model / "config.json").write_text(json.dumps(config))
    asked: list[str | None] = []

    def run(prepared: Prepared, study: Study, listener: object, probe: VllmProbe, interruption: object) -> StudyRecord:
        preflight = Preflight(prepared.subject, lambda _: None, probe)
        asked.extend(preflight.refusal(EngineConfig({"seed": seed})) for seed in (0, 4))
        return read_study(options.storage, study.name)

    monkeypatch.setattr(launching, "_search", run)
    storage = f"sqlite:///{tmp_path}/studies.db"
    options = SearchOptions(
        goal=["throughput"], model=str(model), python=Path(sys.executable), storage=storage, set=["load_format=dummy"]
    )
    launch(options, lambda _: None)
    assert asked == [None, "seed 4 is refused"]
    (only,) = imports(release)
    assert identity(only) is None, "the child ends with the search"


@pytest.mark.parametrize(("seed", "how"), [(1, "SIGKILL: terminate called after throwing an instance"), (2, "exit code 7")])
@pytest.mark.fault("the child that answers for vLLM dies over a question")
def test_a_death_over_a_question_is_said_and_the_next_question_has_a_new_child(
    release: Path, probe: VllmProbe, seed: int, how: str
) -> None:
    probe.arguments()
    with pytest.raises(EnvironmentLacks, match="died over a question about a configuration") as lacks:
        probe.ask("m", {"seed": seed})
    assert how in lacks.value.message
    assert sys.executable in lacks.value.hint
    assert probe.ask("m", {"seed": 0}).accepted
    assert len(set(imports(release))) == 2


@pytest.mark.fault("the child that answers for vLLM dies between two questions")
def test_a_death_between_two_questions_goes_unnoticed(release: Path, probe: VllmProbe) -> None:
    probe.arguments()
    (first,) = imports(release)
    os.kill(first, signal.SIGKILL)
    # Not its state in /proc: that of the first thread, which ends before the others and so before the process.
    eventually(lambda: os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT), 30.0)
    assert probe.ask("m", {}).accepted
    assert len(imports(release)) == 2


@pytest.mark.fault("the child that answers for vLLM hangs over a question")
def test_a_hang_over_a_question_ends_at_its_deadline(release: Path) -> None:
    with VllmProbe(sys.executable, timeout_s=30.0, environment={"PYTHONPATH": str(release)}) as probe:
        probe.arguments()
        hung = living(imports(release)[0])
        probe._timeout_s = 0.2
        with pytest.raises(EnvironmentLacks, match=r"no answer about a configuration within 0\.2 s"):
            probe.ask("m", {"seed": 3})
        assert not alive(hung)


@pytest.mark.fault("the child that answers for vLLM hangs in its import")
def test_an_import_that_hangs_is_ended_with_what_it_started(release: Path) -> None:
    (release / "hang").touch()
    with VllmProbe(sys.executable, environment={"PYTHONPATH": str(release)}) as probe:
        probe.wake()
        eventually(lambda: (release / "helper").exists() and (release / "helper").read_text(), 30.0)
        helper = living(int((release / "helper").read_text()))
        probe._timeout_s = 0.2
        with pytest.raises(EnvironmentLacks, match="no answer about its arguments"):
            probe.arguments()
        assert identity(imports(release)[0]) is None
        eventually(lambda: not alive(helper), 30.0)


@pytest.mark.fault("search killed while vLLM is imported to be asked")
def test_a_killed_search_takes_the_child_with_it(release: Path) -> None:
    (release / "hang").touch()
    code = (
        "import sys, time\nfrom vopt.optimizer.engine.arguments import VllmProbe\n"
        f"VllmProbe(sys.executable, environment={{'PYTHONPATH': {str(release)!r}}}).wake()\ntime.sleep(600)"
    )
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    search = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths})
    try:
        eventually(lambda: (release / "helper").exists() and (release / "helper").read_text(), 30.0)
        who = [living(imports(release)[0]), living(int((release / "helper").read_text()))]
    finally:
        search.kill()
        search.wait()
    eventually(lambda: not any(alive(one) for one in who), 30.0)


def test_a_vllm_that_cannot_be_imported_is_no_verdict_on_a_configuration(release: Path, probe: VllmProbe) -> None:
    (release / "broken").touch()
    for ask in (lambda: probe.ask("m", {}), probe.arguments, lambda: probe.read_back(["--seed", "1"])):
        with pytest.raises(
            EnvironmentLacks, match="cannot be imported: ModuleNotFoundError: No module named 'a_module"
        ) as lacks:
            ask()
        assert not isinstance(lacks.value, UsageError)


def test_a_vllm_whose_parser_is_of_another_kind_is_named(release: Path, probe: VllmProbe) -> None:
    (release / "vllm" / "utils" / "argparse_utils.py").unlink()
    with pytest.raises(EnvironmentLacks, match=r"cannot be asked for its arguments: ModuleNotFoundError: .*argparse_utils"):
        probe.arguments()


@pytest.mark.parametrize("seed", [1, 3])
@pytest.mark.fault("the child that answers for vLLM is lost during a search")
def test_a_search_goes_on_without_a_child_that_was_lost(release: Path, probe: VllmProbe, seed: int) -> None:
    model, none = ModelFiles("m", {}, None, None), EngineConfig()
    subject = Subject(model, None, stored_arguments("0.32.0"), Machine(None), sys.executable, none, none)
    said: list[str] = []
    preflight = Preflight(subject, said.append, probe)
    assert preflight.refusal(EngineConfig({"seed": 4})) == "seed 4 is refused"
    probe._timeout_s = 0.2 if seed == 3 else 60.0
    assert preflight.refusal(EngineConfig({"seed": seed})) is None
    assert preflight.refusal(EngineConfig({"seed": 4, "max_num_seqs": 2})) is None
    (line,) = said
    assert "configurations are no longer checked before their engines start" in line
    assert len(imports(release)) == 1


@pytest.mark.parametrize(
    ("made", "words"),
    [(None, "there is no interpreter"), ("#!/bin/sh\necho hello\n", "cannot be asked where its vLLM is"), ("", "does not run")],
)
def test_what_is_no_interpreter_is_named(tmp_path: Path, made: str | None, words: str) -> None:
    path = tmp_path / "python"
    if made is not None:
        path.write_text(made)
        path.chmod(0o755)
    with pytest.raises(EnvironmentLacks, match=words) as lacks:
        read_arguments(str(path))
    assert "--python" in lacks.value.hint


def living(pid: int) -> Identity:
    found = identity(pid)
    assert found is not None, f"{pid} should live"
    return found
