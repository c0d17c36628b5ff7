"""The real messenger of several nodes on a simulated fabric, simulated connections and a clock of its own.

A run is made by its seed alone: shapes, moments and everything that goes wrong. Fabric and engines are those of
tests/messenger, which judge every write that lands, every page that is given up and every key that is retired.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

from pdd.address import Address
from pdd.fabric.types import Event
from pdd.messenger.decoder import Decoder
from pdd.messenger.events import FabricEvents
from pdd.messenger.handshake import LocalNode
from pdd.messenger.link import LinkContext
from pdd.messenger.peers import Backoff
from pdd.messenger.planner import compare
from pdd.messenger.prefiller import Prefiller
from pdd.messenger.settings import DecoderSettings, LinkSettings
from pdd.states import Change
from tests.messenger.fake_engines import FakeDecodeEngine, FakePlanner, FakePrefillEngine
from tests.messenger.fake_fabric import FakeCounter, FakeFabric, FakeNetwork, Write
from tests.messenger.rig import NUM_LAYERS, geometry
from tests.sim.clock import Inline, VirtualLoop
from tests.sim.pipes import Pipes

LINKS = LinkSettings(heartbeat=0.1, suspect_after=0.25, dead_after=0.6, connect_timeout=1.0)
DECODING = DecoderSettings(prefill_stall_timeout=0.9, max_attempts=3)


class InOrder(dict[Write, None]):
    """A set that is gone through in one order, whatever addresses the writes have."""

    def add(self, write: Write) -> None:
        self[write] = None

    def discard(self, write: Write) -> None:
        self.pop(write, None)


class SimFabric(FakeFabric):
    """Whose events are heard a little late, and whose calls may come from the loop: there is no other thread."""

    def _wait(self, gate: Any) -> None:
        """It takes no time."""

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.call_later(self.network.delay() / 4, loop.readable, self._fd)

    def read_events(self, max_events: int = 1024) -> list[Event]:
        batch, self._events = self._events[:max_events], self._events[max_events:]
        return batch


@dataclasses.dataclass
class DecoderLife:
    name: str
    context: LinkContext
    fabric: SimFabric
    engine: FakeDecodeEngine
    decoder: Decoder

    def leftovers(self) -> list[str]:
        self.engine.check_integrity()
        left = [f"{self.name}: {status}" for status in self.decoder.attempts()]
        left += [f"{self.name}: key {key}" for key in self.fabric.slots]
        left += [f"{self.name}: pages of {held.request.request_id}" for held in self.engine.reservations.values()]
        left += [f"{self.name}: {ident} has no outcome" for ident, request in self.engine.requests.items() if not request.outcome]
        return left

    async def end(self) -> None:
        await self.decoder.close()
        self.context.events.detach()


@dataclasses.dataclass
class PrefillerLife:
    name: str
    context: LinkContext
    fabric: SimFabric
    engine: FakePrefillEngine
    prefiller: Prefiller

    def leftovers(self) -> list[str]:
        left = [f"{self.name}: {status}" for status in self.prefiller.jobs()]
        left += [f"{self.name}: pages of {held}" for held in self.engine.held]
        left += [f"{self.name}: transfer {ident}" for ident in self.fabric.transfers]
        return left

    async def end(self) -> None:
        await self.prefiller.close()
        await self.engine.close()
        self.context.events.detach()


class World:
    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.history: list[tuple[float, str, tuple[Any, ...]]] = []
        self.network = FakeNetwork(rng.randrange(1 << 30), most_delay=rng.choice([0.001, 0.005, 0.02]))
        self.network.in_flight = InOrder()  # type: ignore[assignment]
        self.pipes = Pipes(loop, rng, self.note)
        self.decoders: dict[str, DecoderLife] = {}
        self.prefillers: dict[str, PrefillerLife] = {}
        self._epochs = itertools.count(0xA000)

    # -- what happened ----------------------------------------------------------------------------------------------
    def note(self, text: str, *values: Any) -> None:
        self.history.append((self.loop.time(), text, values))

    def lines(self) -> Iterator[str]:
        for at, text, values in self.history:
            yield f"{at:9.6f} {text % values}"

    @property
    def violations(self) -> list[str]:
        return self.network.violations

    def leftovers(self) -> list[str]:
        lives = (*self.decoders.values(), *self.prefillers.values())
        return [line for life in lives for line in life.leftovers()]

    # -- lives --------------------------------------------------------------------------------------------------------
    async def bear_prefiller(self, name: str) -> None:
        rng, loop = self.rng, self.loop
        counter = FakeCounter()
        fabric = SimFabric(self.network, name, counter)
        context = self._context(name, "prefill", fabric, max_tokens=200, num_pages=24)
        post_seconds = rng.choice([0.0, 0.004, 0.03])
        last_post = 0.0

        def post(call: Callable[[], None]) -> None:
            nonlocal last_post  # what the engine says comes late, but in order
            last_post = max(last_post + 1e-6, loop.time() + post_seconds * rng.random())
            loop.call_at(last_post, call)

        engine = FakePrefillEngine(
            fabric, counter, lambda event: post(lambda: prefiller.engine_event(event)), num_pages=24,
            page_size=context.node.geometry.page_size, num_layers=NUM_LAYERS, chunk=rng.choice([3, 8, 40]),
            layer_seconds=rng.choice([0.0, 0.001, 0.01]),
        )  # fmt: skip
        no_socket: Any = None
        prefiller = Prefiller(context, no_socket, engine, FakePlanner(), watch=1, post=post, load=engine.load)
        self.pipes.listeners[name] = prefiller.listener._accept
        self.prefillers[name] = PrefillerLife(name, context, fabric, engine, prefiller)

    async def bear_decoder(self, name: str, prefillers: list[str]) -> None:
        fabric = SimFabric(self.network, name)
        context = self._context(name, "decode", fabric, num_pages=20)
        engine = FakeDecodeEngine(
            fabric, lambda event: decoder.engine_event(event), num_pages=20,
            page_size=context.node.geometry.page_size, num_layers=NUM_LAYERS, seed=self.rng.randrange(1 << 30),
        )  # fmt: skip
        decoder = Decoder(
            context, [Address(prefiller, 1) for prefiller in prefillers], engine, FakePlanner(), DECODING,
            connect=lambda address: self.pipes.dial(name, address.host), backoff=Backoff(first=0.02, most=0.1),
            rng=random.Random(self.rng.randrange(1 << 30)),
        )  # fmt: skip
        await decoder.start()
        landed = fabric.on_land

        def note_and_judge(write: Write) -> None:
            self.note("a write of %s lands in layer %d of page %d of %s", write.source.name, write.layer, write.dst_page, name)
            landed(write)

        fabric.on_land = note_and_judge
        self.decoders[name] = DecoderLife(name, context, fabric, engine, decoder)

    async def kill(self, name: str) -> None:
        """The process is gone: its connections are reset, its endpoints vanish, what has left it may still land."""
        self.note("%s is killed", name)
        for pipe in self.pipes.open:
            if name in (pipe.decoder, pipe.prefiller):
                pipe.cut()
        self.pipes.listeners.pop(name, None)
        life = self.prefillers.pop(name, None) or self.decoders.pop(name)
        await life.end()
        self.pipes.reborn(name)
        os.close(life.fabric._fd)

    def _context(self, name: str, role: str, fabric: SimFabric, *, max_tokens: int = 0, num_pages: int) -> LinkContext:
        node = LocalNode(
            name, role, next(self._epochs), "0.1.0", "fake", geometry(num_pages=num_pages), regions=(1,), max_tokens=max_tokens
        )
        events = FabricEvents(fabric)
        events.attach(self.loop)

        def record(change: Change) -> None:
            self.note("%s: %s %s %s -> %s (%s)", name, change.kind, change.ident, change.before, change.after, change.why)

        return LinkContext(node, fabric, events, LINKS, compare, self.loop.time, record, threads=Inline())

    async def end(self) -> None:
        for name in (*self.decoders, *self.prefillers):
            life = self.decoders.get(name) or self.prefillers[name]
            await life.end()
            if life.fabric.endpoints:
                self.violations.append(f"{name} ends with endpoints {list(life.fabric.endpoints)}")
            os.close(life.fabric._fd)
