"""From an engine's own words to a failure kind: every entry by its sample, and logs as engines write them."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from vopt.optimizer.engine.failures import Ending, MessageRule, classify, root_cause, rules
from vopt.optimizer.engine.interpreter import probe
from vopt.optimizer.trial import Blame, FailureKind, Phase

LOGS = Path(__file__).parents[2] / "assets" / "engine_logs"
_SPEC = importlib.util.find_spec("vllm")
VLLM = Path(_SPEC.origin).parent if _SPEC is not None and _SPEC.origin is not None else None
"""The installed vLLM's folder; it is read, never imported."""
SAMPLED = ("0.32.0", "0.32.0+cpu")
"""The release whose words the samples have; others differ in some, which no pattern looks at."""


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule.kind}-{rule.sample[:40]}")
def test_each_sample_gets_its_own_kind(rule: MessageRule) -> None:
    phase = min(rule.phases, default=Phase.START)
    log = ["INFO 11-30 loading", rule.sample, "RuntimeError: Engine core initialization failed. See root cause above."]
    failed = classify(phase, Ending(1), "RuntimeError: Engine core initialization failed. See root cause above.", log)
    assert failed.kind is rule.kind
    assert bool(failed.hint) == (rule.argument is not None)
    for bounds in failed.hint.values():
        assert all(isinstance(bound, int) and bound > 0 for bound in bounds.values())


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule.kind}-{rule.sample[:40]}")
def test_each_sample_says_where_it_comes_from(rule: MessageRule) -> None:
    assert re.match(
        r"recorded: .*\d.*, .|vllm/[\w/]+\.py(?: or vllm/[\w/]+\.py)?$|torch: c10/|CUDA runtime: \w+ of \w+;", rule.source
    )


FROM_VLLM = [rule for rule in rules() if rule.source.startswith("vllm/")]


@pytest.mark.skipif(VLLM is None, reason="needs vLLM's source: make test installs it")
@pytest.mark.parametrize("rule", FROM_VLLM, ids=lambda rule: f"{rule.kind}-{rule.sample[:40]}")
def test_vllm_still_writes_what_the_table_says(rule: MessageRule) -> None:
    """A string of the named file has the pattern; in the release of the samples it becomes the sample, too, once its figures
    are filled in."""
    assert VLLM is not None
    files = [VLLM.parent / name for name in rule.source.split(" or ")]
    found = [words for file in files if file.exists() for words in strings(file)]
    filled = ["".join("7" if part is None else part for part in words) for words in found]
    assert any(rule.pattern.search(text) for text in filled), "no string of vLLM's has this pattern"
    if probe(sys.executable).vllm_version in SAMPLED:
        templates = ("".join(".*?" if part is None else re.escape(part) for part in words) for words in found)
        assert any(re.search(template, rule.sample) for template in templates), "no string of vLLM's becomes the sample"


def strings(file: Path) -> list[list[str | None]]:
    """Every string of a Python file, in pieces: literal text, and ``None`` for what is filled in."""
    found = []
    tree = ast.parse(file.read_text())
    pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        match node:
            case _ if id(node) in pieces:
                continue
            case ast.JoinedStr(values=values):
                words = [part.value if isinstance(part, ast.Constant) else None for part in values]
            case ast.Constant(value=str(text)):
                words = [text]
            case _:
                continue
        if sum(len(part) for part in words if part is not None) >= 20:
            found.append(words)
    return found


def test_every_failure_that_an_engine_words_has_an_entry() -> None:
    by_other_means = {
        FailureKind.HANG,
        FailureKind.LOW_SUCCESS,
        FailureKind.STORAGE,
        FailureKind.BAD_REQUEST,
        FailureKind.DISTURBED,
    }
    assert {rule.kind for rule in rules()} == set(FailureKind) - by_other_means


def test_the_same_words_mean_different_things_in_different_phases() -> None:
    words = ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]
    assert classify(Phase.START, Ending(1), None, words).kind is FailureKind.OOM_START
    assert classify(Phase.LOAD, Ending(1), None, words).kind is FailureKind.OOM_LOAD


@pytest.mark.parametrize("prefix", ["", "(EngineCore pid=7) "])
@pytest.mark.parametrize("words", ["ValueError: no such thing", "torch.OutOfMemoryError: CUDA out of memory."])
def test_what_a_trial_process_survived_is_no_cause(prefix: str, words: str) -> None:
    assert classify(Phase.START, Ending(1), words, []).kind is not FailureKind.ENGINE_DIED
    failed = classify(Phase.START, Ending(1), None, [f"{prefix}vopt: the model's class is inspected again: {words}"])
    assert failed.kind is FailureKind.ENGINE_DIED
    assert failed.detail == "exit status 1"


