"""A script is read as bash would run it: the same words, the same variables; what is not read is named."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sample_study
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vopt.optimizer.command import bound_argv, to_argv
from vopt.optimizer.command_in_use import file_command, with_config_file
from vopt.optimizer.command_reader import parse_command
from vopt.optimizer.command_shell import environment_of
from vopt.optimizer.errors import UsageError
from vopt.optimizer.report.deploy import export
from vopt.optimizer.script import Script, read_script
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.arguments import stored_arguments

SCHEMA = stored_arguments("0.33.0")
STUB = '#!/bin/bash\nprintf "%s\\0" vllm "$@" > "$STUB_OUT"\nenv -0 > "$STUB_OUT.env"\n'
OUTSIDE = {"HOME": "/home/me", "WEIGHTS": "/data/w", "LC_ALL": "C.UTF-8"}
NOT_THE_SCRIPTS = {*OUTSIDE, "PATH", "STUB_OUT", "PWD", "SHLVL", "_", "OLDPWD"}

AS_BASH = {
    "exports before the command": "export A=1 B='two words'\nexport C=\"$A$B\"\nvllm serve m --x $A",
    "an export after the assignment": "A=1\nexport A\nB=2; export B; C=3\nvllm serve m",
    "assigned after it was exported": "export A\nA=5\nvllm serve m",
    "assignments on the line": "A=1 B='x y' vllm serve m",
    "a line's own assignment wins": "export A=1\nA=2 vllm serve m",
    "env": "env A=1 B=2 vllm serve m",
    "declare": "declare -x A=1\ntypeset B=2\nreadonly C=3\nexport -n D\nvllm serve m",
    "all exported": "set -a\nA=1\nset +a\nB=2\nvllm serve m",
    "allexport by name": "set -o allexport; A=1; vllm serve m",
    "unset": "export A=1 B=2\nunset A\nvllm serve m",
    "no longer exported": "export A=1\nexport -n A\nvllm serve m",
    "appended": "export A=1\nA+=2\nvllm serve m --x $A",
    "exec and arguments of its own": '#!/usr/bin/env bash\nset -euo pipefail\nexec vllm serve m \\\n  --a 1 \\\n  "$@"\n',
    "quotes over lines": "vllm serve m --json '{\n  \"a\": 1\n}' --b \"x\ny\"",
    "comments": "# vllm serve other\nvllm serve m --a 1 # --b 2\n# the end",
    "a hash inside a word": "vllm serve m --a b#c '#d'",
    "escapes": "vllm serve m --a b\\ c --d \\$HOME --e \"\\$x \\\" \\\\ \\y\" --f 'it'\\''s'",
    "ansi quotes": "vllm serve m --a $'l1\\nl2\\t\\x41\\u00e9\\'q'",
    "variables in words": "M=org/model\nN=64\nvllm serve \"$M\" --max ${N} --port ${PORT:-8001} --d /x/${M}-y --e ${UNSET-}z",
    "defaults": 'A="${A:-1}"\n: "${B:=2}"\nvllm serve m --a "$A" --b $B --c "${C:-it is}" --d ${A:+yes}',
    "words in a variable": 'ARGS="--a 1  --b"\nARGS="$ARGS --c 2"\nvllm serve m $ARGS "$ARGS"',
    "an array": "ARGS=(--a 1 'b c' # why\n  --d \"$HOME\")\nARGS+=(--e)\nvllm serve m \"${ARGS[@]}\" x\"${ARGS[@]}\"y",
    "an empty array": 'ARGS=()\nvllm serve m "${ARGS[@]}" --b',
    "an unset variable alone": "vllm serve m $EXTRA --b",
    "what the shell has": 'vllm serve "$WEIGHTS/m" --home ~/x',
    "redirected": "vllm serve m --a 1 > out.log 2>&1 < /dev/null",
    "a document in place": "cat > notes.txt <<'EOF'\nvllm serve other; export X=1\nEOF\nvllm serve m",
    "a function": 'main() {\n  export A=1\n  vllm serve m "$@"\n}\nmain',
    "a chain": "cd . && export A=1 && vllm serve m --a 1",
    "in the background": "export A=1\nvllm serve m --a 1 2>&1 &\nPID=$!\nwait $PID",
    "piped": "vllm serve m --a 1 2>&1 | cat",
    "in parentheses": "(export A=1; vllm serve m)",
    "bash -c": "export A=1\nbash -c 'B=2 vllm serve m --x \"y z\"'",
    "talked about": 'echo "starting vllm serve m"\necho vllm serve m\nvllm serve m',
    "wrapped": "A=1 nohup env B=2 nice -n 1 vllm serve m",
    "the shell's default is no condition": 'if true; then\n  vllm serve m --a 1\nfi',
    "empty words": "vllm serve m --a '' --b \"\" ''",
    "line ends inside words": "vllm serve m --lo\\\nng 1",
}  # fmt: skip


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "vllm").write_text(STUB)
    (folder / "vllm").chmod(0o755)
    return folder


def by_bash(text: str, stub: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """The words and the script's own variables that a ``vllm`` gets when bash runs ``text``."""
    out = stub / "out"
    (stub / "run.sh").write_text(text)
    environment = {**OUTSIDE, "PATH": f"{stub}:{os.environ['PATH']}", "STUB_OUT": str(out)}
    subprocess.run(["bash", "run.sh"], cwd=stub, env=environment, check=True, capture_output=True, timeout=20)
    words = tuple(out.read_text().split("\0")[:-1])
    variables = dict(line.split("=", 1) for line in Path(f"{out}.env").read_text().split("\0") if "=" in line)
    return words, {name: value for name, value in variables.items() if name not in NOT_THE_SCRIPTS}


