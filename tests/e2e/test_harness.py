"""The harness leaves no node behind, however its runner ends."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import REPOSITORY

PROBE = """
import pathlib, time
from tests.cluster import Node

def test_that_waits():
    node = Node("b0", "both", {model!r}, pathlib.Path({run_dir!r}), sets=["engine.threads=1", "kv.num_pages=16"])
    try:
        node.start().wait_ready()
        print("node", node.pid, flush=True)
        time.sleep(600)
    finally:
        print("torn down", flush=True)
        node.kill()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_node_ends_with_its_runner(tiny_model: pathlib.Path, run_dir: pathlib.Path, number: signal.Signals) -> None:
    probe = run_dir / "test_probe.py"
    probe.write_text(PROBE.format(model=str(tiny_model), run_dir=str(run_dir)))
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(run_dir),
               str(probe)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY)
    assert runner.stdout is not None
    pid = next(int(line.split("node ")[1]) for line in runner.stdout if "node " in line)
    try:
        runner.send_signal(number)
        rest = runner.communicate(timeout=60)[0]
        assert ("torn down" in rest) == (number != signal.SIGKILL)
        deadline = time.monotonic() + 30
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(pid)
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """An orphan that nobody reaps is over too."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