def test_the_last_cause_decides_not_an_earlier_one_that_was_survived() -> None:
    log = [
        "ERROR 11-30 10:00:00 [registry.py:1120] ImportError: cannot import name 'x'",
        "ERROR 11-30 10:00:01 [core.py:5] NotImplementedError: some kernel is not supported, falling back",
        "ERROR 11-30 10:00:09 [core.py:5] ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (600).",
    ]
    failed = classify(Phase.START, Ending(1), "RuntimeError: Engine core initialization failed.", log)
    assert failed.kind is FailureKind.MAMBA_BLOCKS
    assert failed.hint == {"max_num_seqs": {"at_most": 600}}


@pytest.mark.parametrize(
    ("phase", "ending", "exception", "kind"),
    [
        (Phase.START, Ending(0), None, FailureKind.ENGINE_DIED),
        (Phase.START, Ending(2), None, FailureKind.INVALID_CONFIG),
        (Phase.START, Ending(-9), None, FailureKind.ENGINE_DIED),
        (Phase.START, Ending(-9), "AssertionError: logged by another as it went down", FailureKind.ENGINE_DIED),
        (Phase.START, Ending(-11), None, FailureKind.ENGINE_DIED),
        (Phase.START, Ending(None), "ValueError: a rule never seen", FailureKind.INVALID_CONFIG),
        (Phase.LOAD, Ending(0), None, FailureKind.ENGINE_DIED),
        (Phase.LOAD, Ending(None), "ValueError: a rule never seen", FailureKind.ENGINE_DIED),
    ],
)
def test_without_a_known_message_the_ending_decides(
    phase: Phase, ending: Ending, exception: str | None, kind: FailureKind
) -> None:
    failed = classify(phase, ending, exception, ["INFO 11-30 all is well"])
    assert failed.kind is kind
    assert failed.detail


FATAL = "(EngineCore pid=7) ERROR 11-30 10:00:09 [core.py:5] EngineCore encountered a fatal error."


@pytest.mark.parametrize(
    ("phase", "log", "kind"),
    [
        (Phase.START, [], FailureKind.OOM_START),
        (Phase.LOAD, [], FailureKind.OOM_LOAD),
        (Phase.LOAD, [FATAL], FailureKind.OOM_LOAD),
        (Phase.START, ["OSError: [Errno 28] No space left on device"], FailureKind.DISK_FULL),
    ],
)
def test_a_silent_death_is_lack_of_memory_if_the_kernel_counted_a_kill(phase: Phase, log: list[str], kind: FailureKind) -> None:
    failed = classify(phase, Ending(-9), None, log, oom_killed=True)
    assert failed.kind is kind
    assert ("the kernel killed a process for lack of memory" in failed.detail) == (kind is not FailureKind.DISK_FULL)
    assert classify(phase, Ending(-9), None, log).kind in (FailureKind.ENGINE_DIED, FailureKind.DISK_FULL)


@pytest.mark.parametrize(
    ("name", "phase", "kind"),
    [
        ("cpu_memory_held_0.32.log", Phase.START, FailureKind.MEMORY_HELD),
    ],
)
def test_whole_logs(name: str, phase: Phase, kind: FailureKind) -> None:
    lines = (LOGS / name).read_text().splitlines()
    failed = classify(phase, Ending(1), "RuntimeError: Engine core initialization failed. See root cause above.", lines)
    assert failed.kind is kind
    assert "root cause" not in failed.detail
    assert failed.log_tail == tuple(lines[-40:])


def test_a_hang_shows_the_last_lines() -> None:
    failed = classify(Phase.START, Ending(None), None, ["one", "INFO loading shard 3 of 9", ""], hang=True)
    assert failed.kind is FailureKind.HANG
    assert "loading shard 3 of 9" in failed.detail


def test_the_root_cause_is_the_engine_cores_not_the_frontends() -> None:
    log = [
        "(EngineCore pid=7) ERROR 11-30 02:50:15 [core.py:1510] KeyError: 'layers.3'",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
    ]
    assert root_cause(log) == "KeyError: 'layers.3'"


def test_blame_follows_the_kind() -> None:
    assert FailureKind.MAMBA_BLOCKS.blame is Blame.CONFIGURATION
    assert FailureKind.MEMORY_HELD.blame is Blame.INFRASTRUCTURE
    assert FailureKind.TOO_LONG.blame is Blame.WORKLOAD
