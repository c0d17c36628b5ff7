"""The tree of errors: every class that names an id is the only one of that id, and the table finds it."""

from __future__ import annotations

import ast

from pdd import errors
from tests.tree.imports import modules


def ids(source: str) -> list[tuple[str, str]]:
    """(class, id) of each class body that sets `id`, alone or in a tuple."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        for line in node.body:
            if isinstance(line, ast.Assign):
                target = line.targets[0]
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                values = line.value.elts if isinstance(line.value, ast.Tuple) else [line.value]
                found += [(node.name, value.value) for name, value in zip(names, values, strict=False)
                          if isinstance(name, ast.Name) and name.id == "id" and isinstance(value, ast.Constant)]
    return found


def test_an_id_stands_for_one_class_and_the_table_finds_it() -> None:
    named = ids(modules()["pdd.errors"])
    assert len(named) > 30
    assert len({error_id for _, error_id in named}) == len(named)
    assert {name: error_id for name, error_id in named} == {kind.__name__: i for i, kind in errors.BY_ID.items()}


def test_a_doubled_id_is_seen() -> None:
    assert ids('class A:\n    id, retryable = "E1", True\nclass B(A):\n    id = "E1"') == [("A", "E1"), ("B", "E1")]


def test_only_the_tree_names_ids() -> None:
    """A class elsewhere goes by its parent's id: only what pdd.errors has survives a process border."""
    for name, source in modules().items():
        if name != "pdd.errors":
            assert [each for each in ids(source) if each[1].startswith("E")] == [], name
