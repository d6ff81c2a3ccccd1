"""Each file format gives back the argv that was measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import kubernetes_validate
import pytest
import sample_study
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vopt.optimizer.command import bound_argv
from vopt.optimizer.errors import UsageError
from vopt.optimizer.history import StudyRecord
from vopt.optimizer.recommend import Recommendation
from vopt.optimizer.report.deploy import ExportFormat, argv_from_yaml, config_mapping, export, gpus_needed, options_of
from vopt.optimizer.report.redaction import is_secret_name

words = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12).filter(
    lambda text: not text.startswith("-")
)
flag = st.from_regex(r"--x[a-z]{1,6}(-[a-z]{1,4})?", fullmatch=True).filter(lambda name: not is_secret_name(name))
argvs = st.builds(
    lambda model, options: (
        "vllm",
        "serve",
        f"m{model}",
        *(word for name, values in options.items() for word in (name, *values)),
    ),
    words,
    st.dictionaries(flag, st.lists(words, max_size=3), max_size=5),
)


def test_a_pod_finds_its_secrets_and_is_asked_with_patience() -> None:
    (deployment, _) = yaml.safe_load_all(export(sample_study.study(), "k8s"))
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    secrets = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one}
    assert set(secrets) == {"HF_TOKEN", "VLLM_API_KEY"}
    assert all(reference["optional"] for reference in secrets.values())
    assert all(container[probe]["timeoutSeconds"] >= 5 for probe in ("startupProbe", "readinessProbe", "livenessProbe"))


def answering(argv: tuple[str, ...]) -> StudyRecord:
    made = sample_study.study()
    assert isinstance(made.recommendation, Recommendation)
    return replace(made, recommendation=replace(made.recommendation, argv=argv))


def compose_argv(text: str) -> tuple[str, ...]:
    """What the container's process gets: compose turns ``$$`` into ``$``."""
    service = yaml.safe_load(text)["services"]["vllm"]
    assert not [word for word in service["command"] if re.search(r"(?<!\$)(\$\$)*\$(?!\$)", word)]
    return tuple(word.replace("$$", "$") for word in (*service["entrypoint"], *service["command"]))


def manifest_argv(text: str) -> tuple[str, ...]:
    """Kubernetes turns ``$$`` into ``$`` and expands ``$(NAME)``, of which none may be left."""
    (deployment, _) = yaml.safe_load_all(text)
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert not [word for word in container["args"] if re.search(r"(?<!\$)(\$\$)*\$(?!\$)", word)]
    return tuple(word.replace("$$", "$") for word in (*container["command"], *container["args"]))


@settings(max_examples=20, deadline=None)
@given(argvs)
def test_the_argv_that_comes_out_is_the_argv_that_was_measured(argv: tuple[str, ...]) -> None:
    made = answering(argv)
    assert argv_from_yaml(export(made, "yaml")) == bound_argv(argv)
    assert compose_argv(export(made, "docker")) == argv
    assert manifest_argv(export(made, "k8s")) == argv
    assert tuple(json.loads(export(made, "json"))["argv"]) == argv


@pytest.mark.parametrize("form", [ExportFormat.YAML, ExportFormat.DOCKER, ExportFormat.K8S])
def test_files_are_as_agreed(form: ExportFormat) -> None:
    golden.check(f"export-{form}.yaml", export(sample_study.study(), form))


@pytest.mark.parametrize(
    "argv", [sample_study.argv_of(sample_study.LITE), ("vllm", "serve", "/models/my model", "-tp", "4", "--port", "9000")]
)
def test_kubernetes_accepts_the_manifests(argv: tuple[str, ...]) -> None:
    for document in yaml.safe_load_all(export(answering(argv), "k8s")):
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_containers_take_the_gpus_and_the_port_of_the_command() -> None:
    argv = ("vllm", "serve", "/models/x", "-tp", "4", "--data-parallel-size", "2", "--port", "9000", "--host", "127.0.0.1")
    assert gpus_needed(argv) == 8
    service = yaml.safe_load(export(answering(argv), "docker"))["services"]["vllm"]
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 8
    assert service["ports"] == ["127.0.0.1:9000:9000"]
    assert "--host" not in service["command"]
    assert {"type": "bind", "source": "/models/x", "target": "/models/x", "read_only": True} in service["volumes"]
    assert ":9000/health" in service["healthcheck"]["test"][-1]
    deployment, _ = yaml.safe_load_all(export(answering(argv), "k8s"))
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert pod["enableServiceLinks"] is False


