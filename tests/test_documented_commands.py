"""Every command in README and docs can be typed: `vopt` lines run on a simulated engine, `make` targets exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from vopt.optimizer.cli import app, verbs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "reference" / "cli.md"})
"""The reference of the command line is generated from it."""

MODEL = "Qwen/Qwen3-8B"
MEANT = {"M": MODEL, "MODEL": MODEL, "STUDY": "documented", "N": "0", "NAME": "max_num_seqs", "Qwen/Qwen3.5-9B": MODEL}
SHORT = ("--simulate", "h200", "--window", "1s", "--concurrency", "8")
SHORT_SEARCH = ("--trials", "2", "--rounds", "0", "--soak", "0", "--no-guard", "--quiet")
PARSED_ALONE = ("dashboard", "clean", "workload", "doctor")
"""What serves until it is ended, removes caches of this machine, watches a server, or imports the vLLM that is here."""
ENDS = re.compile(r"\s(?:>|\|\||\||&&)\s.*")


def code_lines(text: str) -> Iterator[str]:
    """Indented and fenced lines, and what stands between backticks in the text."""
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line.strip()
        else:
            yield from (code.replace("\\|", "|") for code in re.findall(r"`([^`]+)`", line))


def documented() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for line in code_lines(page.read_text("utf-8")):
            if line.startswith("vopt ") and line.split()[1] in verbs():
                yield f"{page.relative_to(ROOT)}: {line}", line


COMMANDS = dict(documented())


def words_of(line: str) -> list[str]:
    """What is typed, with real names where the page has placeholders."""
    words = shlex.split(ENDS.sub("", line), comments=True)[1:]
    words = [re.sub(r"\bvllm serve M\b", f"vllm serve {MODEL}", MEANT.get(word, word)) for word in words]
    kept = [word for before, word in zip(["", *words], words, strict=False) if word != "…" or before.startswith("--")]
    return [word.replace(" …", "").replace("…", f"vllm serve {MODEL}") for word in kept]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a study and the files that the pages name."""
    folder = tmp_path_factory.mktemp("documented")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = ["search", "--goal", "throughput", *SHORT, *SHORT_SEARCH, "--study", "documented", "--trials", "5"]
        done = CliRunner().invoke(app, [*words, "--", "vllm", "serve", MODEL, "--max-num-seqs", "4"])
        assert done.exit_code == 0, done.output
        for name in ("serve.sh", "launch.sh", "c.sh"):
            Path(name).write_text(done.stdout)
        rows = ({"prompt_tokens": 100 + i, "output_tokens": 20} for i in range(64))
        Path("my-log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        page = (ROOT / "docs" / "how-to" / "write-a-search-space.md").read_text("utf-8")
        Path("my-space.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    return folder


def typed(words: list[str]) -> list[str]:
    """With a short load on a simulated engine, where one would be started."""
    verb, *rest = words
    if verb in ("search", "bench") and "--study" not in rest:
        given = set(rest[: rest.index("--")] if "--" in rest else rest)
        pairs = list(zip(SHORT[::2], SHORT[1::2], strict=True))
        if "--rate" in given:
            pairs = [pair for pair in pairs if pair[0] != "--concurrency"]
        more = [word for pair in pairs if pair[0] not in given for word in pair]
        missing = [] if {"--model", "--from", "--", "--url"} & set(rest) else ["--model", MODEL]
        goal = [] if verb == "bench" or "--goal" in given else ["--goal", "throughput"]
        return [verb, *more, *missing, *goal, *(SHORT_SEARCH if verb == "search" else ()), *rest]
    if verb == "space" and "--simulate" not in rest:
        return [verb, "--simulate", "h200", *([] if {"--model", "--check"} & set(rest) else ["--model", MODEL]), *rest]
    return words


def once() -> list[str]:
    """Each command of the pages by its first place."""
    first = {" ".join(words_of(line)): name for name, line in reversed(COMMANDS.items())}
    return sorted(first.values())


@pytest.mark.parametrize("name", once())
def test_a_command_of_the_pages_does_what_it_says(
    name: str, study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = words_of(COMMANDS[name])
    elsewhere = {"URL", "PATH", "/opt/vllm/bin/python"} & set(words) or words[0] in PARSED_ALONE
    if elsewhere:
        group = typer.main.get_command(app)
        with group.make_context("vopt", words, resilient_parsing=False) as context:
            verb, command, rest = group.resolve_command(context, words)  # type: ignore[attr-defined]  # a group of commands
            command.make_context(verb, list(rest), parent=context)
        return
    shutil.copytree(study, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    done = CliRunner().invoke(app, typed(words))
    fine = {"space": {0, 1, 6}, "bench": {0, 5}}.get(words[0], {0})
    assert done.exit_code in fine, done.output


def test_every_page_is_looked_at() -> None:
    assert len(COMMANDS) > 50
    assert {name.partition(":")[0] for name in COMMANDS} >= {"README.md", "docs/tutorial/first-search.md"}


def test_every_target_of_make_that_is_named_exists() -> None:
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text("utf-8")))
    pages = (*PAGES, ROOT / "CONTRIBUTING.md")
    named = {
        match for page in pages for line in code_lines(page.read_text("utf-8")) for match in re.findall(r"^make ([\w-]+)", line)
    }
    assert named
    assert named <= targets
