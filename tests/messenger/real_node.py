"""A messenger node over the real fabric, with memory of its own and an engine that writes a pattern for KV.

`python -m tests.messenger.real_node NAME PORT LAYER_SECONDS VIA [CHANGES [FAULT]]` is a prefiller process; it prints one
line when it listens. Its engine runs on a thread, as the real one does. VIA "local" allows KV to go through memory,
"tcp" does not, nor does "rails", where ranks are spread over two rail groups. CHANGES (JSON) are those of its geometry: every rank has a region. FAULT as in "error:7" fails one write.
"""

from __future__ import annotations

import asyncio
import itertools
import json
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
from pdd.daemon.flight import FlightReader
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
from pdd.messenger.status import AttemptDone
from pdd.states import record_nothing
from tests.fabric.fabric_node import make_memory
from tests.messenger.fake_engines import FakeDecodeEngine, Reservation

GEOMETRY = wire.Geometry(
    model="tiny-1", dtype="float32", num_layers=4, num_kv_heads=2, head_dim=64, page_size=16, tp=1, num_pages=96,
    vocab_size=1000,
)
SETTINGS = LinkSettings(heartbeat=0.1, suspect_after=0.4, dead_after=2.0, connect_timeout=5.0)
GRAIN = 16  # tokens; every page is a whole number of them


def reshaped(**changes: Any) -> wire.Geometry:
    """GEOMETRY with some fields changed."""
    return wire.Geometry(**{**{name: getattr(GEOMETRY, name) for name in GEOMETRY.__struct_fields__}, **changes})


def pattern(geometry: wire.Geometry, tokens: Sequence[int], grain: int, layer: int) -> npt.NDArray[np.uint8]:
    """KV of GRAIN tokens, `[head, tile, token, byte]`: depends on every token up to their end, on place and layer."""
    seen = np.asarray(tokens[: (grain + 1) * GRAIN], dtype="<u4").tobytes()
    seed = zlib.crc32(seen, grain * 1000 + layer)
    shape = geometry.num_kv_heads, geometry.tiles, GRAIN, shard_spec(geometry).layout.token_bytes
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


