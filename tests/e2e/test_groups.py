"""A decoder of several engines (engine.dp): clients cannot tell, all groups work, and each gets its pages back."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import signal
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.cluster import Node, page_sum_holds
from tests.e2e.conftest import complete, model_name, post, prompt_of, way_sets
from tests.e2e.scrapes import Scrapes

SETS = ["kv.page_size=16", "engine.threads=1", "model.dtype=float32", "engine.max_batch_tokens=64"]
LENGTHS = [1, 2, 15, 16, 17, 33, 40, 64, 65, 90, 100, 130]


def groups_idle(node: Node, groups: int) -> list[dict]:
    """The groups of a node that is idle: every one has all its pages back."""
    status = node.wait_idle()
    assert page_sum_holds(status)
    assert [group["index"] for group in status["groups"]] == list(range(groups))
    for group in status["groups"]:
        assert group["pages"]["free"] == group["pages"]["total"] == 96
        assert group["running"] == group["waiting"] == group["waiting_for_kv"] == 0
    return status["groups"]


@pytest.fixture
def started() -> Iterator[Callable[[Sequence[Node]], None]]:
    """Starts nodes and waits until they are ready and linked; kills them at the end."""
    nodes: list[Node] = []

    def start(made: Sequence[Node]) -> None:
        nodes.extend(made)
        for node in made:
            node.start()
        for node in made:
            node.wait_ready()
        for node in made:
            node.wait("its prefillers", lambda s: all(peer["state"] == "up" for peer in s["peers"]))

    yield start
    for node in nodes:
        node.kill()


def at_once(url: str, prompts: Sequence[Sequence[int]], **extra: int) -> list:
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: complete(url, prompt, **{"max_tokens": 40, **extra}), prompts))


@pytest.mark.parametrize("via", ["tcp", pytest.param("local", marks=pytest.mark.slow)])
def test_two_groups_answer_as_one_node_does_and_both_work(tiny_model, run_dir: pathlib.Path, started, via: str) -> None:
    sets = [*SETS, "kv.num_pages=96", *way_sets(via)]
    p0 = Node("p0", "prefill", tiny_model, run_dir, sets=sets)
    d0 = Node("d0", "decode", tiny_model, run_dir, peers=[p0.peer_address], sets=sets)
    d0.argv += ["--dp", "2"]
    b0 = Node("b0", "both", tiny_model, run_dir, sets=sets)
    started([p0, d0, b0])
    assert {peer["via"] for peer in d0.status()["peers"]} == {via}
    prompts = [prompt_of(length, length) for length in LENGTHS]
    oracle = at_once(b0.url, prompts)
    with Scrapes([d0, p0]) as seen:
        for _ in range(2):
            assert at_once(d0.url, prompts) == oracle
        # Choices of one answer are requests of their own, each with its seed, wherever they go.
        body = {"prompt": prompts[5], "n": 4, "seed": 11, "temperature": 0.9, "max_tokens": 12}
        several = [post(f"{node.url}/v1/completions", {**body, "model": model_name(node.url)}) for node in (d0, b0)]
        assert [choice["text"] for choice in several[0]["choices"]] == [choice["text"] for choice in several[1]["choices"]]
        assert several[0]["usage"] == several[1]["usage"]
    seen.assert_clean()
    groups = groups_idle(d0, 2)
    assert all(group["steps"] > 40 for group in groups), "one group did all the work"
    pids = {(rank["group"], rank["pid"]) for rank in d0.status()["ranks"]}
    assert len(pids) == 2
    p0.wait_idle()
    assert p0.status()["transfers"]["failed"] == 0

    # A rank of one group ends the node, and what it says names the group.
    [victim] = [pid for group, pid in pids if group == 1]
    os.kill(victim, signal.SIGKILL)
    assert d0.process is not None
    assert d0.process.wait(20) == 75
    assert f"group 1: rank 0 (pid {victim}) was killed by SIGKILL" in d0.log


def test_groups_of_a_node_alone_and_pools_that_find_their_size(tiny_model, run_dir: pathlib.Path, started) -> None:
    one = Node("b1", "both", tiny_model, run_dir, sets=[*SETS, "kv.num_pages=96"])
    three = Node("b3", "both", tiny_model, run_dir, sets=[*SETS, "kv.memory_fraction=0.001", "engine.dp=3"])
    started([one, three])
    prompts = [prompt_of(10 + n, n) for n in range(6)]
    assert at_once(three.url, prompts) == at_once(one.url, prompts)
    groups = three.wait_idle()["groups"]
    assert len({group["pages"]["total"] for group in groups}) == 1
    assert all(group["steps"] for group in groups)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [((1, 1), (3, 1)), ((2, 2), (2, 1))], ids=str)
def test_decoders_of_unequal_groups_share_prefillers(
    tiny_model, run_dir: pathlib.Path, started, sizes: tuple[tuple[int, int], ...], via: str
) -> None:
    """`sizes`: (groups, ranks of each) of each decoder. One of the prefillers has pages of another size and two ranks."""
    sets = [*SETS, *way_sets(via)]
    prefillers = [
        Node("p0", "prefill", tiny_model, run_dir, sets=[*sets, "kv.num_pages=96"]),
        Node("p1", "prefill", tiny_model, run_dir,
             sets=[*(s for s in sets if "page_size" not in s), "kv.page_size=32", "kv.num_pages=48", "engine.tp=2"]),
    ]
    decoders = [
        Node(f"d{dp}-{tp}", "decode", tiny_model, run_dir, peers=[p.peer_address for p in prefillers],
             sets=[*sets, "kv.num_pages=96", f"engine.dp={dp}", f"engine.tp={tp}"])
        for dp, tp in sizes
    ]
    both = Node("b0", "both", tiny_model, run_dir, sets=[*sets, "kv.num_pages=96"])
    started([*prefillers, *decoders, both])
    prompts = [prompt_of(length, length) for length in LENGTHS]
    oracle = at_once(both.url, prompts)
    with Scrapes([*decoders, *prefillers]) as seen:
        for round_number in range(3):
            with concurrent.futures.ThreadPoolExecutor(len(decoders)) as pool:
                assert list(pool.map(lambda node: at_once(node.url, prompts), decoders)) == [oracle] * len(decoders), round_number
    seen.assert_clean()
    for (dp, tp), node in zip(sizes, decoders, strict=True):
        assert all(group["steps"] and group["ranks"] == tp for group in groups_idle(node, dp))
    for node in prefillers:
        assert node.wait_idle()["transfers"]["units"] > 0
