"""The shipped configurations of HAProxy and nginx, run by the real programs before two real decoders."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import Node, cluster, free_port
from tests.e2e.conftest import complete, error_of, model_name, prompt_of
from tests.ops.conftest import SETS, eventually, program, started
from tests.tree.imports import ROOT


@dataclasses.dataclass(frozen=True)
class Front:
    kind: str
    url: str
    decoders: tuple[Node, Node]

    def ended(self) -> dict[str, int]:
        """Requests that have ended at each decoder."""
        return {node.name: _ended(node) for node in self.decoders}

    def settle(self) -> None:
        """Until the proxy sends to both again, and neither has anything to do."""
        for node in self.decoders:
            node.wait_idle()
        def both() -> bool:
            before = self.ended()
            for seed in range(4):
                complete(self.url, prompt_of(20, seed), max_tokens=1)
            return all(self.ended()[name] > count for name, count in before.items())
        eventually("both decoders in use", both)


def _ended(node: Node) -> int:
    with urllib.request.urlopen(f"{node.url}/metrics", timeout=10) as answer:
        return int(sum(float(n) for n in re.findall(r'^pdd_requests_total\{.*\} (\S+)$', answer.read().decode(), re.M)))


def _haproxy(directory: pathlib.Path, port: int, nodes: tuple[Node, Node]) -> list[str]:
    text = (ROOT / "etc/haproxy/pdd.cfg").read_text()
    for address, node in zip(("127.0.0.1:8000", "127.0.0.1:8001"), nodes, strict=True):
        assert address in text
        text = text.replace(address, f"127.0.0.1:{node.port}")
    (directory / "pdd.cfg").write_text(text.replace("127.0.0.1:8080", f"127.0.0.1:{port}"))
    command = [program("haproxy"), "-f", str(directory / "pdd.cfg")]
    return command


def _nginx(directory: pathlib.Path, port: int, nodes: tuple[Node, Node]) -> list[str]:
    text = (ROOT / "etc/nginx/pdd.conf").read_text()
    for address, node in zip(("127.0.0.1:8000", "127.0.0.1:8001"), nodes, strict=True):
        assert address in text
        text = text.replace(address, f"127.0.0.1:{node.port}")
    (directory / "pdd.conf").write_text(text.replace("127.0.0.1:8080", f"127.0.0.1:{port}"))
    paths = "".join(f"{kind}_temp_path {directory}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root; " if os.geteuid() == 0 else ""  # else its workers could not write where the test is
    (directory / "nginx.conf").write_text(
        f"{user}daemon off; pid {directory}/pid; error_log stderr; worker_processes 1; events {{}}\n"
        f"http {{ access_log off; {paths} include {directory}/pdd.conf; }}\n"
    )
    command = [program("nginx", "nginx-light"), "-p", str(directory), "-c", str(directory / "nginx.conf")]
    return command


@pytest.fixture(scope="module", params=[_haproxy, _nginx], ids=["haproxy", "nginx"])
def front(request: pytest.FixtureRequest, tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory,
          module_run_dir: pathlib.Path) -> Iterator[Front]:  # fmt: skip
    directory, port = tmp_path_factory.mktemp("front"), free_port()
    program(request.param.__name__[1:])  # before the nodes, which take longer
    run_dir = module_run_dir / request.param.__name__[1:]
    run_dir.mkdir()
    with cluster(run_dir, tiny_model, decoders=2, sets=SETS) as nodes:
        decoders = (nodes["d0"], nodes["d1"])
        with started(request.param(directory, port, decoders), directory / "log"):
            url = f"http://127.0.0.1:{port}"
            eventually("answer", lambda: urllib.request.urlopen(f"{url}/health", timeout=2).status == 200)
            yield Front(request.param.__name__[1:], url, decoders)


class Stream:
    """One streamed completion through the proxy."""

    def __init__(self, front: Front, max_tokens: int) -> None:
        body = {"model": model_name(front.url), "prompt": prompt_of(40), "max_tokens": max_tokens, "stream": True, "temperature": 0}
        self._connection = http.client.HTTPConnection(front.url.removeprefix("http://"), timeout=30)
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self.answer = self._connection.getresponse()
        self.first = self.event()
        [self.node] = [node for node in front.decoders if node.status()["running"] == 1]

    def event(self) -> str:
        while not (line := self.answer.readline()).strip():
            assert line, "the stream ended"
        return line.decode().strip()

    def rest(self) -> list[str]:
        """All further events, up to the end or the break."""
        events: list[str] = []
        with contextlib.suppress(http.client.HTTPException, ConnectionError, AssertionError):
            while True:
                events.append(self.event())
        self._connection.close()
        return events


@pytest.mark.parametrize(("proxy", "check"), [(_haproxy, "-c"), (_nginx, "-t")], ids=["haproxy", "nginx"])
def test_a_configuration_is_valid(proxy: Any, check: str, tmp_path: pathlib.Path) -> None:
    nodes = (Node("d0", "decode", "none", tmp_path), Node("d1", "decode", "none", tmp_path))
    done = subprocess.run([*proxy(tmp_path, free_port(), nodes), check], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[WARNING]" not in done.stderr


@pytest.mark.slow
def test_requests_spread_over_both_and_a_stream_is_not_held_back(front: Front) -> None:
    front.settle()
    stream = Stream(front, 400)  # its node is still at work: the first event did not wait for the last
    assert json.loads(stream.first.removeprefix("data: "))["choices"]
    other = next(node for node in front.decoders if node is not stream.node)
    before = front.ended()
    for seed in range(3):
        complete(front.url, prompt_of(30, seed), max_tokens=2)
    if stream.node.status()["running"]:
        assert front.ended()[other.name] >= before[other.name] + 2, "the busy node has fewer connections to spare"
    assert stream.rest()[-1] == "data: [DONE]"


@pytest.mark.slow
def test_a_drained_decoder_gets_nothing_new_and_its_stream_goes_on(front: Front) -> None:
    front.settle()
    stream = Stream(front, 400)
    before = front.ended()[stream.node.name]
    subprocess.run([*stream.node.argv[:3], "--run-dir", str(stream.node.run_dir), "-i", stream.node.name, "drain", "--no-wait"],
                   check=True, capture_output=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda seed: complete(front.url, prompt_of(30, seed), max_tokens=2), range(12)))
    assert len(answers) == 12, "a client saw the drain"
    assert stream.rest()[-1] == "data: [DONE]"
    stream.node.wait("drained", lambda s: s["state"] == "drained", 20)
    assert front.ended()[stream.node.name] == before + 1  # the stream alone
    subprocess.run([*stream.node.argv[:3], "--run-dir", str(stream.node.run_dir), "-i", stream.node.name, "resume"],
                   check=True, capture_output=True)
    front.settle()


@pytest.mark.slow
def test_requests_of_any_size_and_a_bad_one_pass_as_they_are(front: Front) -> None:
    code, error = error_of(front.url, {"model": model_name(front.url), "prompt": "x", "max_tokens": -1})
    assert (code, error["type"]) == (400, "invalid_request_error")
    large: Any = {"model": model_name(front.url), "prompt": "x", "user": "y" * 300_000}  # over what a proxy keeps to send again
    with contextlib.suppress(urllib.error.HTTPError):
        request = urllib.request.Request(f"{front.url}/v1/completions", json.dumps(large).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
            return
    raise AssertionError("a large body was refused")


@pytest.mark.slow
def test_a_decoder_that_dies_ends_its_stream_and_no_other_request(front: Front) -> None:
    """Last: one decoder is gone from here on."""
    front.settle()
    stream = Stream(front, 1500)
    survivor = next(node for node in front.decoders if node is not stream.node)
    before = _ended(survivor)
    stream.node.kill()
    events = stream.rest()
    assert "data: [DONE]" not in events, "the client must see that its answer is not whole"
    assert _ended(survivor) == before, "a stream that had begun was asked for again elsewhere"
    for seed in range(8):
        complete(front.url, prompt_of(30, seed), max_tokens=2)
    assert _ended(survivor) == before + 8
    survivor.kill()

    def refused() -> bool:
        try:
            urllib.request.urlopen(f"{front.url}/health", timeout=5).close()
        except urllib.error.HTTPError as error:
            with error:
                return error.code in (502, 503)
        return False

    eventually("refusal", refused)
