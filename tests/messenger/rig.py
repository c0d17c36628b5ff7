"""Decoders and prefillers in one loop: real TCP on loopback, fake fabric, fake engines; and a proxy that hurts their
link."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from pdd.address import Address
from pdd.daemon.engines import Engines
from pdd.engine.limits import SchedulerLimits
from pdd.engine.request import EngineEvent
from pdd.messenger import wire
from pdd.messenger.decoder import Decoder
from pdd.messenger.events import FabricEvents
from pdd.messenger.frames import FrameStream
from pdd.messenger.handshake import LocalNode
from pdd.messenger.link import LinkContext
from pdd.messenger.peers import Backoff
from pdd.messenger.planner import compare
from pdd.messenger.ports import FlightPort
from pdd.messenger.prefiller import Prefiller
from pdd.messenger.settings import DecoderSettings, LinkSettings
from pdd.messenger.status import AttemptDone, JobDone
from pdd.messenger.versions import of_decoder
from pdd.states import Change
from tests.messenger.fake_engines import FakeDecodeEngine, FakePlanner, FakePrefillEngine, Request
from tests.messenger.fake_fabric import FakeCounter, FakeFabric, FakeNetwork

PAGE_SIZE = 4
NUM_LAYERS = 3
FAST = LinkSettings(heartbeat=0.04, suspect_after=0.12, dead_after=0.4, connect_timeout=1.0)
DECODER = DecoderSettings(prefill_stall_timeout=0.6, max_attempts=3)
_epochs = itertools.count(0xA000)


def geometry(**changes: Any) -> wire.Geometry:
    plain = wire.Geometry(
        model="tiny-1", dtype="float32", num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=8, page_size=PAGE_SIZE, tp=1,
        num_pages=64, vocab_size=1000,
    )
    return wire.Geometry(**{**{f: getattr(plain, f) for f in plain.__struct_fields__}, **changes})


def prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1000) for _ in range(length))


@dataclasses.dataclass
class Node:
    """What both roles have."""

    context: LinkContext
    fabric: FakeFabric
    changes: list[Change]

    def states(self, kind: str) -> list[str]:
        return [change.after for change in self.changes if change.kind == kind]


@dataclasses.dataclass
class DecoderNode(Node):
    decoder: Decoder
    engines: tuple[FakeDecodeEngine, ...]
    done: list[AttemptDone]
    heard: list[tuple[int, str]]  # at each word of `linked`: links that can be asked, and why not the others

    @property
    def engine(self) -> FakeDecodeEngine:
        """Of the first group."""
        return self.engines[0]

    async def close(self) -> None:
        await self.decoder.close()
        self.context.events.detach()
        self.fabric.close()


@dataclasses.dataclass
class PrefillerNode(Node):
    prefiller: Prefiller
    engine: FakePrefillEngine
    port: int
    done: list[JobDone]

    async def close(self) -> None:
        await self.prefiller.close()
        await self.engine.close()
        self.context.events.detach()
        self.fabric.close()


class Rig:
    """Makes nodes and takes them down; checks at the end that nothing was violated and nothing is left."""

    def __init__(self, seed: int = 0) -> None:
        self.network = FakeNetwork(seed)
        self.nodes: list[DecoderNode | PrefillerNode] = []
        self.proxies: list[Proxy] = []
        self._calls: list[asyncio.StreamWriter] = []
        self._servers: list[asyncio.Server] = []
        self.skew = 0.0  # seconds that all nodes' clocks have jumped
        self.hosts: dict[str, str] = {}  # boot ids by node; those not named keep to the fabric
        self._talks: list[asyncio.Task[None]] = []

    def _clock(self) -> float:
        return time.monotonic() + self.skew

    def _context(self, name: str, role: str, fabric: FakeFabric, settings: LinkSettings, token: bytes | None,
                 max_tokens: int = 0, **changes: Any) -> tuple[LinkContext, list[Change]]:
        epoch = next(_epochs)
        versions = changes.pop("versions", None) or of_decoder(changes.get("groups", 1))
        node = LocalNode(name, role, epoch, "0.1.0", "fake", geometry(**changes), regions=(1,), token=token,
                         max_tokens=max_tokens, versions=versions, host=self.hosts.get(name, ""))
        events = FabricEvents(fabric)
        events.attach(asyncio.get_running_loop())
        recorded: list[Change] = []
        context = LinkContext(node, fabric, events, settings, compare, self._clock, recorded.append)
        return context, recorded

    async def prefiller(
        self, name: str = "p1", *, port: int = 0, settings: LinkSettings = FAST, token: bytes | None = None,
        chunk: int = 8, layer_seconds: float = 0.0, max_tokens: int = 200,
        post_seconds: float | None = None, flight: FlightPort | None = None, **changes: Any,
    ) -> PrefillerNode:
        counter = FakeCounter()
        fabric = FakeFabric(self.network, name, counter)
        context, recorded = self._context(name, "prefill", fabric, settings, token, max_tokens, **changes)
        loop = asyncio.get_running_loop()

        def post(call: Callable[[], None]) -> None:
            """What the engine says reaches the main loop later, in order, as from a thread."""
            if post_seconds is None:
                loop.call_soon_threadsafe(call)
            else:
                loop.call_later(post_seconds, call)

        engine = FakePrefillEngine(
            fabric, counter, lambda event: post(lambda: prefiller.engine_event(event)),
            num_pages=context.node.geometry.num_pages, page_size=context.node.geometry.page_size,
            num_layers=NUM_LAYERS, chunk=chunk, layer_seconds=layer_seconds,
        )
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        done: list[JobDone] = []
        prefiller = Prefiller(context, sock, engine, FakePlanner(), watch=1, post=post, load=engine.load,
                              report=done.append, flight=flight)
        await prefiller.start()
        node = PrefillerNode(context, fabric, recorded, prefiller, engine, sock.getsockname()[1], done)
        self.nodes.append(node)
        return node

    async def decoder(
        self, ports: Sequence[int], name: str = "d1", *, settings: LinkSettings = FAST,
        decoding: DecoderSettings = DECODER, token: bytes | None = None, **changes: Any,
    ) -> DecoderNode:
        fabric = FakeFabric(self.network, name)
        context, recorded = self._context(name, "decode", fabric, settings, token, **changes)
        shape, ids = context.node.geometry, itertools.count(1)

        def hear(event: EngineEvent) -> None:
            inbox.engine_event(event)
            decoder.engine_event(event)

        engines = tuple(
            FakeDecodeEngine(fabric, hear, num_pages=shape.num_pages, page_size=shape.page_size, num_layers=NUM_LAYERS,
                             group=group, ids=ids)
            for group in range(shape.groups)
        )
        fabric.on_land = lambda write: engines[write.dst_page // shape.num_pages].landed(write)
        everyone: Any = engines
        inbox = Engines(everyone, SchedulerLimits(page_size=shape.page_size, max_context=1 << 20))
        done: list[AttemptDone] = []
        heard: list[tuple[int, str]] = []
        decoder = Decoder(
            context, [Address("127.0.0.1", port) for port in ports], inbox, FakePlanner(), decoding,
            backoff=Backoff(first=0.02, most=0.1), rng=random.Random(1), report=done.append,
            linked=lambda: heard.append((len(decoder.peers.usable_links()), decoder.peers.explain())),
        )
        await decoder.start()
        node = DecoderNode(context, fabric, recorded, decoder, engines, done, heard)
        self.nodes.append(node)
        return node

    async def proxy(self, port: int) -> Proxy:
        proxy = Proxy(port)
        await proxy.start()
        self.proxies.append(proxy)
        return proxy

    async def pair(self, *, decoding: DecoderSettings = DECODER, **changes: Any) -> tuple[PrefillerNode, DecoderNode]:
        """A prefiller (`changes` are for it) and a decoder, linked."""
        p = await self.prefiller(**changes)
        d = await self.decoder([p.port], decoding=decoding)
        await until(up(d))
        await until(lambda: len(p.prefiller.listener.links) == 1)
        return p, d

    async def proxied_pair(self, **changes: Any) -> tuple[PrefillerNode, Proxy, DecoderNode]:
        """The same with a proxy between them."""
        p = await self.prefiller(**changes)
        proxy = await self.proxy(p.port)
        d = await self.decoder([proxy.port])
        await until(up(d))
        await until(lambda: len(p.prefiller.listener.links) == 1)
        return p, proxy, d

    async def trio(self) -> tuple[PrefillerNode, PrefillerNode, DecoderNode]:
        """Two prefillers and a decoder, linked."""
        p1, p2 = await self.prefiller("p1"), await self.prefiller("p2")
        d = await self.decoder([p1.port, p2.port])
        await until(up(d, 2))
        return p1, p2, d

    def address(self, node: PrefillerNode) -> Address:
        return Address("127.0.0.1", node.port)

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of the test's own; dropped at the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        self._calls.append(writer)
        return reader, writer

    async def listen(self, talk: Callable[[FrameStream], Coroutine[None, None, None]]) -> int:
        """Somebody at a prefiller's place, who does `talk` with each caller; the port. Over at the end."""

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._calls.append(writer)
            self._talks.append(asyncio.create_task(talk(FrameStream(reader, writer))))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def kill(self, node: PrefillerNode) -> None:
        """The process is gone: its sockets are reset, its endpoints vanish, what was in flight may still land."""
        for link in node.prefiller.listener.links:
            link._stream.abort()
        await node.engine.close()
        await node.prefiller.close(0.5)
        node.context.events.detach()
        self.nodes.remove(node)

    async def settle(self, seconds: float = 20.0) -> None:
        """Waits until nothing is in hand any more."""
        await until(lambda: self.leftovers() == [], seconds, lambda: str(self.leftovers()))

    def leftovers(self) -> list[str]:
        left = []
        for node in self.nodes:
            name = node.context.node.name
            if isinstance(node, DecoderNode):
                left += [f"{name}: {status}" for status in node.decoder.attempts()]
                left += [f"{name}: key {key}" for key in node.fabric.slots]
                held = sum(len(engine.reservations) for engine in node.engines)
                left += [f"{name}: {held} reservations"] * bool(held)
                left += [f"{name}: {len(node.decoder._judge.retries)} retries"] * bool(len(node.decoder._judge.retries))
                for engine in node.engines:
                    engine.check_integrity()
            else:
                left += [f"{name}: {status}" for status in node.prefiller.jobs()]
                left += [f"{name}: pages of {held}" for held in node.engine.held]
                left += [f"{name}: transfer {ident}" for ident in node.prefiller._by_transfer]
                left += [f"{name}: early end {ident}" for ident in node.prefiller._early_ends]
            left += [f"{name}: transfer {ident}" for ident in node.fabric.transfers]
        return left

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._talks:
            task.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        await hang_up(self._calls)
        for node in reversed(self.nodes):
            await node.close()
            assert node.fabric.never_close or not node.fabric.endpoints, node.context.node.name
        for proxy in self.proxies:
            await proxy.close()


