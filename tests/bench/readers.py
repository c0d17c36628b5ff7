"""What readers of /v1/events cost a daemon at 1,000 requests/s, and what one that is stuck costs the others."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import pathlib
import selectors
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any

from pdd.tui.sources import TOPICS
from tests.bench.common import cpu_seconds, median, percentile, resident_bytes

PER_SECOND, READERS, STUCK = 1000, 8, 8
TURNS = 3  # of each setting
STUCK_AFTER = 5.0  # seconds, in which one that reads nothing has filled its buffers, at ten lines a second


class Readers:
    """Connections of one thread, which notes when each got a line and parses none."""

    def __init__(self, path: pathlib.Path, count: int) -> None:
        self.arrivals: list[list[float]] = [[] for _ in range(count)]
        self.bytes = 0
        self._selector = selectors.DefaultSelector()
        for number in range(count):
            self._selector.register(_connected(path, "1s"), selectors.EVENT_READ, number)
        self._over = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.1):
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 20)
                assert data, "the daemon ended a stream"
                self.bytes += len(data)
                if data.endswith(b"}\n\r\n"):  # the end of a line, which is a chunk
                    self.arrivals[key.data].append(time.monotonic())

    def close(self) -> None:
        self._over = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()

    def lateness(self) -> list[float]:
        """Of each line but the first few, beyond its second after the one before."""
        return [abs(b - a - 1.0) for times in self.arrivals for a, b in itertools.pairwise(times[2:])]


def _connected(path: pathlib.Path, interval: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    connection.sendall(f"GET /v1/events?topics={','.join(TOPICS)}&interval={interval} HTTP/1.1\r\nHost: pdd\r\n\r\n".encode())
    return connection


def unread(connection: socket.socket) -> int:
    """Bytes that wait in it."""
    found: int = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, b"\0" * 4))[0]
    return found


@contextlib.contextmanager
def busy_node(run_dir: pathlib.Path, counts: list[int]) -> Iterator[int]:
    """Its pid; `counts`: requests that ended, each second."""
    program = [sys.executable, str(pathlib.Path(__file__).with_name("busy_node.py")), str(run_dir), str(PER_SECOND)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout
        reading = threading.Thread(target=lambda: counts.extend(int(line) for line in output))
        try:
            reading.start()
            while len(counts) < 2:
                assert process.poll() is None, "the node did not start"
                time.sleep(0.1)
            yield process.pid
        finally:
            process.kill()
            reading.join()


def measure(run_dir: pathlib.Path, seconds: float, rows: list[dict[str, Any]], bounds: list[tuple[str, float, str, float]]) -> None:
    path = run_dir / "busy" / "control.sock"
    counts: list[int] = []
    shares: dict[str, list[float]] = {"nobody": [], "readers": [], "readers and stuck": []}
    late: dict[str, list[float]] = {name: [] for name in shares}
    kilobytes = 0.0
    with busy_node(run_dir, counts) as pid:
        before = resident_bytes(pid)
        for _ in range(TURNS):
            for name in shares:
                stuck = [_connected(path, "100ms") for _ in range(STUCK)] if name.endswith("stuck") else []
                time.sleep(STUCK_AFTER if stuck else 0)
                found = Readers(path, 0 if name == "nobody" else READERS)
                waiting = [unread(connection) for connection in stuck]
                time.sleep(2)  # first lines, with whole documents
                assert waiting == [unread(connection) for connection in stuck], "a reader that should be stuck is not"
                cpu, begin, read = cpu_seconds(pid), time.monotonic(), found.bytes
                time.sleep(seconds / TURNS)
                past = time.monotonic() - begin
                shares[name].append((cpu_seconds(pid) - cpu) / past)
                kilobytes = max(kilobytes, (found.bytes - read) / past / READERS / 1e3)
                found.close()
                late[name] += found.lateness()
                for connection in stuck:
                    connection.close()
        grown = resident_bytes(pid) - before
    for name, values in shares.items():
        row: dict[str, Any] = {"what": f"{PER_SECOND} requests/s, {name}", "cores": median(values)}
        if late[name]:
            row |= {"line_late_p50_ms": median(late[name]) * 1e3, "line_late_p99_ms": percentile(late[name], 0.99) * 1e3}
        rows.append(row)
    rows.append({"what": "requests that ended in a second, kB/s of a reader", "p50": median(counts[1:]), "kb_per_s": kilobytes,
                 "grown_mb": grown / 1e6})
    each = [(with_them - without) / READERS for with_them, without in zip(shares["readers"], shares["nobody"], strict=True)]
    of_stuck = [(b - a) / STUCK for a, b in zip(shares["readers"], shares["readers and stuck"], strict=True)]
    bounds += [
        ("requests that ended in a second of those asked for", median(counts[1:]) / PER_SECOND, ">=", 0.95),
        ("a reader, share of a core", median(each), "<=", 0.02),
        ("a stuck reader, share of a core", median(of_stuck), "<=", 0.005),
        ("lateness of lines beside stuck readers, p50, of that without them",
         median(late["readers and stuck"]) / median(late["readers"]), "<=", 1.5),
    ]
