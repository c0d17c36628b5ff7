"""Files are one concept each: a docstring, a bounded length, no code in `__init__`, nothing that hides a failure."""

from __future__ import annotations

import ast
import re
import statistics
import tomllib
from pathlib import Path

import pytest

from pdd.version import VERSION
from tests.tree.imports import ROOT, modules

MAX_LINES = 600
MAX_MEDIAN_LINES = 150  # a file is one concept; what grows past 400 is worth a second look
PYTHON = sorted([*(ROOT / "pdd").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])


def test_init_files_are_empty() -> None:
    assert [str(path) for path in (ROOT / "pdd").rglob("__init__.py") if path.read_text()] == []


def test_most_modules_are_short() -> None:
    lengths = [len(source.splitlines()) for source in modules().values() if source]
    assert statistics.median(lengths) <= MAX_MEDIAN_LINES


def test_every_module_says_what_it_is() -> None:
    missing = [name for name, source in modules().items() if source and not ast.get_docstring(ast.parse(source))]
    assert missing == []


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_LINES
    assert problems(tree) == []
    assert re.search(r"#\s*(TODO|FIXME|XXX)\b", text) is None


def problems(tree: ast.AST) -> list[str]:
    """Swallowed failures, code from data, pickles."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            if broad and all(isinstance(step, ast.Pass) for step in node.body):
                found.append(f"line {node.lineno}: a failure is swallowed")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            found.append(f"line {node.lineno}: {node.func.id}")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if "pickle" in {name.split(".")[0] for name in names}:
                found.append(f"line {node.lineno}: pickle")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    x\nexcept Exception:\n    pass",
        "try:\n    x\nexcept:\n    pass",
        "eval('1')",
        "import pickle",
        "from pickle import loads",
    ],
)
def test_a_problem_is_seen(source: str) -> None:
    assert len(problems(ast.parse(source))) == 1


def test_one_version() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION
