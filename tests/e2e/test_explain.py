"""`pdd explain` on real nodes: of a request that is served, that hangs because its prefiller is stopped, and that has failed;
and what such a failure leaves behind."""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from pdd.control import dump_files
from pdd.control.client import Client
from tests.cluster import PDD, Node, cluster
from tests.e2e.conftest import complete, error_of, model_name, prompt_of

SETS = ["kv.page_size=16", "kv.num_pages=128", "engine.threads=1", "model.dtype=float32", "engine.max_batch_tokens=32",
        "peers.dead_after=3s", "peers.suspect_after=1200ms", "peers.connect_timeout=1s"]


def pdd(node: Node, *words: str) -> str:
    result = subprocess.run([*PDD, "--run-dir", str(node.run_dir), "-i", node.name, *words], capture_output=True, text=True,
                            timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def explain(node: Node, request_id: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(pdd(node, "--json", "explain", request_id))
    return document


def waits(node: Node, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The request that waits for its KV, once `condition` holds of its row."""
    for _ in range(600):
        rows = [row for row in node.control("/v1/requests")["requests"] if row["state"] == "wait_kv" and condition(row)]
        if rows:
            found: dict[str, Any] = rows[0]
            return found
        time.sleep(0.01)
    raise AssertionError(node.log[-3000:])


@pytest.fixture(scope="module")
def pair(tiny_model, module_run_dir: pathlib.Path):  # type: ignore[no-untyped-def]
    with cluster(module_run_dir, tiny_model, sets=SETS) as nodes:
        yield nodes["p0"], nodes["d0"]


def test_where_the_time_of_a_served_request_went(pair: tuple[Node, Node]) -> None:
    p0, d0 = pair
    complete(d0.url, prompt_of(100), max_tokens=3)
    [request_id] = _lately(d0)
    story = explain(d0, request_id[:8])
    assert (story["id"], story["over"], story["reason"], story["tries"]) == (request_id, True, "length", 1)
    ttft = story["ttft"]
    parts = [ttft[name] for name in ("queue_seconds", "reserve_seconds", "prefill_seconds", "first_decode_seconds")]
    assert sum(parts) == pytest.approx(ttft["total_seconds"], abs=1e-6)
    assert 0 <= ttft["prefill_queue_seconds"] + ttft["prefill_compute_seconds"] <= ttft["prefill_seconds"] + 0.5
    assert ttft["exposed_seconds"] is not None
    [attempt] = story["attempts"]
    assert (attempt["state"], attempt["peer"], attempt["arrived_units"]) == ("whole", "p0", attempt["expected_units"])
    assert attempt["first_unit_at_seconds"] <= attempt["last_unit_at_seconds"] <= ttft["total_seconds"]
    assert attempt["push"]["ok_units"] == attempt["expected_units"]
    assert attempt["push"]["chunks"] == 4  # 99 tokens, 32 a step
    assert attempt["push"]["lacks"] == []
    states = [(step["kind"], step["state"]) for step in story["steps"] if step["kind"] != "link"]
    assert states[0] == ("request", "waiting")
    assert {("attempt", "choosing"), ("attempt", "armed"), ("attempt", "requested"), ("attempt", "done")} <= set(states)
    assert states[-1] == ("request", "finished")

    own = explain(p0, request_id)
    assert (own["kind"], own["role"], own["push"]["state"]) == ("prefill", "prefill", "done")
    assert own["push"]["ok_units"] == attempt["expected_units"]
    assert {step["kind"] for step in own["steps"]} >= {"request", "job"}


def _lately(node: Node) -> list[str]:
    """The id of the request that ended last, from the flight recorder."""
    changes = node.control("/v1/flight")["changes"]
    return [change["of"] for change in changes if change["kind"] == "request" and change["state"] == "finished"][-1:]


def test_the_waterfall_of_a_transfer_is_published(pair: tuple[Node, Node]) -> None:
    p0, d0 = pair
    complete(d0.url, prompt_of(150, 3), max_tokens=2)
    [request_id] = _lately(d0)
    lines = Client(p0.run_dir / p0.name).stream("/v1/events?topics=waterfall&interval=100ms", private=True, idle_timeout=20)
    drawn: dict[str, Any] = {}
    for line in lines:
        drawn |= line.get("docs", {}).get("waterfall", {})
        if drawn.get("id") == request_id:
            break
    lines.close()  # type: ignore[attr-defined]
    layers = p0.status()["engine"]["num_layers"]
    assert {(cell["chunk"], cell["layer"]) for cell in drawn["cells"]} == {
        (chunk, layer) for chunk in range(5) for layer in range(layers)}
    for cell in drawn["cells"]:
        times = [cell[f"{name}_seconds"] for name in ("armed", "compute_end", "posted", "landed")]
        assert times == sorted(times), cell
        assert cell["compute_begin_seconds"] <= cell["compute_end_seconds"]
    assert max(cell["landed_seconds"] for cell in drawn["cells"]) <= drawn["seconds"] + 1e-6


def test_a_stopped_prefiller_is_named_with_what_is_missing_and_leaves_a_dump_and_a_bundle(
    pair: tuple[Node, Node], tmp_path: pathlib.Path
) -> None:
    p0, d0 = pair
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = {"model": model_name(d0.url), "prompt": prompt_of(1400, 9), "max_tokens": 2}
        answer = pool.submit(error_of, d0.url, body)
        try:
            row = waits(d0, lambda row: row["pages"]["have"] > 0)
            live = d0.control(f"/v1/requests/{row['id']}/explain")
            own = p0.control(f"/v1/requests/{row['id']}/explain")["push"]
            p0.signal(signal.SIGSTOP)
            [attempt] = live["attempts"]
            assert attempt["push"]["state"] == "pushing"
            assert attempt["push"]["chunks"] > 0
            assert {lack["what"] for lack in attempt["push"]["lacks"]} <= {"not computed", "not posted", "in flight"}
            assert own["computed_tokens"] >= attempt["push"]["computed_tokens"]
            stopped = d0.control(f"/v1/requests/{row['id']}/explain")
            assert "waits for KV from p0" in stopped["verdict"]
            assert "units are here, the last came" in stopped["verdict"]
            assert "p0 gave no answer" in stopped["verdict"] or "p0 has been silent for" in stopped["verdict"]
            [attempt] = stopped["attempts"]
            assert attempt["push"] is None
            assert 0 < attempt["arrived_units"] < attempt["expected_units"]
            [held] = stopped["pages"]
            assert held["pages"] == row["pages"]["need"]
            assert "p0" in pdd(d0, "explain", row["id"])
            status, _ = answer.result(30)
            assert status in (502, 503)
        finally:
            p0.signal(signal.SIGCONT)
    ended = explain(d0, row["id"])
    assert ended["over"]
    assert "failed after" in ended["verdict"]
    assert ended["attempts"][0]["state"] == "peer_lost"
    silent = [step for step in ended["steps"] if step["kind"] == "link" and step["state"] == "closing"]
    assert "p0 has been silent for 3 s" in silent[0]["why"]
    dumped = pathlib.Path(ended["dump"])
    assert dumped in dump_files.kept(d0.run_dir / "d0")
    assert str(dumped) in d0.log
    picture = json.loads(gzip.decompress(dumped.read_bytes()))
    assert row["id"] in picture["why"]
    assert any(change["kind"] == "attempt" and change["state"] == "fencing" for change in picture["changes"])
    assert any(thread["name"] == "pdd-engine" for thread in picture["stacks"]["threads"])

    out = tmp_path / "b.tar.gz"
    said = json.loads(pdd(d0, "--json", "bundle", "--out", str(out)))
    names = {entry["name"] for entry in said["entries"]}
    assert {"status.json", "flight.json", "config.json", "logs.json", f"dumps/{dumped.name.removesuffix('.gz')}"} <= names
    d0.wait("p0 back", lambda s: s["peers"][0]["state"] == "up", 30)
    d0.wait_idle()
    p0.wait_idle()
