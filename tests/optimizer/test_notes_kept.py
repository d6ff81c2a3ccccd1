"""What was noted along the way reaches the reader: of a command, of an answer without a command, of an interruption."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from landscapes import MemoryStudy, small_landscape
from typer.testing import CliRunner

from vopt.objectives.goals import built_in_goal, parse_limit
from vopt.optimizer.cli import app
from vopt.optimizer.history import FailureSummary, Stage, TrialRequest
from vopt.optimizer.launch import so_far
from vopt.optimizer.recommend import Verdict
from vopt.optimizer.search import search
from vopt.optimizer.setup import Budget, SearchSetup
from vopt.optimizer.trial import EngineConfig, FailureKind, Phase

SCRIPT = "export CUDA_VISIBLE_DEVICES=1 FOO=2\ncd /srv\nvllm serve Qwen/Qwen3-8B --port 8001 --max-num-seqs 32\n"
SAID = (
    "run.sh: left out, as no part of the command or of its environment: cd /srv",
    "CUDA_VISIBLE_DEVICES of the command is left out",
    "with the command's own environment: FOO=2",
    "--port 8001: for the server in front of the engine",
)


@pytest.mark.parametrize("verb", [("space",), ("bench", "--concurrency", "8", "--window", "5s")])
def test_every_note_on_the_command_in_use_is_said(
    verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(SCRIPT)
    words = [*verb, "--simulate", "h200", "--from", "run.sh"]
    if verb[0] == "bench":  # has no --from
        words = [*words[:-2], "--", "CUDA_VISIBLE_DEVICES=1", "FOO=2", *SCRIPT.splitlines()[-1].split()]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    text = " ".join((done.stdout if verb[0] == "space" else done.output).split())
    for said in SAID if verb[0] == "space" else SAID[1:]:
        assert said in text
    at = words.index("--simulate")
    document = json.loads(CliRunner().invoke(app, [*words[:at], "--json", *words[at:]]).stdout)
    notes = document["notes"] if verb[0] == "space" else document["vopt"]["notes"]
    for said in SAID if verb[0] == "space" else SAID[1:]:
        assert any(said in note for note in notes)
    assert len(notes) == len(set(notes))


LEFT_OUT = (
    "run.sh: left out, as no part of the command or of its environment: cd /srv",
    "run.sh: $WIDTH: as set in this shell",
    "CUDA_VISIBLE_DEVICES of the command is left out: --gpus says which GPUs an engine gets",
)


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_what_is_left_out_of_a_command_is_said_always_and_stands_in_what_is_exported(
    quiet: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever starts the exported command does without it; what is hidden by --quiet is progress."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WIDTH", "32")
    Path("run.sh").write_text(SCRIPT.replace("32", '"$WIDTH"'))
    search = ["search", "--goal", "throughput", "--from", "run.sh", "--simulate", "h200", "--trials", "2", "--rounds", "0"]
    done = CliRunner().invoke(app, [*search, "--window", "5s", "--concurrency", "16", "--soak", "0", *quiet])
    assert done.exit_code == 0, done.stderr
    before_the_answer = done.stderr.partition("Unconfirmed")[0]
    for said in LEFT_OUT:
        assert said in " ".join(before_the_answer.split())
    assert ("asking" in before_the_answer or "plan:" in before_the_answer) is not bool(quiet)
    for form in ("shell", "yaml", "json", "docker", "k8s"):
        for trial in ([], ["--trial", "0"]):
            text = CliRunner().invoke(app, ["export", "--format", form, *trial]).stdout
            comments = json.loads(text)["notes"] if form == "json" else [line for line in text.splitlines() if line[:1] == "#"]
            assert all(any(said in comment for comment in comments) for said in LEFT_OUT), (form, trial)
    assert LEFT_OUT[0] in " ".join(CliRunner().invoke(app, ["show"]).stdout.split())
    resumed = CliRunner().invoke(app, ["resume", "--quiet"])
    assert resumed.exit_code == 0, resumed.stderr
    assert LEFT_OUT[0] in " ".join(resumed.stderr.split())


def setup_with(limit: str) -> SearchSetup:
    goal = built_in_goal("throughput", limits=(parse_limit(limit),), guard=False)
    return SearchSetup(goal, small_landscape().space, Budget(8, rounds=2, time_s=None, soak_s=0))


def test_an_answer_without_a_command_keeps_the_notes_on_what_was_measured() -> None:
    setup = replace(setup_with("tokens_per_s>=20000"), notes=("not simulated: --x", "the GPU is shared"))
    answer = search(setup, MemoryStudy(), small_landscape().evaluator(0), lambda event: None)
    assert answer.verdict is Verdict.NOTHING_FEASIBLE
    assert answer.notes[-2:] == setup.notes


def test_an_interruption_compares_with_the_baseline_that_came_up() -> None:
    """The first start failed: relative limits and gains are against the repaired one."""
    evaluate = small_landscape().evaluator(0)
    configs = [EngineConfig(), EngineConfig({"max_num_seqs": 128}), EngineConfig({"max_num_seqs": 512})]
    records = [evaluate(TrialRequest(str(number), config, Stage.SEARCH)) for number, config in enumerate(configs)]
    failure = FailureSummary(Phase.START, FailureKind.OOM_START, "too large")
    records[0] = replace(records[0], metrics=None, status=None, failure=failure)
    told = so_far(records, setup_with("tokens_per_s<=1.05*baseline"))
    assert "best so far: trial 1 (max_num_seqs=128)" in told, "512 breaks the limit that is relative to 128"
    told = so_far(records, setup_with("tokens_per_s>=1"))
    assert "best so far: trial 2 (max_num_seqs=512, tokens_per_s +" in told
    assert "against the baseline" in told
    assert so_far(records[:1], setup_with("tokens_per_s>=1")) == "1 engine start is kept, none with a result yet"
