"""What is refused as a secret, what is not, and that nothing which was let in is taken out later."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.optimizer.errors import UsageError
from vopt.optimizer.report.redaction import clean, clean_argv
from vopt.optimizer.secrecy import (
    REMOVED,
    clean_text,
    holds_secret,
    known_secrets,
    refuse_known,
    refuse_secret,
    refuse_words,
    secret_shape,
)

WORD = "geheim" + "nis0815"

REFUSED = [
    ("env:LMCACHE_REMOTE_PASS", WORD),
    ("env:REDIS_PASSWD", WORD),
    ("env:DB_PWD", WORD),
    ("env:KEY_PASSPHRASE", WORD),
    ("env:AZURE_CREDENTIALS", WORD),
    ("env:PROXY_AUTH", f"me:{WORD}"),
    ("env:BLOB_SAS", WORD),
    ("env:AZURE_STORAGE_KEY", WORD),
    ("env:AWS_SECRET_ACCESS_KEY", WORD),
    ("env:GITHUB_PAT", WORD),
    ("env:HF_TOKEN", "x"),
    ("env:REDIS_URL", f"redis://:{WORD}@host:6379/0"),
    ("env:ANY", f"see https://me:{WORD}@host/x"),
    ("env:ANY", f"https://{WORD * 2}@sentry.example/4"),
    ("env:OTEL_EXPORTER_OTLP_HEADERS", f"Authorization=Basic {WORD}"),
    ("env:OTEL_EXPORTER_OTLP_HEADERS", f"x-api-key={WORD}"),
    ("env:URL", f"https://blob/x?sv=2024&sig={WORD}"),
    ("env:URL", f"https://s3/x?X-Amz-Signature={WORD}"),
    ("otlp_traces_endpoint", f"https://collector/x?api_key={WORD}"),
    ("--otlp-traces-endpoint", f"https://me:{WORD}@collector"),
    ("kv_transfer_config", {"kv_connector_extra_config": {"redisPassword": WORD}}),
    ("kv_transfer_config", f'{{"extra": [{{"url": "redis://u:{WORD}@h"}}]}}'),
    ("kv-transfer-config.extra.remote_pass", WORD),
    ("hf_overrides", {"api_keys": [WORD]}),
    ("tokenizer", "hf_" + "a1B2" * 6),
    ("served_model_name", ["m", "ghp_" + "a1B2" * 6]),
    ("middleware", "-----BEGIN PRIVATE KEY-----\nabc"),
    ("api_key", "x"),
]

TAKEN: list[tuple[str, Any]] = [
    ("env:VLLM_FUSION_PASSES", "rmsnorm,quant"),
    ("env:VLLM_FUSION_PASS", "1"),
    ("env:LMCACHE_BYPASS", "lustre-direct"),
    ("env:VLLM_TOKENIZER", "some-tokenizer"),
    ("env:PWD", "/srv/app"),
    ("env:VLLM_AUTH", "kerberos"),
    ("env:SSL_KEY", "/etc/tls/key.pem"),
    ("env:GOOGLE_APPLICATION_CREDENTIALS", "/etc/gcp.json"),
    ("env:MAX_TOKEN", "131072"),
    ("env:CACHE_KEY", "model-a-b-c"),
    ("env:VLLM_COMPASS", "north-by-northwest"),
    ("env:HTTPS_PROXY", "http://proxy.example:3128"),
    ("env:DSN", "postgres://db.example/metrics"),
    ("max_num_batched_tokens", 8192),
    ("tokenizer", "org/tokenizer-large"),
    ("allow_credentials", True),
    ("hf_token", True),
    ("hf_overrides", {"pad_token": "<|endoftext|>", "eos_token": "</s>", "max_token": 131072, "keys": ["a.b.c.d"]}),
    ("override_generation_config", '{"max_new_tokens": 131072, "stop_token": "<|im_end|>"}'),
    ("ssl_keyfile", "/etc/tls/key.pem"),
    ("otlp_traces_endpoint", "http://collector.example:4317/v1?tenant=production"),
    ("kv_transfer_config", {"remote_url": "redis://host:6379", "key": "layer.name", "token_curve": "x"}),
    ("chat_template", "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"),
    ("model", "git@github.com:org/model"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda part: str(part)[:40].replace(WORD, "…"))
def test_a_secret_is_refused_with_what_to_type_and_not_repeated(name: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_secret(name, value)
    said = f"{caught.value} {caught.value.hint}"
    assert WORD not in said
    assert caught.value.hint
    assert name.removeprefix("env:").lstrip("-").replace("-", "_") in said.replace("-", "_")


@pytest.mark.parametrize(("name", "value"), TAKEN, ids=lambda part: str(part)[:40])
def test_what_only_looks_like_one_is_taken_and_stays_as_it_is(name: str, value: Any) -> None:
    refuse_secret(name, value)
    assert clean({name: value}) == {name: value}
    if not isinstance(value, bool):
        argv = ["vllm", "serve", "m", f"--{name.removeprefix('env:').replace('_', '-')}", str(value)]
        assert clean_argv(argv) == argv


def test_a_switch_that_is_named_like_a_secret_stays_in_the_command() -> None:
    argv = ["vllm", "serve", "m", "--allow-credentials", "--trust-remote-code", "--hf-token"]
    assert clean_argv(argv) == argv


names = st.sampled_from(
    [name for name, _ in (*REFUSED, *TAKEN)] + ["a_pass", "auth", "theKey", "x-token", "secret", "note", "env:N"]
)
parts = st.sampled_from(
    [
        *("redis://", "u:", "p4ssw0rd", "@", "h", "/", "?", "&", "=", "api_key", "sig", "token", ": ", "Bearer "),
        *("hf_" + "a" * 20, " ", "authorization", "1", "<|x|>", "'", '"', "{", "}", ",", "eyJ" + "a" * 12, ".", "b" * 12),
        *("password", "None", "$X"),
    ]
)
texts = st.lists(parts, max_size=9).map("".join)
values = st.recursive(
    texts | st.integers() | st.none(), lambda v: st.lists(v, max_size=2) | st.dictionaries(names, v, max_size=2)
)


@given(names, values)
def test_what_is_let_in_is_never_taken_out_again(name: str, value: Any) -> None:
    try:
        refuse_secret(name, value)
    except UsageError:
        return
    assert clean({name: value}) == {name: value}


@given(texts)
def test_cleaning_twice_is_cleaning_once(text: str) -> None:
    once = clean_text(text)
    assert clean_text(once) == once


def test_words_of_flags_that_nobody_knows_are_looked_at_too() -> None:
    for words in (["m", "--new-password", WORD], ["m", f"--new-password={WORD}"], [f"https://me:{WORD}@h/m"]):
        with pytest.raises(UsageError) as caught:
            refuse_words(words)
        assert WORD not in str(caught.value)
    refuse_words(["m", "--max-num-seqs", "8", "--trust-remote-code", "--seed", "-1"])


def test_a_placeholder_is_no_value() -> None:
    with pytest.raises(UsageError, match="not the command that was measured"):
        refuse_words(["m", "--otlp-traces-endpoint", f"https://{REMOVED}@h"])


def test_the_value_of_a_secret_variable_of_this_shell_is_refused_by_its_name() -> None:
    environment = {"MY_WEBHOOK_SECRET": "plain words", "EDITOR": "plain", "X_AUTH": "none"}
    assert known_secrets(environment) == ("plain words",)
    with pytest.raises(UsageError, match="MY_WEBHOOK_SECRET"):
        refuse_known(["m", "a plain words b"], environment)
    refuse_known(["plain", "none"], environment)


def test_a_number_is_a_password_and_no_count_of_tokens_is() -> None:
    assert holds_secret("DB_PASSWORD", 12345678)
    assert not holds_secret("max_token", 12345678)


@pytest.mark.parametrize("count", ["12345678", "1.0000000000000002e+16", "1e-123456", "-2.5E7", "100000.5", "131072k"])
def test_a_count_is_none_in_whatever_form_it_is_written(count: str) -> None:
    assert secret_shape(f'{{"max_token":{count}}}') is None
    assert secret_shape(f'{{"password":{count}}}') is not None
