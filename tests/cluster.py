"""Real pdd nodes for tests, benchmarks and the demo: started as a user would, looked at through their own sockets."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pdd.control.client import Client
from pdd.metrics import PAGE_STATES

PDD = [sys.executable, "-m", "pdd"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be imported between fork and exec
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """For a child before exec: it is killed when the thread that started it ends, however that comes about."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Node:
    """One `pdd serve` process. Its output goes to RUN_DIR/NAME.log. It ends with this process, unless it `outlives` it."""

    def __init__(self, name: str, role: str, model: str | os.PathLike[str], run_dir: pathlib.Path, *,
                 peers: Sequence[str] = (), sets: Sequence[str] = (), cpus: Sequence[int] | None = None,
                 env: dict[str, str] | None = None, outlives: bool = False) -> None:
        self.outlives = outlives
        self.name, self.role, self.run_dir = name, role, run_dir
        self.port, self.peer_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.peer_address = f"127.0.0.1:{self.peer_port}"
        self.log_path = run_dir / f"{name}.log"
        self.argv = [*PDD, "serve", "--role", role, "--name", name, "--model", str(model), "--run-dir", str(run_dir),
                     "--listen", f"127.0.0.1:{self.port}"]
        if role == "prefill":
            self.argv += ["--peer-listen", self.peer_address]
        for peer in peers:
            self.argv += ["--peer", peer]
        for item in sets:
            self.argv += ["--set", item]
        self.cpus = cpus
        # All of these nodes are on one host: those that do not ask (--set fabric.local=auto) use the network.
        self.env = {**os.environ, "PYTHONUNBUFFERED": "1", "PDD_FABRIC__LOCAL": "off", **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Node:
        assert self.outlives or threading.current_thread() is threading.main_thread(), "it would end with this thread"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(self.argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env,
                                            preexec_fn=self._before_exec, start_new_session=True)
        return self

    def _before_exec(self) -> None:
        if not self.outlives:
            die_with_parent()
        if self.cpus is not None:
            os.sched_setaffinity(0, self.cpus)

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def control(self, path: str, method: str = "GET") -> Any:
        client = Client(self.run_dir / self.name, timeout=5.0)
        return client.delete(path) if method == "DELETE" else client.get(path, private=True)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self.control("/v1/status")
        return document

    def wait(self, what: str, condition: Any, timeout: float = 60.0) -> dict[str, Any]:
        """Polls the status until `condition(status)`; fails with the node's log otherwise."""
        deadline = time.monotonic() + timeout
        last: dict[str, Any] = {}
        while time.monotonic() < deadline:
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"{self.name} exited {self.process.returncode} while waiting for {what}:\n{self.log[-4000:]}")
            try:
                last = self.status()
            except Exception as error:  # not up yet, or being restarted
                last = {"error": str(error)}
            else:
                if condition(last):
                    return last
            time.sleep(0.05)
        raise AssertionError(f"{self.name}: no {what} within {timeout} s; last status {last}\n{self.log[-4000:]}")

    def wait_ready(self, timeout: float = 60.0) -> dict[str, Any]:
        return self.wait("state ready", lambda s: s["state"] == "ready", timeout)

    def wait_idle(self, timeout: float = 10.0) -> dict[str, Any]:
        """The Q-check: nothing held, nothing open, every page free or cached."""
        def idle(s: dict[str, Any]) -> bool:
            pages = s["pages"]
            return (s["running"] == s["waiting"] == s["waiting_for_kv"] == 0 and s["transfers"]["active"] == 0
                    and s["transfers"]["attempts"] == s["transfers"]["prefills"] == 0
                    and pages["free"] + pages["cached"] == pages["total"])
        return self.wait("quiet state", idle, timeout)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self, timeout: float = 20.0) -> int:
        """SIGTERM, then the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
                self.signal(signal.SIGKILL)
            self.process.wait(10)


def page_sum_holds(status: dict[str, Any]) -> bool:
    pages = status["pages"]
    return bool(sum(pages[state] for state in PAGE_STATES) == pages["total"])


@contextlib.contextmanager
def cluster(run_dir: pathlib.Path, model: str | os.PathLike[str], *, prefillers: int = 1, decoders: int = 1, both: int = 0,
            sets: Sequence[str] = (), ready_timeout: float = 120.0) -> Iterator[dict[str, Node]]:
    """p0.., d0.., b0..: started together, ready, decoders connected to every prefiller; killed at the end."""
    ps = [Node(f"p{i}", "prefill", model, run_dir, sets=sets) for i in range(prefillers)]
    ds = [Node(f"d{i}", "decode", model, run_dir, peers=[p.peer_address for p in ps], sets=sets) for i in range(decoders)]
    bs = [Node(f"b{i}", "both", model, run_dir, sets=sets) for i in range(both)]
    nodes = [*ps, *ds, *bs]
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_ready(ready_timeout)
        for node in ds:
            node.wait("all peers up", lambda s: sum(p["state"] == "up" for p in s["peers"]) == prefillers, 30)
        yield {node.name: node for node in nodes}
    finally:
        for node in nodes:
            node.kill()
