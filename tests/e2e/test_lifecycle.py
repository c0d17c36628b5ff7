"""Start, drain and death of a daemon, as systemd and an operator see them."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from pdd.control import dump_files
from pdd.control.client import Client
from tests.cluster import PDD, Node, cluster
from tests.e2e.conftest import complete, error_of, model_name, prompt_of

SETS = ["kv.num_pages=128", "engine.threads=1", "model.dtype=float32"]


def children(pid: int) -> list[int]:
    """Child processes of any thread of `pid`."""
    return [int(c) for task in pathlib.Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pids: list[int], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while any(alive(p) for p in pids):
        assert time.monotonic() < deadline, f"still alive: {[p for p in pids if alive(p)]}"
        time.sleep(0.02)


@pytest.fixture
def both(tiny_model, run_dir: pathlib.Path):
    node = Node("b0", "both", tiny_model, run_dir, sets=SETS).start()
    node.wait_ready()
    yield node
    node.kill()


def test_no_orphan_survives_a_killed_daemon(both: Node) -> None:
    ranks = children(both.pid)
    assert ranks
    both.kill()
    wait_gone(ranks)


def test_a_killed_rank_ends_the_daemon_with_its_reason(both: Node) -> None:
    (rank,) = children(both.pid)
    os.kill(rank, signal.SIGKILL)
    assert both.process is not None
    assert both.process.wait(10) == 75
    assert "rank 0" in both.log
    [written] = dump_files.kept(both.run_dir / both.name)
    assert f"flight recorder written to {written}: the node has failed" in both.log


def test_sigterm_lets_streams_finish_and_refuses_new_work(tiny_model, run_dir: pathlib.Path) -> None:
    with cluster(run_dir, tiny_model, sets=SETS) as nodes:
        d0 = nodes["d0"]
        whole = complete(d0.url, prompt_of(40), max_tokens=300)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(complete, d0.url, prompt_of(40), 300)
            d0.wait("the request running", lambda s: s["running"] == 1, 10)
            d0.signal(signal.SIGTERM)
            d0.wait("draining", lambda s: s["state"] == "draining", 5)
            assert error_of(d0.url, {"model": model_name(d0.url), "prompt": prompt_of(40)})[0] == 503
            assert future.result() == whole
        assert d0.process is not None
        assert d0.process.wait(10) == 0
        assert nodes["p0"].stop() == 0


def test_a_second_sigterm_exits_now(both: Node) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        cut = pool.submit(complete, both.url, prompt_of(40), 1500)
        both.wait("the request running", lambda s: s["running"] == 1, 10)
        both.signal(signal.SIGTERM)
        both.wait("draining", lambda s: s["state"] == "draining", 5)
        both.signal(signal.SIGTERM)
        assert both.process is not None
        both.process.wait(5)
        assert cut.exception() is not None, "the request was answered in full: nothing was cut short"


def test_a_taken_port_is_told_before_weights_are_loaded(both: Node, tiny_model, run_dir: pathlib.Path) -> None:
    second = subprocess.run([*PDD, "serve", "--role", "both", "--name", "other", "--model", str(tiny_model), "--run-dir", str(run_dir),
                             "--listen", f"127.0.0.1:{both.port}"], capture_output=True, text=True, timeout=30)
    assert second.returncode == 73
    assert str(both.port) in second.stderr
    assert "stopped" not in second.stderr


def test_a_live_socket_is_not_stolen_and_a_stale_one_blocks_nothing(both: Node, tiny_model, run_dir: pathlib.Path) -> None:
    thief = Node("b0", "both", tiny_model, run_dir, sets=SETS)
    second = subprocess.run(thief.argv, capture_output=True, text=True, timeout=30)
    assert second.returncode == 73
    assert both.status()["state"] == "ready"
    both.kill()  # leaves its socket files
    both.start()
    both.wait_ready()


def test_health_says_why_it_is_not_ready(tiny_model, run_dir: pathlib.Path) -> None:
    d0 = Node("d0", "decode", tiny_model, run_dir, peers=["127.0.0.1:1"], sets=SETS).start()
    try:
        d0.wait("loaded", lambda s: s["state"] == "not_ready", 60)
        with pytest.raises(urllib.error.HTTPError) as not_ready:
            urllib.request.urlopen(f"{d0.url}/health/ready", timeout=5)
        with not_ready.value as answer:
            assert answer.code == 503
            assert b"127.0.0.1:1" in answer.read()
        with urllib.request.urlopen(f"{d0.url}/health/live", timeout=5) as answer:
            assert answer.status == 200
        assert f"HTTP at 127.0.0.1:{d0.port}" in next(line for line in d0.log.splitlines() if "loaded " in line)
        assert d0.log.count("INFO pdd: decode not ready: no prefiller: 127.0.0.1:1 is ") == 1
        assert d0.stop() == 0
        assert d0.log.count("stopped") == 1
        assert " ready at" not in d0.log
    finally:
        d0.kill()


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_a_prefiller_listens_by_name_and_by_ipv6(tiny_model, run_dir: pathlib.Path, host: str) -> None:
    p0 = Node("p0", "prefill", tiny_model, run_dir, sets=SETS)
    address = f"{host}:{p0.peer_port}"
    p0.argv = [address if argument == p0.peer_address else argument for argument in p0.argv]
    d0 = Node("d0", "decode", tiny_model, run_dir, peers=[address], sets=SETS)
    try:
        for node in (p0, d0):
            node.start()
        d0.wait_ready()
        assert len(complete(d0.url, prompt_of(40), max_tokens=3).tokens) == 3
        assert d0.status()["transfers"]["units_received"] > 0
    finally:
        p0.kill()
        d0.kill()


def test_a_drain_while_the_model_loads_holds_when_it_is_loaded(tiny_model, run_dir: pathlib.Path) -> None:
    p0 = Node("p0", "prefill", tiny_model, run_dir, sets=SETS)
    d0 = Node("d0", "decode", tiny_model, run_dir, peers=[p0.peer_address], sets=SETS)
    try:
        p0.start()
        p0.wait("loading", lambda s: s["state"] == "loading", 60)
        Client(run_dir / "p0").post("/v1/drain")
        d0.start()
        p0.wait("drained", lambda s: s["state"] == "drained", 60)
        d0.wait("the drain is known", lambda s: any("draining" in reason for reason in s["reasons"]), 60)
        assert error_of(d0.url, {"model": model_name(d0.url), "prompt": prompt_of(40)})[0] == 503
        Client(run_dir / "p0").post("/v1/resume")
        d0.wait_ready(10)
    finally:
        p0.kill()
        d0.kill()


def test_a_required_provider_that_is_not_there_ends_the_start_as_a_missing_device(tiny_model, run_dir: pathlib.Path) -> None:
    p0 = Node("p0", "prefill", tiny_model, run_dir, sets=[*SETS, "fabric.require=efa"])
    result = subprocess.run(p0.argv, capture_output=True, text=True, timeout=60)
    assert result.returncode == 69  # systemd tries again: the driver may come later
    assert "efa" in result.stderr


@pytest.mark.parametrize(("arguments", "word"), [
    (["--role", "decod"], "decode"),
    (["--role", "both", "--set", "engine.max_bath_size=4"], "max_batch_size"),
])
def test_wrong_config_exits_78_with_a_suggestion(tiny_model, run_dir: pathlib.Path, arguments: list[str], word: str) -> None:
    result = subprocess.run([*PDD, "serve", "--model", str(tiny_model), "--run-dir", str(run_dir), *arguments],
                            capture_output=True, text=True, timeout=30)
    assert result.returncode in (2, 78)
    assert word in result.stderr


def test_an_idle_pair_uses_next_to_no_cpu(tiny_model, run_dir: pathlib.Path) -> None:
    def cpu(pid: int) -> float:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    with cluster(run_dir, tiny_model, sets=SETS) as nodes:
        complete(nodes["d0"].url, prompt_of(40))
        time.sleep(1)
        pids = [p for node in nodes.values() for p in (node.pid, *children(node.pid))]
        before = sum(cpu(p) for p in pids)
        time.sleep(5)
        # Both daemons and both ranks together; 1 % of a core each is the promise.
        assert sum(cpu(p) for p in pids) - before < 5 * 0.01 * 2 * 1.5
