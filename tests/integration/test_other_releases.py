"""The same on several releases of vLLM: spaces, stored arguments, and a trial, each with that release's own engine.

Long, because the releases are installed first and each starts real engines: run it by name with ``-m long``.
``VOPT_TEST_VLLM_PYTHONS`` names interpreters to use instead of those that are made here, separated like ``PATH``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from asked import read_arguments
from support.other_vllm import RELEASES, RELEASES_AT, given_pythons, needs, overlay
from support.sessions import plan, source, spec

from vopt.optimizer.engine.arguments import VllmProbe
from vopt.optimizer.engine.process import ProcessSession
from vopt.optimizer.errors import UsageError
from vopt.optimizer.options import CheckedSpaceOptions
from vopt.optimizer.space_of import check_command, describe_space
from vopt.search_spaces.arguments import release_of, stored_arguments
from vopt.search_spaces.space import SearchSpace

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

NINE, MOE = "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B-FP8"
LLAMA, MLA = "meta-llama/Llama-3.3-70B-Instruct", "deepseek-ai/DeepSeek-V3"
GUIDE = (
    "--model Qwen-14B --max-num-seqs 256 --max-model-len 8192 --gpu-memory-utilization 0.95 --enable-prefix-caching "
    "--scheduling-policy lof --num-scheduler-steps 8 --speculative-model Qwen-0.5B --num-speculative-tokens 8"
)


@pytest.fixture(scope="module", params=given_pythons() or RELEASES)
def python(request: pytest.FixtureRequest, vllm_python: str) -> str:
    """An interpreter with that release's vLLM for the CPU."""
    wanted: str = request.param
    if not re.fullmatch(r"\d+\.\d+\.\d+", wanted):
        return wanted
    if read_arguments(vllm_python).version.startswith(wanted):
        return vllm_python
    return overlay(RELEASES_AT, wanted)


@pytest.fixture(autouse=True)
def caches(engine_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(engine_cache))


def test_its_arguments_are_those_that_are_stored(python: str) -> None:
    said = read_arguments(python)
    stored = stored_arguments(said.version)
    assert stored.release == said.release
    assert dict(stored.arguments) == dict(said.arguments)
    assert stored.hidden == said.hidden


@pytest.mark.parametrize("version", ["0.20.0", "0.22.1", "0.26.0"])
def test_releases_whose_engines_do_not_run_here_still_say_their_arguments(version: str, vllm_python: str) -> None:
    said = read_arguments(overlay(RELEASES_AT, version, *needs(version)))
    stored = stored_arguments(version)
    assert dict(stored.arguments) == dict(said.arguments)
    assert stored.hidden == said.hidden


@pytest.mark.parametrize(("model", "gpus"), [(NINE, 1), (MOE, 1), (LLAMA, 1), (LLAMA, 2), (LLAMA, 4), (MLA, 8)])
def test_the_space_of_a_known_model_on_h200s(python: str, model: str, gpus: int) -> None:
    """The arguments are asked of the interpreter; the stored ones of that release lead to the same space."""
    release = ".".join(map(str, read_arguments(python).release))
    asked = describe_space(CheckedSpaceOptions(model=model, simulate="h200", gpus=str(gpus), python=Path(python)))
    stored = describe_space(CheckedSpaceOptions(model=model, simulate="h200", gpus=str(gpus), vllm_version=release))
    assert f"vLLM {release}" in asked.text.splitlines()[0].replace("+cpu", "")
    assert asked.text.splitlines()[1:] == stored.text.splitlines()[1:]
    assert asked.document["digest"] == stored.document["digest"]


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_space_of_a_tiny_model_on_the_engine_itself(python: str, tiny_models: tuple[Path, Path], hybrid: bool) -> None:
    options = CheckedSpaceOptions(
        model=str(tiny_models[hybrid]),
        python=Path(python),
        set=["load_format=dummy", *(["language_model_only=true"] if hybrid else [])],
    )
    answer = describe_space(options)
    arguments = read_arguments(python)
    assert f"vLLM {arguments.version}" in answer.text.splitlines()[0]
    space = SearchSpace.from_json(answer.document)
    for parameter in space.parameters:
        assert all(arguments.unlike(parameter.name, value) is None for value in parameter.values)
    assert space["max_num_seqs"].default == 128, "the CPU build's own default, from create_engine_config"
    # Every point that the rules allow is one that this vLLM makes an engine configuration of.
    with VllmProbe(python) as judge:
        for seed in (space.default_point(), *(seed.point for seed in space.seeds)):
            assert not space.violations(seed)
            verdict = judge.ask(str(tiny_models[hybrid]), {**space.facts["set"], **space.config(seed)})
            assert verdict.accepted, (seed, verdict.kind, verdict.message)


def test_a_guides_command_is_taken_apart_and_its_successor_is_accepted(python: str) -> None:
    answer = check_command(CheckedSpaceOptions(check=GUIDE, python=Path(python), simulate="h200"))
    assert answer.exit_code in (1, 6)
    with VllmProbe(python) as judge:
        given, refusal = judge.read_back(answer.document["command"][3:])
        assert given is not None, refusal
        for retired in (["--num-scheduler-steps", "8"], ["--speculative-model", "m"], ["--scheduling-policy", "lof"]):
            assert judge.read_back(retired)[0] is None


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_trial_starts_loads_and_stops(
    python: str, tiny_models: tuple[Path, Path], engine_cache: Path, tmp_path: Path, hybrid: bool
) -> None:
    more = {"language_model_only": True} if hybrid else {}
    session = ProcessSession(spec(tmp_path, tiny_models[hybrid], python, engine_cache, max_num_seqs=64, **more))
    try:
        started = session.start(lambda phase, words: None)
        assert release_of(started.vllm_version) == read_arguments(python).release
        assert started.resolved["max_num_seqs"] == 64
        assert (started.kv_cache_tokens or 0) > 10_000
        result = session.load(source(), plan(), lambda tick: True)
        finished = [record for record in result.records if not record.censored]
        assert len(finished) > 20
        assert all(record.succeeded for record in finished)
        assert all(record.output_tokens == record.requested_output_tokens for record in finished)
    finally:
        leftovers = session.close()
    assert leftovers == ()


def test_a_version_beside_an_interpreter_is_refused(python: str) -> None:
    both = CheckedSpaceOptions(model=NINE, simulate="h200", python=Path(python), vllm_version="0.28.0")
    with pytest.raises(UsageError, match="--python names a vLLM that is asked itself"):
        describe_space(both)
