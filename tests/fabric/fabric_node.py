"""A node of the fabric tests: one Fabric, one shared-memory arena, and a few moves to drive it from a test.

`Node` runs in this process; `spawn` starts the same class in another one and returns a proxy that forwards calls as
JSON lines over its pipes. Run as a script, this file is that other process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pdd import memfd
from pdd.fabric import _native as native
from tests.cluster import die_with_parent

PAGE = 4096


def make_memory(name: str, nbytes: int) -> int:
    """A memfd as ranks make it."""
    return memfd.sealed(name, nbytes)


class Node:
    """Everything takes and returns JSON values, so that it works through a pipe."""

    def __init__(self, library: str, provider: str, bind: list[str], num_pages: int, **options: Any) -> None:
        self.fabric = native.Fabric(library=library, provider=provider, bind=bind, **options)
        self.nbytes = num_pages * PAGE
        fd = make_memory("arena", self.nbytes)
        self.memory = native.MappedMemory(fd, self.nbytes)
        self.region = self.fabric.register(self.memory.address, self.nbytes, fd)
        os.close(fd)
        self.more: dict[int, native.MappedMemory] = {}  # by region
        self.events: list[list[Any]] = []
        self.watches: dict[int, native.Counter] = {}

    # -- set-up
    def open(self) -> int:
        return self.fabric.open_endpoint()

    def describe(self, endpoint: int, with_memory: bool = True) -> str:
        return self.fabric.describe(endpoint, [self.region, *self.more] if with_memory else []).hex()

    def add_region(self) -> int:
        """Another arena, as of another rank."""
        fd = make_memory("arena", self.nbytes)
        memory = native.MappedMemory(fd, self.nbytes)
        region: int = self.fabric.register(memory.address, self.nbytes, fd)
        os.close(fd)
        self.more[region] = memory
        return region

    def connect(self, endpoint: int, descriptor: str) -> None:
        self.fabric.connect(endpoint, bytes.fromhex(descriptor))

    def caps(self) -> dict[str, Any]:
        return dict(self.fabric.caps)

    def call(self, method: str, *args: Any) -> Any:
        """Any method of Fabric whose arguments and result are plain."""
        return getattr(self.fabric, method)(*args)

    # -- memory
    def view(self) -> np.ndarray[Any, Any]:
        return self.memory.view()

    def fill(self, seed: int) -> None:
        self.view()[:] = np.random.default_rng(seed).integers(0, 256, self.nbytes, dtype=np.uint8)

    def digests(self, pages: list[int]) -> list[str]:
        view = self.view()
        return [hashlib.sha1(view[p * PAGE : (p + 1) * PAGE]).hexdigest() for p in pages]

    @staticmethod
    def digests_of(pages: np.ndarray[Any, Any], count: int) -> list[str]:
        """What `digests` gives for the first pages of a copy."""
        return [hashlib.sha1(pages[p * PAGE : (p + 1) * PAGE]).hexdigest() for p in range(count)]

    def digest(self) -> str:
        return hashlib.sha1(self.view()).hexdigest()

    # -- events
    def wait(self, kind: int, subject: int, timeout: float = 20.0) -> list[Any]:
        """The first event of `kind` about `subject`, seen or to come; it is taken out, others are kept."""
        deadline = time.monotonic() + timeout
        while True:
            for event in self.events:
                if event[0] == kind and event[1] == subject:
                    self.events.remove(event)
                    return event
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no event {kind} of {subject}; have {self.events}; {self.fabric.stats()}")
            select.select([self.fabric.fileno()], [], [], left)
            self.events += [list(event)[:6] for event in self.fabric.drain()]  # without what a transfer cost

    def seen(self) -> list[list[Any]]:
        """All events that nobody waited for."""
        self.events += [list(event)[:6] for event in self.fabric.drain()]  # without what a transfer cost
        return self.events

    def whole(self, key: int, pages: list[int], timeout: float = 20.0) -> list[str]:
        """Waits for the key and hashes the pages at that very moment."""
        self.wait(native.IMM_REACHED, key, timeout)
        return self.digests(pages)

    def settled(self, key: int, quiet: float = 0.1) -> int:
        """Units of a key once none has come for `quiet` seconds."""
        while True:
            arrived = self.fabric.imm_arrived(key)
            time.sleep(quiet)
            if self.fabric.imm_arrived(key) == arrived:
                return arrived

    # -- writing
    def watch(self, fd: int | None = None) -> int:
        if fd is None:
            counter, own = native.Counter.create()
            os.close(own)
        else:
            counter = native.Counter(fd)
        watch = self.fabric.watch(counter)
        self.watches[watch] = counter
        return watch

    def bump(self, watch: int) -> int:
        return self.watches[watch].bump()

    def bump_at(self, watch: int) -> float:
        """Bumps; returns when (CLOCK_MONOTONIC, seconds)."""
        now = time.perf_counter()
        self.bump(watch)
        return now

    def when_whole(self, key: int) -> float:
        """When the key was seen to be whole."""
        self.wait(native.IMM_REACHED, key)
        return time.perf_counter()

    def layer(self, endpoint: int, key: int, watch: int, value: int, order: list[int], scale: int) -> int:
        """Arms one layer: piece i of `scale` pages goes to piece order[i] when the counter reads `value`."""
        plan = native.WritePlan(
            src_region=self.region,
            dst_region=0,
            src_offset=np.arange(len(order), dtype=np.int64) * scale * PAGE,
            dst_offset=np.array(order, dtype=np.int64) * scale * PAGE,
            nbytes=np.full(len(order), scale * PAGE, dtype=np.int64),
            units=np.ones(len(order), dtype=np.int64),
            src_layer_stride=0,
            dst_layer_stride=0,
            num_layers=1,
        )
        transfer = self.fabric.open_transfer(endpoint, key)
        self.fabric.arm(transfer, watch, value, plan, 0, len(order))
        self.fabric.finish(transfer)
        return transfer

    def plan(
        self, src: list[int], dst: list[int], layers: int = 1, src_stride: int = 0, dst_stride: int = 0
    ) -> native.WritePlan:
        """One entry of one unit per page; strides in pages."""
        return native.WritePlan(
            src_region=self.region,
            dst_region=0,
            src_offset=np.array(src, dtype=np.int64) * PAGE,
            dst_offset=np.array(dst, dtype=np.int64) * PAGE,
            nbytes=np.full(len(src), PAGE, dtype=np.int64),
            units=np.ones(len(src), dtype=np.int64),
            src_layer_stride=src_stride * PAGE,
            dst_layer_stride=dst_stride * PAGE,
            num_layers=layers,
        )

    def push(self, endpoint: int, key: int, src: list[int], dst: list[int], finish: bool = True) -> int:
        """Writes pages at once and returns the transfer."""
        transfer = self.fabric.open_transfer(endpoint, key)
        watch = self.watch()
        self.bump(watch)
        self.fabric.arm(transfer, watch, 1, self.plan(src, dst), 0, len(src))
        self.fabric.unwatch(watch)
        if finish:
            self.fabric.finish(transfer)
        return transfer

    def connections(self, cut_to: str = "") -> list[tuple[str, str]]:
        """(local, remote) address of every established TCP connection of this process; breaks those to one remote one."""
        found = []
        sockets = [fd for fd in os.listdir("/proc/self/fd") if stat.S_ISSOCK(_mode(int(fd)))]
        for fd in sockets:  # and nothing else: a socket object of a pipe's duplicate fails and leaves the duplicate open
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as connection:
                if connection.family != socket.AF_INET:
                    continue
                found.append((connection.getsockname()[0], connection.getpeername()[0]))
                if found[-1][1] == cut_to:
                    connection.shutdown(socket.SHUT_RDWR)
        return found

    def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def cpu_seconds(self) -> float:
        times = os.times()
        return times.user + times.system

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self.fabric.close()


def _mode(fd: int) -> int:
    """0 for one that is closed, as the listing's own is."""
    try:
        return os.fstat(fd).st_mode
    except OSError:
        return 0


