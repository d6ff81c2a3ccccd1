"""The script hands on the very words that were measured, whatever is in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import golden
import pytest
import sample_study
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vopt.optimizer.command import bound_argv
from vopt.optimizer.errors import NothingFeasible, UsageError
from vopt.optimizer.report.deploy import export
from vopt.optimizer.report.shell import shell_script
from vopt.optimizer.report.view import StudyView

NASTY = (
    *("", " ", "two words", "it's", '"quoted"', "$HOME", "`id`", "$(id)", "a\nb", "\n", "tab\there", "back\\slash", "\\"),
    *(
        "ünïcode – “quotes”",
        "模型",
        "*",
        "~",
        "#no comment",
        "!!",
        "{a,b}",
        "&& exit 3",
        "; exit 4",
        "|",
        ">out",
        "-1",
        "'\\''",
    ),
    '{"method":"mtp","num_speculative_tokens":4}',
)
STUB = """#!/bin/sh
: > "$STUB_OUT"
for word in vllm "$@"; do printf '%s\\0' "$word" >> "$STUB_OUT"; done
env -0 > "$STUB_OUT.env"
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stub")
    (folder / "vllm").write_text(STUB)
    (folder / "vllm").chmod(0o755)
    return folder


def received(script: str, stub: Path, *arguments: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """What a ``vllm`` on the PATH gets when the script runs."""
    out = stub / "words"
    path = stub / "serve.sh"
    path.write_text(script, encoding="utf-8")
    environment = {"PATH": f"{stub}:{os.environ['PATH']}", "STUB_OUT": str(out), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["bash", str(path), *arguments], env=environment, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    words = tuple(out.read_bytes().decode("utf-8").split("\0")[:-1])
    variables = dict(line.split("=", 1) for line in Path(f"{out}.env").read_text("utf-8").split("\0") if "=" in line)
    return words, variables


def nasty_argv() -> tuple[str, ...]:
    words = ["vllm", "serve", "/models/it's a $model\nü"]
    for number, value in enumerate(NASTY):
        words += [f"--option-{number}", value]
    return tuple(words)


def test_the_script_is_as_agreed() -> None:
    golden.check("export-shell.sh", export(sample_study.study(), "shell"))


def test_a_trial_that_lost_says_so_in_its_script() -> None:
    golden.check("export-shell-trial-4.sh", export(sample_study.simulated(), "shell", "4"))


def test_a_script_without_a_gain_is_the_baseline() -> None:
    golden.check("export-shell-no-gain.sh", export(sample_study.no_gain(), "shell"))


def test_any_value_survives(stub: Path) -> None:
    view = StudyView.of(sample_study.study())
    words, _ = received(shell_script(view, nasty_argv()), stub)
    assert words == bound_argv(nasty_argv())


text = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=text.filter(lambda model: not model.startswith("-")),
    values=st.lists(st.tuples(st.from_regex(r"[a-z][a-z-]{0,8}", fullmatch=True), text), max_size=5),
)
def test_any_value_at_all_survives(stub: Path, model: str, values: list[tuple[str, str]]) -> None:
    argv = ["vllm", "serve", model]
    for name, value in values:
        argv += [f"--x-{name}-x", value]
    script = shell_script(StudyView.of(sample_study.running()), argv)
    words, _ = received(script, stub)
    assert words == bound_argv(argv)


def test_environment_variables_that_mattered_are_exported_and_only_those(stub: Path) -> None:
    made = sample_study.study()
    answer = made.recommendation
    assert answer is not None
    assert answer.winner_config is not None
    answer = replace(answer, winner_config=answer.winner_config | {"env:VLLM_ATTENTION_BACKEND": "FLASHINFER"})
    options = {**made.setup["options"], "set": ["env:OMP_NUM_THREADS=7", "max_model_len=4096"]}
    environment = {**made.setup["environment"]}
    environment["variables"] = {
        **environment["variables"],
        "CUDA_VISIBLE_DEVICES": "3",
        "VLLM_PORT": "5000",
        "LMCACHE_CHUNK": "7",
        "VLLM_API_KEY": "abcdefgh",
    }
    made = replace(made, recommendation=answer, setup={**made.setup, "options": options, "environment": environment})
    _, variables = received(export(made, "shell"), stub)
    assert variables["LMCACHE_NOTE"] == "it's $HOME\nand more"
    assert variables["VLLM_ATTENTION_BACKEND"] == "FLASHINFER"
    assert variables["OMP_NUM_THREADS"] == "7"
    assert variables["LMCACHE_CHUNK"] == "7"
    assert not {"CUDA_VISIBLE_DEVICES", "VLLM_PORT", "VLLM_API_KEY", "VLLM_CACHE_ROOT", "VLLM_HOST_IP"} & variables.keys()


def test_it_listens_on_loopback_unless_the_user_said_where(stub: Path) -> None:
    view = StudyView.of(sample_study.study())
    own = ("vllm", "serve", "m", "--host", "10.0.0.7")
    assert received(shell_script(view, own), stub)[0] == own
    assert bound_argv(("vllm", "serve", "m", "--host=::1"))[-1] == "--host=::1"
    assert bound_argv(("vllm", "serve", "m", "--uds", "/run/s"))[-2:] == ("--uds", "/run/s")
    assert bound_argv(("vllm", "serve", "m", "--hostile", "x"))[-2:] == ("--host", "127.0.0.1")
    assert "To open it" in shell_script(view, ("vllm", "serve", "m"))
    assert "To open it" not in shell_script(view, own)


def test_further_arguments_are_appended(stub: Path) -> None:
    words, _ = received(export(sample_study.study(), "shell"), stub, "--port", "9 9")
    assert words[-2:] == ("--port", "9 9")


def test_comments_cannot_be_left(stub: Path) -> None:
    made = sample_study.study()
    evil = "x\nexit 9\r\nexit 8\x1b[2J"
    made = replace(
        made, name=evil, setup={**made.setup, "workload": {"name": evil}, "model_revision": evil, "vllm_version": evil}
    )
    assert received(export(made, "shell"), stub)[0][:2] == ("vllm", "serve")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("argv", [nasty_argv(), sample_study.argv_of(sample_study.LITE)])
def test_shellcheck_has_nothing_to_say(argv: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text(shell_script(StudyView.of(sample_study.study()), argv), encoding="utf-8")
    done = subprocess.run(["shellcheck", "--norc", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


def test_what_cannot_be_exported_says_what_to_type() -> None:
    with pytest.raises(NothingFeasible, match="nothing feasible"):
        export(sample_study.nothing_feasible(), "shell")
    with pytest.raises(UsageError, match="no answer yet") as running:
        export(sample_study.running(), "shell")
    assert "vopt resume" in running.value.hint
    with pytest.raises(UsageError, match="'99'"):
        export(sample_study.study(), "shell", "99")
    with pytest.raises(UsageError, match="no export format"):
        export(sample_study.study(), "toml")


def test_the_json_of_a_trial_is_that_trials_command() -> None:
    document = json.loads(export(sample_study.study(), "json", "8"))
    assert document["argv"] == list(sample_study.argv_of(sample_study.FINALIST))
