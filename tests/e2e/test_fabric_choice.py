"""Which libfabric and provider carry the KV: any pairing of the supported versions works, and nothing less than asked is used."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from pdd.fabric import _native
from tests.cluster import Node
from tests.e2e.conftest import complete, prompt_of

SETS = ["kv.num_pages=96", "engine.threads=1", "model.dtype=float32"]


def libraries() -> dict[str, str]:
    """One loadable libfabric per version family: 1.x and 2.x."""
    found = {}
    for candidate in _native.library()["candidates"]:
        if candidate["version"]:
            found[candidate["version"].split(".")[0]] = candidate["path"]
    return found


def test_the_oldest_and_the_newest_library_serve_together(tiny_model, run_dir: pathlib.Path) -> None:
    paths = libraries()
    if len(paths) < 2:
        pytest.skip(f"one libfabric only: {paths}")
    p0 = Node("p0", "prefill", tiny_model, run_dir, sets=[*SETS, f"fabric.library={paths['1']}"])
    d0 = Node("d0", "decode", tiny_model, run_dir, peers=[p0.peer_address], sets=[*SETS, f"fabric.library={paths['2']}"])
    b0 = Node("b0", "both", tiny_model, run_dir, sets=SETS)
    nodes = [p0, d0, b0]
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_ready()
        assert [n.status()["fabric"]["library_version"].split(".")[0] for n in (p0, d0)] == ["1", "2"]
        for n in (17, 48, 100):
            assert complete(d0.url, prompt_of(n, n)) == complete(b0.url, prompt_of(n, n))
    finally:
        for node in nodes:
            node.kill()


@pytest.mark.parametrize(("setting", "code", "words"), [
    ("fabric.require=efa", 69, ["efa", "not the required"]),
    ("fabric.library=/nowhere/libfabric.so.1", 69, ["/nowhere/libfabric.so.1"]),
    ("fabric.provider=sockets", 78, ["sockets", "starves"]),
    ("fabric.provider=shm", 78, ["shm", "tcp"]),
])
def test_what_cannot_be_had_is_told_and_nothing_else_is_used(tiny_model, run_dir: pathlib.Path, setting: str, code: int,
                                                            words: list[str]) -> None:
    node = Node("p0", "prefill", tiny_model, run_dir, sets=[*SETS, setting])
    result = subprocess.run(node.argv, capture_output=True, text=True, timeout=60)
    assert result.returncode == code, result.stderr
    assert all(word in result.stderr for word in words), result.stderr


def test_a_name_to_listen_on_is_resolved_for_the_fabric(tiny_model, run_dir: pathlib.Path) -> None:
    node = Node("p0", "prefill", tiny_model, run_dir, sets=[*SETS])
    node.argv[node.argv.index("--peer-listen") + 1] = f"localhost:{node.peer_port}"
    try:
        assert node.start().wait_ready()["fabric"]["provider"] == "tcp"
    finally:
        node.kill()
