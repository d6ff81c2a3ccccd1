"""A study that cannot go on here says in words what is not as it was, and both ways on can be typed as they stand."""

from __future__ import annotations

import copy
import shlex
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from vopt.objectives.goals import built_in_goal, parse_limit
from vopt.optimizer import cli
from vopt.optimizer.environment import COMPARED
from vopt.optimizer.errors import UsageError
from vopt.optimizer.options import SearchOptions
from vopt.optimizer.resumption import refuse_difference, stored_options
from vopt.optimizer.retyped import search_line
from vopt.optimizer.study import read_study

URL = "sqlite:///studies.db"
NAME = "qwen3-8b-throughput-1"
TYPED = (
    *("search", "--goal", "throughput", "--model", "Qwen/Qwen3-8B", "--simulate", "h200", "--trials", "2", "--rounds", "0"),
    *("--concurrency", "16", "--window", "1s", "--soak", "0", "--quiet"),
)
Setup = dict[str, Any]


def vopt(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    done = vopt(*TYPED, "--storage", f"sqlite:///{folder}/studies.db")
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def here(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(finished, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def put(path: str, value: Any) -> Callable[[Setup], None]:
    def edit(setup: Setup) -> None:
        *within, last = path.split("/")
        for name in within:
            setup = setup[name]
        setup[last] = value

    return edit


def real(edit: Callable[[Setup], None]) -> Callable[[Setup], None]:
    """Of a search on real engines."""

    def both(setup: Setup) -> None:
        setup.update(simulated=False, gpus=["NVIDIA H200"], engine="vllm", model_revision="a" * 40)
        edit(setup)

    return both


def of_a_file(setup: Setup) -> None:
    setup["options"].update(from_file="serve.sh", model=None)
    setup["baseline"] = {"max_num_seqs": 64}


def narrower(setup: Setup) -> None:
    space = setup["space"]
    for row in (*space["parameters"], *space["dormant"]):
        if row["name"] == "max_num_batched_tokens":
            row["values"] = row["values"][1:]
    space["parameters"] = [row for row in space["parameters"] if row["name"] != "max_num_seqs"]


def with_a_past(setup: Setup) -> None:
    setup["space"]["parameters"].append({**setup["space"]["parameters"][0], "name": "swap_space"})
    setup["environment"]["vopt_version"] = "0.0.9"


def as_stored_once(setup: Setup) -> None:
    setup["space"], setup["space_digest"] = {"dimensions": []}, "0123456789ab"


def of_a_workload_file(setup: Setup) -> None:
    setup["options"]["workload"] = "mine.jsonl"
    setup.update(workload={"name": "mine"}, workload_digest="0123456789ab")


DIFFERENT: tuple[tuple[str, Callable[[Setup], None], str, str], ...] = (
    (
        "gpus",
        put("gpus", ["NVIDIA A100"] * 2),
        "it was measured on 2x NVIDIA A100, this would be 1x NVIDIA H200",
        "# on 2x NVIDIA",
    ),
    ("gpus", put("gpus", ["cpu"]), "it was measured on the CPU, this would be 1x NVIDIA H200", "# on the CPU"),
    (
        "vllm_version",
        put("vllm_version", "0.31.0"),
        "with vLLM 0.31.0, this is vLLM 0.33.0",
        "--vllm-version 0.31.0 --seed-from",
    ),
    (
        "vllm_version",
        real(put("vllm_version", "0.31.0+cu130")),
        "this is vLLM",
        "python -m pip install vllm==0.31.0 && vopt resume",
    ),
    (
        "model",
        put("model", "Qwen/Qwen3-4B"),
        "with the model Qwen/Qwen3-4B, this would be Qwen/Qwen3-8B",
        f"vopt resume {NAME}",
    ),
    (
        "model_revision",
        real(put("seed", 1)),
        f"with revision {'a' * 40} of Qwen/Qwen3-8B, which is {'b' * 40} now",
        "revision=aaaa",
    ),
    (
        "model_files",
        put("model_files", {"config.json": "0123456789ab"}),
        "the model in Qwen/Qwen3-8B is not what it was",
        "# with the model in Qwen/Qwen3-8B as it was",
    ),
    ("engine", put("engine", "server"), "with engine = 'server', here it is 'simulated'", f"vopt resume {NAME}"),
    ("fixed", put("fixed/seed", 3), "with --set seed 3, here it is not set", f"vopt resume {NAME}"),
    ("baseline", of_a_file, "the baseline's max_num_seqs 64, here it is not set", "# with serve.sh as it was"),
    ("front_end", put("front_end", ["--port", "81"]), "its command had --port 81 for the server", f"vopt resume {NAME}"),
    (
        "variables",
        put("environment/variables/VLLM_X", "a b"),
        "variable VLLM_X 'a b', here it is not set",
        "VLLM_X='a b' vopt resume",
    ),
    (
        "variables",
        put("environment/variables/VLLM_X_KEY", "[removed]"),
        "VLLM_X_KEY '[removed]', here",
        "export VLLM_X_KEY=… && vopt",
    ),
    ("workload_digest", of_a_workload_file, "its workload mine is not what it was", "# with mine.jsonl as it was"),
    (
        "workload_digest",
        lambda setup: (setup["workload"]["lengths"]["prompt"].update(mean=999), setup.update(workload_digest="0"))[0],
        "its workload chat is not what it was: lengths.prompt.mean 342 instead of 999",
        f"vopt resume {NAME}   # with ",
    ),
    (
        "workload_digest",
        lambda setup: setup.update(workload={**setup["workload"], "sampling": {"top_k": 3}}, workload_digest="0"),
        "sampling.top_k null instead of 3",
        "# with the generation_config.json of Qwen/Qwen3-8B as it was",
    ),
    ("space_digest", narrower, "max_num_batched_tokens takes 4096, 8192", f"vopt resume {NAME}   # with "),
    ("space_digest", narrower, "max_num_seqs is new", f"vopt resume {NAME}   # with "),
    ("space_digest", with_a_past, "of vopt 0.0.9 (2", "pip install vopt==0.0.9"),
    ("space_digest", with_a_past, "swap_space is no part of it any more", "pip install vopt==0.0.9"),
    ("space_digest", as_stored_once, "the built-in space has changed since", f"vopt resume {NAME}   # with "),
    ("goal", put("goal/limits", []), "its goal has another meaning now: limits", f"vopt resume {NAME}   # with "),
)


@pytest.mark.parametrize(("field", "edit", "said", "back"), DIFFERENT, ids=[f"{row[0]}: {row[2]}"[:60] for row in DIFFERENT])
@pytest.mark.fault("changed options on resume")
def test_what_differs_is_said_in_words_with_both_ways_on(
    here: Path, field: str, edit: Callable[[Setup], None], said: str, back: str
) -> None:
    record = read_study(URL)
    now = copy.deepcopy(dict(record.setup))
    if "real" in edit.__qualname__:
        now.update(
            simulated=False,
            gpus=["NVIDIA H200"],
            engine="vllm",
            model_revision="b" * 40 if field == "model_revision" else "a" * 40,
        )
    elif field == "gpus":
        now["gpus"] = ["NVIDIA H200"]
    edit(record.setup)
    with pytest.raises(UsageError) as refused:
        refuse_difference(record, replace(stored_options(record.setup["options"]), storage=URL), now)
    assert said in refused.value.message
    new, again = refused.value.hint.split("\n   or: ")
    assert back in again
    words = shlex.split(new, comments=True)
    assert words[:2] == ["vopt", "search"]
    assert ("--seed-from" in words) is (field not in ("model", "gpus", "vllm_version", "goal"))
    assert str(record.setup.get("space_digest")) not in refused.value.message
    if again.startswith("vopt"):
        assert CliRunner().invoke(cli.app, [*shlex.split(again, comments=True)[1:], "--help"]).exit_code == 0


def test_every_field_that_must_agree_is_looked_at() -> None:
    assert {row[0] for row in DIFFERENT} == set(COMPARED)


@pytest.mark.usefixtures("here")
def test_the_new_study_that_is_offered_can_be_typed_as_it_stands() -> None:
    study = optuna.load_study(storage=URL, study_name=NAME)
    setup = copy.deepcopy(study.user_attrs["setup"])
    narrower(setup)
    study.set_user_attr("setup", setup)
    before = read_study(URL)
    refused = vopt("resume", "--trials", "3", "--quiet")
    assert refused.exit_code == 2, refused.output
    assert "max_num_seqs is new" in refused.stderr
    assert read_study(URL) == before, "nothing was stored"
    (line,) = (row for row in refused.stderr.splitlines() if row.startswith("  try: "))
    done = vopt(*shlex.split(line.removeprefix("  try: "), comments=True)[1:])
    assert done.exit_code == 0, done.output
    new = next(study for name in (f"{NAME[:-1]}2",) if (study := read_study(URL, name)))
    assert new.setup["options"]["trials"] == 3
    assert new.setup["options"]["seed_from"] == NAME


@pytest.mark.usefixtures("here")
def test_of_a_goal_the_limit_that_differs_is_said() -> None:
    """What a search makes of its goal now holds tuples, what is stored lists."""
    goal = built_in_goal("throughput", limits=[parse_limit("p95_ttft_s<=0.5")])
    record = read_study(URL)
    with pytest.raises(UsageError, match=r"limits p95_ttft_s.value 0.5 instead of 1.5"):
        refuse_difference(record, stored_options(record.setup["options"]), {**record.setup, "goal": goal.to_json()})


@pytest.mark.fault("a guard that another version had")
def test_a_latency_study_of_an_earlier_version_goes_on_with_its_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["latency" if word == "throughput" else word for word in TYPED if word not in ("--concurrency", "16")]
    assert vopt(*typed, "--rate", "4").exit_code == 0
    study = optuna.load_study(storage=URL, study_name="qwen3-8b-latency-1")
    setup = copy.deepcopy(study.user_attrs["setup"])
    guard = {"metric": "tokens_per_s", "op": ">=", "value": 0.98, "relative_to_baseline": True}
    setup["goal"]["limits"][-1] = guard
    study.set_user_attr("setup", setup)
    done = vopt("resume", "--trials", "3", "--quiet")
    assert done.exit_code == 0, done.output
    record = read_study(URL)
    assert len(record.trials) == 3
    assert record.setup["goal"]["limits"][-1] == guard


texts = st.text("ab c'\"$-=", min_size=1, max_size=6).filter(lambda text: not text.startswith("-"))
options = st.builds(
    SearchOptions,
    model=st.none() | texts,
    set=st.lists(texts, max_size=2),
    vary=st.lists(texts, max_size=2),
    goal=st.lists(st.sampled_from(["throughput", "latency"]), max_size=2),
    command=st.none() | st.lists(texts, min_size=1, max_size=3),
    from_file=st.none() | st.sampled_from([Path("serve it.sh")]),
    window=st.none() | st.sampled_from([1.0, 60.0, 2.5]),
    soak=st.sampled_from([0.0, 600.0, 45.0]),
    trials=st.integers(1, 99),
    min_success=st.none() | st.sampled_from([0.5, 0.99]),
    no_guard=st.booleans(),
    disk_budget=st.sampled_from([10 * 2**30, 2**30]),
    rate=st.none() | st.sampled_from([2.0, 0.25]),
    storage=st.sampled_from(["sqlite:///studies.db", "sqlite:////tmp/a b.db"]),
    seed=st.integers(0, 3),
)


@settings(deadline=None, max_examples=60)
@given(options)
def test_a_search_that_is_typed_again_is_the_same_search(typed: SearchOptions) -> None:
    heard: list[SearchOptions] = []
    app = cli.typer.Typer()
    app.command("search")(cli.command(SearchOptions, heard.append))
    app.command("other")(lambda: None)
    done = CliRunner().invoke(app, shlex.split(search_line(typed))[1:], env={"VOPT_STORAGE": None})
    assert done.exit_code == 0, done.output
    (again,) = heard
    for spec in fields(SearchOptions):
        was, is_now = getattr(typed, spec.name), getattr(again, spec.name)
        assert was == is_now or (not was and not is_now), spec.name