class Memory:
    """The KV region of every rank, and the fabric that they are registered with."""

    def __init__(self, via: str, geometry: wire.Geometry) -> None:
        self.via = via
        self.geometry = geometry
        rails: list[tuple[list[str], list[int]]] = [(["127.0.0.1"], []), (["127.0.0.2"], [])]
        self.fabric = Fabric(groups=rails if via == "rails" else rails[:1], local=via == "local")
        self._spec = shard_spec(geometry)
        layout = self._spec.layout
        self._mappings, self._views, regions = [], [], []
        for rank in range(geometry.tp):
            fd = make_memory("kv", layout.region_bytes)
            mapping = native.MappedMemory(fd, layout.region_bytes)
            self._mappings.append(mapping)
            self._views.append(mapping.view().reshape(*layout.shape[:-1], layout.token_bytes))
            group = rank % 2 if via == "rails" else 0
            regions.append(self.fabric.register(mapping.address, mapping.nbytes, fd, group=group))
            os.close(fd)
        self.regions = tuple(regions)

    def grains(self, layer: int, pages: Sequence[int], grain: int) -> list[tuple[npt.NDArray[np.uint8], range]]:
        """Where each rank keeps GRAIN tokens of a prompt in `pages`, and the heads that it keeps of them."""
        page, slot = divmod(grain * GRAIN, self.geometry.page_size)
        return [
            (view[layer, pages[page], :, :, slot : slot + GRAIN], self._spec.heads(rank))
            for rank, view in enumerate(self._views)
        ]

    def __setitem__(self, place: tuple[int, int], _: None) -> None:
        """What FakeDecodeEngine does to a page that it hands out: nothing of its last owner is left."""
        for view in self._views:
            view[place] = 0xEE

    def context(self, name: str, role: str) -> LinkContext:
        epoch = random.SystemRandom().getrandbits(64)
        provider = self.fabric.read_caps().provider
        node = LocalNode(
            name, role, epoch, "0.1.0", provider, self.geometry, regions=self.regions, max_tokens=1500,
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
            fabric, emit, num_pages=memory.geometry.num_pages, page_size=memory.geometry.page_size,
            num_layers=memory.geometry.num_layers,
        )
        self._memory = memory

    def _verify(self, reservation: Reservation) -> None:
        tokens = reservation.request.tokens
        for grain, layer in itertools.product(range(-(-len(tokens) // GRAIN)), range(self.num_layers)):
            whole = pattern(self._memory.geometry, tokens, grain, layer)
            for rank, (held, heads) in enumerate(self._memory.grains(layer, reservation.pages, grain)):
                if not np.array_equal(held, whole[heads.start : heads.stop]):
                    self.violations.append(
                        f"{reservation.request.request_id}: layer {layer} of tokens {grain * GRAIN}+ is wrong in rank {rank}"
                    )
                    return


class RealDecoder:
    """A decoder of this process."""

    def __init__(self, ports: Sequence[int], via: str, geometry: wire.Geometry = GEOMETRY) -> None:
        self.memory = Memory(via, geometry)
        self.context = self.memory.context("d", "decode")
        self.engine = DecodeEngine(self.memory, lambda event: self.decoder.engine_event(event))
        planner = ShardPlanner(self.memory.regions, native.WritePlan)
        self.done: list[AttemptDone] = []
        self.decoder = Decoder(
            self.context, [Address("127.0.0.1", port) for port in ports], self.engine, planner, DecoderSettings(),
            backoff=Backoff(first=0.02, most=0.2), report=self.done.append,
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
        self._free = list(range(memory.geometry.num_pages))
        self._page_size, self._num_layers = memory.geometry.page_size, memory.geometry.num_layers
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
            while not self._queue or -(-len(self._queue[0].prompt) // self._page_size) > len(self._free):
                self._do(*self._commands.get())
            self._prefill(self._queue.pop(0))

    def _do(self, what: str, argument: Any) -> None:
        if what == "submit":
            self._queue.append(argument)
        elif what == "settled":
            pages = self._held.pop(argument)
            for page in pages:
                for layer in range(self._num_layers):
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
        num_pages = -(-len(spec.prompt) // self._page_size)
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
            for layer in range(self._num_layers):
                time.sleep(self._layer_seconds)
                for grain in range(begin // GRAIN, -(-end // GRAIN)):
                    whole = pattern(self._memory.geometry, spec.prompt[:end], grain, layer)
                    for held, heads in self._memory.grains(layer, pages, grain):
                        held[:] = whole[heads.start : heads.stop]
                self.counter.bump()
            self._step += 1
        spec.sink.close(completed=True)
        self._emit(Finished(spec.request_id, FinishReason.STOP))


async def serve(name: str, port: int, layer_seconds: float, via: str, changes: str = "{}", fault: str = "") -> None:
    """A prefiller until the process is killed."""
    loop = asyncio.get_running_loop()
    memory = Memory(via, reshaped(**json.loads(changes)))
    if fault:
        kind, _, after = fault.partition(":")
        memory.fabric.inject_fault(kind, int(after), nic=-1 if via == "local" else 0)  # memory has no number; one of all rails
    context = memory.context(name, "prefill")

    def emit(event: EngineEvent) -> None:
        loop.call_soon_threadsafe(lambda: prefiller.engine_event(event))

    engine = ThreadedEngine(memory, emit, layer_seconds)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    prefiller = Prefiller(
        context, sock, engine, ShardPlanner(memory.regions, native.WritePlan),
        watch=memory.fabric.watch(engine.counter), post=loop.call_soon_threadsafe, load=engine.load,
        flight=FlightReader(memory.fabric, memory.fabric.read_caps()),
    )
    await prefiller.start()
    print("ready", sock.getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:]))
