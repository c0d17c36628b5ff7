"""Which libfabric and provider carry the KV: any pairing of the supported versions works, and nothing less than asked is used."""

from __future__ import annotations

import pathlib
import subprocess
import urllib.request

import pytest

from pdd.fabric import _native
from tests.cluster import Node
from tests.e2e.conftest import complete, model_name, post, prompt_of, way_sets

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


def test_two_nodes_of_one_host_need_no_network_unless_one_of_them_says_so(tiny_model, run_dir: pathlib.Path) -> None:
    """As they are by default: local. One that is told not to, or that must use a provider, takes the network."""
    p0 = Node("p0", "prefill", tiny_model, run_dir, sets=[*SETS, *way_sets("local")])
    ways = {"d0": (way_sets("local"), "local"), "d1": (way_sets("tcp"), "tcp"),
            "d2": ([*way_sets("local"), "fabric.require=tcp"], "tcp")}
    nodes = {"p0": p0, "b0": Node("b0", "both", tiny_model, run_dir, sets=SETS)}
    for name, (way, _) in ways.items():
        nodes[name] = Node(name, "decode", tiny_model, run_dir, peers=[p0.peer_address], sets=[*SETS, *way])
    try:
        for node in nodes.values():
            node.start()
        nodes["b0"].wait_ready()
        for name, (_, via) in ways.items():
            d = nodes[name]
            assert d.wait("its peer", lambda s: s["peers"] and s["peers"][0]["state"] == "up")["peers"][0]["via"] == via
            d.wait_ready()
            body = {"model": model_name(d.url), "prompt": prompt_of(100), "max_tokens": 8, "temperature": 0}
            answer = post(f"{d.url}/v1/completions", body)
            assert answer["choices"][0]["text"] == complete(nodes["b0"].url, prompt_of(100)).text
            [transfer] = d.control("/v1/transfers")["transfers"]
            assert (transfer["direction"], transfer["via"], transfer["units"] > 0) == ("in", via, True)
            assert (transfer["nic"] is None) == (via == "local")
            with urllib.request.urlopen(f"{d.url}/metrics", timeout=10) as metrics:
                assert f'pdd_kv_transfer_seconds_count{{direction="in",via="{via}"}} 1.0' in metrics.read().decode()
            assert d.control(f"/v1/requests/{answer['id']}")["transfer"]["via"] == via
            assert f"KV over {via}" in d.log
        flows = {row["peer"]: row["via"] for row in p0.control("/v1/transfers")["transfers"]}
        assert flows == {name: via for name, (_, via) in ways.items()}
        assert "memory to peers on this host" in p0.log
    finally:
        for node in nodes.values():
            node.kill()


@pytest.mark.parametrize(("setting", "code", "words"), [
    ("fabric.require=efa", 69, ["efa", "not the required"]),
    ("fabric.library=/nowhere/libfabric.so.1", 78, ["fabric.library", "/nowhere/libfabric.so.1"]),
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
