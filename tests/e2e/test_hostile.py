"""Strangers, operators, restarts and broken networks: real daemons, whose books are looked at ten times a second."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import threading
import time
import urllib.error
from collections.abc import Iterator

import pytest

from pdd.control.client import Client
from pdd.errors import ControlError
from tests.cluster import Node, cluster
from tests.e2e.conftest import Answer, complete, error_of, model_name, prompt_of
from tests.e2e.scrapes import Scrapes

SETS = ["kv.page_size=16", "kv.num_pages=64", "engine.threads=1", "model.dtype=float32", "engine.max_batch_tokens=32",
        "peers.dead_after=2s", "peers.suspect_after=1s"]

GARBAGE = [
    b"", b"\0", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff" + b"x" * 1000, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), struct.pack(">I", 10) + b"abc",
    struct.pack(">I", 5) + b"\x93" * 5, struct.pack(">I", 6) + b"\xdf\xff\xff\xff\xff\x00", struct.pack(">I", 200) + b"\x91" * 200,
    bytes(random.Random(1).randbytes(100_000)), b"POST /v1/drain HTTP/1.1\r\nHost: pdd\r\nContent-Length: 99999999999\r\n\r\n{}",
]


def throw(family: socket.AddressFamily, address: object, *, reset: bool) -> None:
    for data in GARBAGE:
        with contextlib.suppress(OSError), socket.socket(family) as stranger:
            stranger.settimeout(2)
            stranger.connect(address)
            if reset:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.sendall(data)
            stranger.settimeout(0.03)
            stranger.recv(100)


def listening_ports(node: Node) -> set[int]:
    """Every TCP port of the process, those that libfabric opened included."""
    inodes = set()
    for fd in pathlib.Path(f"/proc/{node.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
    rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def outcome(node: Node, prompt: list[int], max_tokens: int = 8) -> Answer | int | str:
    """The answer, the HTTP status of the error, or what became of the connection."""
    try:
        return complete(node.url, prompt, max_tokens)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError as error:
        return repr(error)


def test_garbage_on_every_port_disturbs_nobody(tiny_model, run_dir: pathlib.Path) -> None:
    with cluster(run_dir, tiny_model, both=1, sets=SETS) as nodes:
        p0, d0 = nodes["p0"], nodes["d0"]
        oracle = complete(nodes["b0"].url, prompt_of(77))
        assert complete(d0.url, prompt_of(77)) == oracle
        ports = listening_ports(p0) | listening_ports(d0)
        assert {p0.port, p0.peer_port, d0.port} <= ports
        began = time.monotonic()
        stop, answers = threading.Event(), []

        def traffic() -> None:
            while not stop.is_set():
                answers.append(outcome(d0, prompt_of(77)))

        with Scrapes([p0, d0]) as seen, concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(traffic)
            try:
                for reset in (False, True):
                    for port in ports:
                        throw(socket.AF_INET, ("127.0.0.1", port), reset=reset)
                    for node in (p0, d0):
                        for name in ("control", "status"):
                            throw(socket.AF_UNIX, str(run_dir / node.name / f"{name}.sock"), reset=reset)
            finally:
                stop.set()
            future.result()
        seen.assert_clean()
        assert len(answers) > 10
        assert all(answer == oracle for answer in answers)
        (link,) = d0.status()["peers"]
        assert link["since_seconds"] > time.monotonic() - began, "the link between the two was renewed"
        for node in (p0, d0):
            status = node.wait_idle()
            assert status["state"] == "ready"
            assert status["transfers"]["failed"] == 0
            assert "Traceback" not in node.log
            assert len(node.log.splitlines()) < 60


def test_an_operator_ends_and_drains_at_random(tiny_model, run_dir: pathlib.Path) -> None:
    """Prefills are cancelled at the prefiller, requests at the decoder, both are drained: an answer is right or an error."""
    rng = random.Random(3)
    with cluster(run_dir, tiny_model, both=1, sets=SETS) as nodes:
        p0, d0 = nodes["p0"], nodes["d0"]
        prompts = [prompt_of(200 + i, i) for i in range(12)]
        oracle = [complete(nodes["b0"].url, prompt) for prompt in prompts]

        def meddle(node: Node) -> None:
            client = Client(run_dir / node.name, timeout=5.0)
            with contextlib.suppress(ControlError):  # it ended by itself, or was not draining
                rows = client.get("/v1/requests", private=True)["requests"]
                if rows and rng.random() < 0.7:
                    client.delete(f"/v1/requests/{rng.choice(rows)['id']}")
                client.post("/v1/drain" if rng.random() < 0.1 else "/v1/resume")

        with Scrapes([p0, d0]) as seen, concurrent.futures.ThreadPoolExecutor(12) as pool:
            futures = [pool.submit(outcome, d0, prompts[i % 12]) for i in range(60)]
            while not all(future.done() for future in futures):
                meddle(p0)
                meddle(d0)
                time.sleep(0.02)
        seen.assert_clean()
        for i, future in enumerate(futures):
            assert future.result() in (oracle[i % 12], 503)
        assert any(future.result() == 503 for future in futures), "nothing was hurt: the test proves nothing"
        for node in (p0, d0):
            with contextlib.suppress(ControlError):
                Client(run_dir / node.name).post("/v1/resume")
            node.wait_idle()
            assert "Traceback" not in node.log
        d0.wait_ready(10)
        assert complete(d0.url, prompts[0]) == oracle[0]


@pytest.fixture
def fat_model(tmp_path: pathlib.Path) -> pathlib.Path:
    """Random weights, but 768 KiB of KV a page: no socket buffer swallows a push whole."""
    from pdd.model.demo import write_demo_model

    return write_demo_model(tmp_path / "fat", num_layers=6, num_heads=8, num_kv_heads=8, head_dim=128)


def test_a_stopped_decoder_costs_its_own_requests_only(fat_model, run_dir: pathlib.Path) -> None:
    """STOP in the middle of pushes: the prefiller gets its pages back and serves others; after CONT all is well again."""
    with cluster(run_dir, fat_model, decoders=2, both=1, sets=SETS) as nodes:
        p0, d0, d1 = nodes["p0"], nodes["d0"], nodes["d1"]
        prompts = [prompt_of(400 + i, i) for i in range(3)]
        oracle = [complete(nodes["b0"].url, prompt) for prompt in prompts]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(outcome, d0, prompt) for prompt in prompts]
            p0.wait("a push", lambda s: s["transfers"]["units"] > 0, 10)
            d0.signal(signal.SIGSTOP)
            try:
                p0.wait("a push that hangs", lambda s: s["pages"]["sending"] > 0, 1.5)
                assert [complete(d1.url, prompt) for prompt in prompts] == oracle
                p0.wait_idle(10)
            finally:
                d0.signal(signal.SIGCONT)
            for future, right in zip(futures, oracle, strict=True):
                assert future.result() in (right, 503)
        d0.wait_ready(10)
        assert [complete(d0.url, prompt) for prompt in prompts] == oracle
        for node in (p0, d0, d1):
            node.wait_idle()


@contextlib.contextmanager
def namespace() -> Iterator[str]:
    """A network of its own at 10.99.78.2, reached from here over a veth pair; the name is that of both."""
    name = f"pdd{os.getpid() % 100_000}"
    commands = [
        f"netns add {name}", f"link add {name} type veth peer name {name}p", f"link set {name}p netns {name}",
        f"addr add 10.99.78.1/24 dev {name}", f"link set {name} up", f"-n {name} addr add 10.99.78.2/24 dev {name}p",
        f"-n {name} link set {name}p up", f"-n {name} link set lo up",
    ]
    try:
        for command in commands:
            try:
                subprocess.run(["ip", *command.split()], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespace can be made here: {error}")
        yield name
    finally:
        for command in (f"netns del {name}", f"link del {name}"):
            with contextlib.suppress(OSError):
                subprocess.run(["ip", *command.split()], check=False, capture_output=True)


def test_a_partition_heals_without_a_restart(tiny_model, run_dir: pathlib.Path) -> None:
    """Nothing is reset or refused, packets just vanish: TCP and the fabric both hang, for shorter and longer than death."""
    token = run_dir / "token"
    token.write_text("x" * 40)
    token.chmod(0o600)
    sets = [*SETS, f"peers.token_credential={token}", "peers.connect_timeout=2s"]
    with namespace() as name, contextlib.ExitStack() as stack:
        p0 = Node("p0", "prefill", tiny_model, run_dir, sets=sets)
        address = f"10.99.78.2:{p0.peer_port}"
        p0.argv = ["ip", "netns", "exec", name, *[address if a == p0.peer_address else a for a in p0.argv]]
        d0 = Node("d0", "decode", tiny_model, run_dir, peers=[address], sets=sets)
        b0 = Node("b0", "both", tiny_model, run_dir, sets=SETS)
        for node in (p0, d0, b0):
            stack.callback(node.start().kill)
        for node in (p0, b0, d0):
            node.wait_ready()
        prompts = [prompt_of(400 + i, i) for i in range(4)]
        oracle = [complete(b0.url, prompt) for prompt in prompts]
        assert [complete(d0.url, prompt) for prompt in prompts] == oracle
        with Scrapes([d0]) as seen, concurrent.futures.ThreadPoolExecutor(4) as pool:
            for seconds in (0.6, 6.0):
                futures = [pool.submit(outcome, d0, prompt) for prompt in prompts]
                time.sleep(0.1)
                subprocess.run(["ip", "link", "set", name, "down"], check=True)
                time.sleep(seconds)
                subprocess.run(["ip", "link", "set", name, "up"], check=True)
                for future, right in zip(futures, oracle, strict=True):
                    assert future.result() in ((right,) if seconds < 1 else (right, 503))
                d0.wait_ready(20)
                assert [complete(d0.url, prompt) for prompt in prompts] == oracle
                for node in (d0, p0):
                    node.wait_idle()
        seen.assert_clean()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_kills_in_the_middle_of_pushes(tiny_model, run_dir: pathlib.Path) -> None:
    """Prefiller and decoder in turn, each restarted on its ports: every life serves, nothing piles up."""
    rng = random.Random(4)
    with cluster(run_dir, tiny_model, both=1, sets=SETS) as nodes:
        p0, d0 = nodes["p0"], nodes["d0"]
        prompts = [prompt_of(300 + i, i) for i in range(6)]
        oracle = [complete(nodes["b0"].url, prompt) for prompt in prompts]
        with Scrapes([p0, d0]) as seen, concurrent.futures.ThreadPoolExecutor(6) as pool:
            for turn in range(20):
                victim = (p0, d0)[turn % 2]
                futures = [pool.submit(outcome, d0, prompt) for prompt in prompts]
                time.sleep(rng.random() * 0.15)
                victim.kill()
                for future, right in zip(futures, oracle, strict=True):
                    got = future.result()
                    assert got in (right, 503) or (victim is d0 and isinstance(got, str))
                victim.start()
                victim.wait_ready()
                d0.wait_ready(20)
                assert complete(d0.url, prompts[0]) == oracle[0]
        seen.assert_clean()
        for node in (p0, d0):
            node.wait_idle()
            assert "Traceback" not in node.log
            assert len(os.listdir(f"/proc/{node.pid}/fd")) < 60


def test_prompts_that_fill_the_pool_never_stop_the_small_ones(tiny_model, run_dir: pathlib.Path) -> None:
    """One that can never fit is refused at once; one that must wait for nearly all pages is served, and so are small ones."""
    with cluster(run_dir, tiny_model, both=1, sets=SETS) as nodes:
        p0, d0, b0 = nodes["p0"], nodes["d0"], nodes["b0"]
        code, error = error_of(d0.url, {"model": model_name(d0.url), "prompt": prompt_of(70 * 16), "max_tokens": 4})
        assert code == 400
        assert "1025" in error["message"]  # 64 pages, and a last token that needs no KV
        growing = [(prompt_of(12 * 16, i), 150) for i in range(4)]
        big = (prompt_of(60 * 16, 5), 8)
        small = [(prompt_of(12, i), 4) for i in range(10)]
        work = [*growing, big, *small]
        oracle = [complete(b0.url, *item) for item in work]
        with Scrapes([p0, d0]) as seen, concurrent.futures.ThreadPoolExecutor(len(work)) as pool:
            futures = []
            for i, item in enumerate(work):
                futures.append(pool.submit(complete, d0.url, *item))
                if i in (3, 4):
                    time.sleep(0.2)
            assert [future.result() for future in futures] == oracle
        seen.assert_clean()
        assert d0.wait_idle()["engine"]["preemptions"] > 0
        p0.wait_idle()
