"""Nodes of several ranks: any number of ranks feeds any other, and a rank that dies, hangs or is left alone takes its node along."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import threading
import time
import urllib.error
from collections.abc import Iterator, Sequence

import pytest

from pdd.errors import EXIT_CONFIG, EXIT_ENGINE_DIED
from tests.cluster import Node, page_sum_holds
from tests.e2e.conftest import complete, model_name, post, prompt_of

SETS = ["engine.threads=1", "model.dtype=float32", "kv.num_pages=96", "engine.step_timeout=3s"]
LENGTHS = (1, 2, 16, 17, 33, 70, 131)
PATIENCE_SECONDS = 60.0


def test_a_node_cannot_be_told_from_one_with_other_ranks_until_one_of_them_ends(tiny_model, run_dir: pathlib.Path) -> None:
    """Two ranks to one, one to two, four alone; two KV heads, pages of 16 and 32."""
    p1 = Node("p1", "prefill", tiny_model, run_dir, sets=[*SETS, "kv.page_size=32"])
    p2 = Node("p2", "prefill", tiny_model, run_dir, sets=[*SETS, "engine.tp=2"])
    d1 = Node("d1", "decode", tiny_model, run_dir, peers=[p2.peer_address], sets=SETS)
    d2 = Node("d2", "decode", tiny_model, run_dir, peers=[p1.peer_address], sets=[*SETS, "engine.tp=2"])
    b4 = Node("b4", "both", tiny_model, run_dir, sets=[*SETS, "engine.tp=4"])
    with started(p1, p2, d1, d2, b4):
        assert [len(node.status()["ranks"]) for node in (p1, p2, d1, d2, b4)] == [1, 2, 1, 2, 4]
        for length in LENGTHS:
            wanted = complete(b4.url, prompt_of(length, length), max_tokens=16)
            assert complete(d1.url, prompt_of(length, length), max_tokens=16) == wanted, f"{length} tokens, 2 ranks to 1"
            assert complete(d2.url, prompt_of(length, length), max_tokens=16) == wanted, f"{length} tokens, 1 rank to 2"
        for decoder, prefiller in ((d1, p2), (d2, p1)):
            there, here = prefiller.wait_idle()["transfers"], decoder.wait_idle()["transfers"]
            assert there["units"] == here["units_received"] > 0
            assert there["bytes"] == here["bytes_received"]
        # One dies while the other waits for it; one hangs; all are left alone.
        dies_in_a_step(d2)
        hangs_in_a_step(p2, asked=d1)
        left_alone(b4)


def dies_in_a_step(node: Node) -> None:
    pids = rank_pids(node)
    os.kill(pids[1], signal.SIGSTOP)
    with asked_for(node):
        wait_until(lambda: node.status()["running"] + node.status()["waiting_for_kv"] > 0)
        time.sleep(0.3)  # into the collective, most likely; it may as well have begun to wait anywhere before
        os.kill(pids[1], signal.SIGKILL)
        ends(node, pids)
    assert f"rank 1 (pid {pids[1]}) was killed by SIGKILL" in node.log


def hangs_in_a_step(node: Node, asked: Node) -> None:
    pids = rank_pids(node)
    os.kill(pids[1], signal.SIGSTOP)
    with asked_for(asked):
        ends(node, pids)
    assert "rank 1 did not finish step" in node.log
    assert "within 3 s and was killed; rank 0 waited for it" in node.log


def left_alone(node: Node) -> None:
    pids = rank_pids(node)
    assert len(pids) == 4
    node.kill()
    for pid in pids:
        wait_until(lambda pid=pid: not runs(pid))


def ends(node: Node, pids: Sequence[int]) -> None:
    assert node.process is not None
    assert node.process.wait(PATIENCE_SECONDS) == EXIT_ENGINE_DIED
    for pid in pids:
        wait_until(lambda pid=pid: not runs(pid))


def test_ranks_that_a_model_does_not_divide_over_are_refused_before_anything_starts(tiny_model, run_dir: pathlib.Path) -> None:
    node = Node("b3", "both", tiny_model, run_dir, sets=[*SETS, "engine.tp=3"]).start()
    assert node.process is not None
    assert node.process.wait(PATIENCE_SECONDS) == EXIT_CONFIG
    assert "engine.tp: this model cannot run on 3 ranks: num_attention_heads (4) does not divide over 3 ranks" in node.log
    assert "Set engine.tp (--tp) to one of 1, 2, 4." in node.log


def test_latents_and_experts_on_unequal_ranks(tmp_path: pathlib.Path, run_dir: pathlib.Path) -> None:
    """DeepSeek: each rank has all of the compressed cache and some of the experts; two ranks to one, pages of 32 and 16."""
    from pdd.model.demo import write_demo_model

    model = write_demo_model(tmp_path / "model", "deepseek_v3")
    b1 = Node("b1", "both", model, run_dir, sets=SETS)
    p2 = Node("p2", "prefill", model, run_dir, sets=[*SETS, "engine.tp=2", "kv.page_size=32"])
    d1 = Node("d1", "decode", model, run_dir, peers=[p2.peer_address], sets=SETS)
    with started(b1, p2, d1):
        for length in LENGTHS:
            wanted = complete(b1.url, prompt_of(length, length), max_tokens=16)
            assert complete(d1.url, prompt_of(length, length), max_tokens=16) == wanted, f"{length} tokens"
        assert d1.wait_idle()["transfers"]["units_received"] > 0


MODELS = {**{f"{heads}-kv-heads": dict(family="llama", num_kv_heads=heads) for heads in (8, 4, 2, 1)},
          "latents": dict(family="deepseek_v3"), "experts": dict(family="qwen3_moe", num_kv_heads=4),
          "window": dict(family="mistral", num_kv_heads=2)}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("of", "pages", "via"),
    [*((of, pages, "tcp") for of in MODELS for pages in ((16, 16), (16, 32), (32, 16))),
     ("8-kv-heads", (32, 16), "local"), ("2-kv-heads", (16, 32), "local"), ("latents", (16, 16), "local")],
)
def test_the_grid(tmp_path: pathlib.Path, run_dir: pathlib.Path, of: str, pages: tuple[int, int], via: str) -> None:
    """Prefillers of 1, 2 and 4 ranks, each with decoders of 1, 2 and 4; some requests are given up half-way, and at the end a
    prefiller loses a rank under load: no page stays behind."""
    from pdd.model.demo import write_demo_model

    model = write_demo_model(tmp_path / "model", num_heads=8, head_dim=16, **MODELS[of])
    sets = [*SETS, f"fabric.local={'auto' if via == 'local' else 'off'}"]
    b1 = Node("b1", "both", model, run_dir, sets=sets)
    with started(b1):
        wanted = {length: complete(b1.url, prompt_of(length, length), max_tokens=16) for length in LENGTHS}
    for tp in (1, 2, 4):
        p = Node("p", "prefill", model, run_dir, sets=[*sets, f"kv.page_size={pages[0]}", f"engine.tp={tp}"])
        ds = [Node(f"d{each}", "decode", model, run_dir, peers=[p.peer_address],
                   sets=[*sets, f"kv.page_size={pages[1]}", f"engine.tp={each}"]) for each in (1, 2, 4)]
        with started(p, *ds):
            for decoder, length in itertools.product(ds, LENGTHS):
                assert complete(decoder.url, prompt_of(length, length), max_tokens=16) == wanted[length], (tp, decoder.name, length)
            for decoder in ds:
                for patience in (0.001, 0.01, 0.05):
                    with contextlib.suppress(TimeoutError, urllib.error.URLError):
                        complete_in(decoder, patience)
                assert page_sum_holds(decoder.wait_idle())
                assert complete(decoder.url, prompt_of(70, 70), max_tokens=16) == wanted[70]
            p.wait_idle()
            if tp > 1:
                pids = rank_pids(p)
                with contextlib.ExitStack() as load:
                    for decoder in ds:
                        load.enter_context(asked_for(decoder))
                    os.kill(pids[-1], signal.SIGKILL)
                    ends(p, pids)
                for decoder in ds:
                    assert page_sum_holds(decoder.wait_idle(PATIENCE_SECONDS))
        for node in (p, *ds):
            node.kill()


# -- helpers ----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def started(*nodes: Node) -> Iterator[None]:
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_ready(120.0)
        for node in nodes:
            if node.role == "decode":
                node.wait("its prefiller", lambda s: s["peers"][0]["state"] == "up")
        yield
    finally:
        for node in nodes:
            node.kill()


@contextlib.contextmanager
def asked_for(node: Node) -> Iterator[None]:
    """Somebody waits for long answers of the node, whatever becomes of it; gone at the end."""
    def ask(number: int) -> None:
        with contextlib.suppress(OSError):  # HTTP errors and cut connections are both
            complete(node.url, prompt_of(150, number), max_tokens=64)

    model_name(node.url)  # ask it while it can answer
    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def complete_in(node: Node, seconds: float) -> None:
    """Gives up after so long."""
    post(f"{node.url}/v1/completions",
         {"model": model_name(node.url), "prompt": prompt_of(190, 5), "max_tokens": 64, "temperature": 0}, timeout=seconds)


def rank_pids(node: Node) -> list[int]:
    return [rank["pid"] for rank in node.status()["ranks"]]


def runs(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
