"""A prefiller that dies, pauses or is replaced costs at most its own requests and is used again by itself."""

from __future__ import annotations

import concurrent.futures
import pathlib
import signal
import time

import pytest

from tests.cluster import Node, cluster, page_sum_holds
from tests.e2e.conftest import complete, error_of, model_name, prompt_of, way_sets

SETS = ["kv.page_size=16", "kv.num_pages=128", "engine.threads=1", "model.dtype=float32", "engine.max_batch_tokens=32",
        "peers.dead_after=2s"]
PAUSES = pytest.mark.parametrize("pause", [0.7, 4.0], ids=["shorter-than-suspicion", "longer-than-death"])


def test_a_killed_prefiller_is_replaced_behind_its_address(tiny_model, run_dir: pathlib.Path, via: str) -> None:
    with cluster(run_dir, tiny_model, both=1, sets=[*SETS, *way_sets(via)]) as nodes:
        p0, d0 = nodes["p0"], nodes["d0"]
        oracle = complete(nodes["b0"].url, prompt_of(100))
        assert complete(d0.url, prompt_of(100)) == oracle
        old = d0.status()["peers"][0]["epoch"]
        p0.kill()
        d0.wait("the loss noticed", lambda s: s["peers"][0]["state"] != "up", 10)
        assert f"WARNING pdd: decode not ready: no prefiller: {p0.peer_address} is " in d0.log
        status, error = error_of(d0.url, {"model": model_name(d0.url), "prompt": prompt_of(100), "max_tokens": 4})
        assert status == 503
        assert "prefiller" in error["message"]
        # What needs no prefiller is still served.
        assert len(complete(d0.url, prompt_of(1), max_tokens=3).tokens) == 3
        p0.start()
        d0.wait("the new life used", lambda s: s["peers"][0]["state"] == "up" and s["peers"][0]["epoch"] != old, 60)
        assert d0.log.count(f"INFO pdd: decode ready at 127.0.0.1:{d0.port}") == 2
        assert complete(d0.url, prompt_of(100)) == oracle
        d0.wait_idle()


def test_decodes_go_on_while_a_prefiller_dies_and_another_takes_over(tiny_model, run_dir: pathlib.Path, via: str) -> None:
    with cluster(run_dir, tiny_model, prefillers=2, both=1, sets=[*SETS, *way_sets(via)]) as nodes:
        d0, p0 = nodes["d0"], nodes["p0"]
        prompts = [prompt_of(60 + 13 * i, i) for i in range(16)]
        oracle = [complete(nodes["b0"].url, p, max_tokens=40) for p in prompts]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(complete, d0.url, p, 40) for p in prompts]
            time.sleep(0.15)
            p0.kill()
            answers = [f.result() for f in futures]
        assert answers == oracle, "a death cost more than a retry"
        assert page_sum_holds(d0.wait_idle())
        nodes["p1"].wait_idle()


@PAUSES
def test_a_paused_prefiller(tiny_model, run_dir: pathlib.Path, pause: float, via: str) -> None:
    """STOP, not kill: writes that were on their way land late. No page of theirs may be in other hands by then."""
    with cluster(run_dir, tiny_model, prefillers=2, both=1, sets=[*SETS, *way_sets(via)]) as nodes:
        d0, p0 = nodes["d0"], nodes["p0"]
        prompts = [prompt_of(300 + i, i) for i in range(12)]
        oracle = [complete(nodes["b0"].url, p, max_tokens=20) for p in prompts]
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            futures = [pool.submit(complete, d0.url, p, 20) for p in prompts]
            time.sleep(0.2)
            p0.signal(signal.SIGSTOP)
            time.sleep(pause)
            p0.signal(signal.SIGCONT)
            assert [f.result() for f in futures] == oracle
        d0.wait("both prefillers back", lambda s: sum(p["state"] == "up" for p in s["peers"]) == 2, 20)
        assert [complete(d0.url, p, 20) for p in prompts[:4]] == oracle[:4]
        for name in ("d0", "p0", "p1"):
            assert page_sum_holds(nodes[name].wait_idle())


@PAUSES
def test_a_paused_decoder(tiny_model, run_dir: pathlib.Path, pause: float, via: str) -> None:
    """It may stop in the middle of taking a page, and go on when the prefiller has given that page to another prompt."""
    with cluster(run_dir, tiny_model, both=1, sets=[*SETS, *way_sets(via)]) as nodes:
        d0 = nodes["d0"]
        prompts = [prompt_of(300 + i, i) for i in range(8)]
        oracle = [complete(nodes["b0"].url, p, max_tokens=20) for p in prompts]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(complete, d0.url, p, 20) for p in prompts]
            time.sleep(0.2)
            d0.signal(signal.SIGSTOP)
            time.sleep(pause)
            d0.signal(signal.SIGCONT)
            assert [f.result() for f in futures] == oracle
        assert [complete(d0.url, p, 20) for p in prompts[:4]] == oracle[:4]
        for name in ("d0", "p0"):
            assert page_sum_holds(nodes[name].wait_idle())


def test_local_prefill_steps_in_when_allowed(tiny_model, run_dir: pathlib.Path) -> None:
    with cluster(run_dir, tiny_model, both=1, sets=[*SETS, "scheduler.local_prefill_fallback=true", "peers.connect_timeout=1s"]) as nodes:
        oracle = complete(nodes["b0"].url, prompt_of(77))
        nodes["p0"].kill()
        assert complete(nodes["d0"].url, prompt_of(77)) == oracle


def test_nodes_that_do_not_fit_refuse_each_other_by_field(tiny_model, run_dir: pathlib.Path) -> None:
    p0 = Node("p0", "prefill", tiny_model, run_dir, sets=[*SETS, "model.dtype=bfloat16"])
    d0 = Node("d0", "decode", tiny_model, run_dir, peers=[p0.peer_address], sets=SETS)
    try:
        for node in (p0, d0):
            node.start()
        p0.wait_ready()
        status = d0.wait("the refusal", lambda s: any(p["state"] == "incompatible" for p in s["peers"]), 60)
        assert "dtype" in str(status["peers"]) or "dtype" in str(d0.control("/v1/peers"))
        assert status["reasons"] == [
            f"no prefiller: {p0.peer_address} is incompatible (dtype; `pdd peers` says what differs)"]
        code, error = error_of(d0.url, {"model": model_name(d0.url), "prompt": prompt_of(40), "max_tokens": 4})
        assert code == 503
        assert "dtype" in error["message"]
    finally:
        p0.kill()
        d0.kill()
