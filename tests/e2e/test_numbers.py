"""What /metrics, status and requests say of real nodes that served, failed over, were left and were cancelled."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import pathlib
import re
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from tests.cluster import Node, page_sum_holds
from tests.e2e.conftest import complete, error_of, model_name, post, prompt_of

SETS = ["kv.page_size=16", "engine.threads=1", "model.dtype=float32", "engine.max_batch_tokens=64"]
# A pool of 8 pages: the prefiller refuses longer prompts, which the decoder then prefills itself.
PREFILLER, DECODER = ["kv.num_pages=8"], ["kv.num_pages=128", "scheduler.local_prefill_fallback=true", "debug.show_prompts=true"]
SHORT, LONG = 100, 300


@pytest.fixture(scope="module")
def nodes(tiny_model: pathlib.Path, module_run_dir: pathlib.Path) -> Iterator[tuple[Node, Node]]:
    p0 = Node("p0", "prefill", tiny_model, module_run_dir, sets=[*SETS, *PREFILLER])
    d0 = Node("d0", "decode", tiny_model, module_run_dir, peers=[p0.peer_address], sets=[*SETS, *DECODER])
    try:
        for node in (p0, d0):
            node.start()
        for node in (p0, d0):
            node.wait_ready()
        d0.wait("its prefiller", lambda s: s["peers"][0]["state"] == "up")
        yield p0, d0
    finally:
        for node in (p0, d0):
            node.kill()


def scrape(node: Node) -> dict[str, float]:
    with urllib.request.urlopen(f"{node.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}


def eventually(condition: Callable[[], object], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def leave_after_first_piece(node: Node, max_tokens: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=10)
    body = {"model": model_name(node.url), "prompt": prompt_of(SHORT), "max_tokens": max_tokens, "stream": True,
            "ignore_eos": True, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    connection.getresponse().read(10)
    connection.close()


def request_of(node: Node, state: str) -> str:
    """The id of a live request in this state."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [row["id"] for row in node.control("/v1/requests")["requests"] if row["state"] == state]
        return bool(found)

    eventually(look, f"no request is {state}")
    return found[0]


def test_every_family_that_should_have_moved_has(nodes: tuple[Node, Node]) -> None:
    p0, d0 = nodes
    text = complete(d0.url, prompt_of(SHORT), max_tokens=40).text  # by the prefiller
    complete(d0.url, prompt_of(LONG), max_tokens=5)  # too long for it: prefilled here
    body = {"model": model_name(d0.url), "prompt": prompt_of(SHORT), "max_tokens": 400, "temperature": 0, "stop": text[3:5]}
    stopped = post(f"{d0.url}/v1/completions", body)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    leave_after_first_piece(d0, 1500)
    d0.wait_idle()  # else the next look for a running request may find the one that was just left
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        failing = pool.submit(error_of, d0.url, {**body, "stop": None, "max_tokens": 1500, "ignore_eos": True})
        d0.control(f"/v1/requests/{request_of(d0, 'running')}", method="DELETE")
        assert failing.result()[0] == 503
    d0.wait_idle()
    p0.wait_idle()
    mine, theirs = scrape(d0), scrape(p0)

    moved = [
        "time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
        "request_queue_seconds_count", "engine_step_seconds_count", "step_batch_size_count", "generation_tokens_total",
        "prompt_tokens_total", "engine_steps_total", "kv_transfer_units_received_total", "kv_attempts_total",
        'kv_transfer_seconds_count{direction="in",via="tcp"}', 'kv_transfer_failures_total{reason="refused"}',
        'kv_fallback_total{from="remote",to="local"}', 'kv_transfer_bytes_total{direction="in",nic="lo",peer="p0"}',
        f'peer_up{{peer="{p0.peer_address}"}}', 'requests_total{outcome="stop"}', 'requests_total{outcome="length"}',
        'requests_total{outcome="abort"}', 'requests_total{outcome="error"}', "kv_pool_pages", 'kv_pages{state="free"}',
    ]
    assert [name for name in moved if not mine.get(f"pdd_{name}")] == []
    moved = [
        "request_queue_seconds_count", "engine_step_seconds_count", "step_batch_size_count", "prompt_tokens_total",
        "engine_steps_total", "kv_transfer_writes_total", "kv_transfer_units_total", "kv_prefills_total",
        'kv_transfer_seconds_count{direction="out",via="tcp"}',
        'kv_transfer_bytes_total{direction="out",nic="lo",peer="d0"}', 'peer_up{peer="d0"}', "kv_pool_pages",
        'kv_pages{state="free"}',
    ]
    assert [name for name in moved if not theirs.get(f"pdd_{name}")] == []
    still = ["kv_transfers_active", "kv_leases", "kv_leases_expired_total", "kv_stale_units_total", "kv_fences_total",
             "kv_transfer_sets_failed_total", "requests_running", "requests_waiting", "requests_waiting_for_kv"]
    assert [name for name in still if mine[f"pdd_{name}"] or theirs[f"pdd_{name}"]] == []

    # And they are true: one observation per step and per request, one outcome per request.
    assert mine["pdd_engine_step_seconds_count"] == mine["pdd_step_batch_size_count"] == mine["pdd_engine_steps_total"]
    outcomes = {name[len("pdd_requests_total{outcome=") :].strip('"}'): count for name, count in mine.items() if "pdd_requests_total" in name}
    assert outcomes == {"stop": 1, "length": 2, "abort": 1, "error": 1}
    assert mine["pdd_request_queue_seconds_count"] == mine["pdd_e2e_request_latency_seconds_count"] == 5
    assert theirs["pdd_request_queue_seconds_count"] == theirs["pdd_kv_prefills_total"] == 4
    refused = 'pdd_kv_transfer_failures_total{reason="refused"}'
    assert (mine[refused], theirs[refused]) == (1, 0)  # the decoder knew: nobody was asked
    assert mine['pdd_kv_fallback_total{from="remote",to="local"}'] == 1




