"""A model that lies in a directory of this machine has no revision: what is in it is compared when a study goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_models import write_tiny_models
from typer.testing import CliRunner, Result

from vopt.optimizer.cli import app
from vopt.optimizer.model_files import SAMPLED_BYTES, contents
from vopt.optimizer.study import read_study

SEARCH = (
    *("search", "--goal", "throughput", "--model", "./m", "--simulate", "h200", "--trials", "2", "--rounds", "0"),
    *("--concurrency", "16", "--window", "1s", "--soak", "0", "--quiet"),
)


def vopt(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(write_tiny_models(tmp_path_factory.mktemp("models"))[0], folder / "m")
    (folder / "m" / "model.safetensors").write_bytes(bytes(range(256)) * 2048)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = vopt(*SEARCH)
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def model(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(finished, tmp_path / "here")  # with times of their own: a copy is the same model
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here" / "m"


def deeper(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 2}))


def trained(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")


def resharded(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-1.safetensors")


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (deeper, "config.json"),
        (trained, "weights"),
        pytest.param(resharded, "weights", marks=pytest.mark.slow),
        pytest.param(
            lambda model: (model / "chat_template.jinja").write_text("{{ x }}"), "chat_template.jinja", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.fault("model directory changed before a resume")
def test_another_model_in_the_same_place_is_refused(model: Path, change: Callable[[Path], None], file: str) -> None:
    change(model)
    refused = vopt("resume", "--trials", "3", "--quiet")
    assert refused.exit_code == 2, refused.output
    assert f"{file} in ./m is not what it was: results would not compare" in refused.stderr
    assert "--seed-from m-throughput-1" in refused.stderr
    assert f"vopt resume m-throughput-1   # with {file} in ./m as it was" in refused.stderr
    assert len(read_study("sqlite:///studies.db").trials) == 2


def test_a_copy_of_the_model_and_what_does_not_run_are_the_same(model: Path) -> None:
    (model / "README.md").write_text("of no weight")
    done = vopt("resume", "--trials", "3", "--quiet")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("change", [deeper, None])
def test_a_recommendation_measured_again_on_another_model_says_so(model: Path, change: Callable[[Path], None] | None) -> None:
    if change is not None:
        change(model)
    again = vopt("bench", "--study", "m-throughput-1", "--repeat", "2", "--json")
    said = "config.json of ./m: not as m-throughput-1 measured the model"
    assert (said in json.loads(again.stdout)["notes"]) == (change is not None), again.output


@pytest.mark.fault("model directory gone before a resume")
def test_a_model_that_is_gone_is_named_with_the_way_back(model: Path) -> None:
    model.rename(model.with_name("elsewhere"))
    refused = vopt("resume", "--trials", "3", "--quiet")
    assert refused.exit_code == 2, refused.output
    assert "there is no directory ./m" in refused.stderr
    assert "put it back, then: vopt resume m-throughput-1" in refused.stderr


def test_large_files_are_told_apart_by_size_beginning_and_end(tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    whole = bytes(4 * SAMPLED_BYTES)
    weights.write_bytes(whole)
    first = contents(tmp_path)
    for other in (whole + b"\0", b"x" + whole[1:], whole[:-1] + b"x"):
        weights.write_bytes(other)
        assert contents(tmp_path) != first
    weights.write_bytes(whole)
    assert contents(tmp_path) == first
