"""A messenger node over the real fabric, with memory of its own and an engine that writes a pattern for KV.

`python -m tests.messenger.real_node NAME PORT LAYER_SECONDS VIA` is a prefiller process; it prints one line when it
listens. Its engine runs on a thread, as the real one does. VIA "local" allows KV to go through memory, "tcp" does not.
"""

from __future__ import annotations

import asyncio
import os
import queue
import random
import socket
import sys
import threading
import time
import types
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdd.address import Address
from pdd.engine.request import EngineEvent, Finished, FinishReason, PrefillSpec
from pdd.fabric import _native as native
from pdd.fabric.engine import Fabric
from pdd.messenger import wire
from pdd.messenger.decoder import Decoder
from pdd.messenger.events import FabricEvents
from pdd.messenger.handshake import LocalNode
from pdd.messenger.link import LinkContext
from pdd.messenger.peers import Backoff
from pdd.messenger.planner import ShardPlanner, compare, shard_spec
from pdd.messenger.prefiller import Prefiller
from pdd.messenger.settings import DecoderSettings, LinkSettings
from pdd.states import record_nothing
from tests.fabric.fabric_node import make_memory
from tests.messenger.fake_engines import FakeDecodeEngine, Reservation

GEOMETRY = wire.Geometry(
    model="tiny-1", dtype="float32", num_layers=4, num_kv_heads=2, head_dim=64, page_size=16, tp=1, num_pages=96,
    vocab_size=1000,
)
SETTINGS = LinkSettings(heartbeat=0.1, suspect_after=0.4, dead_after=2.0, connect_timeout=5.0)
LAYOUT = shard_spec(GEOMETRY).layout


def pattern(tokens: Sequence[int], page: int, layer: int) -> npt.NDArray[np.uint8]:
    """What a page must hold: depends on every token up to its end, on the page and on the layer."""
    seen = np.asarray(tokens[: (page + 1) * GEOMETRY.page_size], dtype="<u4").tobytes()
    seed = zlib.crc32(seen, page * 1000 + layer)
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.page_bytes, dtype=np.uint8)


class Memory:
    """A rank's KV region, and the fabric that it is registered with."""

    def __init__(self, via: str) -> None:
        self.via = via
        fd = make_memory("kv", LAYOUT.region_bytes)
        self._mapping = native.MappedMemory(fd, LAYOUT.region_bytes)
        self.bytes = self._mapping.view()
        self.fabric = Fabric(bind=["127.0.0.1"], local=via == "local")
        self.region = self.fabric.register(self._mapping.address, self._mapping.nbytes, fd)
        os.close(fd)

    def page(self, layer: int, page: int) -> npt.NDArray[np.uint8]:
        begin = layer * LAYOUT.layer_bytes + page * LAYOUT.page_bytes
        return self.bytes[begin : begin + LAYOUT.page_bytes]

    def __setitem__(self, place: tuple[int, int], _: None) -> None:
        """What FakeDecodeEngine does to a page that it hands out: nothing of its last owner is left."""
        self.page(*place)[:] = 0xEE

    def context(self, name: str, role: str) -> LinkContext:
        epoch = random.SystemRandom().getrandbits(64)
        provider = self.fabric.read_caps().provider
        node = LocalNode(
            name, role, epoch, "0.1.0", provider, GEOMETRY, regions=(self.region,), max_tokens=1500,
            host="this-boot" if self.via == "local" else "",
        )
        events = FabricEvents(self.fabric)
        events.attach(asyncio.get_running_loop())
        return LinkContext(node, self.fabric, events, SETTINGS, compare, time.monotonic, record_nothing)


class DecodeEngine(FakeDecodeEngine):
    """Books of the fake, bytes of the real region."""

    def __init__(self, memory: Memory, emit: Callable[[EngineEvent], None]) -> None:
        self.violations: list[str] = []
        network = types.SimpleNamespace(violations=self.violations, can_land=lambda *_: "")
        fabric: Any = types.SimpleNamespace(memory=memory, network=network)
        super().__init__(
            fabric, emit, num_pages=GEOMETRY.num_pages, page_size=GEOMETRY.page_size, num_layers=GEOMETRY.num_layers
        )
        self._memory = memory

    def _verify(self, reservation: Reservation) -> None:
        tokens = reservation.request.tokens
        for index, page in enumerate(reservation.pages):
            for layer in range(self.num_layers):
                if not np.array_equal(self._memory.page(layer, page), pattern(tokens, index, layer)):
                    self.violations.append(f"{reservation.request.request_id}: layer {layer} of page {page} is wrong")
                    return


