"""A token in the environment and one in an argument appear in nothing that people read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sample_study

from vopt.optimizer.history import StudyRecord
from vopt.optimizer.recommend import Rejected
from vopt.optimizer.report import document, notes, show
from vopt.optimizer.report.blocks import plain_text
from vopt.optimizer.report.deploy import ExportFormat, export
from vopt.optimizer.report.live import Progress
from vopt.optimizer.report.page import page
from vopt.optimizer.report.redaction import clean, clean_argv, clean_text, is_secret_name, known_secrets
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.trial import EngineConfig

IN_ENVIRONMENT = "correct-horse-battery"
IN_ARGUMENT = "staple-of-the-api"
SHAPED = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWx"
SECRETS = (IN_ENVIRONMENT, IN_ARGUMENT, SHAPED)


def leaking_study(root: Path) -> StudyRecord:
    """The sample study with secrets wherever text can be."""
    made = sample_study.study()
    environment = {**made.setup["environment"], "HF_TOKEN": IN_ENVIRONMENT}
    environment["variables"] = {"VLLM_API_KEY": IN_ENVIRONMENT, "VLLM_NOTE": f"Bearer {IN_ENVIRONMENT}", "HF_TOKEN": SHAPED}
    made = replace(made, setup={**made.setup, "environment": environment})
    argv = (*sample_study.argv_of(sample_study.LITE), "--api-key", IN_ARGUMENT, f"--hf-token={SHAPED}", "--seed", "9")
    trials = []
    for trial in made.trials:
        failure = trial.failure
        if failure is not None:
            tail = (f"api_key='{IN_ARGUMENT}' token: {SHAPED}", f"HF_TOKEN={IN_ENVIRONMENT}", "the end")
            failure = replace(failure, detail=f"{failure.detail} ({IN_ENVIRONMENT} {SHAPED})", log_tail=tail)
        config = EngineConfig({**trial.config, "api_key": IN_ARGUMENT})
        trials.append(replace(trial, argv=argv, failure=failure, config=config, environment={"HF_TOKEN": IN_ENVIRONMENT}))
    answer = made.recommendation
    assert answer is not None
    rejected = tuple(Rejected(r.label, r.config, r.kind, f"{r.reason} {SHAPED}") for r in answer.rejected)
    answer = replace(answer, argv=argv, baseline_argv=argv, rejected=rejected, notes=(f"token={IN_ENVIRONMENT}",))
    return sample_study.on_disk(replace(made, trials=tuple(trials), recommendation=answer), root)


def renderings(made: StudyRecord, secrets: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    view = StudyView.of(made, secrets)
    yield "show", plain_text(show.study_blocks(view))
    yield "answer", plain_text(show.answer_blocks(view))
    yield "list", plain_text(show.list_blocks([view]))
    yield "document", json.dumps(document.study_document(view))
    yield "page", page(made, secrets=secrets)
    yield "note", notes.study_note(view)
    for trial in view.trials:
        yield f"note of {trial.label}", notes.trial_note(view, trial)
    for form in ExportFormat:
        yield form, export(made, form, secrets=secrets)
        yield f"{form} of a trial", export(made, form, "8", secrets=secrets)
    progress = Progress(secrets=secrets)
    for at, event in enumerate(sample_study.events(made)):
        progress.hear(event, float(at))
        yield "progress", str(progress.plain_line(event, float(at)))
        yield "progress", str(progress.facts(float(at)))
    yield "table", plain_text([progress.table()])


def in_fixed(made: StudyRecord) -> StudyRecord:
    return replace(made, setup={**made.setup, "fixed": {"kv_transfer_config.extra": {"password": "[removed]"}}})


def in_the_command(made: StudyRecord) -> StudyRecord:
    return replace(made, setup={**made.setup, "front_end": ["--otlp-traces-endpoint", "https://[removed]@h"]})


def in_the_answer(made: StudyRecord) -> StudyRecord:
    assert made.recommendation is not None
    argv = (*sample_study.argv_of({}), "--api-key", "abcdefgh")
    return replace(made, recommendation=replace(made.recommendation, argv=argv))


def in_a_start(made: StudyRecord) -> StudyRecord:
    first, *others = made.trials
    return replace(made, trials=(replace(first, config=EngineConfig({"env:X_PASS": "[removed]"})), *others))


def in_the_environment(made: StudyRecord) -> StudyRecord:
    environment = {**made.setup["environment"], "variables": {"VLLM_REMOTE": "redis://:[removed]@h"}}
    return replace(made, setup={**made.setup, "environment": environment})


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (in_fixed, "--kv-transfer-config: a secret was removed here"),
        (in_the_command, "--otlp-traces-endpoint: a secret was removed here"),
        (in_the_answer, "--api-key: a secret was removed here"),
        (in_a_start, "X_PASS: a secret was removed here"),
        (in_the_environment, "VLLM_REMOTE: set in the measurement, a secret, and not stored: the command needs it again"),
    ],
)
def test_what_was_taken_out_of_a_study_is_named_wherever_it_is_shown(
    lost: Callable[[StudyRecord], StudyRecord], said: str, answered: bool
) -> None:
    made = lost(sample_study.study())
    if not answered and lost is not in_the_answer:
        made = replace(made, recommendation=None)
    view = StudyView.of(made)
    shown = plain_text(show.study_blocks(view), width=1000)
    assert said in shown
    assert said in page(made)
    assert any(said in note for note in document.answer_document(view)["notes"])
    assert not StudyView.of(sample_study.study()).removed


def test_no_rendering_shows_a_secret(tmp_path: Path) -> None:
    secrets = known_secrets({"HF_TOKEN": IN_ENVIRONMENT, "MY_API_KEY": IN_ARGUMENT, "PATH": "/usr/bin"})
    assert "/usr/bin" not in secrets
    shown = list(renderings(leaking_study(tmp_path), secrets))
    assert len(shown) > 40
    assert [(name, secret) for name, text in shown for secret in SECRETS if secret in text] == []


def test_names_and_shapes_are_enough_where_the_environment_is_another_one(tmp_path: Path) -> None:
    """A page made tomorrow in another shell knows no values: option names and token shapes have to do."""
    shown = list(renderings(leaking_study(tmp_path), ()))
    assert [(name, secret) for name, text in shown for secret in (IN_ARGUMENT, SHAPED) if secret in text] == []


@pytest.mark.parametrize("name", ["HF_TOKEN", "--api-key", "api_key", "AWS_SECRET_ACCESS_KEY", "hf-token", "DB_PASSWORD"])
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["tokenizer", "max_num_batched_tokens", "num_speculative_tokens", "token_curve", "monkey", "tokens"]
)
def test_names_that_only_look_like_it(name: str) -> None:
    assert not is_secret_name(name)


def test_a_secret_option_is_left_out_with_its_value_and_nothing_else() -> None:
    argv = ["vllm", "serve", "m", "--api-key", "abcdef", "ghijkl", "--max-num-seqs", "8", "--hf-token=xyzxyz", "-tp", "2"]
    assert clean_argv(argv) == ["vllm", "serve", "m", "--max-num-seqs", "8"]


def test_harmless_text_is_left_as_it_is() -> None:
    made = sample_study.study()
    record = json.loads(json.dumps(made.trials[4].to_json()))
    assert clean(record) == record
    text = "max_num_batched_tokens=16384 tokenizer=auto https://host:8000/path key: value"
    assert clean_text(text) == text
