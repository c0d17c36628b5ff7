"""Connections in memory between simulated nodes, and what becomes of their frames on the way.

As TCP, they keep order and lose nothing but at the end of a connection; unlike TCP, on request they let a Cancel
overtake its request, repeat a request and bring one of a decoder's former life, since the protocol promises to
survive that.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from pdd.messenger import wire
from tests.sim.clock import VirtualLoop

_HEADER_BYTES = 4
_TICK = 1e-6  # between two deliveries: timers of one moment fire in any order
Note = Callable[..., None]


def message_of(frame: bytes) -> wire.Message:
    return wire.decode(frame[_HEADER_BYTES:])


class End(asyncio.Transport):
    """One end of a connection. Every `write` is one frame (FrameStream sees to that)."""

    def __init__(self, pipe: Pipe, name: str) -> None:
        super().__init__()
        self.pipe = pipe
        self.name = name
        self.other: End
        self._protocol: asyncio.BaseProtocol
        self._on_the_way: deque[bytes] = deque()  # to the other end; b"" is the end of the stream
        self._last_at = 0.0
        self._said_eof = False
        self._closing = False
        self.lost = False  # connection_lost was said

    def attach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = self.pipe.loop
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        self._protocol = protocol
        protocol.connection_made(self)
        return reader, asyncio.StreamWriter(self, protocol, reader, loop)

    # -- asyncio.Transport
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.other.name, 1) if name == "peername" else default

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def resume_reading(self) -> None:
        """It never pauses."""

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: Any) -> None:
        if not self._closing and not self._said_eof:
            self._send(bytes(data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._said_eof:
            self._said_eof = True
            self._send(b"")

    def close(self) -> None:
        if self._closing:
            return
        self.write_eof()
        self._closing = True
        self.pipe.loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self.pipe.cut()

    # -- on the way
    def _send(self, frame: bytes) -> None:
        self._on_the_way.append(frame)
        self.pipe.look(self, frame)
        self._last_at = max(self._last_at + _TICK, self.pipe.loop.time() + self.pipe.delay(), self.pipe.silent_until)
        self.pipe.loop.call_at(self._last_at, self._deliver)

    def _deliver(self) -> None:
        if self.pipe.is_cut or not self._on_the_way:
            return
        silence = self.pipe.silent_until - self.pipe.loop.time()
        if silence > 0:  # it began after this was sent
            self._last_at = max(self._last_at + _TICK, self.pipe.silent_until)
            self.pipe.loop.call_at(self._last_at, self._deliver)
            return
        frame, there = self._on_the_way.popleft(), self.other
        if there.lost:
            return
        if frame:
            there._protocol.data_received(frame)  # type: ignore[attr-defined]
        elif not there._protocol.eof_received():  # type: ignore[attr-defined]
            there.close()

    def overtake(self, frame: bytes) -> None:
        """The last frame goes before `frame`, if that is still on the way."""
        if frame in self._on_the_way:
            last = self._on_the_way.pop()
            self._on_the_way.insert(self._on_the_way.index(frame), last)

    def _lose(self, error: Exception | None) -> None:
        if not self.lost:
            self.lost = self._closing = True
            self._protocol.connection_lost(error)


class Pipe:
    """One connection, from a decoder to a prefiller."""

    def __init__(self, world: Pipes, decoder: str, prefiller: str) -> None:
        self.world = world
        self.loop = world.loop
        self.decoder, self.prefiller = decoder, prefiller
        self.is_cut = False
        self.silent_until = 0.0
        self.caller, self.callee = End(self, decoder), End(self, prefiller)
        self.caller.other, self.callee.other = self.callee, self.caller
        self._requests: dict[int, bytes] = {}
        self._is_up = False

    @property
    def is_over(self) -> bool:
        return self.is_cut or (self.caller.lost and self.callee.lost)

    def delay(self) -> float:
        return self.world.rng.random() * self.world.most_delay

    def cut(self) -> None:
        """Resets it: what is on the way is lost."""
        if self.is_cut:
            return
        self.is_cut = True
        for end in (self.caller, self.callee):
            end._closing = True
            self.loop.call_later(self.delay(), end._lose, ConnectionResetError(104, "reset by the simulation"))

    def look(self, end: End, frame: bytes) -> None:
        """A frame was sent: the adversary's chance."""
        message = message_of(frame) if frame else None
        if message is not None and not isinstance(message, wire.Greeting | wire.Heartbeat):  # a nonce is no part of a history
            self.world.note("%s -> %s: %s", end.name, end.other.name, message)
        if end is not self.caller:
            return
        rng, world = self.world.rng, self.world
        match message:
            case wire.PrefillRequest():
                self._requests[message.attempt] = world.last_requests[self.decoder] = frame
                if rng.random() < world.repeats:
                    world.loop.call_later(rng.random() * 0.05, end.write, frame)
            case wire.Cancel() if rng.random() < world.overtakes and message.attempt in self._requests:
                end.overtake(self._requests[message.attempt])
            case wire.Heartbeat() if not self._is_up:
                self._is_up = True
                stale = world.stale_requests.get(self.decoder)
                if stale is not None and rng.random() < world.replays:
                    world.note("a request of a former life of %s goes to %s", self.decoder, self.prefiller)
                    world.loop.call_soon(end.write, stale)


class Pipes:
    """All connections. Addresses are names of prefillers."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, note: Note) -> None:
        self.loop = loop
        self.rng = rng
        self.note = note
        self.most_delay = 0.005
        self.overtakes = 0.0  # how often a Cancel goes before its request, if it can
        self.replays = 0.0  # how often a new link brings a request of the decoder's former life
        self.repeats = 0.0  # how often a request comes twice
        self.listeners: dict[str, Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]] = {}
        self.open: list[Pipe] = []
        self.last_requests: dict[str, bytes] = {}
        self.stale_requests: dict[str, bytes] = {}

    async def dial(self, decoder: str, prefiller: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        await asyncio.sleep(self.rng.random() * self.most_delay)
        accept = self.listeners.get(prefiller)
        if accept is None:
            raise ConnectionRefusedError(111, f"nobody listens at {prefiller}")
        self.open = [pipe for pipe in self.open if not pipe.is_over]
        pipe = Pipe(self, decoder, prefiller)
        self.open.append(pipe)
        accept(*pipe.callee.attach())
        return pipe.caller.attach()

    def reborn(self, decoder: str) -> None:
        """A decoder comes back: what it asked last is of a former life now."""
        if decoder in self.last_requests:
            self.stale_requests[decoder] = self.last_requests.pop(decoder)

    def calm(self) -> None:
        self.overtakes = self.replays = self.repeats = 0.0
        for pipe in self.open:
            pipe.silent_until = 0.0