def read(text: str, outside: Mapping[str, str] = OUTSIDE) -> Script:
    return read_script(text, "--from f.sh", outside)


@pytest.mark.parametrize("text", AS_BASH.values(), ids=AS_BASH)
def test_words_and_variables_are_those_that_bash_hands_over(text: str, stub: Path) -> None:
    words, variables = by_bash(text, stub)
    environment, command = environment_of(read(text).words)
    assert (tuple(command), environment) == (words, variables)


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        ("cd /srv\nulimit -n 65535\nsource env.sh\n. ./more.sh\nvllm serve m",
         ("cd /srv", "ulimit -n …", "source env.sh", ". ./more.sh")),
        ("export T=$(date) U=`id`\nvllm serve m", ("T (its value is not in the file)", "U (its value is not in the file)")),
        ('[ -n "$X" ] && export A=1\nif [ x ]; then export B=2; fi\nvllm serve m',
         ("A (its value is not in the file)", "B (its value is not in the file)")),
        ("numactl --cpunodebind=0 vllm serve m", ("numactl --cpunodebind=0",)),
        ("export HF_TOKEN=$HF_TOKEN\nvllm serve m", ("HF_TOKEN (its value is not in the file)",)),
        ("env -u WEIGHTS vllm serve m", ("-u WEIGHTS",)),
        ("unset WEIGHTS\nvllm serve m", ("unset WEIGHTS",)),
        ("SOME_PASS=abc123 login --now\nvllm serve m\ncurl -H 'Authorization: Bearer abcdef123456' x",
         ("SOME_PASS=… login …", "curl -H …")),
        ("set -euo pipefail\necho hello\nvllm serve m &\nwait", ()),
    ],
)  # fmt: skip
def test_what_is_left_out_is_named_without_secrets(text: str, left_out: tuple[str, ...]) -> None:
    script = read(text)
    assert script.left_out == left_out
    assert script.words == ("vllm", "serve", "m")
    (note, *_) = script.notes("f.sh") or ("",)
    assert all(one in note for one in left_out)


def test_other_variables_are_as_known_in_a_loop_as_outside_it() -> None:
    text = "A=1\nfor i in 1 2; do sleep 1; done\nread -r -p A -t 5 B\nfor ((j=0; j<2; j++)); do :; done\nvllm serve m --a $A"
    assert read(text).words == ("vllm", "serve", "m", "--a", "1")


