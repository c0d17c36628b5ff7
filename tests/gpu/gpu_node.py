"""A node of the fabric tests whose arena is in a GPU, in a process of its own: run as a script, driven by JSON lines.

With "rank" the process has no fabric: it allocates the arena and hands it over, as a rank does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from pdd.fabric import _native as native
from tests.fabric.fabric_node import PAGE, Node, RemoteNode
from tests.gpu.cuda import Cuda


class GpuNode(Node):
    """Its memory is a DeviceMemory: allocated here, or mapped from a descriptor that a rank's process made."""

    def __init__(self, library: str, provider: str, num_pages: int, fd: int = -1, **options: Any) -> None:
        options.setdefault("bind", ["127.0.0.1"])
        self.fabric = native.Fabric(library=library, provider=provider, device="cuda", **options)
        self.nbytes = num_pages * PAGE
        self.gpu = Cuda()
        if fd < 0:
            self.arena = native.DeviceMemory.allocate("cuda", self.nbytes)
        else:
            self.arena = native.DeviceMemory.import_fd("cuda", fd, self.nbytes)
            os.close(fd)
        self.region = self.fabric.register(self.arena.address, self.nbytes)
        self.more: dict[int, native.MappedMemory] = {}
        self.events: list[list[Any]] = []
        self.watches: dict[int, native.Counter] = {}

    def view(self) -> np.ndarray[Any, Any]:
        """A copy of the arena."""
        return np.frombuffer(self.gpu.read(self.arena.address, self.nbytes), dtype=np.uint8)

    def fill(self, seed: int) -> None:
        data = np.random.default_rng(seed).integers(0, 256, self.nbytes, dtype=np.uint8)
        self.gpu.write(self.arena.address, data.tobytes())

    def bytes_at(self, offset: int, nbytes: int) -> str:
        return self.gpu.read(self.arena.address + offset, nbytes).hex()

    def stat(self, name: str) -> Any:
        return self.fabric.stats()[name]

    def register(self, address: int, nbytes: int) -> int:
        return self.fabric.register(address, nbytes)

    def write_at(self, endpoint: int, key: int, offset: int, nbytes: int) -> int:
        """One write of the arena's first bytes to `offset` of the peer's."""
        transfer = self.fabric.open_transfer(endpoint, key)
        self.fabric.write(transfer, self.region, 0, 0, offset, nbytes, 1)
        self.fabric.finish(transfer)
        return transfer

    def arm_layers(self, endpoint: int, key: int, fd: int, layers: int) -> int:
        """One page of each layer, layer l from and to page l, fired by the counter at `fd`."""
        watch = self.watch(fd)
        transfer = self.fabric.open_transfer(endpoint, key)
        self.fabric.arm(transfer, watch, 1, self.plan([0], [0], layers, 1, 1), 0, 1)
        self.fabric.finish(transfer)
        return transfer

    # -- the fake driver's handles
    def fake(self, name: str, *args: int) -> int:
        function = getattr(self.gpu.lib, f"fake_cuda_{name}")
        function.restype = ctypes.c_uint64
        return int(function(*args))

    def fake_later(self, seconds: float, name: str, *args: int) -> None:
        threading.Timer(seconds, self.fake, (name, *args)).start()


class GpuRank:
    """What a rank does with its GPU: makes memory and hands it over, bumps the layer counter."""

    def __init__(self, num_pages: int) -> None:
        self.gpu = Cuda()
        self.memory = native.DeviceMemory.allocate("cuda", num_pages * PAGE)
        self.kernel: native.LayerKernel | None = None

    def hand_over(self, sock: int) -> None:
        fd = self.memory.export_fd()
        with socket.socket(fileno=sock) as channel:
            socket.send_fds(channel, [b"x"], [fd])
        os.close(fd)

    def write(self, offset: int, data: str) -> None:
        self.gpu.write(self.memory.address + offset, bytes.fromhex(data))

    def read(self, offset: int, nbytes: int) -> str:
        return self.gpu.read(self.memory.address + offset, nbytes).hex()

    def interface(self) -> dict[str, Any]:
        return dict(self.memory.__cuda_array_interface__)

    def count_at(self, fd: int) -> None:
        self.kernel = native.LayerKernel("cuda", fd)
        self.counter = native.Counter(fd)

    def bump(self, times: int) -> None:
        assert self.kernel is not None
        for _ in range(times):
            self.kernel.bump(0)

    def replay(self, per_graph: int, replays: int) -> float:
        """Captures so many bumps in one graph and replays it; returns the seconds from launch to the host seeing the end,
        of one replay."""
        assert self.kernel is not None
        stream = self.gpu.stream()
        self.gpu.capture_begin(stream)
        for _ in range(per_graph):
            self.kernel.bump(stream)
        graph = self.gpu.capture_end(stream)
        best = float("inf")
        for _ in range(replays):
            before = self.counter.value
            started = time.perf_counter()
            self.gpu.launch(graph, stream)
            while self.counter.value < before + per_graph:
                pass
            best = min(best, time.perf_counter() - started)
        self.gpu.synchronize()
        return best

    def close(self) -> None:
        self.kernel = None


def spawn(kind: str, environment: dict[str, str], *args: Any, pass_fds: tuple[int, ...] = (), **options: Any) -> RemoteNode:
    """kind: "node" or "rank"."""
    path = os.pathsep.join(part for part in sys.path if part)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.gpu_node", json.dumps([kind, args, options])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=pass_fds,
        env={**os.environ, "PYTHONPATH": path, **environment}, cwd=Path(__file__).parents[2],
    )
    node = RemoteNode(process)
    try:
        node.receive()
    except BaseException:
        node.kill()
        node.stop()
        raise
    return node


def serve() -> None:
    kind, args, options = json.loads(sys.argv[1])
    try:
        node: Any = {"node": GpuNode, "rank": GpuRank}[kind](*args, **options)
    except Exception as error:  # reported to the test, which decides
        print(json.dumps([False, f"{type(error).__name__}: {error}"]), flush=True)
        return
    print(json.dumps([True, None]), flush=True)
    for line in sys.stdin:
        method, *call_args = json.loads(line)
        try:
            answer = [True, getattr(node, method)(*call_args)]
        except Exception as error:  # reported to the test, which decides
            answer = [False, f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)
    with contextlib.suppress(native.FabricError):
        node.close()


if __name__ == "__main__":
    serve()