async def hang_up(writers: Iterable[asyncio.StreamWriter]) -> None:
    """Drops connections and waits until they are gone: one that is left open fails some other test."""
    for writer in writers:
        writer.transport.abort()
    for writer in writers:
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def running(seed: int = 0) -> AsyncIterator[Rig]:
    """A rig whose promises are checked at the end."""
    rig = Rig(seed)
    before = asyncio.all_tasks()
    try:
        yield rig
        await rig.settle()
    finally:
        await rig.close()
    assert rig.network.violations == [], rig.network.violations
    await until(lambda: asyncio.all_tasks() <= before, 5.0, lambda: str(asyncio.all_tasks() - before))


async def until(condition: Callable[[], bool], seconds: float = 15.0, explain: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"still not after {seconds} s: {explain()}")
        await asyncio.sleep(0.002)


async def finish(*requests: Any) -> list[str]:
    """Outcomes of requests, once all have one."""
    async with asyncio.timeout(40):
        for request in requests:
            await request.done.wait()
    return [request.outcome for request in requests]


async def stuck(p: PrefillerNode, d: DecoderNode, count: int = 1) -> list[Request]:
    """Requests of 9 tokens that the prefiller has in hand and does not work on until its engine is let go."""
    p.engine.paused.clear()
    requests = [d.engine.generate("r" if count == 1 else f"r{n}", prompt(n, 9)) for n in range(count)]
    await until(lambda: p.prefiller.num_jobs == count)
    return requests


