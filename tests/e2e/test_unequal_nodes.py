"""A prefiller and a decoder whose pages and pools differ."""

from __future__ import annotations

import pathlib

from tests.cluster import Node, page_sum_holds
from tests.e2e.conftest import complete, error_of, model_name, prompt_of

SETS = ["engine.threads=1", "model.dtype=float32"]


def test_bytes_are_counted_alike_and_a_prompt_too_long_for_the_prefiller_is_the_clients_error(
    tiny_model, run_dir: pathlib.Path
) -> None:
    p0 = Node("p0", "prefill", tiny_model, run_dir, sets=[*SETS, "kv.page_size=8", "kv.num_pages=16"])
    d0 = Node("d0", "decode", tiny_model, run_dir, peers=[p0.peer_address], sets=[*SETS, "kv.page_size=32", "kv.num_pages=32"])
    b0 = Node("b0", "both", tiny_model, run_dir, sets=[*SETS, "kv.num_pages=64"])
    try:
        for node in (p0, d0, b0):
            node.start()
        for node in (p0, d0, b0):
            node.wait_ready()
        d0.wait("the prefiller", lambda s: s["peers"][0]["state"] == "up")
        for length in (2, 9, 33, 100, 129):
            assert complete(d0.url, prompt_of(length)) == complete(b0.url, prompt_of(length))
        here, there = d0.wait_idle()["transfers"], p0.wait_idle()["transfers"]
        assert here["bytes_received"] == there["bytes"] > 0
        assert here["units_received"] == there["units"]
        body = {"model": model_name(d0.url), "prompt": prompt_of(130), "max_tokens": 4}
        for stream in (False, True):
            status, error = error_of(d0.url, {**body, "stream": stream})
            assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "context_length_exceeded")
            assert error["param"] == "prompt"
            assert f"{p0.peer_address} takes at most 128" in error["message"]
        assert page_sum_holds(d0.wait_idle())
        assert d0.status()["transfers"]["units_received"] == here["units_received"]
    finally:
        for node in (p0, d0, b0):
            node.kill()
