"""Launch commands as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from vopt.optimizer.command_reader import human_integer, parse_command
from vopt.optimizer.errors import UsageError
from vopt.search_spaces.arguments import stored_arguments

SCHEMA = stored_arguments("0.32.0")


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("-tp 2 -pp=4", {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}),
        ("-O3", {"optimization_level": 3}),
        ("-O 1", {"optimization_level": 1}),
        ("-O=0", {"optimization_level": 0}),
        ("--max_num_seqs=5", {"max_num_seqs": 5}),
        ("--max-model-len 64k", {"max_model_len": 64000}),
        ("--max-model-len 8K", {"max_model_len": 8192}),
        ("--max-model-len auto", {"max_model_len": -1}),
        ("--kv-cache-memory 1g", {"kv_cache_memory_bytes": 10**9}),
        ("--device-memory-utilization .9", {"gpu_memory_utilization": 0.9}),
        ("-cc.cudagraph_mode=FULL -cc.pass_config.fuse_norm_quant true", {
            "compilation_config": {"cudagraph_mode": "FULL", "pass_config": {"fuse_norm_quant": True}}
        }),
        ("--speculative-config.method ngram --speculative_config.num_speculative_tokens 3", {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}
        }),
        ("--kv-transfer-config.list+ a,b --kv-transfer-config.list+=c", {"kv_transfer_config": {"list": ["a", "b", "c"]}}),
        ("""--kv-transfer-config '{"bytes": 80m, "a": "80m"}'""", {"kv_transfer_config": {"bytes": 80000000, "a": "80m"}}),
        ("--tokenizer 'a;b|c>d&e' --revision a\\;b", {"tokenizer": "a;b|c>d&e", "revision": "a;b"}),
        ("--moe-backend FlashInfer-Cutlass", {"moe_backend": "flashinfer_cutlass"}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--max-num-seqs 4 --max-num-seqs 8", {"max_num_seqs": 8}),
        ("--cudagraph-capture-sizes 1 2 4 --seed 1", {"cudagraph_capture_sizes": [1, 2, 4], "seed": 1}),
        ("--served-model-name a b", {"served_model_name": ["a", "b"]}),
        ("--device-ids 0,1,GPU-x", {"device_ids": [0, 1, "GPU-x"]}),
        ("--quantization None", {"quantization": None}),
    ],
)  # fmt: skip
def test_forms_of_vllms_parser(words: str, config: dict[str, Any]) -> None:
    parsed = parse_command(f"vllm serve org/model {words}", SCHEMA)
    assert dict(parsed.config) == config
    assert parsed.model == "org/model"


@pytest.mark.parametrize(
    "head",
    [
        "vllm serve org/model",
        "vllm serve --model org/model",
        "/opt/venv/bin/vllm serve org/model",
        "python -m vllm.entrypoints.openai.api_server --model org/model",
        "python3 -m vllm.entrypoints.openai.api_server --model=org/model",
        "uv run vllm serve org/model",
        "nohup env A=1 vllm serve org/model",
        "--model org/model",
    ],
)
def test_heads_of_commands(head: str) -> None:
    parsed = parse_command(f"{head} \\\n  --max-num-seqs 8  # a comment\n", SCHEMA)
    assert parsed.model == "org/model"
    assert dict(parsed.config) == {"max_num_seqs": 8}


def test_parts_that_do_not_reach_the_engine() -> None:
    parsed = parse_command("VLLM_X='a b' vllm serve m --port 80 --middleware a --middleware b --config f.yaml &", SCHEMA)
    assert parsed.environment == {"VLLM_X": "a b"}
    assert parsed.front_end == ("--port", "80", "--middleware", "a", "--middleware", "b")
    assert parsed.config_file == "f.yaml"
    assert dict(parsed.config) == {}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "is empty"),
        ("python train.py --lr 3", "is not a `vllm serve` command"),
        ("vllm serve m --speculative-config {method:mtp}", "not valid JSON"),
        ('vllm serve m --speculative-config \'{"a": 1', "not valid shell text"),
        ("vllm serve m && rm -r /", "one `vllm serve` command alone"),
        ("vllm serve m --num-scheduler-steps 8", "has no such argument"),
        ("vllm serve m --enable-prefix-caching=True", "takes no value"),
        ("vllm serve m --enable-prefix-caching True", "belongs to no flag"),
        ("vllm serve m --max-num-seqs 1k", "takes no suffix"),
        ("vllm serve m --max-num-seqs", "wants a value"),
        ("vllm serve m --scheduling-policy lof", "takes fcfs, priority"),
        ("vllm serve m --max-num 3", "could be"),
        ("vllm serve m extra", "belongs to no flag"),
    ],
)
def test_commands_that_vllm_would_refuse(command: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_command(command, SCHEMA)


@pytest.mark.parametrize(
    "command", ["vllm serve m --api-key s3cret", "HF_TOKEN=s3cret vllm serve m", "vllm serve m --hf-token s3cret"]
)
def test_secrets_in_commands_are_refused(command: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_command(command, SCHEMA, strict=False)
    assert "s3cret" not in str(caught.value) + caught.value.hint


def test_json_beside_dotted_keys_is_dropped_as_vllm_drops_it() -> None:
    parsed = parse_command("""vllm serve m -cc '{"mode": 3}' -cc.cudagraph_mode=FULL""", SCHEMA, strict=False)
    assert dict(parsed.config) == {"compilation_config": {"cudagraph_mode": "FULL"}}
    assert parsed.problems == ("--compilation-config: dotted keys replace the JSON given beside them",)


def test_numbers_with_suffixes() -> None:
    assert [human_integer(text) for text in ("1k", "1K", "25.6k", "2M", "17")] == [1000, 1024, 25600, 2097152, 17]
    with pytest.raises(ValueError, match="invalid literal"):
        human_integer("1.5K")