def test_status_tells_what_runs_and_how_requests_ended(nodes: tuple[Node, Node]) -> None:
    p0, d0 = nodes
    status = d0.status()
    [rank] = status["ranks"]
    assert rank["attention"] in ("native", "torch")
    assert (rank["dtype"], rank["threads"]) == ("float32", 1)
    assert rank["pid"] != status["pid"]
    assert rank["param_bytes"] > 0
    [inward] = d0.control("/v1/transfers")["transfers"]
    assert (inward["peer"], inward["direction"], inward["state"], inward["nic"], inward["inflight"]) == ("p0", "in", "up", "lo", 0)
    assert inward["p50_seconds"] > 0
    [outward] = p0.control("/v1/transfers")["transfers"]
    assert (outward["peer"], outward["direction"], outward["state"], outward["failed"]) == ("d0", "out", "up", 0)


def test_requests_and_show_agree_on_both_nodes(nodes: tuple[Node, Node]) -> None:
    p0, d0 = nodes
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = {"model": model_name(d0.url), "prompt": prompt_of(SHORT, 5), "max_tokens": 1500, "ignore_eos": True}
        failing = pool.submit(error_of, d0.url, body)
        request_id = request_of(d0, "running")
        eventually(lambda: d0.control(f"/v1/requests/{request_id}")["first_token_seconds"] is not None, "no first token")
        listed = next(row for row in d0.control("/v1/requests")["requests"] if row["id"] == request_id)
        shown = d0.control(f"/v1/requests/{request_id}")
        for row in (listed, shown):
            assert (row["state"], row["peer"], row["attempts"], row["kind"]) == ("running", "p0", 1, "generate")
            assert row["first_token_seconds"] is not None
        assert listed["prompt"] is None  # shown for one request, because the config says so
        assert shown["prompt"] == prompt_of(SHORT, 5)
        d0.control(f"/v1/requests/{request_id}", method="DELETE")
        failing.result()
    d0.wait_idle()
    ended = d0.control(f"/v1/requests/{request_id}")
    assert (ended["state"], ended["reason"]) == ("finished", "error")
    assert "operator" in ended["why"]
    there = p0.control(f"/v1/requests/{request_id}")  # by the decoder's id
    assert (there["state"], there["peer"], there["kind"]) == ("finished", "d0", "prefill")
    assert page_sum_holds(p0.wait_idle())
    assert re.fullmatch(r"[0-9a-f-]+", request_id)


def test_a_request_is_found_by_every_id_that_its_client_saw(nodes: tuple[Node, Node]) -> None:
    p0, d0 = nodes
    body = json.dumps({"model": model_name(d0.url), "prompt": prompt_of(SHORT, 6), "max_tokens": 2, "n": 1}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{d0.url}/v1/completions", body, headers), timeout=60) as answer:
        own, whole = answer.headers["x-request-id"], json.load(answer)["id"]
    assert own.removeprefix("req-") == whole.removeprefix("cmpl-")
    named = urllib.request.Request(f"{d0.url}/v1/completions", body, {**headers, "X-Request-Id": "batch/7#1"})
    with urllib.request.urlopen(named, timeout=60) as answer:
        assert answer.headers["x-request-id"] == "batch/7#1"
        second = json.load(answer)["id"].removeprefix("cmpl-")
    first = whole.removeprefix("cmpl-")
    for wanted, found in ((own, first), (whole, first), (first[:12], first), ("batch%2F7%231", second), ("batch", second)):
        row = d0.control(f"/v1/requests/{wanted}")
        assert (row["id"], row["state"]) == (found, "finished")
    assert row["client_request_id"] == "batch/7#1"
    assert p0.control(f"/v1/requests/{whole}")["kind"] == "prefill"
    assert d0.control(f"/v1/requests/{second}", method="DELETE") == {
        "schema": "pdd.cancel/1", "ids": [second], "cancelled": False,
    }
