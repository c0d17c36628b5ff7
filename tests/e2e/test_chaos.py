"""Clients that leave, under load: nothing leaks, and the page sum holds at every look."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import pathlib
import random
import threading

from tests.cluster import Node, cluster, page_sum_holds
from tests.e2e.conftest import complete, model_name, prompt_of, way_sets

SETS = ["kv.page_size=16", "kv.num_pages=128", "engine.threads=1", "model.dtype=float32", "engine.max_batch_tokens=64"]


def dropped(node: Node, prompt: list[int], after: float) -> None:
    """A client that asks, reads nothing, and closes after `after` seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
    body = {"model": model_name(node.url), "prompt": prompt, "max_tokens": 200, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    threading.Event().wait(after)
    connection.close()


def test_a_tenth_of_the_clients_leave_and_everything_comes_back(tiny_model, run_dir: pathlib.Path) -> None:
    rng = random.Random(7)
    with cluster(run_dir, tiny_model, prefillers=2, both=1, sets=SETS) as nodes:
        d0, b0 = nodes["d0"], nodes["b0"]
        before = {name: node.wait_idle() for name, node in nodes.items()}
        prompts = [prompt_of(rng.randrange(2, 200), i) for i in range(100)]
        leaving = set(rng.sample(range(100), 10))
        stop = threading.Event()
        looks: list[bool] = []

        def watch() -> None:
            while not stop.wait(0.02):
                looks.extend(page_sum_holds(nodes[name].status()) for name in ("d0", "p0", "p1"))

        def one(i: int) -> object:
            return dropped(d0, prompts[i], rng.random() * 0.2) if i in leaving else complete(d0.url, prompts[i], max_tokens=12)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with concurrent.futures.ThreadPoolExecutor(32) as pool:
                answers = list(pool.map(one, range(100)))
        finally:
            stop.set()
            watcher.join()
        assert len(looks) > 20
        assert all(looks), "a page was in two states, or in none"
        for name, node in nodes.items():
            after = node.wait_idle()
            assert after["pages"] == before[name]["pages"]
        for i in range(0, 100, 9):
            if i not in leaving:
                assert answers[i] == complete(b0.url, prompts[i], max_tokens=12)


def test_cancel_at_every_moment_of_a_push(tiny_model, run_dir: pathlib.Path, via: str) -> None:
    """Clients close between 0 and 60 ms after asking: queued, prefilling, pushing, decoding; the next answer is right."""
    with cluster(run_dir, tiny_model, both=1, sets=[*SETS, *way_sets(via)]) as nodes:
        d0, p0 = nodes["d0"], nodes["p0"]
        oracle = complete(nodes["b0"].url, prompt_of(150, 1))
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: dropped(d0, prompt_of(150 + i, i), i * 0.001), range(60)))
        d0.wait_idle()
        p0.wait_idle()
        assert complete(d0.url, prompt_of(150, 1)) == oracle
        assert d0.status()["pages"]["quarantined"] == 0