def test_what_this_shell_fills_in_is_named() -> None:
    script = read('export X="$HOME/x"\nvllm serve $WEIGHTS/m')
    assert script.words == ("X=/home/me/x", "vllm", "serve", "/data/w/m")
    assert script.notes("f.sh") == ("f.sh: $HOME, $WEIGHTS: as set in this shell",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm serve $(cat model)", r"holds \$\(cat model\), whose value is not in the file"),
        ("vllm serve m --port $1", r"holds \$1"),
        ("vllm serve m --port ${PORT%x}", r"holds \$\{PORT%x\}"),
        ('vllm serve m --x "$NOBODY"', r"holds \$NOBODY"),
        ("if x; then M=a; fi\nvllm serve $M", r"holds \$M"),
        ("for M in a b; do vllm serve $M; done", r"holds \$M"),
        ("M=a\nfor M in c d; do vllm serve $M; done", r"holds \$M"),
        ("M=a; select M in c d; do vllm serve $M; done", r"holds \$M"),
        ("N=64; read N; vllm serve m --max-num-seqs $N", r"holds \$N"),
        ("N=64\nwhile IFS=, read -r M N; do vllm serve m --n $N; done < f", r"holds \$N"),
        ("read -rp 'which one? ' WEIGHTS\nvllm serve $WEIGHTS", r"holds \$WEIGHTS"),
        ("read; vllm serve $REPLY", r"holds \$REPLY"),
        ("vllm serve m --api-key $VLLM_API_KEY", "api_key as a value"),
        ("vllm serve m --hf-token=$HF_TOKEN", "hf_token as a value"),
        ("echo hello vllm", "holds 0 'vllm serve' commands"),
        ("vllm serve m\nvllm serve n", "holds 2 'vllm serve' commands"),
        ("vllm serve m --a 'x", "No closing for the ' on line 1"),
        ('A=1\nvllm serve m --a "x', 'No closing for the " on line 2'),
        ("vllm serve m --a ${X", "No closing for the"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_why(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read(text)
    assert caught.value.hint


@pytest.mark.parametrize(("name", "text"), [("run.yaml", "model: m\ndate: 2001-99-99\n"), ("x", "date: 2001-99-99\n# vllm\n")])
def test_a_date_that_there_is_not_is_an_error_in_words(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match="month must be"):
        file_command(tmp_path / name, "--from")
    with pytest.raises(UsageError, match="month must be"):
        with_config_file(parse_command(f"vllm serve m --config {tmp_path / name}", SCHEMA), SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "export HF_TOKEN=hf_abc\nvllm serve m",
        "LMCACHE_REMOTE_PASS=geheim1\nexport LMCACHE_REMOTE_PASS\nvllm serve m",
        "T=abcdef; export HF_TOKEN=$T; vllm serve m",
        "export REDIS_URL=redis://:geheim1@h:1\nvllm serve m",
        "docker run -e HF_TOKEN=abcdef vllm/vllm-openai --model m",
    ],
)
def test_a_secret_in_a_script_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError, match="secret") as caught:
        parse_command(read(text).words, SCHEMA)
    assert not [one for one in ("hf_abc", "geheim1", "abcdef") if one in str(caught.value) + str(caught.value.hint)]


def test_a_container_gets_what_is_passed_to_it_and_no_more() -> None:
    text = """export VLLM_A=1 VLLM_B=2
docker run --gpus all -v $PWD:/x -v $(pwd):/y --env-file prod.env -e VLLM_A -e HF_TOKEN=$HF_TOKEN -e C="x y" \\
  vllm/vllm-openai:v0.33.0 --model m --max-num-seqs 64
"""
    script = read(text)
    command = parse_command(script.words, SCHEMA)
    assert (command.model, dict(command.config)) == ("m", {"max_num_seqs": 64})
    assert command.environment == {"VLLM_A": "1", "C": "x y"}
    assert "--env-file" in script.left_out
    assert "HF_TOKEN (its value is not in the file)" in script.left_out


text_values = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)
json_values = st.recursive(st.booleans() | st.integers() | text_values, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
configs = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.integers(1, 4096),
        "gpu_memory_utilization": st.floats(0.1, 1.0),
        "enable_prefix_caching": st.booleans(),
        "compilation_config": st.dictionaries(text_values, json_values, max_size=3),
        "tokenizer": text_values.filter(lambda value: value not in ("", "None")),
        "cudagraph_capture_sizes": st.lists(st.integers(1, 512), min_size=1, max_size=4),
        "speculative_config": st.just({"method": "ngram", "num_speculative_tokens": 4}),
    },
)
front_ends = st.lists(
    st.sampled_from(
        [("--port", "8001"), ("--chat-template", "{{ 'a' }}\n$x `y`"), ("--host", "0.0.0.0"), ("--middleware", "a.b")]
    ),
    unique=True,
    max_size=3,
)
variables = st.dictionaries(
    st.sampled_from(["VLLM_USE_V2_MODEL_RUNNER", "LMCACHE_CHUNK", "NCCL_DEBUG", "MY_OWN"]), text_values, max_size=3
)
models = text_values.filter(lambda model: model.strip() == model != "" and not model.startswith("-"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models, configs, front_ends, variables)
def test_an_exported_script_is_the_same_baseline_again(
    model: str, config: dict[str, Any], front_end: list[tuple[str, str]], environment: dict[str, str]
) -> None:
    argv = to_argv(model, EngineConfig(config), [word for pair in front_end for word in pair], SCHEMA)
    made = sample_study.study()
    assert made.recommendation is not None
    setup = {**made.setup, "environment": {**made.setup["environment"], "variables": environment}}
    made = replace(made, recommendation=replace(made.recommendation, argv=argv), setup=setup)
    before, after = parse_command(bound_argv(argv), SCHEMA), parse_command(read(export(made, "shell"), {}).words, SCHEMA)
    assert (after.model, after.config, after.front_end) == (before.model, before.config, before.front_end)
    assert after.environment == environment


@settings(max_examples=60, deadline=None)
@given(st.text("ab =\n\\'\"$`{}()[]#;&|<>@~:-+?!1", max_size=24))
def test_no_text_at_all_is_a_fault(text: str) -> None:
    """Whatever stands in a file, it is read or refused in a sentence."""
    try:
        script = read(f"{text}\nvllm serve m\n")
    except UsageError:
        return
    assert "vllm" in script.words


def test_vllms_yaml_and_what_names_vllm_in_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(export(sample_study.study(), "yaml"))
    assert "# Use it with: vllm serve" in path.read_text()
    command = parse_command(file_command(path).command, SCHEMA)
    assert (command.model, dict(command.config)) == (sample_study.MODEL, dict(sample_study.LITE))


@pytest.mark.parametrize(("form", "what"), [("docker", "a compose file"), ("k8s", "a Kubernetes manifest")])
def test_files_of_other_tools_are_refused_by_name(form: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(export(sample_study.study(), form))
    with pytest.raises(UsageError, match=what) as caught:
        file_command(path)
    assert "--format shell" in str(caught.value.hint)


def test_a_configuration_file_of_the_command_is_part_of_it(tmp_path: Path) -> None:
    """vLLM puts it before the command's own words, which win."""
    path = tmp_path / "c.yaml"
    path.write_text("model: org/m\nmax-num-seqs: 8\nmax-model-len: 4096\nport: 80\n")
    command = with_config_file(parse_command(f"vllm serve --config {path} --max-num-seqs 9 --port 81", SCHEMA), SCHEMA)
    assert command.model == "org/m"
    assert dict(command.config) == {"max_num_seqs": 9, "max_model_len": 4096}
    assert command.front_end == ("--port", "81")
    with pytest.raises(UsageError, match=r"--config .*absent"):
        with_config_file(parse_command("vllm serve m --config absent.yaml", SCHEMA), SCHEMA)
