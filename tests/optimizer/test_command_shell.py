"""What stands around the arguments of a launch command as people keep it: scripts, logs, containers."""

from __future__ import annotations

import pytest

from vopt.optimizer.command_reader import parse_command
from vopt.optimizer.errors import UsageError
from vopt.search_spaces.arguments import stored_arguments

SCHEMA = stored_arguments("0.32.0")


@pytest.mark.parametrize(
    ("command", "model", "config", "environment"),
    [
        (
            "docker run --gpus all -p 8000:8000 vllm/vllm-openai:latest --model M --max-num-seqs 64",
            "M",
            {"max_num_seqs": 64},
            {},
        ),
        ("docker run vllm/vllm-openai M --max-num-seqs 64", "M", {"max_num_seqs": 64}, {}),
        ("docker run -it --rm --ipc=host vllm/vllm-openai:v0.32.0 serve M -tp 2", "M", {"tensor_parallel_size": 2}, {}),
        ("docker run -e VLLM_X=1 --env CUDA=0 vllm/vllm-openai --model M", "M", {}, {"VLLM_X": "1", "CUDA": "0"}),
        ("docker run --env=VLLM_X=1 vllm/vllm-openai --model M", "M", {}, {"VLLM_X": "1"}),
        ('docker run -e "HF_TOKEN=$HF_TOKEN" -e HF_HOME vllm/vllm-openai --model M', "M", {}, {}),
        ("sudo podman run -d --name x vllm/vllm-openai --model M", "M", {}, {}),
        ("docker run --entrypoint vllm my/vllm:1 serve M", "M", {}, {}),
        ("docker run -v /m:/m registry.here/team/vllm:1 vllm serve M --seed 1", "M", {"seed": 1}, {}),
        ("docker run img/vllm python3 -m vllm.entrypoints.openai.api_server --model M", "M", {}, {}),
        ("DOCKER_X=1 docker container run vllm/vllm-openai M", "M", {}, {}),
        ("VLLM_X=1 VLLM_Y=2 docker run -e VLLM_X -e HF_HOME vllm/vllm-openai M", "M", {}, {"VLLM_X": "1"}),
        ("vllm serve M > log.txt 2>&1 &", "M", {}, {}),
        ("nohup vllm serve M --seed 1 >> out.log 2> err.log", "M", {"seed": 1}, {}),
        ("vllm serve M --seed 1 2>&1 | tee -a log.txt", "M", {"seed": 1}, {}),
        ("vllm serve M --seed 2 &> log", "M", {"seed": 2}, {}),
        ("vllm serve M --seed 1 < /dev/null", "M", {"seed": 1}, {}),
        ('vllm serve M --seed 1 "$@"', "M", {"seed": 1}, {}),
    ],
)
def test_forms_that_people_keep(command: str, model: str, config: dict[str, object], environment: dict[str, str]) -> None:
    read = parse_command(command, SCHEMA)
    assert (read.model, dict(read.config), dict(read.environment)) == (model, config, environment)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("vllm serve M; rm -rf x", "holds ';'"),
        ("vllm serve M && echo ready", "holds '&'"),
        ("vllm serve M | grep x", "holds '|'"),
        ("vllm serve M > $(x) y", "holds '>'"),
        ("vllm serve M --hf-overrides '{", "not valid shell text"),
        ("docker run --gpus all", "names no image"),
        ("docker run --gpus all ubuntu bash", "is not one of vLLM's"),
        ("docker ps vllm", "is not a `vllm serve` command"),
        ("docker run -e HF_TOKEN=hf_abc vllm/vllm-openai --model M", "holds a secret"),
        ("docker run --entrypoint bash vllm/vllm-openai -c x", "is not a `vllm serve` command"),
    ],
)
def test_what_is_no_single_command_is_refused_with_a_way_out(command: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse_command(command, SCHEMA)
    assert caught.value.hint
    assert "hf_abc" not in str(caught.value)


def test_quoted_operators_are_values() -> None:
    read = parse_command("vllm serve M --chat-template 'a > b; c | d & e' --served-model-name \"x>y\"", SCHEMA)
    assert dict(read.config) == {"served_model_name": ["x>y"]}
    assert "a > b; c | d & e" in read.front_end