class RemoteNode:
    """A Node in another process. Attributes are its methods; `send`/`receive` split a call in two."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def send(self, method: str, *args: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps([method, *args]), file=self.process.stdin, flush=True)

    def receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"node ended with {self.process.wait()}")
        ok, value = json.loads(line)
        if not ok:
            raise RuntimeError(value)
        return value

    def __getattr__(self, method: str) -> Any:
        def forward(*args: Any) -> Any:
            self.send(method, *args)
            return self.receive()

        return forward

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        assert self.process.stdout is not None
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"node {self.process.pid} did not end when its input had") from None
        finally:
            self.process.stdout.close()


def spawn(*args: Any, pass_fds: tuple[int, ...] = (), prefix: Sequence[str] = (), **options: Any) -> RemoteNode:
    """`prefix` goes before the command: `ip netns exec NAME`, for one."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    process = subprocess.Popen(
        [*prefix, sys.executable, __file__, json.dumps([args, options])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        pass_fds=pass_fds,
        preexec_fn=die_with_parent,
    )
    node = RemoteNode(process)
    node.receive()
    return node


def serve() -> None:
    args, options = json.loads(sys.argv[1])
    node = Node(*args, **options)
    print(json.dumps([True, None]), flush=True)
    for line in sys.stdin:
        method, *call_args = json.loads(line)
        try:
            answer = [True, getattr(node, method)(*call_args)]
        except Exception as error:  # reported to the test, which decides
            answer = [False, f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)
    node.close()


if __name__ == "__main__":
    serve()
