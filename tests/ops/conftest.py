"""What the tests of packages, units, monitoring and proxies share: real nodes, and other people's real programs."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.cluster import Node, cluster, die_with_parent
from tests.e2e.conftest import module_run_dir as module_run_dir
from tests.e2e.conftest import run_dir as run_dir
from tests.ops.machine import Machine, machine
from tests.tree.imports import ROOT

UNIT = "pdd@b0.service"
SETS = ["kv.num_pages=128", "engine.threads=1", "model.dtype=float32"]


def program(name: str, package: str = "") -> str:
    """The path of a program of Debian; without it the test is skipped, and says what would run it."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install {package or name}, or make ops-tools")
    return found


@contextlib.contextmanager
def started(argv: Sequence[str], log: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs until the block ends, whatever ends it."""
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def eventually(what: str, condition: Callable[[], object], timeout: float = 30.0) -> None:
    """Waits until the condition is true; what it raises counts as not yet."""
    deadline = time.monotonic() + timeout
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = condition()
        except Exception as error:
            last = error
        else:
            if last:
                return
        time.sleep(0.1)
    raise AssertionError(f"no {what} within {timeout} s: {last!r}")


@pytest.fixture(scope="module")
def pair(tiny_model: pathlib.Path, module_run_dir: pathlib.Path) -> Iterator[dict[str, Node]]:
    """A prefiller and two decoders, with vLLM's names in their metrics."""
    with cluster(module_run_dir, tiny_model, decoders=2, sets=[*SETS, 'metrics.compat=["vllm"]']) as nodes:
        yield nodes


# -- the package on a machine ------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def deb(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """PDD_TEST_DEB if it is set, else built here, which takes a minute or two and an index."""
    if given := os.environ.get("PDD_TEST_DEB"):
        return pathlib.Path(given).resolve()
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not here: a Debian package is built on Debian")
    done = subprocess.run([str(ROOT / "tools/pack.sh"), "deb"], env={**os.environ, "PYTHON": "/usr/bin/python3"}, capture_output=True,
                          text=True, check=False, timeout=1500)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [built] = (ROOT / "dist").glob("pdd-node_*.deb")
    return built


@pytest.fixture(scope="module")
def host(deb: pathlib.Path, tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("machine")) as found:
        shutil.copy(deb, found.shared / "pdd-node.deb")
        shutil.copytree(tiny_model, found.shared / "tiny")
        found.run("rm -rf /opt/pdd /etc/pdd /usr/local/bin/pdd; mkdir -p /srv && cp -r /shared/tiny /srv/tiny && chmod -R a+rX /srv")
        yield found


def status(host: Machine) -> dict[str, object]:
    found: dict[str, object] = json.loads(host.out("pdd -i b0 status --json"))
    return found


ASK = """python3 -c '
import json, urllib.request
body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4}).encode()
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=20))["usage"]["completion_tokens"])'"""
