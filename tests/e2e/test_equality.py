"""A client can not tell that two nodes answered: token by token the same as one node, at every edge that pages and chunks have."""

from __future__ import annotations

import concurrent.futures
import pathlib

import pytest

from tests.cluster import cluster, page_sum_holds
from tests.e2e.conftest import complete, prompt_of, way_sets

PAGE = 16
LENGTHS = sorted({k * PAGE + d for k in range(6) for d in (-2, -1, 0, 1, 2) if k * PAGE + d >= 1})
SETS = ["kv.page_size=16", "kv.num_pages=96", "engine.threads=1", "model.dtype=float32"]


@pytest.mark.parametrize(
    ("chunk", "prefillers", "via"), [
        (16, 1, "tcp"), (2048, 2, "local"),
        *(pytest.param(*case, marks=pytest.mark.slow)
          for case in ((2048, 2, "tcp"), (40, 2, "tcp"), (40, 2, "local"), (16, 1, "local"))),
    ],
)
def test_every_length_around_a_page_edge_equals_both(
    tiny_model, run_dir: pathlib.Path, chunk: int, prefillers: int, via: str
) -> None:
    sets = [*SETS, *way_sets(via), f"engine.max_batch_tokens={chunk}"]
    with cluster(run_dir, tiny_model, prefillers=prefillers, both=1, sets=sets) as nodes:
        d0, b0 = nodes["d0"], nodes["b0"]
        assert {peer["via"] for peer in d0.status()["peers"]} == {via}
        oracle = {n: complete(b0.url, prompt_of(n, n), max_tokens=20) for n in LENGTHS}
        for n in LENGTHS:
            assert complete(d0.url, prompt_of(n, n), max_tokens=20) == oracle[n], f"prompt of {n} tokens"
        # Together, so that chunks of several prompts share steps and transfers overlap.
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = dict(zip(LENGTHS, pool.map(lambda n: complete(d0.url, prompt_of(n, n), max_tokens=20), LENGTHS), strict=True))
        assert answers == oracle
        status = d0.wait_idle()
        assert page_sum_holds(status)
        # It was counted, exactly: every prompt twice, all tokens but the last.
        expected_units = 2 * sum(-(-(n - 1) // PAGE) for n in LENGTHS)
        layers = d0.status()["engine"]["num_layers"]
        assert status["transfers"]["units_received"] == expected_units * layers
        sent = [nodes[f"p{i}"].wait_idle()["transfers"] for i in range(prefillers)]
        assert sum(t["units"] for t in sent) == expected_units * layers
        assert all(t["failed"] == 0 for t in sent)
        if prefillers == 2:
            assert all(t["units"] > 0 for t in sent), "one prefiller did all the work"


def test_seeded_sampling_equals_both(tiny_model, run_dir: pathlib.Path) -> None:
    with cluster(run_dir, tiny_model, both=1, sets=SETS) as nodes:
        for seed in range(5):
            knobs = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": seed, "presence_penalty": 0.5, "max_tokens": 24}
            answers = [complete(nodes[name].url, prompt_of(37, seed), **knobs) for name in ("d0", "b0")]
            assert answers[0] == answers[1]
        assert len({complete(nodes["d0"].url, prompt_of(37), temperature=1.0, seed=s, max_tokens=16).text for s in range(6)}) > 1


def test_more_decodes_than_the_pool_holds_all_finish_as_both_says(tiny_model, run_dir: pathlib.Path) -> None:
    """Decodes outgrow the pool: some are preempted, prefilled again by the prefiller, and still equal."""
    small = [*[s for s in SETS if "num_pages" not in s], "kv.num_pages=24"]
    with cluster(run_dir, tiny_model, both=1, sets=small) as nodes:
        d0, b0 = nodes["d0"], nodes["b0"]
        prompts = [prompt_of(50 + i, i) for i in range(6)]
        oracle = [complete(b0.url, p, max_tokens=90) for p in prompts]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda p: complete(d0.url, p, max_tokens=90), prompts))
        assert answers == oracle
        assert d0.wait_idle()["engine"]["preemptions"] > 0, "the pool was never short: the test proves nothing"
        nodes["p0"].wait_idle()
