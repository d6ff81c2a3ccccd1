"""Each third-party package has the importers that the design names, and no others."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("objectives", "search_spaces", "optimizer")

IMPORTERS = {
    "aiohttp": {"optimizer/load/client.py"},
    "bottle": {"optimizer/dashboard_guard.py"},
    "huggingface_hub": {"optimizer/hub.py"},
    "optuna": {
        "optimizer/study.py",
        "optimizer/storage.py",
        "optimizer/samplers.py",
        "optimizer/dashboard.py",
        "optimizer/dashboard_storage.py",
    },
    "optuna_dashboard": {"optimizer/dashboard.py"},
    "plotly": {"optimizer/report/page.py"},
    "pynvml": {"optimizer/gpus.py"},
    "rich": {"optimizer/report/console.py"},
    "sqlalchemy": {
        "optimizer/dashboard.py",
        "optimizer/dashboard_storage.py",
        "optimizer/storage.py",
        "optimizer/study.py",
    },
    "cloudpickle": {"optimizer/engine/core_start.py"},
    "tokenizers": {"optimizer/load/text.py"},
    "triton": {"optimizer/engine/kernel_tuning.py"},
    "typer": {"optimizer/cli.py", "optimizer/options.py", "optimizer/shared_options.py"},
    "vllm": {"optimizer/engine/vllm.py", "optimizer/engine/trial_process.py", "optimizer/engine/arguments_probe.py"},
    "yaml": {"optimizer/report/deploy.py"},
}
ANYWHERE = {"numpy", "scipy", "vopt"}


def imported_by(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                found |= {name.name.partition(".")[0] for name in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.partition(".")[0])
    return found


def test_third_party_packages_are_imported_where_they_belong() -> None:
    importers: dict[str, set[str]] = defaultdict(set)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for package in imported_by(path) - set(sys.stdlib_module_names) - ANYWHERE:
                importers[package].add(str(path.relative_to(ROOT)))
    strangers = {name: where - IMPORTERS.get(name, set()) for name, where in importers.items()}
    assert {name: where for name, where in strangers.items() if where} == {}


def module_of(path: Path) -> str:
    return ".".join(("vopt", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def names_taken(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of all that a module takes from others: imported by name, or as an attribute of an imported module."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.module, alias.name
        elif isinstance(node, ast.Import):
            modules |= {alias.asname: alias.name for alias in node.names if alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def names_given(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """What a module defines at its top, but for what a decorator registers elsewhere."""
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if not node.decorator_list:
                yield node.name, node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node


def test_nothing_is_there_that_only_tests_use() -> None:
    """Of functions, plain classes and constants. What no command needs is a promise that nobody keeps."""
    trees = {path: ast.parse(path.read_text("utf-8")) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    trees[ROOT / "docs" / "generate.py"] = ast.parse((ROOT / "docs" / "generate.py").read_text("utf-8"))
    taken = {pair for tree in trees.values() for pair in names_taken(tree)}
    idle = []
    for path, tree in trees.items():
        loaded = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        for name, at in names_given(tree):
            inside = range(at.lineno, (at.end_lineno or at.lineno) + 1)
            used = (module_of(path), name) in taken or any(n.id == name and n.lineno not in inside for n in loaded)
            if not used and not name.startswith("__"):
                idle.append(f"{path.relative_to(ROOT)}: {name}")
    assert idle == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    empty = {"utils", "helpers", "common", "manager", "handler", "misc", "base_utils"}
    assert [str(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.stem in empty] == []


EXPECTED_ERRORS = ("UsageError", "SearchSpaceError", "EnvironmentLacks", "NothingFeasible", "GateFailed")


def test_every_expected_error_says_what_to_type_next() -> None:
    bare = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted((ROOT / "optimizer").rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in EXPECTED_ERRORS
        if not any(keyword.arg == "hint" for keyword in call.keywords)
    ]
    assert bare == []
