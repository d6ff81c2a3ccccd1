"""An exported command carries the variables that its engines had and that change what they do; no place of the machine that
searched, no value that was in force nowhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sample_study
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vopt.optimizer.bench_run import spec_of
from vopt.optimizer.caches import KEPT_OUT, MISLEADING, engine_environment
from vopt.optimizer.cli import app
from vopt.optimizer.environment import first_difference
from vopt.optimizer.history import StudyRecord
from vopt.optimizer.load.plan import Arrivals
from vopt.optimizer.measurement import Asked
from vopt.optimizer.options import BenchOptions
from vopt.optimizer.report.deploy import ExportFormat, export
from vopt.optimizer.report.notes import study_note
from vopt.optimizer.report.page import page
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.script import read_script
from vopt.optimizer.study import read_study
from vopt.optimizer.subject import find_subject
from vopt.optimizer.variables import OURS, PLACES, computing, handed_on

SET_FOR_EVERY_START = frozenset({*OURS, *MISLEADING, *KEPT_OUT, *engine_environment(Path(), cpu_build=False, offline=True)})
PLACED = (
    "VLLM_CACHE_ROOT",
    "VLLM_HOST_IP",
    "VLLM_LOGGING_LEVEL",
    "VLLM_CONFIG_ROOT",
    "VLLM_RPC_BASE_PATH",
    "VLLM_USAGE_SOURCE",
)
COMPUTING = ("VLLM_USE_DEEP_GEMM", "VLLM_USE_AOT_COMPILE", "VLLM_MARLIN_USE_ATOMIC_ADD")


def searched(variables: dict[str, str], of_command: list[str] | None = None, **setup: Any) -> StudyRecord:
    made = sample_study.study(**setup)
    environment = {**made.setup["environment"], "variables": variables}
    del environment["variables_of_command"]
    if of_command is not None:
        environment["variables_of_command"] = of_command
    return replace(made, setup={**made.setup, "environment": environment})


def in_the_export(text: str, form: ExportFormat) -> dict[str, str]:
    """The variables that an export sets, as a tool would read it."""
    match form:
        case ExportFormat.SHELL:
            rows = (line.removeprefix("export ") for line in text.splitlines() if line.startswith("export "))
        case ExportFormat.YAML:
            rows = iter(
                next((line for line in text.splitlines() if "in the environment: " in line), "").split(": ")[-1].split()
            )
        case ExportFormat.JSON:
            return dict(json.loads(text)["variables"])
        case ExportFormat.DOCKER:
            rows = iter(yaml.safe_load(text)["services"]["vllm"]["environment"])
        case ExportFormat.K8S:
            container = next(yaml.safe_load_all(text))["spec"]["template"]["spec"]["containers"][0]
            rows = (f"{row['name']}={row['value']}" for row in container["env"] if "value" in row)
    return dict(row.split("=", 1) for row in rows if "=" in row)


@pytest.mark.parametrize("form", ExportFormat)
@pytest.mark.parametrize("of_command", [None, []])
def test_of_the_shell_that_searched_only_what_computes_is_exported(form: ExportFormat, of_command: list[str] | None) -> None:
    shell = {name: "of-this-machine" for name in (*SET_FOR_EVERY_START, *PLACED) if name.startswith("VLLM_")}
    text = export(searched({**shell, **dict.fromkeys(COMPUTING, "1")}, of_command), form)
    assert {name: value for name, value in in_the_export(text, form).items() if value == "1"} == dict.fromkeys(COMPUTING, "1")
    if form is not ExportFormat.JSON:  # a document also says what the shell had
        assert "of-this-machine" not in text
        assert not [name for name in (*SET_FOR_EVERY_START, *PLACED) if name in text and name not in in_containers(form)]


def in_containers(form: ExportFormat) -> set[str]:
    """What a container or a comment of every export names by itself."""
    return {"VLLM_API_KEY", *(("VLLM_CACHE_ROOT", "HF_TOKEN") if form in (ExportFormat.DOCKER, ExportFormat.K8S) else ())}


@pytest.mark.parametrize("form", [ExportFormat.SHELL, ExportFormat.YAML, ExportFormat.JSON])
def test_the_places_that_the_command_in_use_names_are_the_users(form: ExportFormat) -> None:
    """They won over those of a search in every engine start, and the model lies there."""
    own = {"HF_HOME": "/data/hub", "VLLM_CACHE_ROOT": "/data/vllm", "VLLM_PLAIN": "1"}
    text = export(searched({**own, "VLLM_HOST_IP": "10.0.0.7"}, sorted(own)), form)
    assert in_the_export(text, form) == own


@pytest.mark.parametrize("form", [ExportFormat.DOCKER, ExportFormat.K8S])
def test_a_container_has_places_of_its_own(form: ExportFormat) -> None:
    own = {"HF_HUB_CACHE": "/data/hub", "VLLM_CACHE_ROOT": "/data/vllm", "LMCACHE_CHUNK": "7"}
    found = in_the_export(export(searched(own, sorted(own)), form), form)
    assert found["LMCACHE_CHUNK"] == "7"
    assert not [value for value in found.values() if value.startswith("/data")]


@pytest.mark.parametrize("form", ExportFormat)
def test_the_servers_key_is_named_as_withheld(form: ExportFormat) -> None:
    text = export(searched({"VLLM_API_KEY": "[removed]"}), form)
    assert "VLLM_API_KEY" in text
    assert in_the_export(text, form).get("VLLM_API_KEY") is None
    if form is not ExportFormat.JSON:
        assert "VLLM_API_KEY was set where this was searched" in text
        assert "VLLM_API_KEY was set where this was searched" not in export(searched({}), form)


names = st.sampled_from([*sorted(SET_FOR_EVERY_START), *PLACED, *COMPUTING, "LMCACHE_CHUNK", "HF_HOME", "NCCL_DEBUG"])


@settings(deadline=None)
@given(st.dictionaries(names, st.sampled_from("01")), st.sets(names), st.sampled_from([["NVIDIA H200"], ["cpu"]]))
def test_what_is_handed_on_was_in_force(variables: dict[str, str], named: set[str], gpus: list[str]) -> None:
    own = named & variables.keys()
    setup = searched(variables, sorted(own), gpus=gpus).setup
    by_us = SET_FOR_EVERY_START | (
        engine_environment(Path(), cpu_build=True, offline=True).keys() if gpus == ["cpu"] else set()
    )
    found = handed_on(setup)
    assert found.keys() & own == own - OURS.keys()
    assert not found.keys() - own & by_us
    assert not [name for name in found.keys() - own if PLACES.fullmatch(name)]
    assert computing(setup).items() <= found.items() <= variables.items()


def test_a_value_that_was_in_force_nowhere_hinders_no_resume() -> None:
    before, now = (searched({"VLLM_ENGINE_READY_TIMEOUT_S": value, "VLLM_X": "1"}).setup for value in ("5", "900"))
    assert first_difference(before, now) is None
    assert first_difference(before, searched({"VLLM_X": "2"}).setup) == "variables:VLLM_X"


def test_a_variable_that_was_set_for_every_engine_is_in_its_environment_and_no_argument(tmp_path: Path) -> None:
    """Of a bench as of a search: they make the specification of a start in one way."""
    options = BenchOptions(model="Qwen/Qwen3-8B", simulate="h200", set=["env:VLLM_X=1", "max_num_seqs=8"])
    spec = spec_of(find_subject(options), options, Asked(Arrivals.CLOSED), tmp_path, 0)
    assert spec.environment == {"VLLM_X": "1"}
    assert dict(spec.arguments) == {"max_num_seqs": 8}


def test_the_command_of_an_answer_has_its_variables_wherever_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redirected into a file, it is the command in use again: the same arguments, the same variables."""
    monkeypatch.chdir(tmp_path)
    words = [
        "search",
        "--goal",
        "throughput",
        "--model",
        "Qwen/Qwen3-8B",
        "--simulate",
        "h200",
        "--trials",
        "2",
        "--rounds",
        "0",
    ]
    words += ["--window", "1s", "--concurrency", "8", "--soak", "0", "--set", "env:VLLM_X=a b", "--quiet"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("VLLM_X='a b' vllm serve Qwen/Qwen3-8B")
    Path("serve.sh").write_text(done.stdout)
    assert read_script(done.stdout, "serve.sh", {}).words[:3] == ("VLLM_X=a b", "vllm", "serve")
    assert "VLLM_X='a b'" in CliRunner().invoke(app, ["show"]).stdout
    view = StudyView.of(read_study("sqlite:///studies.db"))
    assert "VLLM_X=&#x27;a b&#x27;" in page(view.record)
    assert "VLLM_X='a b'" in study_note(view)
