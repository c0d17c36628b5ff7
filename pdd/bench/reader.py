"""The reading end of a benchmark: asks for pages as a decoder does, counts them, and measures.

It keeps about `cell.depth` requests asked for. A request counts from the asking to the last of its pages counted here, on one
clock. What arrived is compared, page by page, with the checksums that the writer took of what it sent; the pool is
cleared before every repeat, so nothing of an earlier one can pass for it.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from pdd.bench import wire
from pdd.bench.cells import Cell, order
from pdd.bench.channel import Channel
from pdd.bench.node import BenchNode, Cost
from pdd.errors import BenchPeerLost, FabricFailure, TimedOut, WrongContents
from pdd.fabric.types import EndpointFailed, Event, ImmOverrun, ImmReached
from pdd.messenger.wire import pack_u32

_GLANCE_SECONDS = 0.05  # while nothing arrives, how often the writer is listened to


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One repeat of one cell."""

    seconds: float
    requests: int
    writes: int  # operations of the writer's NICs
    latencies: tuple[float, ...]  # seconds, one per request
    reader_cores: float
    writer_cores: float
    verified_pages: int


class Reader:
    """Owner: one thread. `begin`, then any number of `take` and `measure`."""

    def __init__(self, channel: Channel, node: BenchNode) -> None:
        self._channel, self._node = channel, node
        self._cell: Cell | None = None

    @property
    def node(self) -> BenchNode:
        return self._node

    def begin(self) -> wire.Ready:
        """Joins the two fabrics; what the writer says of its own."""
        self._channel.send(wire.Setup(len(self._node.view), self._channel.timeout))
        self.writer = self._channel.expect(wire.Ready)
        self._channel.send(wire.Target(self._node.describe(with_memory=True)))
        self._node.connect(self.writer.descriptor)
        return self.writer

    def take(self, cell: Cell) -> None:
        """Tells the writer of the next cell and hears what its pages hold."""
        sources, self._targets = order(cell.num_pages, cell.layout, 1), order(cell.num_pages, cell.layout, 2)
        self._channel.send(wire.Cell(cell.page_bytes, cell.pages, pack_u32(sources.tolist()),
                                     pack_u32(self._targets.tolist())))
        filled = self._channel.expect(wire.Filled)
        if len(filled.checksums) != 4 * cell.num_pages:
            raise BenchPeerLost(f"{self._channel.peer} sent {len(filled.checksums)} bytes of checksums for "
                                f"{cell.num_pages} pages")
        self._checksums = np.frombuffer(filled.checksums, dtype="<u4")
        self._cell = cell

    def measure(self, seconds: float) -> Sample:
        """One repeat of the cell that was taken, `seconds` long and the requests that are then on their way.

        Raises:
            WrongContents: something else arrived than was sent. FabricFailure: a write failed, or too much arrived.
            TimedOut: a request did not become whole. BenchPeerLost: the writer went away.
        """
        cell = self._cell
        assert cell is not None
        self._node.clear(cell.pool_bytes)
        self._channel.send(wire.Start())
        self._channel.expect(wire.Started)
        asked: dict[int, tuple[float, int]] = {}  # by key: when, and the slot
        free = collections.deque(range(cell.num_slots))
        used: dict[int, None] = {}  # slots, the latest last
        latencies: list[float] = []
        cost = Cost()
        begin = last = time.perf_counter()
        owed = cell.depth  # asked for some at a time: each asking costs both ends a waking
        while owed or asked:
            if owed and (4 * owed >= cell.depth or not asked):
                self._ask(cell, [free.popleft() for _ in range(owed)], asked)
                owed = 0
            done = self._arrived(asked)
            now = time.perf_counter()
            if done:
                last = now
                latencies += [now - start for start, _ in done]
                for _, slot in done:
                    free.append(slot)
                    used.pop(slot, None)
                    used[slot] = None
            elif now - last > self._channel.timeout:
                raise TimedOut(f"{len(asked)} requests of {cell.name} are not whole, and nothing has arrived for "
                               f"{self._channel.timeout:g} s", hint="Allow more with --timeout.")
            owed = owed + len(done) if now - begin < seconds else 0
        cpu, passed = cost.so_far()
        self._channel.send(wire.Stop())
        stopped = self._channel.expect(wire.Stopped)
        return Sample(
            seconds=last - begin, requests=len(latencies), writes=stopped.writes, latencies=tuple(latencies),
            reader_cores=cpu / passed, writer_cores=stopped.cpu_seconds / max(stopped.elapsed_seconds, 1e-9),
            verified_pages=self._verify(cell, list(used)),
        )

    def _ask(self, cell: Cell, slots: Sequence[int], asked: dict[int, tuple[float, int]]) -> None:
        fabric = self._node.fabric
        keys = tuple(fabric.imm_allocate(self._node.endpoint) for _ in slots)
        for key in keys:
            fabric.imm_arm(key, cell.pages)
        now = time.perf_counter()
        asked.update((key, (now, slot)) for key, slot in zip(keys, slots, strict=True))
        self._channel.send(wire.Ask(tuple(slots), keys))

    def _arrived(self, asked: dict[int, tuple[float, int]]) -> list[tuple[float, int]]:
        """The requests that have become whole: when asked for, and the slot. Waits a moment when none has."""
        events = self._node.fabric.read_events() or self._node.wait(_GLANCE_SECONDS)
        if not events and (message := self._channel.take()) is not None:
            raise BenchPeerLost(f"{self._channel.peer} sent a {type(message).__name__} out of turn")
        return [request for event in events if (request := self._one(event, asked)) is not None]

    def _one(self, event: Event, asked: dict[int, tuple[float, int]]) -> tuple[float, int] | None:
        if isinstance(event, ImmReached):
            self._node.fabric.imm_retire(event.key)
            return asked.pop(event.key)
        if isinstance(event, ImmOverrun):
            raise FabricFailure(f"more pages arrived under key {event.key} than were asked for: {event.arrived}")
        if isinstance(event, EndpointFailed):
            raise FabricFailure(f"the endpoint failed: {event.message}")
        return None

    def _verify(self, cell: Cell, slots: Sequence[int]) -> int:
        """How many pages are what was sent: all that came into these slots, those of the last one first."""
        entries = np.concatenate([np.arange(slot * cell.pages, (slot + 1) * cell.pages) for slot in reversed(slots)])
        found = self._node.checksums(cell.page_bytes, self._targets[entries])
        wrong = entries[found != self._checksums[entries]]
        if len(wrong):
            raise WrongContents(
                f"{len(wrong)} of {len(entries)} pages of {cell.name} are not what was sent, page "
                f"{int(self._targets[wrong[0]])} for one ({self._node.provider}, libfabric {self._node.library_version})",
                hint="Please report it, with `pdd topology --export FILE`.",
            )
        return len(entries)
