"""Every setting is read somewhere, as config.<section>.<key>: a setting that nothing reads is a promise to nobody."""

from __future__ import annotations

import ast

from pdd import config
from tests.tree.imports import modules

_NOT_READERS = ("pdd.config", "pdd.config_load", "pdd.config_sources")  # they check settings; that is no use of one


def keys_read(source: str) -> set[str]:
    """Each `section.key` that the source reads: as attributes, through a name for a section, or by `configured`."""
    tree = ast.parse(source)
    sections = set(config.sections())
    names = {section: {section} for section in sections}  # section → names that stand for it
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target, value in _pairs(node):
                if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and value.attr in sections:
                    names[value.attr].add(target.id)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Attribute) and owner.attr in sections:
                found.add(f"{owner.attr}.{node.attr}")
            elif isinstance(owner, ast.Name):
                found.update(f"{section}.{node.attr}" for section, known in names.items() if owner.id in known)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "configured":
            found.update(word.value for word in node.args if isinstance(word, ast.Constant))
    return found


def _pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        return list(zip(target.elts, node.value.elts, strict=True))
    return [(target, node.value)]


def test_every_setting_is_read_by_code() -> None:
    read: set[str] = set()
    for name, source in modules().items():
        if name not in _NOT_READERS:
            read |= keys_read(source)
    assert set(config.all_fields()) - read == set()


def test_what_counts_as_reading() -> None:
    assert "kv.page_size" in keys_read("x = self.config.kv.page_size")
    assert "fabric.idle" in keys_read("a, wanted = b, config.fabric\nf(wanted.idle)")
    assert "top.theme" in keys_read("configured(options.config, 'top.theme')")
    assert keys_read("'kv.page_size'  # config.kv.page_size\nraise E(f'fabric.idle = {x}')") == set()
