"""The writing end of a benchmark: does what the reader asks until it says goodbye.

Each request is armed at the watcher on a counter that has already moved, which is how a prefill's layer leaves a node.
Run as a program with the number of an inherited socket, it is the second process of `pdd bench kv --loopback`.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time

import msgspec
import numpy as np

from pdd.bench import wire
from pdd.bench.cells import MAX_POOL_BYTES, Pages
from pdd.bench.channel import Channel
from pdd.bench.node import BenchNode, Cost, FabricOptions
from pdd.errors import BenchPeerLost, FabricFailure, PddError, TimedOut
from pdd.fabric import _native
from pdd.fabric.types import EndpointFailed, Event, TransferDone
from pdd.messenger.wire import pack_u32

_GLANCE_SECONDS = 0.05


def serve(channel: Channel, options: FabricOptions) -> None:
    """One benchmark; returns when the reader has finished.

    Raises:
        BenchPeerLost: the reader went away before. FabricFailure, LimitError: told to the reader too.
    """
    try:
        setup = channel.expect(wire.Setup)
        channel.timeout = setup.timeout
        if setup.memory_bytes > MAX_POOL_BYTES:
            raise BenchPeerLost(f"{channel.peer} asks for {setup.memory_bytes >> 20} MiB of memory; at most "
                                f"{MAX_POOL_BYTES >> 20} are allowed")
        node = BenchNode(options, setup.memory_bytes)
        try:
            _Writer(channel, node).run()
        finally:
            node.close()
    except BenchPeerLost as error:
        channel.close(error.message)
        raise
    except PddError as error:
        channel.send(wire.Failed(error.message[:2048]))
        channel.close(error.message)
        raise
    except KeyboardInterrupt:
        channel.close("it was interrupted")
        raise
    channel.close()


class _Writer:
    def __init__(self, channel: Channel, node: BenchNode) -> None:
        self._channel, self._node = channel, node
        self._plan: _native.WritePlan | None = None
        self._pages = self._slots = 0  # of one request; requests side by side
        self._open: set[int] = set()  # transfers
        counter, fd = _native.Counter.create()
        os.close(fd)
        counter.bump()
        self._counter = counter  # kept: its memory is the counter's
        self._watch = node.fabric.watch(counter)

    def run(self) -> None:
        node, channel = self._node, self._channel
        node.fill()
        channel.send(wire.Ready(node.provider, node.library_version, node.nics, node.line_rate,
                                node.describe(with_memory=False)))
        node.connect(channel.expect(wire.Target).descriptor)
        cost, writes = Cost(), 0
        while True:
            message = self._next()
            if isinstance(message, wire.Ask):
                self._ask(message)
            elif isinstance(message, wire.Cell):
                self._take_cell(message)
            elif isinstance(message, wire.Start):
                cost, writes = Cost(), node.fabric.read_stats().writes
                channel.send(wire.Started())
            elif isinstance(message, wire.Stop):
                self._settle()
                channel.send(wire.Stopped(*cost.so_far(), node.fabric.read_stats().writes - writes))
            elif isinstance(message, wire.Goodbye):
                return
            else:
                raise BenchPeerLost(f"{channel.peer} sent a {type(message).__name__} out of turn")

    def _next(self) -> wire.Message:
        """The reader's next word. It may think as long as it likes: its end is noticed. The fabric is looked at by the way,
        because a waking for every request that has gone would take from the processor that moves them."""
        while (message := self._channel.take()) is None:
            select.select([self._channel], [], [], _GLANCE_SECONDS)
            self._mind(self._node.fabric.read_events())
        return message

    def _settle(self) -> None:
        deadline = time.monotonic() + self._channel.timeout
        while self._open:
            self._mind(self._node.wait(1.0))
            if self._channel.take() is not None:
                raise BenchPeerLost(f"{self._channel.peer} spoke before it was told that its requests have ended")
            if self._open and time.monotonic() > deadline:
                raise TimedOut(f"{len(self._open)} requests of {self._channel.peer} did not end within "
                               f"{self._channel.timeout:g} s", hint="Allow more with --timeout.")

    def _mind(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TransferDone):
                self._open.discard(event.transfer)
                if event.end.error:
                    raise FabricFailure(f"a request's writes ended by: {event.end.error}")
            elif isinstance(event, EndpointFailed):
                raise FabricFailure(f"the endpoint failed: {event.message}")

    def _take_cell(self, cell: wire.Cell) -> None:
        sources, targets = _pages(cell.sources), _pages(cell.targets)
        if not 0 < cell.pages <= len(sources) == len(targets):
            raise BenchPeerLost(f"{self._channel.peer} sent {len(sources)} sources and {len(targets)} targets for requests "
                                f"of {cell.pages} pages")
        if (int(sources.max()) + 1) * cell.page_bytes > len(self._node.view):
            raise BenchPeerLost(f"{self._channel.peer} names page {int(sources.max())}, beyond the memory it asked for")
        self._plan = self._node.plan(cell.page_bytes, sources, targets)
        self._pages, self._slots = cell.pages, len(sources) // cell.pages
        self._channel.send(wire.Filled(pack_u32(self._node.checksums(cell.page_bytes, sources).tolist())))

    def _ask(self, ask: wire.Ask) -> None:
        if self._plan is None:
            raise BenchPeerLost(f"{self._channel.peer} asks for pages before it said which")
        if len(ask.slots) != len(ask.keys) or not all(slot < self._slots for slot in ask.slots):
            raise BenchPeerLost(f"{self._channel.peer} asks for requests that its pool of {self._slots} does not hold")
        fabric, endpoint = self._node.fabric, self._node.endpoint
        for slot, key in zip(ask.slots, ask.keys, strict=True):
            begin = slot * self._pages
            transfer = fabric.open_transfer(endpoint, key)
            self._open.add(transfer)
            fabric.arm(transfer, self._watch, 1, self._plan, begin, begin + self._pages)
            fabric.finish(transfer)


def _pages(data: bytes) -> Pages:
    if len(data) % 4:
        raise BenchPeerLost(f"a page table of {len(data)} bytes is no whole number of pages")
    return np.frombuffer(data, dtype="<u4").astype(np.int64)


def main() -> None:
    """argv: the socket's number, the FabricOptions as JSON. What goes wrong is the reader's to report."""
    options = msgspec.json.decode(sys.argv[2], type=FabricOptions)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), "the reader", timeout=30.0, proved=True)
    try:
        serve(channel, options)
    except PddError as error:
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
