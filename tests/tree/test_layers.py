"""A module imports its own package and lower layers only; the daemon never meets torch; clients stay light."""

from __future__ import annotations

import pytest

from tests.tree.imports import imports, modules, reachable, violations


def test_the_tree_keeps_its_layers() -> None:
    assert violations(modules()) == []


def test_the_daemon_process_never_imports_torch() -> None:
    sources = modules()
    reached = reachable("pdd.daemon", sources)
    guilty = [
        str(each)
        for name in reached
        for each in imports(name, sources[name], set(sources))
        if each.imported.split(".")[0] == "torch"
    ]
    assert guilty == []


@pytest.mark.parametrize(
    ("name", "source", "why"),
    [
        ("pdd.kv.pool", "import pdd.engine.loop", "higher layer"),
        ("pdd.kv.pool", "from pdd import cli", "higher layer"),
        ("pdd.kv.pool", "def f():\n    from pdd.fabric import engine", "strangers"),
        ("pdd.control.app", "from pdd.api.app import x", "strangers"),
        ("pdd.model.llama", "from pdd.kv.pool import PagePool", "only pdd.kv.layout"),
        ("pdd.messenger.decoder", "from pdd.engine.loop import EngineLoop", "only pdd.engine.batch"),
        ("pdd.engine.loop", "import torch", "torch belongs"),
        ("pdd.daemon.node", "import torch.cuda", "torch belongs"),
        ("pdd.tui.app", "import httpx", "too heavy"),
        ("pdd.control.client", "from starlette.requests import Request", "too heavy"),
        ("pdd.kv.pool", "from . import layout", "relative"),
        ("pdd.attic", "", "in no layer"),
    ],
)
def test_a_violation_is_seen(name: str, source: str, why: str) -> None:
    others = dict.fromkeys(("pdd", "pdd.engine.loop", "pdd.kv.pool", "pdd.fabric.engine", "pdd.cli"), "")
    found = violations({**others, name: source})
    assert len(found) == 1
    assert why in found[0]


def test_what_is_allowed_is_not_a_violation() -> None:
    sources = {
        "pdd.model.llama": "import torch\nfrom pdd.kv.layout import KvLayout\nfrom pdd.model.layers import x",
        "pdd.engine.worker": "import torch",
        "pdd.messenger.decoder": "from pdd.engine.request import KvOutcome\nfrom pdd.errors import PeerError",
        "pdd.cli": "from pdd.commands.common import Globals\nfrom pdd.daemon.main import run",
        "pdd.control.app": "import starlette\nfrom pdd import metrics",
    }
    assert violations(sources) == []


def test_torch_behind_the_daemon_is_seen() -> None:
    sources = {
        "pdd.daemon.main": "from pdd.engine import executor",
        "pdd.engine": "",
        "pdd.engine.executor": "def f():\n    import pdd.engine.worker",
        "pdd.engine.worker": "import torch",
    }
    assert "pdd.engine.worker" in reachable("pdd.daemon", sources)
