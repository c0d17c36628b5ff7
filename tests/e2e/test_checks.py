"""Checks against real nodes: a serving prefiller is called at, its decoder pings and compares, a bench end is written from."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.cluster import PDD, Node, cluster, die_with_parent, free_port

SETS = ["kv.num_pages=64", "engine.threads=1", "model.dtype=float32"]


def pdd(node: Node, *words: str) -> tuple[int, Any]:
    command = [*PDD, "--run-dir", str(node.run_dir), "-i", node.name, "--json", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, json.loads(result.stdout or result.stderr)


def levels(document: Any) -> dict[str, str]:
    return {row["id"]: row["level"] for row in document["checks"]}


def test_a_pair_is_called_at_pinged_and_compared(tiny_model: pathlib.Path, run_dir: pathlib.Path) -> None:
    with cluster(run_dir, tiny_model, sets=SETS) as nodes:
        p0, d0 = nodes["p0"], nodes["d0"]
        code, found = pdd(d0, "peers", "ping", "p0", "--count", "2")
        assert code == 0
        assert len(found["round_trips_seconds"]) == 2
        assert all(0 <= trip < 60 for trip in found["round_trips_seconds"])
        assert pdd(p0, "peers", "ping", "d0")[0] == 0
        assert pdd(d0, "peers", "compare", p0.peer_address) == (
            0, {"schema": "pdd.compare/1", "peer": "p0", "address": p0.peer_address, "compatible": True, "fields": []},
        )
        assert pdd(d0, "peers", "ping", "p9")[1]["id"] == "E355"

        common = ("--set", "node.role=decode", "--set", f"peers.static={p0.peer_address}", "--set", f"model.path={tiny_model}",
                  "check", "--only", "peer", "--peer", p0.peer_address)
        common = (*common[6:], *common[:6])
        code, found = pdd(d0, *common, "--set", "model.dtype=float32")
        assert (code, levels(found)) == (0, {"D070": "pass", "D071": "pass", "D072": "pass", "D073": "pass", "D074": "skip"})
        code, found = pdd(d0, *common, "--set", "model.dtype=bfloat16")
        assert (code, levels(found)["D072"]) == (7, "fail")
        token = run_dir / "token"
        token.write_text("secret\n")
        token.chmod(0o600)
        code, found = pdd(d0, *common, "--set", f"peers.token_credential={token}")
        assert (code, levels(found)) == (7, {"D070": "pass", "D071": "fail"})
        assert "only asked what this node is" in p0.log
        assert d0.status()["peers"][0]["state"] == "up"  # whoever calls by the way disturbs no link

        code, found = pdd(d0, "check", "--live")
        assert code == 0, found
        assert levels(found)["D050"] == "pass"
        assert levels(found)["D034"] == "pass"
        assert levels(found)["D070"] == "pass"
        try:  # a prefiller that hangs is found by that alone
            p0.signal(signal.SIGSTOP)
            d0.wait("a lost link", lambda s: s["peers"][0]["state"] == "down", 30)
            code, found = pdd(d0, "check", "--live")
            [row] = [row for row in found["checks"] if row["level"] == "fail"]
            assert (code, row["id"]) == (7, "D070")
            assert p0.peer_address in row["message"]
            assert "the link is down" in row["message"]
            assert ("silent" in row["message"]) or ("handshake" in row["message"])
            assert any("systemctl status" in fix for fix in row["fix"])
        finally:
            p0.signal(signal.SIGCONT)


@pytest.mark.slow
def test_a_bench_end_is_written_from_and_measured(run_dir: pathlib.Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    listener = subprocess.Popen([sys.executable, "-m", "pdd", "bench", "kv", "--listen", address, "--keep"],
                                stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
    try:
        assert listener.stderr is not None
        assert "listening on" in listener.stderr.readline()
        command = [*PDD, "--json", "check", "--only", "peer", "--peer", address]
        for _ in range(2):  # it is still there
            result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            rows = {row["id"]: row for row in json.loads(result.stdout)["checks"]}
            assert {id: row["level"] for id, row in rows.items()} == {"D070": "pass", "D074": "pass"}, result.stdout
            assert rows["D074"]["observed"] > 0
            assert "pages verified" in rows["D074"]["message"]
    finally:
        listener.kill()
        listener.communicate()