def test_short_options_become_long_ones_and_negative_numbers_stay_values() -> None:
    _, options = options_of(("vllm", "serve", "m", "-tp", "2", "-O3", "-cc", "{}", "--seed", "-1", "--lora=a=b", "--flag"))
    assert options == [
        ("--tensor-parallel-size", ["2"]),
        ("--optimization-level", ["3"]),
        ("--compilation-config", ["{}"]),
        ("--seed", ["-1"]),
        ("--lora", ["a=b"]),
        ("--flag", []),
    ]


def test_yaml_values_stay_the_texts_that_they_were() -> None:
    argv = (
        "vllm",
        "serve",
        "m",
        "--a",
        "1e3",
        "--b",
        "true",
        "--c",
        "007",
        "--d",
        "null",
        "--e",
        "1_000",
        "--f",
        "0.9",
        "--no-g",
    )
    text = export(answering(argv), "yaml")
    assert argv_from_yaml(text) == bound_argv(argv)
    mapping: dict[str, Any] = yaml.safe_load(text)
    assert mapping["no-g"] is True
    assert mapping["b"] == "true"


def test_an_option_given_twice_has_no_yaml() -> None:
    with pytest.raises(UsageError, match="--a is given twice"):
        config_mapping(("vllm", "serve", "m", "--a", "1", "--a", "2"))


@pytest.mark.parametrize(
    ("text", "rule"), [("- 1\n- 2\n", "mapping"), ("a: [1", "not YAML"), ("date: 2001-99-99", "month must be")]
)
def test_a_file_that_is_no_configuration_is_refused(text: str, rule: str) -> None:
    with pytest.raises(UsageError, match=rule):
        argv_from_yaml(text)


def test_a_users_own_file_is_read_as_vllm_reads_it() -> None:
    text = "model: m\nmax-num-seqs: 8\nspeculative-config: {method: mtp, n: 1}\n"
    text += "enable-x: true\ny: false\nsizes: [1, 2]\nempty: []\n"
    expected = ("vllm", "serve", "m", "--max-num-seqs", "8", "--speculative-config", '{"method": "mtp", "n": 1}')
    assert argv_from_yaml(text) == (*expected, "--enable-x", "--no-y", "--sizes", "1", "2")


def test_what_ran_without_a_gpu_has_no_container() -> None:
    made = sample_study.study(gpus=[])
    with pytest.raises(UsageError, match="without a GPU"):
        export(made, "docker")


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # importing vLLM warns of its own dependencies
def test_vllm_reads_the_yaml_as_the_argv_that_was_measured(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    argv = (
        *(
            "vllm",
            "serve",
            "/models/it's $a",
            "--max-num-seqs",
            "512",
            "--speculative-config",
            '{"method":"ngram","num_speculative_tokens":4}',
        ),
        *("--enable-prefix-caching", "--no-enable-chunked-prefill", "--gpu-memory-utilization", "0.97"),
        *("--cudagraph-capture-sizes", "1", "2", "4"),
    )
    path = tmp_path / "serve.yaml"
    path.write_text(export(answering(argv), "yaml").replace("host: 127.0.0.1\n", ""), encoding="utf-8")
    direct = parser.parse_args(["--model", *argv[2:]])
    from_file = parser.parse_args(parser.load_config_file(str(path)))
    assert AsyncEngineArgs.from_cli_args(from_file) == AsyncEngineArgs.from_cli_args(direct)
