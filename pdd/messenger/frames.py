"""Framed reading and writing of one TCP connection, bounded in both directions.

A length beyond the limit, a payload that is no message, or an end inside a frame raises PeerProtocol: the caller logs
one line and drops the connection. Sending never waits: what the peer does not read is buffered up to
`max_unsent_bytes`, and more than that means that the peer is not alive in any useful sense. Closing lingers, so that the
last message is read (linger.py). It does not retry, time anything else or know message order.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from pdd.address import Address
from pdd.errors import PeerLost, PeerProtocol
from pdd.messenger import wire
from pdd.messenger.linger import Linger

_HEADER = struct.Struct(">I")
_READ_BYTES = 64 << 10


class FrameBuffer:
    """Cuts a byte stream into payloads. Pure: no socket, no clock."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes of one payload; raised once the peer has proved itself
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> bytes | None:
        """The next whole payload, or None until more bytes come. Raises PeerProtocol for a length nobody sends."""
        if len(self._data) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._data)
        if not 0 < length <= self.limit:
            start = bytes(self._data[: _HEADER.size])
            if start.isascii() and start.decode().isprintable():  # "HTTP", "GET ": the port of some other service
                raise PeerProtocol(f"the other end speaks no peer protocol, its first bytes are {start.decode()!r}: "
                                   "is this the port of peers.listen, not of the API?")
            raise PeerProtocol(f"a frame of {length} bytes was announced; at most {self.limit} are allowed here")
        end = _HEADER.size + length
        if len(self._data) < end:
            return None
        payload = bytes(memoryview(self._data)[_HEADER.size : end])
        del self._data[:end]
        return payload


class FrameStream:
    """One connection, as messages. Owner: the task of its link."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, max_unsent_bytes: int = 64 << 20):
        self._reader = reader
        self._writer = writer
        self._buffer = FrameBuffer(wire.MAX_HANDSHAKE_BYTES)
        self._max_unsent_bytes = max_unsent_bytes
        self._is_over = False  # closed or dropped by this side
        self.num_received_bytes = 0

    @property
    def peer_name(self) -> str:
        """The other end's address, for logs."""
        name = self._writer.get_extra_info("peername")
        return str(Address(name[0], name[1])) if isinstance(name, tuple) and len(name) >= 2 else str(name)

    @property
    def lingers(self) -> bool:
        """It was closed here, and the peer has not ended it yet."""
        return self._is_over and not self._writer.transport.is_closing()

    def allow_large_frames(self) -> None:
        self._buffer.limit = wire.MAX_FRAME_BYTES

    async def receive_payload(self) -> bytes:
        """The next payload. Raises PeerLost at the end of the stream, PeerProtocol for what is no frame."""
        while (payload := self._buffer.next()) is None:
            if self._is_over:
                raise PeerLost("the connection is closed")
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError as error:
                raise PeerLost(f"the connection broke: {error.strerror or error}") from error
            if not data:
                if len(self._buffer):
                    raise PeerProtocol(f"the connection ended inside a frame, after {len(self._buffer)} bytes of it")
                raise PeerLost("the peer closed the connection")
            self.num_received_bytes += len(data)
            self._buffer.feed(data)
        return payload

    async def receive(self) -> wire.Message:
        payload = await self.receive_payload()
        try:
            return wire.decode(payload)
        except msgspec.MsgspecError as error:
            raise PeerProtocol(f"a frame of {len(payload)} bytes is no message: {error}") from error

    def send(self, message: wire.Message) -> None:
        """Queues one frame. Raises PeerLost when the connection is closing or the peer does not read."""
        payload = wire.encode(message)
        if len(payload) > wire.MAX_FRAME_BYTES:
            raise ValueError(f"a {type(message).__name__} of {len(payload)} bytes does not fit a frame")
        transport = self._writer.transport
        if self._is_over or transport.is_closing():
            raise PeerLost("the connection is closed")
        unsent = transport.get_write_buffer_size()
        if unsent > self._max_unsent_bytes:
            raise PeerLost(f"the peer does not read: {unsent} bytes wait to be sent")
        self._writer.write(_HEADER.pack(len(payload)) + payload)

    def close(self) -> None:
        """Ends the connection once what is queued is sent and the peer has ended it too, or is too slow to. Returns at
        once; whoever waits for a message hears of the end at once, too."""
        transport = self._writer.transport
        if self._is_over or transport.is_closing():
            return
        self._is_over = True
        if self._reader.at_eof():  # the peer's end has come: nothing that arrives can reset the connection
            transport.close()
        Linger(self._writer).begin()
        self._reader.feed_eof()

    async def wait_closed(self) -> None:
        """Returns once the connection is gone; `close` or `abort` came before. Cancelling the wait drops it."""
        waiting = asyncio.create_task(self._writer.wait_closed())
        waiting.add_done_callback(lambda task: task.cancelled() or task.exception())  # somebody has looked
        try:
            await asyncio.shield(waiting)  # others may wait for the same end
        except OSError:
            return  # it broke before it was closed, which is as good
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """Drops the connection at once; queued bytes are lost."""
        self._is_over = True
        self._writer.transport.abort()