class RealDecoder:
    """A decoder of this process."""

    def __init__(self, ports: Sequence[int], via: str) -> None:
        self.memory = Memory(via)
        self.context = self.memory.context("d", "decode")
        self.engine = DecodeEngine(self.memory, lambda event: self.decoder.engine_event(event))
        planner = ShardPlanner([self.memory.region], native.WritePlan)
        self.decoder = Decoder(
            self.context, [Address("127.0.0.1", port) for port in ports], self.engine, planner, DecoderSettings(),
            backoff=Backoff(first=0.02, most=0.2),
        )

    async def close(self) -> None:
        await self.decoder.close()
        self.context.events.detach()
        self.memory.fabric.close()


class ThreadedEngine:
    """EngineInbox of a prefiller, one prompt after the other, `CHUNK` tokens per step, on a thread."""

    CHUNK = 48

    def __init__(self, memory: Memory, emit: Callable[[EngineEvent], None], layer_seconds: float) -> None:
        self.counter, self._fd = native.Counter.create()
        self._memory = memory
        self._emit = emit
        self._layer_seconds = layer_seconds
        self._commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._queue: list[PrefillSpec] = []
        self._free = list(range(GEOMETRY.num_pages))
        self._held: dict[str, tuple[int, ...]] = {}
        self._aborted: set[str] = set()
        self._step = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit_prefill(self, spec: PrefillSpec) -> None:
        self._commands.put(("submit", spec))

    def abort(self, request_id: str) -> None:
        self._commands.put(("abort", request_id))

    def prefill_settled(self, request_id: str) -> None:
        self._commands.put(("settled", request_id))

    def submit(self, spec: Any) -> None:
        raise NotImplementedError

    def kv_settled(self, attempt: int, outcome: Any, **_: Any) -> None:
        raise NotImplementedError

    def load(self) -> wire.Load:
        return wire.Load(queued_tokens=sum(len(spec.prompt) for spec in list(self._queue)), steps=self._step)

    def _run(self) -> None:
        while True:
            while not self._queue or -(-len(self._queue[0].prompt) // GEOMETRY.page_size) > len(self._free):
                self._do(*self._commands.get())
            self._prefill(self._queue.pop(0))

    def _do(self, what: str, argument: Any) -> None:
        if what == "submit":
            self._queue.append(argument)
        elif what == "settled":
            pages = self._held.pop(argument)
            for page in pages:
                for layer in range(GEOMETRY.num_layers):
                    self._memory[layer, page] = None  # a write that still reads it is found out
            self._free += pages
        else:
            waiting = [spec for spec in self._queue if spec.request_id == argument]
            self._aborted |= {argument} - {spec.request_id for spec in waiting}
            for spec in waiting:
                self._queue.remove(spec)
                spec.sink.close(completed=False)
                self._emit(Finished(argument, FinishReason.ABORT))

    def _prefill(self, spec: PrefillSpec) -> None:
        num_pages = -(-len(spec.prompt) // GEOMETRY.page_size)
        pages, self._free = tuple(self._free[:num_pages]), self._free[num_pages:]
        self._held[spec.request_id] = pages
        spec.sink.open(pages)
        for begin in range(0, len(spec.prompt), self.CHUNK):
            while not self._commands.empty():
                self._do(*self._commands.get())
            if spec.request_id in self._aborted:
                spec.sink.close(completed=False)
                self._emit(Finished(spec.request_id, FinishReason.ABORT))
                return
            end = min(begin + self.CHUNK, len(spec.prompt))
            spec.sink.arm(self._step, begin, end)
            for layer in range(GEOMETRY.num_layers):
                time.sleep(self._layer_seconds)
                for index in range(begin // GEOMETRY.page_size, -(-end // GEOMETRY.page_size)):
                    self._memory.page(layer, pages[index])[:] = pattern(spec.prompt[:end], index, layer)
                self.counter.bump()
            self._step += 1
        spec.sink.close(completed=True)
        self._emit(Finished(spec.request_id, FinishReason.STOP))


async def serve(name: str, port: int, layer_seconds: float, via: str) -> None:
    """A prefiller until the process is killed."""
    loop = asyncio.get_running_loop()
    memory = Memory(via)
    context = memory.context(name, "prefill")

    def emit(event: EngineEvent) -> None:
        loop.call_soon_threadsafe(lambda: prefiller.engine_event(event))

    engine = ThreadedEngine(memory, emit, layer_seconds)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    prefiller = Prefiller(
        context, sock, engine, ShardPlanner([memory.region], native.WritePlan),
        watch=memory.fabric.watch(engine.counter), post=loop.call_soon_threadsafe, load=engine.load,
    )
    await prefiller.start()
    print("ready", sock.getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]))