def up(node: DecoderNode, count: int = 1) -> Callable[[], bool]:
    return lambda: len(node.decoder.peers.usable_links()) == count


Verdict = Callable[[str, int, wire.Message | None], "str | float"]


class Proxy:
    """Between one decoder and one prefiller; understands frames. `verdict(direction, n, message)` says what becomes of
    the n-th frame of a direction ("pass", "drop", "cut", or seconds of delay); direction is "to_p" or "to_d"."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.verdict: Verdict = lambda direction, n, message: "pass"
        self.silent = False  # frames are held back, the connection stays
        self.refusing = False
        self.closing = False
        self.seen: list[tuple[str, wire.Message | None]] = []
        self._counts = {"to_p": 0, "to_d": 0}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._ever: list[asyncio.StreamWriter] = []  # connections, those that are over too
        self._loud = asyncio.Event()

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self.closing = True
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await hang_up(self._ever)

    def cut(self) -> None:
        """Resets every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    def silence(self, silent: bool) -> None:
        self.silent = silent
        if not silent:
            self._loud.set()
            self._loud = asyncio.Event()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ever.append(writer)
        if self.closing:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        if self.refusing:
            writer.transport.abort()
            return
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(there_writer)
        self._ever.append(there_writer)
        pumps = [
            asyncio.create_task(self._pump("to_p", reader, there_writer)),
            asyncio.create_task(self._pump("to_d", there_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (there_writer, writer):
                end.close()
                self._writers.discard(end)

    async def _pump(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                header = await reader.readexactly(4)
                payload = await reader.readexactly(struct.unpack(">I", header)[0])
                message = wire.decode(payload)
                self.seen.append((direction, message))
                self._counts[direction] += 1
                verdict = self.verdict(direction, self._counts[direction], message)
                while self.silent:
                    await self._loud.wait()
                if verdict == "drop":
                    continue
                if verdict == "cut":
                    self.cut()
                    return
                if isinstance(verdict, float):
                    await asyncio.sleep(verdict)
                writer.write(header + payload)
        except (asyncio.IncompleteReadError, OSError):
            return
